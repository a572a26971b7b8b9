"""Summarise the pieces of micro-full that are there, for notebooks 01_brittleness and 11_claims.

    python scripts/longer.py [--seeds 0] [--only table1 06_cae]

micro finetunes for 120 steps, which is what fits into a reproduction on two cores.
Where pieces of micro-full have been made (`scripts/pieces.py`), this script evaluates them on the
items of micro-full, and writes to data/results/micro-full:

- longer.csv, accuracy, brittleness and mean scores of each row of Table 1 that is there,
  longer_pairs.csv, paired differences of rows, and longer_convergence.csv, how well the runs keep
  the two rules of `compvl.paper.convergence`;
- <results>_contrasts.csv, the figures that the ledger's statements are tested by, as far as their
  rows are there (`compvl.paper.longer`).

With --only, these alone. Nothing is trained; models that have no training run are evaluated.
"""

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from compvl.core import atomic_write, data_dir
from compvl.paper.columns import ACCURACY, MEAN_SCORES
from compvl.paper.comparisons import comparisons
from compvl.paper.convergence import convergence
from compvl.paper.evaluation import learning_curves, results
from compvl.paper.loading import TRIPLET_BENCHMARKS, load
from compvl.paper.longer import CONTRASTED, contrasted_rows, contrasts_of
from compvl.paper.pieces import open_pieces
from compvl.paper.profiles import get_profile
from compvl.paper.runs import run_config
from compvl.paper.statements import contrasts_table
from compvl.paper.table_rows import HP_TABLE1

FOLDER = data_dir() / "results/micro-full"
PARTS = ["table1", *CONTRASTED]
PAIRS = [
    ("clip", "clip-coco"),
    ("clip", "hn"),
    ("clip-coco", "hn"),
    ("clip", "hp+hn"),
    ("hn", "hp+hn"),
]


def rows_there(rows, benchmarks, profile) -> list:
    """The rows that need no training, or have their scores on the benchmarks for all seeds."""
    pieces = open_pieces()
    items, missing = load(benchmarks, profile)
    assert not missing
    found = []
    for row in rows:
        configs = [run_config(row, profile, seed) for seed in profile.seeds]
        trained = [config for config in configs if config is not None]
        if row.source != "bound" and all(pieces.has_scores(config, items) for config in trained):
            found.append(row)
    return found


def write(table, name: str):
    """Write a table beside the pieces."""
    with atomic_write(FOLDER / name) as path:
        table.to_csv(path, index=False)


def write_table1(profile, out: Path):
    """The rows of Table 1, their differences, and how well they converged."""
    rows = rows_there(HP_TABLE1, TRIPLET_BENCHMARKS, profile)
    found = results(rows, TRIPLET_BENCHMARKS, profile, out, "longer")
    found.check()
    write(convergence(learning_curves(rows, profile, out), rows).round(2), "longer_convergence.csv")
    summary = found.summary()
    metrics = {column.metric for column in (*ACCURACY, *MEAN_SCORES)}
    summary = summary[summary.metric.isin(metrics)]
    write(
        summary[["method", "benchmark", "group", "metric", "value", "lo", "hi", "n"]], "longer.csv"
    )
    keys = {row.key for row in rows}
    pairs = [pair for pair in PAIRS if set(pair) <= keys]
    write(comparisons(found, pairs, ACCURACY), "longer_pairs.csv")


def write_contrasts(name: str, profile, out: Path):
    """The contrasts of some results; their numbers are missing where a row is."""
    tests = contrasts_of(name)
    benchmarks, joined = CONTRASTED[name]
    rows = rows_there(contrasted_rows(tests), benchmarks, profile)
    found = results(rows, benchmarks, profile, out, name, joined=joined)
    found.check()
    write(contrasts_table(tests, found), f"{name}_contrasts.csv")


def main(seeds: list[int], only: list[str] | None):
    """Evaluate the rows that are there, and write the tables."""
    os.environ["COMPVL_PIECES"] = str(FOLDER / "pieces")
    profile = replace(get_profile("micro-full"), seeds=tuple(seeds), base_seeds=tuple(seeds))
    with tempfile.TemporaryDirectory() as out:
        for name in only or PARTS:
            if name == "table1":
                write_table1(profile, Path(out))
                continue
            write_contrasts(name, profile, Path(out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="those of all rows")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="tables to write")
    options = parser.parse_args()
    main(options.seeds, options.only)
