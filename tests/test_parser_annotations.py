"""The shipped parser on real captions: F1 against 100 captions annotated by hand, and how many of all captions it finds something in.

The captions stay with the real material; `parser_annotations.json` names them by file and line (or key), gives character spans, and states the
guidelines that the annotation followed. `python tests/test_parser_annotations.py` prints the report and writes data/results/parser_annotations.csv."""

import csv
import json
import os
import random
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from compvl.core import data_dir, git_commit
from compvl.text.parser import parse_many

REAL = Path(
    os.environ.get("COMPVL_REAL") or Path(__file__).resolve().parents[2] / "shared" / "real"
)
TSV, CREPE = "aro/coco_val_neg_captions.tsv", "sugarcrepe"
pytestmark = pytest.mark.skipif(
    not ((REAL / TSV).is_file() and (REAL / CREPE).is_dir()),
    reason=f"no {TSV} and {CREPE} at {REAL} (COMPVL_REAL names another folder)",
)
GOLD = json.loads(Path(__file__).with_name("parser_annotations.json").read_text())["annotations"]
BOUNDS = dict(object=0.90, attribute=0.85, relation=0.85)


def captions():
    "Every distinct caption -> where it stands first: (file, line) of the table, (file, key) of SugarCrepe's."
    where = {}
    with open(REAL / TSV, newline="", encoding="utf-8") as f:
        rows = csv.reader(f, delimiter="\t")
        column, line = next(rows).index("title"), rows.line_num + 1
        for row in rows:
            where.setdefault(row[column].strip(), (TSV, line))
            line = rows.line_num + 1
    for p in sorted((REAL / CREPE).glob("*.json")):
        for key, item in json.loads(p.read_text()).items():
            where.setdefault(item["caption"].strip(), (f"{CREPE}/{p.name}", key))
    return where


def drawn():
    where = captions()
    return [(c, *where[c]) for c in random.Random(0).sample(sorted(where), 100)]


def compare(nlp=None):
    "Per kind (true positives, found, annotated), and per caption its text with what was missed and what was found in excess."
    counts, worst = {k: Counter() for k in BOUNDS}, []
    texts = [c for c, *_ in drawn()]
    for text, gold, parsed in zip(texts, GOLD, parse_many(texts, nlp)):
        wrong = []
        for kind in BOUNDS:
            want, got = (
                {tuple(s) for s in gold["spans"][kind]},
                {tuple(s) for s in parsed.spans(kind)},
            )
            counts[kind].update(hit=len(want & got), got=len(got), want=len(want))
            wrong += [
                f"{sign}{kind} {text[a:b]!r}"
                for sign, spans in (("-", want - got), ("+", got - want))
                for a, b in sorted(spans)
            ]
        worst.append((wrong, text))
    return counts, sorted(worst, key=lambda w: -len(w[0]))


def f1(c):
    return 2 * c["hit"] / (c["got"] + c["want"])


def report(counts, worst, n=30):
    lines = [
        f"{k}: precision {c['hit'] / max(1, c['got']):.3f}, recall {c['hit'] / c['want']:.3f}, F1 {f1(c):.3f} ({c['want']} annotated; at least {BOUNDS[k]})"
        for k, c in counts.items()
    ]
    return "\n".join(
        lines + [f"{text}\n    {', '.join(wrong)}" for wrong, text in worst[:n] if wrong]
    )


def test_the_drawing_gives_the_annotated_captions():
    assert [(source, key) for _, source, key in drawn()] == [
        (g["source"], g.get("line", g.get("key"))) for g in GOLD
    ]
    for (text, *_), gold in zip(drawn(), GOLD):
        spans = sorted(tuple(s) for kind in BOUNDS for s in gold["spans"][kind])
        assert all(0 <= a < b <= len(text) and text[a:b].strip() == text[a:b] for a, b in spans), (
            text
        )
        assert all(b <= c for (_, b), (c, _) in zip(spans, spans[1:])), text


def test_f1_against_hand_annotation():
    counts, worst = compare()
    assert all(f1(c) >= BOUNDS[k] for k, c in counts.items()), "\n" + report(counts, worst)


def scores():
    "By kind: precision, recall and F1 on the annotated captions, how many spans these have, and the share of all captions in which one is found."
    counts, _ = compare()
    parses = list(parse_many(sorted(captions())))
    return pd.DataFrame(
        [
            dict(
                kind=k,
                precision=c["hit"] / c["got"],
                recall=c["hit"] / c["want"],
                f1=f1(c),
                annotated=c["want"],
                found_in=sum(bool(p.spans(k)) for p in parses) / len(parses),
                captions=len(parses),
            )
            for k, c in counts.items()
        ]
        + [
            dict(
                kind="relation or attribute",
                found_in=sum(bool(p.relations or p.attributes) for p in parses) / len(parses),
                captions=len(parses),
            )
        ]
    ).round(4)


def test_coverage_of_all_captions_and_the_committed_scores():
    found = scores()
    share = found.set_index("kind").found_in
    assert share["object"] >= 0.98 and share["relation or attribute"] >= 0.90, found
    pd.testing.assert_frame_equal(
        found, pd.read_csv(data_dir() / "results/parser_annotations.csv").drop(columns="commit")
    )


if __name__ == "__main__":
    print(report(*compare(), n=100))
    scores().assign(commit=git_commit()).to_csv(
        data_dir() / "results/parser_annotations.csv", index=False
    )
