"""Captions of COCO val2014, as they were released with ARO's negatives of them."""

from pathlib import Path

import pandas as pd


def coco_negatives(folder: Path) -> pd.DataFrame:
    """The table `aro/coco_val_neg_captions.tsv`: a caption (title) and its negatives in each row.

    Some captions have a line break, inside quotes."""
    return pd.read_csv(folder / "aro/coco_val_neg_captions.tsv", sep="\t")
