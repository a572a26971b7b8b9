"""The blind baseline against the released files, and what no committed figure shows."""

import json
import math
import random

import numpy as np
import pytest
from blind_baseline import baseline, coco_model
from pandas.testing import assert_frame_equal
from released import REAL

from compvl.benchmarks.items import Benchmark, Triplet
from compvl.core import CompvlError
from compvl.evaluate.blind import (
    PER,
    blind_figures,
    blind_of_files,
    blind_of_microworld,
    blind_scores,
    blind_scores_of,
    blind_table,
    word_model,
)
from compvl.metrics import triplet_metrics

FOLDERS = ("aro", "hard_positives", "sugarcrepe")
ABSENT = [folder for folder in FOLDERS if not (REAL / folder).is_dir()]
INDEX = ["per", "benchmark", "group", "metric"]

needs_files = pytest.mark.skipif(
    bool(ABSENT),
    reason=f"{', '.join(ABSENT)} under {REAL} (released files, not part of the project) absent",
)


@needs_files
def test_the_committed_figures_are_those_of_the_released_files():
    found = baseline(REAL)
    kept = blind_of_files().drop(columns="commit")
    exact = ["per", "benchmark", "group", "metric", "value", "n", "captions", "words"]
    assert_frame_equal(found[exact], kept[exact])
    # resampling may round otherwise with another version of NumPy
    assert_frame_equal(found[["lo", "hi"]], kept[["lo", "hi"]], atol=0.3, rtol=0)


@needs_files
def test_a_second_way_to_count_gives_the_same_accuracies():
    """Plain loops over the released files, without the package's scores and outcomes."""
    model = coco_model(REAL)
    originals = json.loads(
        (REAL / "hard_positives/original/vl_checklist_attributes.json").read_text()
    )
    changed = json.loads(
        (REAL / "hard_positives/hard_positive/vl_checklist_attributes.json").read_text()
    )
    n_original = n_augmented = n_brittle = 0
    for c, p in zip(originals, changed, strict=True):
        scores = []
        for text in (c["true_caption"], c["false_caption"], p["true_caption"]):
            letters = "".join(x if x in "abcdefghijklmnopqrstuvwxyz" else " " for x in text.lower())
            counts = [model.counts[word] + 1 for word in sorted(letters.split())]
            n_all = sum(model.counts.values()) + len(model.counts) + 1
            scores.append(round(sum(math.log(count / n_all) for count in counts), 9))
        caption, negative, positive = scores
        n_original += caption > negative
        n_augmented += caption > negative and positive > negative
        n_brittle += caption > negative > positive or positive > negative > caption
    kept = blind_of_files().set_index(INDEX).value
    for metric, n_right in zip(
        ("orig_acc", "aug_acc", "brittleness"), (n_original, n_augmented, n_brittle), strict=True
    ):
        figure = kept["text", "replace-attributes", "all", metric]
        assert figure == pytest.approx(100 * n_right / len(originals), abs=1e-3)


def test_what_the_committed_figures_say():
    kept = blind_of_files().set_index(INDEX)
    value = kept.value
    for per in PER:
        # far above chance (50) without an image, and below it (33.3) with the hard positives
        assert value[per, "replace", "macro", "orig_acc"] > 80
        assert value[per, "replace", "macro", "aug_acc"] < 100 / 3
        assert value[per, "replace", "macro", "brittleness"] > 50
        for split in ("sugarcrepe-swap-obj", "sugarcrepe-swap-att"):
            row = kept.loc[(per, split, "same words", "ties")]
            assert row.value == row.n > 100
            assert value[per, split, "same words", "accuracy"] == 0
    sizes = kept.n.xs("all", level="group").xs("ties", level="metric").loc["text"]
    assert sizes["replace-relations"] == 16_868
    assert sizes["replace-attributes"] == 10_575


def test_swaps_tie_in_any_order_of_words():
    rng = random.Random(0)
    words = "a the red blue tall small ball box near under crimson ladder".split()
    model = word_model(" ".join(rng.choices(words[:8], k=6)) for _ in range(50))
    for _ in range(300):
        text = rng.choices(words, k=12)
        other = rng.sample(text, len(text))
        for per in PER:
            a, b = blind_scores_of(model, (" ".join(text), " ".join(other)), per)
            assert a == b


def test_figures_are_those_of_the_metrics():
    rng = random.Random(1)
    words = "a the red blue tall small ball box near under crimson ladder".split()
    model = word_model(" ".join(rng.choices(words[:9], k=6)) for _ in range(50))
    items = []
    for i in range(200):
        texts = [" ".join(rng.choices(words, k=rng.randint(2, 6))) for _ in range(3)]
        items.append(Triplet(str(i), None, *texts, "ab"[i % 2]))
    benchmark = Benchmark("random", "triplet", items, "this test")
    found = blind_figures([benchmark], model, n_boot=50).set_index(INDEX)
    for per in PER:
        scores = blind_scores(benchmark, model, per)
        want = triplet_metrics(scores.s_c, scores.s_n, scores.s_p)
        for metric in ("orig_acc", "aug_acc", "brittleness", "ties"):
            row = found.loc[(per, "random", "all", metric)]
            assert row.value == pytest.approx(want[metric])
            assert metric == "ties" or row.lo <= row.value <= row.hi
            assert row.n == 200


def test_the_microworlds_figures_are_drawn_from_its_captions_alone():
    first = blind_of_microworld(100, 200, n_boot=20)
    assert_frame_equal(first, blind_of_microworld(100, 200, n_boot=20))
    value = first.set_index(INDEX).value
    for per in PER:
        assert value[per, "swap", "all", "ties"] == 100
        parts = [
            value[per, f"replace-{part}", "all", "aug_acc"] for part in ("relations", "attributes")
        ]
        assert value[per, "replace", "macro", "aug_acc"] == pytest.approx(np.mean(parts))


def test_errors_say_what_to_do():
    with pytest.raises(CompvlError, match="2 captions contain no word"):
        word_model(["1", "…"])
    model = word_model(["a red ball"])
    with pytest.raises(CompvlError, match="score"):
        blind_scores_of(model, ["a"], "letter")
    with pytest.raises(CompvlError, match="task of the blind baseline"):
        blind_scores(Benchmark("stsb", "text-similarity", [], "this test"), model)


def test_table_has_a_row_for_each_source_and_no_other():
    files = blind_of_files()
    table = blind_table({"files": files}, ["word"])
    assert table.index.get_level_values(0).unique().tolist() == ["log-probability per word, files"]
    value = files.set_index(INDEX).value
    row = table.loc[("log-probability per word, files", "REPLACE relations")]
    assert row["original accuracy"] == value["word", "replace-relations", "all", "orig_acc"]
    assert row.brittleness_lo < row.brittleness < row.brittleness_hi
    assert row["items"] == "16,868"
