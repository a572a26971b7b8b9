"""Summarise the pieces of micro-full that are there, for the notebook 01_brittleness.

    python scripts/longer.py [--seed 0]

micro finetunes for 120 steps, which is what fits into a reproduction on two cores.
Where pieces of micro-full have been made (`scripts/pieces.py`), this script evaluates them on the
items of micro-full, and writes data/results/micro-full/longer.csv, the accuracy and brittleness of
each row of Table 1 that is there, longer_pairs.csv, paired differences of rows, and
longer_convergence.csv, how well the runs keep the two rules of `compvl.paper.convergence`. Nothing
is trained; CLIP, which has no training run, is evaluated.
"""

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from compvl.core import atomic_write, data_dir
from compvl.paper.columns import ACCURACY
from compvl.paper.comparisons import comparisons
from compvl.paper.convergence import convergence
from compvl.paper.evaluation import learning_curves, results
from compvl.paper.loading import TRIPLET_BENCHMARKS
from compvl.paper.pieces import open_pieces
from compvl.paper.profiles import get_profile
from compvl.paper.runs import run_config
from compvl.paper.table_rows import HP_TABLE1

FOLDER = data_dir() / "results/micro-full"
PAIRS = [
    ("clip", "clip-coco"),
    ("clip", "hn"),
    ("clip-coco", "hn"),
    ("clip", "hp+hn"),
    ("hn", "hp+hn"),
]


def rows_with_pieces(profile, seed: int) -> list:
    """The rows of Table 1 that are not trained, or were trained already with this seed."""
    pieces = open_pieces()
    found = []
    for row in HP_TABLE1:
        config = run_config(row, profile, seed)
        if row.source != "bound" and (config is None or pieces.metrics(config) is not None):
            found.append(row)
    return found


def write(table, name: str):
    """Write a table beside the pieces."""
    with atomic_write(FOLDER / name) as path:
        table.to_csv(path, index=False)


def main(seed: int):
    """Evaluate the rows that are there, and write the tables."""
    os.environ["COMPVL_PIECES"] = str(FOLDER / "pieces")
    profile = replace(get_profile("micro-full"), seeds=(seed,))
    rows = rows_with_pieces(profile, seed)
    with tempfile.TemporaryDirectory() as out:
        found = results(rows, TRIPLET_BENCHMARKS, profile, Path(out), "longer")
        found.check()
        log = learning_curves(rows, profile, Path(out))
    write(convergence(log, rows).round(2), "longer_convergence.csv")
    summary = found.summary()
    summary = summary[summary.metric.isin({column.metric for column in ACCURACY})]
    write(
        summary[["method", "benchmark", "group", "metric", "value", "lo", "hi", "n"]], "longer.csv"
    )
    keys = {row.key for row in rows}
    pairs = [pair for pair in PAIRS if set(pair) <= keys]
    write(comparisons(found, pairs, ACCURACY), "longer_pairs.csv")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args().seed)
