"""Hard positives by rule on real captions: what must hold of each, and how many there are."""

import csv
import json
import re
from collections import Counter
from itertools import pairwise

import pytest
from released import REAL

from compvl.text.hard_positives import POSITIVES, hard_positive
from compvl.text.operators import Refused
from compvl.text.parser import parse

# The share of captions that get a hard positive must be above these.
LEAST_SHARES = {
    "replace": 0.75,
    "rules": 0.78,
    "swap": 0.09,
    "frame": 0.4,
    "predicate": 0.1,
    "inverse": 0.01,
}


@pytest.fixture(scope="module")
def captions():
    """Every fifth distinct caption of ARO's COCO file and of SugarCrepe."""
    if not (REAL / "aro").is_dir() or not (REAL / "sugarcrepe").is_dir():
        pytest.skip(f"no real captions in {REAL}: set COMPVL_REAL")
    with open(REAL / "aro/coco_val_neg_captions.tsv", newline="", encoding="utf-8") as file:
        found = [row["title"] for row in csv.DictReader(file, delimiter="\t")]
    for path in sorted((REAL / "sugarcrepe").glob("*.json")):
        found += [item["caption"] for item in json.loads(path.read_text()).values()]
    return list(dict.fromkeys(found))[::5]


def word_counts(text):
    """How often a text contains each word, but for *a* and *an*."""
    counts = Counter(re.findall(r"\w+", text.lower()))
    return {word: count for word, count in counts.items() if word not in ("a", "an")}


def doubled_words(text):
    """The words that follow themselves."""
    return Counter(a for a, b in pairwise(text.lower().split()) if a == b)


def closing_marks(text):
    """The punctuation with which a text ends."""
    return re.search(r"\W*$", text)[0]


def check_well_formed(caption, perturbed):
    """A hard positive is one edit that keeps capitals and punctuation, and doubles no word."""
    (step,) = perturbed.steps
    text = perturbed.text
    assert perturbed.source == step.before == caption
    assert text == step.after
    assert text != caption
    assert caption[step.start : step.end] == step.old
    assert closing_marks(text) == closing_marks(caption), text
    if caption[:1].isalpha():
        assert text[:1].isupper() == caption[:1].isupper(), text
    assert not doubled_words(text) - doubled_words(caption), text


def check_swap(caption, text):
    """A swap moves the words of a caption that has *and* and fewer than 15 words."""
    assert word_counts(text) == word_counts(caption), text
    assert re.search(r"\band\b", caption, re.IGNORECASE)
    assert len(caption.split()) < 15


def test_every_positive_is_a_well_formed_edit(captions):
    """Each is well formed, each refusal has a reason of one line, and most captions get one."""
    made = Counter()
    for caption in captions:
        parsed = parse(caption)
        for method in POSITIVES:
            try:
                perturbed = hard_positive(caption, method, seed=1, parsed=parsed)
            except Refused as refusal:
                assert refusal.reason
                assert "\n" not in refusal.reason
                continue
            made[method] += 1
            check_well_formed(caption, perturbed)
            if perturbed.steps[0].operator == "swap":
                check_swap(caption, perturbed.text)
    shares = {method: count / len(captions) for method, count in made.items()}
    for method, least in LEAST_SHARES.items():
        assert shares[method] > least, shares


def test_a_positive_depends_on_caption_and_seed_alone(captions):
    """The same seed, as a number or a text, gives the same positives; another one gives others."""

    def texts(seed):
        for caption in captions[:200]:
            try:
                yield hard_positive(caption, seed=seed).text
            except Refused as refusal:
                yield refusal.reason

    first = list(texts(3))
    assert list(texts(3)) == first
    assert list(texts("3")) == first
    assert sum(a != b for a, b in zip(first, texts(4), strict=True)) > 50
