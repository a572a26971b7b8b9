"""How rare are the words that hard negatives and hard positives put in?  python scripts/word_rarity.py FOLDER

FOLDER holds released files: aro/coco_val_neg_captions.tsv (COCO captions, for word frequencies), sugarcrepe/, vl_checklist/, valse/, hard_positives/.
Writes data/results/word_rarity_negatives.csv and word_rarity_substitutes.csv, which justify two dials of the microworld. Of CREPE's and SVLC's training negatives there are no files:
their rules are applied to the COCO captions, with the word lists that compvl ships (source *rules on COCO captions*).
"""

import json
import re
import sys
from pathlib import Path

import pandas as pd

from compvl.core import data_dir, git_commit
from compvl.text.hard_negatives import hard_negative
from compvl.text.operators import Refused
from compvl.microworld.audit import rare_words, word_counts


def by_rules(captions, method: str, sound: bool):
    "(caption, hard negative) of every caption that offers one."
    for i, c in enumerate(captions):
        try:
            yield c, hard_negative(c, method, i, sound=sound).text
        except Refused:
            pass


def main(folder: Path):
    captions = pd.read_csv(
        folder / "aro/coco_val_neg_captions.tsv", sep="\t", quoting=3
    ).title.str.lower()
    frequency, text = word_counts(captions), "\n".join(captions)
    first = lambda v: v[0] if isinstance(v, list) else v
    rows = []

    def add(source, split, pairs):
        rows.append(
            dict(source=source, split=split)
            | {k: round(v, 4) for k, v in rare_words(pairs, frequency).items()}
        )

    for split in ("replace_att", "replace_obj", "replace_rel"):
        items = json.loads((folder / f"sugarcrepe/{split}.json").read_text()).values()
        add("SugarCrepe", split, ((i["caption"], i["negative_caption"]) for i in items))
    for path in sorted((folder / "vl_checklist").glob("*/vg/*.json")):
        items = [texts for _, texts in json.loads(path.read_text())]
        add(
            "VL-CheckList",
            f"{path.parts[-3]}/{path.stem}",
            ((first(i["POS"]), first(i["NEG"])) for i in items),
        )
    for part in ("relations", "action-replacement"):
        items = json.loads((folder / f"valse/{part}.json").read_text()).values()
        add("VALSE", part, ((i["caption"], i["foil"]) for i in items))
    for target in ("attributes", "relations"):
        items = json.loads(
            (folder / f"hard_positives/original/vl_checklist_{target}.json").read_text()
        )
        add("REPLACE", target, ((i["true_caption"], i["false_caption"]) for i in items))
    for method, sound in (("crepe-replace", True), ("svlc-rules", False)):
        add("rules on COCO captions", method, by_rules(captions, method, sound))
    substitutes = pd.read_csv(data_dir() / "paper/replace_substitutions.csv")
    for column in ("original", "hard_positive"):
        substitutes[f"n_{column}"] = [
            len(re.findall(rf"\b{re.escape(w)}\b", text)) for w in substitutes[column]
        ]
    made = dict(captions=len(captions), commit=git_commit())
    pd.DataFrame(rows).assign(**made).to_csv(
        data_dir() / "results/word_rarity_negatives.csv", index=False
    )
    substitutes.assign(**made).to_csv(
        data_dir() / "results/word_rarity_substitutes.csv", index=False
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
