"""How rare are the words that hard negatives and hard positives put in?  python scripts/word_rarity.py FOLDER

FOLDER holds released files: aro/coco_val_neg_captions.tsv (COCO captions, for word frequencies), sugarcrepe/, vl_checklist/.
Writes data/results/word_rarity_negatives.csv and word_rarity_substitutes.csv, which justify two dials of the microworld.
"""
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pandas as pd

from compvl.core import data_dir, git_commit

WORD = re.compile(r"[a-z]+")
RARE = 1 / 20  # of the frequency of the word replaced


def inserted(pairs, frequency) -> dict:
    """Over (caption, foil) pairs that differ in one word: how many there are, and in which share the new word is rare."""
    rare = []
    for caption, foil in pairs:
        a, b = WORD.findall(caption.lower()), WORD.findall(foil.lower())
        old, new = [w for w in a if w not in b], [w for w in b if w not in a]
        if len(old) == len(new) == 1:
            rare.append(frequency[new[0]] < RARE * max(frequency[old[0]], 1) or not frequency[new[0]])
    return dict(n=len(rare), rare_share=round(sum(rare) / len(rare), 4))


def main(folder: Path):
    captions = pd.read_csv(folder / "aro/coco_val_neg_captions.tsv", sep="\t", quoting=3).title.str.lower()
    frequency, text = Counter(w for c in captions for w in WORD.findall(c)), "\n".join(captions)
    first = lambda v: v[0] if isinstance(v, list) else v
    rows = []
    for split in ("replace_att", "replace_obj", "replace_rel"):
        items = json.loads((folder / f"sugarcrepe/{split}.json").read_text()).values()
        rows.append(dict(source="SugarCrepe", split=split) | inserted(((i["caption"], i["negative_caption"]) for i in items), frequency))
    for path in sorted((folder / "vl_checklist").glob("*/vg/*.json")):
        items = [texts for _, texts in json.loads(path.read_text())]
        rows.append(dict(source="VL-CheckList", split=f"{path.parts[-3]}/{path.stem}") | inserted(((first(i["POS"]), first(i["NEG"])) for i in items), frequency))
    substitutes = pd.read_csv(data_dir() / "paper/replace_substitutions.csv")
    for column in ("original", "hard_positive"):
        substitutes[f"n_{column}"] = [len(re.findall(rf"\b{re.escape(w)}\b", text)) for w in substitutes[column]]
    made = dict(captions=len(captions), commit=git_commit())
    pd.DataFrame(rows).assign(**made).to_csv(data_dir() / "results/word_rarity_negatives.csv", index=False)
    substitutes.assign(**made).to_csv(data_dir() / "results/word_rarity_substitutes.csv", index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
