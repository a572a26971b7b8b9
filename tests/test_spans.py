"""Tokens and spans on real captions: ids are the tokenizer's own, every parsed span has tokens, and the words at those tokens are the span's."""

import csv
import json
import os
from pathlib import Path

import open_clip
import pytest
import torch

from compvl.text.parser import parse_many
from compvl.text.tokens import span_tokens, tokenize_with_spans

REAL = Path(
    os.environ.get("COMPVL_REAL") or Path(__file__).resolve().parents[2] / "shared" / "real"
)
pytestmark = pytest.mark.skipif(
    not (REAL / "aro").is_dir(),
    reason=f"no real captions at {REAL} (COMPVL_REAL names another folder)",
)


def test_real_captions():
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    with open(REAL / "aro" / "coco_val_neg_captions.tsv", newline="", encoding="utf-8") as f:
        texts = [row["title"] for row in csv.DictReader(f, delimiter="\t")]
    for p in sorted((REAL / "valse").glob("*.json")):
        texts += [
            t
            for item in json.loads(p.read_text()).values()
            for t in (item["caption"], item["foil"])
        ]
    odd = [t for t in texts if not t.isascii() or "&" in t or "  " in t or t != t.strip()]
    assert len(odd) > 100
    texts = texts[:2000] + odd
    ids, spans = tokenize_with_spans(texts, tokenizer)
    assert torch.equal(ids, tokenizer(texts))
    letters = lambda s: "".join(s.lower().split())
    for text, row, parsed in zip(texts[:2000], ids.tolist(), parse_many(texts[:2000])):
        marked = [s for kind in ("object", "attribute", "relation") for s in parsed.spans(kind)]
        for (a, b), at in zip(marked, span_tokens(text, marked, tokenizer)):
            assert letters(text[a:b]) == letters(tokenizer.decode([row[i] for i in at])), (
                text,
                text[a:b],
            )
