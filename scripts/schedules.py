"""Compare learning rates and lengths of finetuning by the loss on held-out scenes.

    python scripts/schedules.py [--processes 2] [--runs FOLDER]

The rows and schedules of `TRIALS` are trained with one seed. Nothing else is computed of these
models: a schedule is chosen by its losses alone (`compvl.paper.convergence`). The script writes
data/results/schedules.csv, a line for each trial. Trials that have a line there, and runs that are
finished, are not trained again.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from compvl.core import data_dir, read_json, runs_dir
from compvl.paper.convergence import held_out_losses
from compvl.paper.profiles import get_profile
from compvl.paper.rows import ROWS
from compvl.paper.runs import run_config, with_validation
from compvl.train.config import TrainConfig
from compvl.train.run import load_run
from compvl.train.sweep import sweep

TABLE = data_dir() / "results/schedules.csv"


class Trial(NamedTuple):
    """A row of the tables with one schedule."""

    row: str
    profile: str  # where it may be used
    n_train: int  # scenes
    steps: int
    lr: float  # peak, after `warmup` steps
    warmup: int


_ROWS = ("clip-coco", "hn")
_SHORT = [(1e-4, 20), (2e-4, 20), (2e-4, 40), (3e-4, 40), (5e-4, 40)]
_LONG = [
    (24_000, 1500, 2e-4, 100),
    (24_000, 1500, 3e-4, 100),
    (24_000, 3000, 3e-4, 300),
    (96_000, 1500, 3e-4, 300),
    (96_000, 3000, 3e-4, 300),
    (96_000, 3000, 2e-4, 300),
]
_LOW_RANK = [1.5e-3, 3e-3, 5e-3, 1.5e-2]
_NORMALIZATION_LAYERS = [2e-4, 6e-4, 2e-3]
_ATTRIBUTION = ["cae-attention", "cae-gradient"]
TRIALS = [
    *(Trial(row, "micro", 12_000, 120, *rate) for rate in _SHORT for row in _ROWS),
    *(Trial("svlc", "micro", 12_000, 120, rate, 40) for rate in _LOW_RANK),
    *(Trial(row, "micro-full", *schedule) for schedule in _LONG for row in _ROWS),
    Trial("clip-coco", "micro-full", 96_000, 3000, 2.5e-4, 300),
    *(Trial("sds-clip", "micro-full", 96_000, 3000, rate, 300) for rate in _NORMALIZATION_LAYERS),
    *(Trial(row, "micro-full", 96_000, 6000, 2e-4, 300) for row in _ATTRIBUTION),
]


def config_of(trial: Trial) -> TrainConfig:
    """What is trained for a trial."""
    row = ROWS[trial.row].training(validate_on=())
    profile = get_profile(trial.profile).training(
        n_train=trial.n_train,
        steps=trial.steps,
        lr=trial.lr / row.rate,
        warmup=trial.warmup,
        validate_every=max(24, trial.steps // 30),
        n_validation=1000,
    )
    return run_config(row, profile)


def line_of(trial: Trial, folder: Path) -> dict:
    """What is kept of the run of a trial."""
    run = load_run(folder)
    losses = held_out_losses(with_validation(run.metrics, run.validation))
    commit = read_json(folder / "environment.json")["commit"]
    return trial._asdict() | losses | dict(run=folder.name, commit=commit)


def read_lines() -> dict[Trial, dict]:
    """The lines of the table that is there."""
    if not TABLE.exists():
        return {}
    lines = pd.read_csv(TABLE).to_dict("records")
    return {Trial(*(line[field] for field in Trial._fields)): line for line in lines}


def main(processes: int, runs: Path):
    """Train what the table does not have, and write it."""
    lines = read_lines()
    missing = [trial for trial in TRIALS if trial not in lines]
    trained = sweep([config_of(trial) for trial in missing], runs, ["cpu"] * processes)
    for trial, run, error in zip(missing, trained.run, trained.error, strict=True):
        if error is None:
            lines[trial] = line_of(trial, runs / run)
    table = pd.DataFrame([lines[trial] for trial in TRIALS if trial in lines])
    measured = dict.fromkeys(["itc", "hn", "sds", "attr", "rise", "fall", "left"], 4)
    table.round(measured).to_csv(TABLE, index=False)
    if len(table) < len(TRIALS):
        sys.exit(f"{len(TRIALS) - len(table)} trials failed")


def training_arguments(description: str) -> dict:
    """What the command line says: how many processes train, and where runs are."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=runs_dir())
    return vars(parser.parse_args())


if __name__ == "__main__":
    main(**training_arguments(__doc__))
