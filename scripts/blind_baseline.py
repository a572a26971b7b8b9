"""How far do word frequencies alone go on released benchmarks?

    python scripts/blind_baseline.py FOLDER

FOLDER contains released files: aro/coco_val_neg_captions.tsv (captions of COCO val2014, whose words
are counted), hard_positives/ (REPLACE) and sugarcrepe/. The script writes
data/results/blind_baseline.csv: the figures of `compvl.evaluate.blind.blind_figures`, and no text.
SugarCrepe's swaps of the same words are a control: a model of single words cannot tell them apart.
"""

import sys
from pathlib import Path

import pandas as pd
from coco_captions import coco_negatives

from compvl.benchmarks import load_benchmark, load_benchmarks
from compvl.core import data_dir, git_commit
from compvl.evaluate.blind import WordModel, blind_figures, word_model


def coco_model(folder: Path) -> WordModel:
    """The unigram model of the COCO captions."""
    return word_model(coco_negatives(folder).title)


def baseline(folder: Path) -> pd.DataFrame:
    """Figures of all benchmarks, to four decimals."""
    model = coco_model(folder)
    benchmarks = []
    for part in ("relations", "attributes"):
        benchmarks.append(load_benchmark(f"replace-{part}", folder, source="released"))
    benchmarks += load_benchmarks("sugarcrepe", folder)
    table = blind_figures(benchmarks, model).round(4)
    return table.assign(captions=model.n_captions, words=model.n_words)


def main(folder: Path):
    """Write the table."""
    path = data_dir() / "results/blind_baseline.csv"
    baseline(folder).assign(commit=git_commit()).to_csv(path, index=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
