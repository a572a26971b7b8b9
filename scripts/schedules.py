"""Compare learning rates and lengths of finetuning by the loss on held-out scenes.

    python scripts/schedules.py [--processes 2] [--runs FOLDER]

The rows and schedules of `TRIALS` are trained with one seed. Nothing else is computed of these
models: a schedule is chosen by its losses alone (`compvl.paper.convergence`). The script writes
data/results/schedules.csv, a line for each trial. Runs that are finished are not trained again.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from compvl.core import data_dir, read_json, runs_dir
from compvl.paper.convergence import held_out_losses
from compvl.paper.profiles import get_profile
from compvl.paper.rows import ROWS
from compvl.paper.runs import run_config, with_validation
from compvl.train.loop import train


class Trial(NamedTuple):
    """A row of the tables with one schedule."""

    row: str
    profile: str  # of the training data
    steps: int
    lr: float  # peak, after `warmup` steps
    warmup: int


_ROWS = ("clip-coco", "hn")
_SCHEDULES = [(2e-4, 50), (2e-4, 100), (3e-4, 50), (3e-4, 100), (5e-4, 100)]
_LONG = [2e-4, 3e-4]
_LOW_RANK = [1.5e-3, 5e-3, 1.5e-2]
TRIALS = [
    *(Trial(row, "micro", 400, lr, warmup) for lr, warmup in _SCHEDULES for row in _ROWS),
    *(Trial("svlc", "micro", 400, lr, 100) for lr in _LOW_RANK),
    *(Trial(row, "micro-full", 1500, lr, 100) for lr in _LONG for row in _ROWS),
]


def run_trial(trial: Trial, runs: Path) -> dict:
    """Train one trial. Returns what is kept of it."""
    torch.set_num_threads(1)
    row = ROWS[trial.row].training(validate_on=())
    profile = get_profile(trial.profile).training(
        steps=trial.steps,
        lr=trial.lr / row.rate,
        warmup=trial.warmup,
        validate_every=trial.steps // 10,
    )
    run = train(run_config(row, profile), runs=runs, progress=False)
    losses = held_out_losses(with_validation(run.metrics, run.validation))
    commit = read_json(run.folder / "environment.json")["commit"]
    return trial._asdict() | losses | dict(run=run.folder.name, commit=commit)


def main(processes: int, runs: Path):
    """Run all trials, and write the table."""
    lines = []
    with ProcessPoolExecutor(processes) as pool:
        for line in pool.map(run_trial, TRIALS, [runs] * len(TRIALS)):
            lines.append(line)
            print(line, flush=True)
    pd.DataFrame(lines).round(4).to_csv(data_dir() / "results/schedules.csv", index=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=runs_dir())
    arguments = parser.parse_args()
    main(arguments.processes, arguments.runs)
