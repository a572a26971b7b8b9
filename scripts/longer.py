"""Summarise the pieces of micro-full that are there, for notebooks 01_brittleness and 11_claims.

    python scripts/longer.py [--seeds 0]

micro finetunes for 120 steps, which is what fits into a reproduction on two cores.
Where pieces of micro-full have been made (`scripts/pieces.py`), this script evaluates them on the
items of micro-full, and writes to data/results/micro-full:

- longer.csv, the accuracy and brittleness of each row of Table 1 that is there, longer_pairs.csv,
  paired differences of rows, and longer_convergence.csv, how well the runs keep the two rules of
  `compvl.paper.convergence`;
- <results>_contrasts.csv, the figures that the ledger's statements are tested by, as far as their
  rows are there (`compvl.paper.longer`).

Nothing is trained; models that have no training run are evaluated.
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
from compvl.paper.longer import CONTRASTED, contrasted_rows, contrasts_of
from compvl.paper.pieces import open_pieces
from compvl.paper.profiles import get_profile
from compvl.paper.runs import run_config
from compvl.paper.statements import contrasts_table
from compvl.paper.table_rows import HP_TABLE1

FOLDER = data_dir() / "results/micro-full"
PAIRS = [
    ("clip", "clip-coco"),
    ("clip", "hn"),
    ("clip-coco", "hn"),
    ("clip", "hp+hn"),
    ("hn", "hp+hn"),
]


def is_there(row, profile) -> bool:
    """Whether a row is not trained, or was trained already with all seeds of the profile."""
    pieces = open_pieces()
    for seed in profile.seeds:
        config = run_config(row, profile, seed)
        if config is not None and pieces.metrics(config) is None:
            return False
    return row.source != "bound"


def write(table, name: str):
    """Write a table beside the pieces."""
    with atomic_write(FOLDER / name) as path:
        table.to_csv(path, index=False)


def write_table1(profile, out: Path):
    """The rows of Table 1, their differences, and how well they converged."""
    rows = [row for row in HP_TABLE1 if is_there(row, profile)]
    found = results(rows, TRIPLET_BENCHMARKS, profile, out, "longer")
    found.check()
    write(convergence(learning_curves(rows, profile, out), rows).round(2), "longer_convergence.csv")
    summary = found.summary()
    summary = summary[summary.metric.isin({column.metric for column in ACCURACY})]
    write(
        summary[["method", "benchmark", "group", "metric", "value", "lo", "hi", "n"]], "longer.csv"
    )
    keys = {row.key for row in rows}
    pairs = [pair for pair in PAIRS if set(pair) <= keys]
    write(comparisons(found, pairs, ACCURACY), "longer_pairs.csv")


def write_contrasts(name: str, profile, out: Path):
    """The contrasts of some results; their numbers are missing where a row is."""
    tests = contrasts_of(name)
    rows = [row for row in contrasted_rows(tests) if is_there(row, profile)]
    benchmarks, joined = CONTRASTED[name]
    found = results(rows, benchmarks, profile, out, name, joined=joined)
    found.check()
    write(contrasts_table(tests, found), f"{name}_contrasts.csv")


def main(seeds: list[int]):
    """Evaluate the rows that are there, and write the tables."""
    os.environ["COMPVL_PIECES"] = str(FOLDER / "pieces")
    profile = replace(get_profile("micro-full"), seeds=tuple(seeds), base_seeds=tuple(seeds))
    with tempfile.TemporaryDirectory() as out:
        write_table1(profile, Path(out))
        for name in CONTRASTED:
            write_contrasts(name, profile, Path(out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="those of all rows")
    main(parser.parse_args().seeds)
