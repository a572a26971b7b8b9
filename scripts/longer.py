"""Summarise the pieces of micro-full that are there, for notebooks 01, 02 and 11.

    python scripts/longer.py [--only table1 06_cae]

micro finetunes for 120 steps, which is what fits into a reproduction on two cores.
Where pieces of micro-full have been made (`scripts/pieces.py`), this script evaluates them on the
items of micro-full, each row with the seeds that are there, and writes to data/results/micro-full:

- longer.csv, accuracy, brittleness and mean scores of each row of Table 1 that is there,
  longer_pairs.csv, paired differences of rows, longer_losses.csv, what hard positives cost,
  longer_perturbed_scores.csv, how far perturbed texts score below the caption,
  longer_synonyms.csv, longer_synonym_gains.csv and longer_synonym_by_synonym.csv, figures by
  the synonym of the hard positive, and by whether finetuning showed it, longer_curves.csv, what was
  measured on held-out scenes during training, longer_examples.csv, the items of Figures 1
  and 3, and longer_turned.csv, how many items turned from CLIP to DAC-LLM;
- longer_table3.csv, accuracy and brittleness of the rows of Table 3;
- longer_convergence.csv, how well all runs that are there keep the two rules of
  `compvl.paper.convergence`;
- 09_iterated_operators_returns.csv, what each further application of the operators brings;
- <results>_contrasts.csv, the figures that the ledger's statements are tested by, as far as their
  rows are there (`compvl.paper.longer`): of two rows, the seeds that both have.

With --only, these alone. Nothing is trained; models that have no training run are evaluated.
"""

import argparse
import os
import tempfile
from pathlib import Path

from compvl.core import atomic_write, data_dir
from compvl.paper.columns import ACCURACY, MEAN_SCORES
from compvl.paper.comparisons import (
    LOSS_GROUPS,
    comparisons,
    hard_positive_losses,
    perturbed_scores,
)
from compvl.paper.convergence import convergence
from compvl.paper.evaluation import learning_curves, results
from compvl.paper.examples import FIGURES, examples_table, figure_examples, turned_triplets
from compvl.paper.loading import TRIPLET_BENCHMARKS, load
from compvl.paper.longer import CONTRASTED, contrasted_rows, contrasts_of
from compvl.paper.pieces import open_pieces
from compvl.paper.profiles import get_profile
from compvl.paper.returns import BY_APPLICATIONS, RETURNS_ON, diminishing
from compvl.paper.rows import ROWS, rows
from compvl.paper.runs import run_config, seeds_of
from compvl.paper.statements import contrasts_table
from compvl.paper.synonyms import synonym_by_synonym, synonym_gains, synonym_table
from compvl.paper.table_rows import HP_RATIOS, HP_TABLE1

FOLDER = data_dir() / "results/micro-full"
WATCHED = rows("clip-coco", "hn", "hp+hn", "swap-only", "replace-only")
PAIRS = [
    ("clip", "clip-coco"),
    ("clip", "hn"),
    ("clip-coco", "hn"),
    ("clip", "hp+hn"),
    ("hn", "hp+hn"),
]


def seeds_where(row, profile, is_there) -> list[int]:
    """The row's seeds of whose config `is_there` is true."""
    return [seed for seed in seeds_of(row, profile) if is_there(run_config(row, profile, seed))]


def seeds_there(rows, benchmarks, profile) -> dict[str, list[int]]:
    """{row key: its seeds that need no training, or have their scores on the benchmarks}.

    Rows without any are left out, and bounds are. Rows that average others have no seeds."""
    pieces = open_pieces()
    items, missing = load(benchmarks, profile)
    assert not missing

    def is_there(config):
        return config is None or pieces.has_scores(config, items)

    found = {}
    for row in rows:
        if row.source == "bound":
            continue
        seeds = seeds_where(row, profile, is_there)
        if seeds or row.of:
            found[row.key] = seeds
    return found


def results_there(rows, seeds, benchmarks, profile, out: Path, name: str, joined=None):
    """The results of the rows that have `seeds` (row key -> seeds), with these."""
    there = [row for row in rows if row.key in seeds]
    found = results(there, benchmarks, profile, out, name, joined=joined, seeds=seeds)
    found.check()
    return found


def write(table, name: str):
    """Write a table beside the pieces."""
    with atomic_write(FOLDER / name) as path:
        table.to_csv(path, index=False)


def write_synonyms(found):
    """Figures on REPLACE's items with seen and with unseen synonyms, and what hard positives do."""
    write(synonym_table(found, ["clip", "clip-coco", "hn", "hp+hn"]), "longer_synonyms.csv")
    write(synonym_gains(found), "longer_synonym_gains.csv")
    write(synonym_by_synonym(found), "longer_synonym_by_synonym.csv")


def write_curves(profile, out: Path, seeds):
    """What was measured on held-out scenes during the training of some rows, thinned."""
    log = learning_curves(WATCHED, profile, out, seeds=seeds)
    measured = [name for name in log if name.startswith("val_")]
    log = log.dropna(subset=["val_loss"])[["method", "seed", "step", *measured]]
    write(log.round(4), "longer_curves.csv")


def write_summary(found, columns, name: str):
    """The metrics of these columns, of all benchmarks and groups."""
    summary = found.summary()
    summary = summary[summary.metric.isin({column.metric for column in columns})]
    kept = ["method", "benchmark", "group", "metric", "value", "lo", "hi", "n", "seeds"]
    write(summary[kept], name)


def write_table1(profile, out: Path):
    """The rows of Table 1, their differences, and how they came about."""
    seeds = seeds_there(HP_TABLE1, TRIPLET_BENCHMARKS, profile)
    found = results_there(HP_TABLE1, seeds, TRIPLET_BENCHMARKS, profile, out, "longer")
    write_synonyms(found)
    of_figures = {name: figure_examples(found, name) for name in FIGURES}
    write(examples_table(of_figures), "longer_examples.csv")
    write(turned_triplets(found, "clip", "dac-llm"), "longer_turned.csv")
    write_curves(profile, out, seeds)
    write_summary(found, (*ACCURACY, *MEAN_SCORES), "longer.csv")
    pairs = [pair for pair in PAIRS if set(pair) <= set(seeds)]
    write(comparisons(found, pairs, ACCURACY), "longer_pairs.csv")
    write(hard_positive_losses(found, LOSS_GROUPS), "longer_losses.csv")
    write(perturbed_scores(found, LOSS_GROUPS, "clip-coco"), "longer_perturbed_scores.csv")


def write_table3(profile, out: Path):
    """The rows of Table 3, and the weights beyond."""
    seeds = seeds_there(HP_RATIOS, TRIPLET_BENCHMARKS, profile)
    found = results_there(HP_RATIOS, seeds, TRIPLET_BENCHMARKS, profile, out, "longer_table3")
    write_summary(found, ACCURACY, "longer_table3.csv")


def write_convergence(profile, out: Path):
    """How well the runs of all rows keep the two rules."""
    pieces = open_pieces()
    seeds = {}
    for row in ROWS.values():
        if row.source != "trained":
            continue
        there = seeds_where(row, profile, lambda config: pieces.metrics(config) is not None)
        if there:
            seeds[row.key] = there
    there = [ROWS[key] for key in seeds]
    curves = learning_curves(there, profile, out, seeds=seeds)
    write(convergence(curves, there).round(2), "longer_convergence.csv")


def write_contrasts(name: str, profile, out: Path):
    """The contrasts of some results; their numbers are missing where a row is."""
    tests = contrasts_of(name)
    benchmarks, joined = CONTRASTED[name]
    rows = contrasted_rows(tests)
    seeds = seeds_there(rows, benchmarks, profile)
    found = results_there(rows, seeds, benchmarks, profile, out, name, joined)
    write(contrasts_table(tests, found), f"{name}_contrasts.csv")


def write_returns(profile, out: Path):
    """Whether further applications of the operators bring less, as TCL13 is tested by it."""
    benchmarks, joined = CONTRASTED["09_iterated_operators"]
    iterated = rows(*BY_APPLICATIONS)
    seeds = seeds_there(iterated, benchmarks, profile)
    found = results_there(iterated, seeds, benchmarks, profile, out, "returns", joined)
    returns = diminishing(found, BY_APPLICATIONS, RETURNS_ON)
    fewest = min(map(len, seeds.values()))
    write(returns.assign(seeds=fewest), "09_iterated_operators_returns.csv")


WRITERS = {
    "table1": write_table1,
    "table3": write_table3,
    "convergence": write_convergence,
    "returns": write_returns,
}
PARTS = [*WRITERS, *CONTRASTED]


def main(only: list[str] | None):
    """Evaluate the rows that are there, and write the tables."""
    os.environ["COMPVL_PIECES"] = str(FOLDER / "pieces")
    profile = get_profile("micro-full")
    with tempfile.TemporaryDirectory() as out:
        for name in only or PARTS:
            if name in WRITERS:
                WRITERS[name](profile, Path(out))
            else:
                write_contrasts(name, profile, Path(out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, help="tables to write")
    options = parser.parse_args()
    main(options.only)
