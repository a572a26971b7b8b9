"""Which operators made the negatives of published benchmarks?  python scripts/operator_shares.py FOLDER

FOLDER holds released files: valse/, vl_checklist/ (Visual Genome part), aro/coco_val_neg_captions.tsv, sugarcrepe/. Writes to data/results:
- operator_shares.csv: by benchmark and group, the share of negatives whose main operator by `compvl.text.classifier` is each of its KINDS, with a 95 % Wilson interval,
  and of `tcl`, the three of TCL (SWAP, REPLACE, ADD) together;
- classify_sugarcrepe.csv: how often that operator is the one that SugarCrepe's split is named for. `classify` was designed on the items of even index.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import pandas as pd

from compvl.benchmarks.loading import load_benchmark, load_benchmarks
from compvl.text.classifier import EDIT_KINDS, classify, operator_shares
from compvl.core import data_dir, git_commit


def negatives(folder: Path):
    "(benchmark, group, caption, negative) of every released negative; each counts in its group and in all."
    for b in load_benchmarks("valse", folder):
        for i in b.items:
            yield "VALSE", b.name.removeprefix("valse-"), i.caption, i.foil
    for part in ("relation", "attribute"):
        for i in load_benchmark(f"vl-checklist-{part}", folder, source="vg").items:
            yield "VL-CheckList VG", f"{part}/{i.group.removeprefix('vg/')}", i.caption, i.foil
    table = pd.read_csv(folder / "aro/coco_val_neg_captions.tsv", sep="\t")
    for caption, foils in zip(table.title, table.neg_caption):
        for foil in ast.literal_eval(foils):
            yield "ARO COCO captions", "", caption, foil
    for b in load_benchmarks("sugarcrepe", folder):
        for i in b.items:
            yield "SugarCrepe", b.name.removeprefix("sugarcrepe-"), i.caption, i.foil


def agreement(folder: Path) -> pd.DataFrame:
    "By split and half of SugarCrepe: agreement of the main operator (and of the target) with the split's name, and the counts of each operator."
    names, out = dict(obj="object", att="attribute", rel="relation"), []
    for b in load_benchmarks("sugarcrepe", folder):
        operator, target = b.name.removeprefix("sugarcrepe-").split("-")
        for half, rest in (("even", 0), ("odd", 1)):
            found = [
                classify(i.caption, i.foil)
                for i in b.items
                if int(i.id.rsplit("-", 1)[1]) % 2 == rest
            ]
            c = Counter(r.main for r in found)
            out.append(
                dict(
                    split=f"{operator}_{target}",
                    half=half,
                    n=len(found),
                    agreement=round(c[operator] / len(found), 4),
                    target_agreement=round(
                        sum(r.target == names[target] for r in found) / len(found), 4
                    ),
                    **{o: c[o] for o in EDIT_KINDS},
                )
            )
    table = pd.DataFrame(out)
    return pd.concat(
        [
            table,
            *(
                pd.DataFrame(
                    [
                        dict(
                            split="macro",
                            half=half,
                            n=g.n.sum(),
                            **g[["agreement", "target_agreement"]].mean().round(4),
                            **g[list(EDIT_KINDS)].sum(),
                        )
                    ]
                )
                for half, g in table.groupby("half")
            ),
        ],
        ignore_index=True,
    )


def main(folder: Path):
    for name, table in (
        ("operator_shares", operator_shares(negatives(folder))),
        ("classify_sugarcrepe", agreement(folder)),
    ):
        table.assign(commit=git_commit()).to_csv(data_dir() / f"results/{name}.csv", index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
