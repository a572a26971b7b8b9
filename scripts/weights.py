"""Choose the weight of L_attr for the schedule of micro-full.

    python scripts/weights.py [--processes 2] [--runs FOLDER]

CLIP-CAE is trained with each of the weights in `WEIGHTS`, with one seed, for as many steps as
micro-full trains its rows, and evaluated on the validation split. Of the weights whose runs keep
the two rules of `compvl.paper.convergence`, each attribution takes the one with the highest mean
accuracy (`compvl.paper.weight_search`). The script writes
data/results/lambda/micro-full_choice.csv, and keeps metrics and scores of each run in
data/results/lambda/pieces: what is there is not trained again, and interrupted runs go on.
"""

import os
import sys
import tempfile
from pathlib import Path

from schedules import training_arguments

from compvl.core import atomic_write, data_dir
from compvl.paper.pieces import open_pieces
from compvl.paper.profiles import get_profile
from compvl.paper.rows import ROWS
from compvl.paper.runs import run_config
from compvl.paper.weight_search import candidates, search_weights
from compvl.train.sweep import sweep

FOLDER = data_dir() / "results/lambda"
WEIGHTS = {
    "attention": (0.03, 0.1, 0.3, 1.0),
    "gradcam": (0.03, 0.1),
    "perturbation": (0.03, 0.1, 0.3),
    "gradient": (0.03, 0.1, 0.3),
}


def train_all(profile, processes: int, runs: Path):
    """Train CLIP-CAE with every weight, and its control, unless their metrics are kept."""
    tried = [ROWS["clip-coco"], *candidates(WEIGHTS)]
    pieces = open_pieces()
    configs = [run_config(row, profile) for row in tried]
    configs = [config for config in configs if pieces.metrics(config) is None]
    trained = sweep(configs, runs, ["cpu"] * processes)
    failed = trained[trained.status == "failed"]
    if len(failed):
        sys.exit(f"{len(failed)} runs failed: {'; '.join(failed.error)}")


def main(processes: int, runs: Path):
    """Train what is not there, evaluate it, and write the choice."""
    os.environ["COMPVL_RUNS"] = str(runs.absolute())
    os.environ["COMPVL_PIECES"] = str(FOLDER / "pieces")
    profile = get_profile("micro-full")
    train_all(profile, processes, runs)
    options = dict(weights=WEIGHTS, seeds=(0,), by_rules=True)
    with tempfile.TemporaryDirectory() as out:
        choice = search_weights(WEIGHTS, profile, out, "weights", **options)
    with atomic_write(FOLDER / "micro-full_choice.csv") as path:
        choice.round(4).to_csv(path, index=False)
    print(choice.round(2).to_string(index=False))


if __name__ == "__main__":
    main(**training_arguments(__doc__))
