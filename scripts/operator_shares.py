"""Which operators made the negatives of published benchmarks?

    python scripts/operator_shares.py FOLDER

FOLDER contains released files: valse/, vl_checklist/ (its Visual Genome part),
aro/coco_val_neg_captions.tsv and sugarcrepe/. The script writes to data/results:

- operator_shares.csv: by benchmark and group, the share of negatives whose main operator
  (`compvl.text.classify`) is each of EDIT_KINDS, with a 95 % Wilson interval, and the share of
  TCL's three operators (SWAP, REPLACE, ADD) together;
- classify_sugarcrepe.csv: how often that operator is the one that SugarCrepe's split is named for.
  `classify` was designed on the items of even index.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
from coco_captions import coco_negatives

from compvl.benchmarks import load_benchmark, load_benchmarks
from compvl.core import data_dir, git_commit
from compvl.text import EDIT_KINDS, classify, operator_shares

TARGET_NAMES = {"obj": "object", "att": "attribute", "rel": "relation"}


def aro_negatives(folder: Path):
    """(benchmark, group, caption, negative) of ARO's negatives of COCO captions."""
    table = coco_negatives(folder)
    for caption, foils in zip(table.title, table.neg_caption, strict=True):
        for foil in ast.literal_eval(foils):
            yield "ARO COCO captions", "", caption, foil


def negatives(folder: Path):
    """(benchmark, group, caption, negative) of every released negative."""
    for benchmark in load_benchmarks("valse", folder):
        group = benchmark.name.removeprefix("valse-")
        for item in benchmark.items:
            yield "VALSE", group, item.caption, item.foil
    for part in ("relation", "attribute"):
        for item in load_benchmark(f"vl-checklist-{part}", folder, source="vg").items:
            group = f"{part}/{item.group.removeprefix('vg/')}"
            yield "VL-CheckList VG", group, item.caption, item.foil
    yield from aro_negatives(folder)
    for benchmark in load_benchmarks("sugarcrepe", folder):
        split = benchmark.name.removeprefix("sugarcrepe-")
        for item in benchmark.items:
            yield "SugarCrepe", split, item.caption, item.foil


def split_agreement(benchmark, half: str) -> dict:
    """Agreement of the main operator, and of the target, with the name of a SugarCrepe split."""
    operator, target = benchmark.name.removeprefix("sugarcrepe-").split("-")
    remainder = ("even", "odd").index(half)
    items = [i for i in benchmark.items if int(i.id.rsplit("-", 1)[1]) % 2 == remainder]
    found = [classify(item.caption, item.foil) for item in items]
    counts = Counter(operators.main for operators in found)
    right_target = sum(operators.target == TARGET_NAMES[target] for operators in found)
    return dict(
        split=f"{operator}_{target}",
        half=half,
        n=len(found),
        agreement=round(counts[operator] / len(found), 4),
        target_agreement=round(right_target / len(found), 4),
        **{kind: counts[kind] for kind in EDIT_KINDS},
    )


def agreement(folder: Path) -> pd.DataFrame:
    """Agreement with the names of SugarCrepe's splits, by split and half, and its macro average."""
    rows = []
    for benchmark in load_benchmarks("sugarcrepe", folder):
        rows += [split_agreement(benchmark, half) for half in ("even", "odd")]
    table = pd.DataFrame(rows)
    shares = ["agreement", "target_agreement"]
    for half, part in table.groupby("half"):
        macro = dict(split="macro", half=half, n=part.n.sum())
        rows.append(macro | dict(part[shares].mean().round(4)) | dict(part[list(EDIT_KINDS)].sum()))
    return pd.DataFrame(rows)


def main(folder: Path):
    """Write both tables."""
    tables = {
        "operator_shares": operator_shares(negatives(folder)),
        "classify_sugarcrepe": agreement(folder),
    }
    for name, table in tables.items():
        table.assign(commit=git_commit()).to_csv(data_dir() / f"results/{name}.csv", index=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
