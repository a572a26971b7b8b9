"""The evaluation engine: what it encodes, what it keeps, and what it does with damaged files."""

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from released import REAL

from compvl.benchmarks.items import (
    Benchmark,
    ClassificationItem,
    Pair,
    RetrievalItem,
    Square,
    TextPair,
    Triplet,
)
from compvl.benchmarks.loading import load_benchmark
from compvl.benchmarks.replace import read_released_replace
from compvl.core import CompvlError
from compvl.evaluate.comparisons import compare
from compvl.evaluate.embed import Embedder
from compvl.evaluate.engine import COLUMNS, evaluate, item_scores
from compvl.evaluate.tasks import TASKS, task_of
from compvl.images import ImageRef, StoredImage, open_image
from compvl.metrics import triplet_metrics
from compvl.microworld import scenes as microworld
from compvl.models.clip import create_model

SCORES = ["s_c", "s_n", "s_p"]
TEXTS = ("caption", "hard_negative", "hard_positive")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return create_model("micro-clip", device="cpu")


class Seen:
    """What a model has encoded: the sum of each image's pixels, and each caption's tokens."""

    def __init__(self):
        self.images = []
        self.texts = []

    def clear(self):
        self.images.clear()
        self.texts.clear()


@pytest.fixture
def counted(model):
    """The model, and what it has encoded."""
    watched = dataclasses.replace(model)
    seen = Seen()

    def encode_image(images):
        seen.images += [round(float(value), 3) for value in images.double().sum((1, 2, 3))]
        return model.encode_image(images)

    def encode_text(tokens):
        seen.texts += [tuple(row) for row in tokens.tolist()]
        return model.encode_text(tokens)

    watched.encode_image = encode_image
    watched.encode_text = encode_text
    return watched, seen


@pytest.fixture
def photos(tmp_path):
    """Six photographs, of which the last is a copy of the first."""
    rng = np.random.default_rng(0)
    for i in range(5):
        pixels = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.jpg", quality=90)
    (tmp_path / "5.jpg").write_bytes((tmp_path / "0.jpg").read_bytes())
    return [str(tmp_path / f"{i}.jpg") for i in range(6)]


def triplet_benchmark(images, name="photos", n=24):
    """n items over the images, with captions that recur between items and between roles."""
    items = []
    for k in range(n):
        item = Triplet(
            f"{name}-{k}",
            images[k % len(images)],
            f"a cat number {k % 4}",
            f"a dog number {k % 3}",
            f"a cat number {k % 2}",
            ("spatial", "action")[k % 2],
        )
        items.append(item)
    return Benchmark(name, "triplet", items, "a test")


def pair_benchmark(images, name, n=8):
    """n pairs of captions over the images."""
    items = [
        Pair(f"{name}-{k}", images[k % len(images)], f"a cat number {k}", f"a dog number {k}")
        for k in range(n)
    ]
    return Benchmark(name, "pair", items, "a test")


def figures_of(table):
    """The table's values by group and metric."""
    return table.set_index(["group", "metric"]).value


def naive(model, items, captions=TEXTS):
    """Scores of one item at a time at the full 77 tokens: one row a caption of the item."""
    scores = []
    with torch.no_grad():
        for item in items:
            if isinstance(item.image, microworld.Scene):
                pixels = model.normalize(microworld.render([item.image], model.image_size))
            else:
                pixels = model.preprocess(open_image(item.image))[None]
            image = model.encode_image(pixels)[0]
            tokens = model.tokenizer([getattr(item, caption) for caption in captions])
            scores.append((model.encode_text(tokens, crop=False) @ image).tolist())
    return np.array(scores).T


def test_each_distinct_image_and_caption_is_encoded_once(counted, photos, tmp_path):
    model, seen = counted
    first = triplet_benchmark(photos)
    second = triplet_benchmark(photos[::-1], "again")
    few_texts = [
        Pair(str(k), photos[k % 6], f"a cat number {k % 4}", "a dog number 0") for k in range(10)
    ]
    benchmarks = [first, second, Benchmark("pairs", "pair", few_texts, "a test")]
    options = dict(cache=tmp_path / "cache", progress=False, n_boot=50)
    table = evaluate(model, benchmarks, **options)

    captions = {getattr(item, text) for item in first.items + second.items for text in TEXTS}
    # 58 items, 6 files, 5 distinct pictures
    assert len(seen.images) == len(set(seen.images)) == 5
    assert len(seen.texts) == len(set(seen.texts)) == len(captions) == 7
    assert set(table.benchmark) == {"photos", "again", "pairs"}

    seen.clear()
    again = evaluate(model, benchmarks, **options)
    assert not seen.images
    assert not seen.texts
    pd.testing.assert_frame_equal(table, again)


def test_new_content_is_added_to_the_cache_and_old_content_is_not_repeated(
    counted, photos, tmp_path
):
    model, seen = counted
    options = dict(cache=tmp_path / "c", progress=False, n_boot=10)
    evaluate(model, triplet_benchmark(photos[:3]), **options)
    seen.clear()
    longer = triplet_benchmark(photos)
    new = dataclasses.replace(longer.items[0], id="new", caption="something new")
    longer.items.append(new)
    evaluate(model, longer, **options)
    assert len(seen.images) == 2
    assert len(seen.texts) == 1

    Image.new("RGB", (80, 60), "red").save(photos[1])  # a file that changes is another image
    seen.clear()
    evaluate(model, longer, **options)
    assert len(seen.images) == 1
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors"}


def test_other_weights_share_nothing(model, photos, tmp_path):
    benchmark = triplet_benchmark(photos)
    torch.manual_seed(5)
    other = create_model("micro-clip", device="cpu")
    first = item_scores(model, benchmark, cache=tmp_path, progress=False)
    second = item_scores(other, benchmark, cache=tmp_path, progress=False)
    assert not np.allclose(first.s_c, second.s_c)
    assert np.allclose(second.s_c, item_scores(other, benchmark, progress=False).s_c)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path):
    path.write_bytes(b"")


def zeroed(path):
    path.write_bytes(b"\0" * 500)


def changed(path):
    path.write_bytes(path.read_bytes()[:-9] + b"corrupted")


@pytest.mark.parametrize("harm", [cut_short, emptied, zeroed, changed])
def test_a_damaged_shard_is_noticed_and_rebuilt(counted, photos, tmp_path, harm):
    model, seen = counted
    benchmark = triplet_benchmark(photos)
    cache = tmp_path / "c"
    good = item_scores(model, benchmark, cache=cache, progress=False)
    (shard,) = cache.glob("*/images/*.safetensors")
    harm(shard)
    seen.clear()
    with pytest.warns(UserWarning, match=f"{shard.name} are damaged"):
        again = item_scores(model, benchmark, cache=cache, progress=False)
    assert len(seen.images) == 5
    assert not seen.texts
    pd.testing.assert_frame_equal(good, again)
    seen.clear()
    item_scores(model, benchmark, cache=cache, progress=False)
    assert not seen.images


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replaced_by_a_page(path):
    path.write_bytes(b"<html>not found</html>")


@pytest.mark.parametrize(
    "harm, says",
    [(halved, "truncated"), (Path.unlink, "3.jpg"), (replaced_by_a_page, "no image")],
)
def test_an_unreadable_image_stops_the_evaluation_but_loses_nothing(
    counted, photos, tmp_path, harm, says
):
    model, seen = counted
    benchmark = triplet_benchmark(photos)
    options = dict(cache=tmp_path / "c", progress=False)
    harm(Path(photos[3]))
    with pytest.raises(CompvlError) as raised:
        evaluate(model, benchmark, **options)
    for part in (photos[3], "item photos-3:", "skip_damaged=True", "4 of 24 items", says):
        assert part in str(raised.value)
    assert len(seen.images) == 4
    seen.images.clear()
    with pytest.raises(CompvlError):
        evaluate(model, benchmark, **options)
    assert not seen.images  # the four good ones were kept

    table, scores = evaluate(
        model, benchmark, skip_damaged=True, return_scores=True, n_boot=50, **options
    )
    coverage = table.set_index(["group", "metric"]).loc[("all", "coverage")]
    assert coverage.value == pytest.approx(100 * 20 / 24)
    assert coverage.n == 20
    kept = scores["photos"]
    assert kept.attrs["skipped"] == [f"photos-{k}" for k in (3, 9, 15, 21)]
    assert len(kept) == 20
    assert not kept.id.isin(kept.attrs["skipped"]).any()


def test_a_missing_image_of_a_known_benchmark_says_where_it_belongs(model, photos):
    Path(photos[3]).unlink()
    benchmark = dataclasses.replace(triplet_benchmark(photos), name="sugarcrepe-add-obj")
    says = "coco/val2017/.*compvl data status sugarcrepe-add-obj.*--skip-damaged"
    with pytest.raises(CompvlError, match=says):
        evaluate(model, benchmark, progress=False)


def test_two_paths_to_the_same_broken_bytes(model, photos):
    for k in (0, 5):
        Path(photos[k]).write_bytes(b"broken")
    scores = item_scores(model, triplet_benchmark(photos), skip_damaged=True, progress=False)
    assert len(scores) == 16
    assert len(scores.attrs["skipped"]) == 8


def test_nothing_readable(model, photos):
    for path in photos:
        Path(path).unlink()
    with pytest.raises(CompvlError, match="not one of its 24 items"):
        evaluate(model, triplet_benchmark(photos), skip_damaged=True, progress=False)


def test_interrupted_encoding_resumes(counted, photos, tmp_path):
    model, seen = counted
    encode_image = model.encode_image
    options = dict(cache=tmp_path / "c", batch_size=1, progress=False)

    def fails_late(images):
        if len(seen.images) >= 2:
            raise KeyboardInterrupt
        return encode_image(images)

    model.encode_image = fails_late
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, triplet_benchmark(photos), **options)
    model.encode_image = encode_image
    seen.images.clear()
    evaluate(model, triplet_benchmark(photos), n_boot=10, **options)
    assert len(seen.images) == 3


def test_item_without_hard_positive(model, photos):
    benchmark = triplet_benchmark(photos)
    benchmark.items[7] = dataclasses.replace(benchmark.items[7], hard_positive=None)
    with pytest.raises(CompvlError, match="item photos-7: it has no hard positive"):
        evaluate(model, benchmark, progress=False)


def test_scores_are_those_of_one_item_at_a_time(model, photos):
    for benchmark in (triplet_benchmark(photos), load_benchmark("swap", n=20)):
        scores = item_scores(model, benchmark, batch_size=7, progress=False)
        expected = naive(model, benchmark.items)
        assert np.allclose(scores[SCORES].to_numpy().T, expected, atol=1e-5)


def test_table_agrees_with_triplet_metrics_and_crops_are_images_of_their_own(model, photos):
    benchmark = triplet_benchmark(photos)
    for k, item in enumerate(benchmark.items):
        crop = ImageRef(item.image, (5 * (k % 3), 0, 40, 40))
        benchmark.items[k] = dataclasses.replace(item, image=crop)
    table, scores = evaluate(model, benchmark, progress=False, return_scores=True, n_boot=100)
    scores = scores["photos"]
    assert np.allclose(scores[SCORES].to_numpy().T, naive(model, benchmark.items), atol=1e-5)

    figures = figures_of(table)
    for group, part in [("all", scores), *scores.groupby("group")]:
        expected = triplet_metrics(part.s_c, part.s_n, part.s_p)
        expected.pop("n")
        for metric, value in expected.items():
            assert figures[group, metric] == pytest.approx(value, abs=1e-6), (group, metric)
    mean = (figures["spatial", "aug_acc"] + figures["action", "aug_acc"]) / 2
    assert figures["macro", "aug_acc"] == pytest.approx(mean)
    assert list(table.columns) == COLUMNS
    assert table.config.nunique() == 1
    assert (table.model == "micro-clip").all()


def image_features(model, paths):
    """Features of images [N, D], each encoded on its own."""
    with torch.no_grad():
        return torch.cat([model.encode_image(model.preprocess(open_image(p))[None]) for p in paths])


def test_retrieval_by_hand(model, photos):
    items = [
        RetrievalItem(str(k), path, (f"photo number {k}", f"{k} cats"))
        for k, path in enumerate(photos[:5])
    ]
    benchmark = Benchmark("r", "retrieval", items, "a test")
    found = evaluate(model, benchmark, progress=False, n_boot=10).set_index("metric").value
    captions = []
    for item in items:
        captions += item.captions
    with torch.no_grad():
        texts = model.encode_text(model.tokenizer(captions))
    scores = image_features(model, photos[:5]) @ texts.T
    to_text = [int(scores[k].argmax()) // 2 == k for k in range(5)]
    to_image = [int(scores[:, j].argmax()) == j // 2 for j in range(10)]
    assert found["image_to_text_recall@1"] == pytest.approx(100 * np.mean(to_text))
    assert found["text_to_image_recall@1"] == pytest.approx(100 * np.mean(to_image))
    assert found["image_to_text_recall@10"] == 100


def test_classification_by_hand(model, photos):
    labels = [0, 1, 1, 0, 1]
    items = [ClassificationItem(str(k), photos[k], label) for k, label in enumerate(labels)]
    benchmark = Benchmark(
        "c",
        "classification",
        items,
        "a test",
        classes=("cat", "dog"),
        templates=("a {}", "the {}"),
    )
    table, scores = evaluate(model, benchmark, progress=False, n_boot=10, return_scores=True)
    with torch.no_grad():
        tokens = model.tokenizer(["a cat", "the cat", "a dog", "the dog"])
        classes = model.encode_text(tokens).view(2, 2, -1).mean(1)
    classes = torch.nn.functional.normalize(classes, dim=-1)
    expected = (image_features(model, photos[:5]) @ classes.T).argmax(1).numpy()
    assert scores["c"].predicted.tolist() == expected.tolist()

    figures = table.set_index("metric").value
    right = expected == np.array(labels)
    assert figures["acc@1"] == pytest.approx(100 * right.mean())
    assert "acc@5" not in figures
    recall = [right[np.array(labels) == label].mean() for label in (0, 1)]
    assert figures["mean_per_class_recall"] == pytest.approx(100 * np.mean(recall))


def test_mode_and_gradients_are_as_before(model, photos):
    model.clip.train()
    model.clip.visual.eval()
    try:
        evaluate(model, triplet_benchmark(photos), progress=False, n_boot=10)
        assert model.clip.training
        assert not model.clip.visual.training
        assert model.clip.token_embedding.training
        assert model.encode_text(model.tokenizer(["a cat"])).requires_grad
    finally:
        model.clip.eval()


def test_embedder_shares_features_over_calls(counted, photos):
    model, seen = counted
    embedder = Embedder(model, progress=False)
    for _ in range(2):
        evaluate(embedder, triplet_benchmark(photos), n_boot=10)
    assert len(seen.images) == 5
    assert dict(embedder.encoded) == dict(images=5, texts=7)


def test_what_cannot_be_evaluated(model, photos):
    benchmark = triplet_benchmark(photos)
    with pytest.raises(CompvlError, match="Unknown task 'poetry'"):
        evaluate(model, dataclasses.replace(benchmark, task="poetry"), progress=False)
    with pytest.raises(CompvlError, match="has no items"):
        evaluate(model, dataclasses.replace(benchmark, items=[]), progress=False)
    with pytest.raises(CompvlError, match="more than once"):
        evaluate(model, [benchmark, benchmark], progress=False)


def test_compare_pairs_items_by_id(model, photos):
    benchmark = triplet_benchmark(photos)
    torch.manual_seed(3)
    other = create_model("micro-clip", device="cpu")
    first = item_scores(model, benchmark, progress=False)
    second = item_scores(other, benchmark, progress=False)
    table = compare(first, second.iloc[::-1]).set_index(["group", "metric"])
    of_first = triplet_metrics(first.s_c, first.s_n, first.s_p)
    of_second = triplet_metrics(second.s_c, second.s_n, second.s_p)
    for metric in ("orig_acc", "aug_acc", "brittleness"):
        row = table.loc["all", metric]
        assert row.a == pytest.approx(of_first[metric])
        assert row.b == pytest.approx(of_second[metric])
        assert row["diff"] == pytest.approx(of_second[metric] - of_first[metric])
        assert row.lo <= row["diff"] <= row.hi
    with pytest.raises(CompvlError, match="photos-0"):
        compare(first, second[second.id != "photos-0"])
    assert task_of(pd.read_csv(io.StringIO(first.to_csv(index=False)))) is TASKS["triplet"]


@pytest.mark.skipif(
    not (REAL / "hard_positives").is_dir(),
    reason=f"the released REPLACE files are not at {REAL / 'hard_positives'} (set COMPVL_REAL)",
)
def test_released_replace_shares_images_and_captions(counted, photos):
    """The structure of the real benchmark, on five stand-in photographs."""
    model, seen = counted
    items = read_released_replace(REAL / "hard_positives", "relations")[:300]
    paths = dict.fromkeys(item.image for item in items)
    stand_in = {path: photos[k % 5] for k, path in enumerate(paths)}
    items = [dataclasses.replace(item, image=stand_in[item.image]) for item in items]
    benchmark = Benchmark("replace-relations", "triplet", items, "released")
    evaluate(model, benchmark, progress=False, n_boot=10)
    captions = {getattr(item, text) for item in items for text in TEXTS}
    assert len(seen.images) == 5
    assert len(seen.texts) == len(captions) < 900


# Kept scores, several models, other kinds of model


def test_finished_benchmarks_survive_an_interruption(counted, photos, tmp_path):
    model, seen = counted
    benchmarks = [pair_benchmark(photos[:3], "one"), pair_benchmark(photos[3:5], "two")]
    options = dict(keep=tmp_path / "kept", n_boot=10, progress=False)
    good = Path(photos[4]).read_bytes()
    Path(photos[4]).write_bytes(good[:500])
    with pytest.raises(CompvlError, match="two-1.*truncated"):
        evaluate(model, benchmarks, **options)
    Path(photos[4]).write_bytes(good)
    seen.clear()
    table = evaluate(model, benchmarks, **options)
    assert len(seen.images) == 2  # those of the second benchmark
    assert len(seen.texts) == 16
    seen.clear()
    again = evaluate(model, benchmarks, **options)
    assert not seen.images
    pd.testing.assert_frame_equal(again, table)


def test_a_folder_that_cannot_be_made_stops_before_anything_is_scored(counted, photos, tmp_path):
    model, seen = counted
    (tmp_path / "file").touch()
    with pytest.raises(CompvlError, match="file/kept cannot be made"):
        evaluate(
            model, pair_benchmark(photos[:3], "one"), keep=tmp_path / "file/kept", progress=False
        )
    assert not seen.images


def test_kept_scores_belong_to_weights_items_images_and_skipping(model, photos, tmp_path):
    benchmark = pair_benchmark(photos[:5], "one")
    kept = tmp_path / "kept"
    options = dict(keep=kept, n_boot=10, progress=False)

    def parts(model=model, benchmark=benchmark, **others):
        """How many scores are kept after an evaluation."""
        evaluate(model, benchmark, **options, **others)
        return len(list(kept.glob("*.json")))

    assert parts() == 1
    assert parts() == 1
    torch.manual_seed(5)
    assert parts(create_model("micro-clip", device="cpu")) == 2
    last = dataclasses.replace(benchmark.items[-1], foil="a hen")
    other = dataclasses.replace(benchmark, items=[*benchmark.items[:-1], last])
    assert parts(benchmark=other) == 3
    assert parts(skip_damaged=True) == 4
    os.utime(photos[0], (1, 1))
    assert parts() == 5
    before = evaluate(model, benchmark, **options)
    for path in kept.glob("*.csv.gz"):
        path.write_bytes(path.read_bytes()[:-9])  # a damaged part is made again
    pd.testing.assert_frame_equal(evaluate(model, benchmark, **options), before)


def test_squares_and_choices_with_a_missing_image(model, photos):
    gone = str(Path(photos[0]).with_name("gone.jpg"))
    items = [
        Square("a", photos[0], photos[1], "a cat", "a dog"),
        Square("b", photos[1], gone, "a cat", "a dog"),
        Square("c", gone, photos[2], "a cat", "a dog"),
    ]
    benchmark = Benchmark("squares", "square", items, "a test")
    assert benchmark.missing == [gone]
    assert benchmark.present == 1
    with pytest.raises(CompvlError, match="item b: .*gone.jpg.*2 of 3 items"):
        evaluate(model, benchmark, progress=False)
    table = evaluate(model, benchmark, skip_damaged=True, n_boot=10, progress=False)
    figures = table.set_index("metric")
    assert figures.n["text"] == 1
    assert figures.value["coverage"] == pytest.approx(100 / 3)
    assert figures.n["coverage"] == 1


def test_sentences_need_no_images(model):
    def figures(items):
        benchmark = Benchmark("s", "text-similarity", items, "a test")
        return evaluate(model, benchmark, n_boot=50, progress=False).set_index("metric").value

    items = [TextPair(str(k), "a cat " + "and a dog " * k, "a cat", float(-k)) for k in range(6)]
    found = figures(items)
    assert {"spearman", "pearson"} <= set(found.index)
    assert -100 <= found["spearman"] <= 100
    assert found["coverage"] == 100
    # all pairs are as similar as can be: nothing to correlate
    same = [dataclasses.replace(item, sentence_1="a cat") for item in items]
    assert figures(same)["spearman"] == 0


class CrossEncoder:
    """A scorer of pairs of image and caption."""

    name: str
    device = "cpu"

    def fingerprint(self):
        return f"{self.name}-1"

    def truncated(self, captions):
        return [False] * len(captions)


class Overlap(CrossEncoder):
    """Prefers captions with many letters a, on bright images; counts its pairs."""

    name = "overlap"

    def __init__(self):
        self.seen = []

    def score(self, images, captions):
        self.seen += captions
        pairs = zip(images, captions, strict=True)
        return [caption.count("a") + np.asarray(image).mean() / 1e3 for image, caption in pairs]


class Sharpness(CrossEncoder):
    """Prefers long captions, on images of much contrast."""

    name = "sharpness"

    def score(self, images, captions):
        pairs = zip(images, captions, strict=True)
        return [float(np.asarray(image).std()) * len(caption) for image, caption in pairs]


TASKS_ON_IMAGES = """swap aro-relation aro-coco-order svo-probes winoground imagenet
coco-retrieval""".split()


def test_cross_encoder_in_every_task_on_images(photos, tmp_path):
    scorer = Overlap()
    benchmarks = [load_benchmark(name, n=6) for name in TASKS_ON_IMAGES]
    options = dict(cache=tmp_path, n_boot=10, progress=False)
    found = evaluate(scorer, benchmarks, **options)
    assert found.model.unique().tolist() == ["overlap"]
    assert found.value.notna().all()
    n = len(scorer.seen)
    evaluate(scorer, [load_benchmark("swap", n=6)], **options)
    assert len(scorer.seen) == n
    with pytest.raises(CompvlError, match="overlap.*leave text similarity out"):
        evaluate(scorer, [load_benchmark("stsb", n=6)], n_boot=10, progress=False)


def test_stored_pictures(counted):
    model, seen = counted

    def read(i):
        return Image.new("RGB", (40, 30), (i % 3, 0, 0))

    items = [ClassificationItem(str(k), StoredImage("toy", k, read), k % 2) for k in range(9)]
    benchmark = Benchmark(
        "toy", "classification", items, "a test", classes=("cat", "dog"), templates=("a {}",)
    )
    figures = evaluate(model, benchmark, n_boot=10, progress=False).set_index("metric")
    assert figures.n["acc@1"] == 9
    assert len(seen.images) == 3  # nine pictures, three different ones


PROCESSES = """
import os, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from accelerate import PartialState
from test_evaluate import scored_by_all
if "WORLD_SIZE" in os.environ:
    assert PartialState(cpu=True).num_processes == 2
scored_by_all(sys.argv[2], sys.argv[3], os.environ.get("RANK", "one"))
"""


def whole_figures(model, benchmarks, out):
    """Figures and scores of a model, as CSV."""
    table, scores = evaluate(
        model,
        benchmarks,
        cache=out / "cache",
        keep=out / "kept",
        n_boot=50,
        batch_size=4,
        progress=False,
        return_scores=True,
    )
    return table.to_csv(), {name: part.to_csv() for name, part in scores.items()}


def retrieval_features(model, encoded):
    """Ranks, counts and features of a retrieval benchmark; batch sizes go to `encoded`."""
    watched = dataclasses.replace(model)

    def encode_image(images):
        encoded.append(len(images))
        return model.encode_image(images)

    watched.encode_image = encode_image
    embedder = Embedder(watched, batch_size=4, progress=False)
    ranks = item_scores(embedder, load_benchmark("coco-retrieval", n=20), progress=False)
    features = embedder.image_store.blocks[0].numpy().tobytes()
    return ranks.to_csv(), dict(embedder.encoded), features


def scored_by_all(photos, out, rank):
    """Scores of both kinds of models; then with photographs that cannot be read, and the error."""
    out = Path(out)
    photos = sorted(map(str, Path(photos).glob("*.jpg")))
    torch.manual_seed(0)
    model = create_model("micro-clip", device="cpu")
    benchmarks = [load_benchmark("swap", n=50), triplet_benchmark(photos)]
    encoded = []
    found = {
        "clip": whole_figures(model, benchmarks, out),
        "cross": whole_figures(Sharpness(), benchmarks, out),
        "retrieval": retrieval_features(model, encoded),
    }
    cached = Embedder(model, out / "cache", progress=False)
    found["again"] = item_scores(cached, benchmarks[1], progress=False).to_csv()

    damaged = triplet_benchmark([*photos, *[str(out / f"{k}.jpg") for k in range(3)]])
    options = dict(progress=False, batch_size=2)
    try:
        evaluate(model, damaged, **options)
    except CompvlError as error:
        found["error"] = str(error)
    found["skipped"] = item_scores(model, damaged, skip_damaged=True, **options).to_csv()
    torch.save((found, sum(encoded)), out / f"{rank}.pt")


def test_two_processes_find_what_one_does(photos, tmp_path):
    """Scores and figures to the last bit, the same on both, whatever is in the cache."""
    script = tmp_path / "evaluation.py"
    script.write_text(PROCESSES)
    out = tmp_path / "out"
    out.mkdir()
    for k in range(3):
        (out / f"{k}.jpg").write_bytes(b"no picture")

    def run(*launch):
        subprocess.run(
            [sys.executable, *launch, script, os.path.dirname(__file__), tmp_path, out],
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        )

    run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert len(list((out / "kept").glob("*.json"))) == 4
    for part in ("kept", "cache"):
        (out / part).rename(tmp_path / part)
    run()
    one, n = torch.load(out / "one.pt", weights_only=True)
    first, n_first = torch.load(out / "0.pt", weights_only=True)
    second, n_second = torch.load(out / "1.pt", weights_only=True)
    assert "swap" in one["clip"][1]
    assert "3 of its images" in one["error"]
    assert one == first == second
    # each process encodes its share of the batches of four
    assert (n, n_first, n_second) == (20, 12, 8)
