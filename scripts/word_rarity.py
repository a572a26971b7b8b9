"""How rare are the words that hard negatives and hard positives introduce?

    python scripts/word_rarity.py FOLDER

FOLDER contains released files: aro/coco_val_neg_captions.tsv (COCO captions, for the frequencies
of words), sugarcrepe/, vl_checklist/, valse/ and hard_positives/. The script writes
data/results/word_rarity_negatives.csv and word_rarity_substitutes.csv, which justify two dials of
the microworld. There are no files of CREPE's and SVLC's training negatives: their rules are applied
to the COCO captions, with the word lists that compvl ships (source *rules on COCO captions*).
"""

import json
import re
import sys
from pathlib import Path

import pandas as pd
from coco_captions import coco_negatives

from compvl.core import data_dir, git_commit
from compvl.microworld.rarity import rare_words, word_counts
from compvl.text import Refused, hard_negative


def by_rules(captions, method: str, sound: bool):
    """(caption, hard negative) of every caption from which the method can make one."""
    for number, caption in enumerate(captions):
        try:
            yield caption, hard_negative(caption, method, number, sound=sound).text
        except Refused:
            continue


def first(value):
    """The first text of a list, or the text itself."""
    return value[0] if isinstance(value, list) else value


def released_pairs(folder: Path):
    """(source, split, pairs of caption and hard negative) of all released files."""
    for split in ("replace_att", "replace_obj", "replace_rel"):
        items = json.loads((folder / f"sugarcrepe/{split}.json").read_text()).values()
        yield "SugarCrepe", split, [(i["caption"], i["negative_caption"]) for i in items]
    for path in sorted((folder / "vl_checklist").glob("*/vg/*.json")):
        texts = [texts for _, texts in json.loads(path.read_text())]
        pairs = [(first(i["POS"]), first(i["NEG"])) for i in texts]
        yield "VL-CheckList", f"{path.parts[-3]}/{path.stem}", pairs
    for part in ("relations", "action-replacement"):
        items = json.loads((folder / f"valse/{part}.json").read_text()).values()
        yield "VALSE", part, [(i["caption"], i["foil"]) for i in items]
    for target in ("attributes", "relations"):
        path = folder / f"hard_positives/original/vl_checklist_{target}.json"
        items = json.loads(path.read_text())
        yield "REPLACE", target, [(i["true_caption"], i["false_caption"]) for i in items]


def substitutes(captions: pd.Series) -> pd.DataFrame:
    """REPLACE's substitutions with the number of times that either side occurs in the captions."""
    table = pd.read_csv(data_dir() / "paper/replace_substitutions.csv")
    text = "\n".join(captions)
    for column in ("original", "hard_positive"):
        words = [rf"\b{re.escape(word)}\b" for word in table[column]]
        table[f"n_{column}"] = [len(re.findall(word, text)) for word in words]
    return table


def main(folder: Path):
    """Write both tables."""
    captions = coco_negatives(folder).title.str.lower()
    frequency = word_counts(captions)
    sources = list(released_pairs(folder))
    for method, sound in (("crepe-replace", True), ("svlc-rules", False)):
        sources.append(("rules on COCO captions", method, by_rules(captions, method, sound)))
    rows = []
    for source, split, pairs in sources:
        shares = {key: round(value, 4) for key, value in rare_words(pairs, frequency).items()}
        rows.append(dict(source=source, split=split) | shares)
    made = dict(captions=len(captions), commit=git_commit())
    results = data_dir() / "results"
    tables = {"negatives": pd.DataFrame(rows), "substitutes": substitutes(captions)}
    for name, table in tables.items():
        table.assign(**made).to_csv(results / f"word_rarity_{name}.csv", index=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
