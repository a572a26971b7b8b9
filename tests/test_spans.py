"""Tokens and spans on real captions.

Ids are the tokenizer's own, every parsed span has tokens, and the words at these are the span's.
"""

import csv
import json

import open_clip
import pytest
import torch
from released import REAL

from compvl.text.parser import parse_many
from compvl.text.tokens import span_tokens, tokenize_with_spans

KINDS = ("object", "attribute", "relation")
pytestmark = pytest.mark.skipif(
    not (REAL / "aro").is_dir(),
    reason=f"no real captions at {REAL} (COMPVL_REAL names another folder)",
)


def real_captions() -> list[str]:
    """The captions of ARO's COCO file, and the captions and foils of VALSE."""
    with open(REAL / "aro" / "coco_val_neg_captions.tsv", newline="", encoding="utf-8") as file:
        texts = [row["title"] for row in csv.DictReader(file, delimiter="\t")]
    for path in sorted((REAL / "valse").glob("*.json")):
        for item in json.loads(path.read_text()).values():
            texts += [item["caption"], item["foil"]]
    return texts


def is_odd(text: str) -> bool:
    """Whether a text has other than ASCII characters, an ampersand or superfluous spaces."""
    return not text.isascii() or "&" in text or "  " in text or text != text.strip()


def letters(text: str) -> str:
    return "".join(text.lower().split())


def test_real_captions():
    """Ids and spans of 2,000 captions and of all odd ones."""
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    texts = real_captions()
    odd = [text for text in texts if is_odd(text)]
    assert len(odd) > 100
    first = texts[:2000]
    ids, _ = tokenize_with_spans(first + odd, tokenizer)
    assert torch.equal(ids, tokenizer(first + odd))
    for text, row, parsed in zip(first, ids.tolist(), parse_many(first), strict=False):
        marked = []
        for kind in KINDS:
            marked += parsed.spans(kind)
        for (start, end), tokens in zip(marked, span_tokens(text, marked, tokenizer), strict=True):
            span = text[start:end]
            decoded = tokenizer.decode([row[i] for i in tokens])
            assert letters(span) == letters(decoded), (text, span)
