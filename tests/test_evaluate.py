"The evaluation engine: what it encodes, what it keeps, and what it does with damage."

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
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
from compvl.benchmarks.replace_swap import read_released_replace
from compvl.core import CompvlError
from compvl.evaluate.comparisons import compare
from compvl.evaluate.embed import Embedder
from compvl.evaluate.engine import COLUMNS, evaluate, item_scores
from compvl.evaluate.tasks import TASKS, task_of
from compvl.images import ImageRef, StoredImage, open_image
from compvl.metrics import triplet_metrics
from compvl.models.clip import create_model
from PIL import Image

from compvl.microworld import scenes as microworld

REAL = Path(os.environ.get("COMPVL_REAL", Path(__file__).parents[2] / "shared/real"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return create_model("micro-clip", device="cpu")


@pytest.fixture
def counted(model):
    "The model, with a list of every image (its pixels' sum) and every caption's tokens that it was asked to encode."
    m, seen = replace(model), dict(images=[], texts=[])

    def encode_image(x):
        seen["images"] += [round(float(v), 3) for v in x.double().sum((1, 2, 3))]
        return model.encode_image(x)

    def encode_text(t):
        seen["texts"] += [tuple(r) for r in t.tolist()]
        return model.encode_text(t)

    m.encode_image, m.encode_text = encode_image, encode_text
    return m, seen


@pytest.fixture
def photos(tmp_path):
    "Six photographs, of which the last is a copy of the first."
    rng = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)).save(
            tmp_path / f"{i}.jpg", quality=90
        )
    (tmp_path / "5.jpg").write_bytes((tmp_path / "0.jpg").read_bytes())
    return [str(tmp_path / f"{i}.jpg") for i in range(6)]


def triplet_benchmark(images, name="photos", n=24):
    "n items over the images, with captions that recur between items and between roles."
    items = [
        Triplet(
            f"{name}-{k}",
            images[k % len(images)],
            f"a cat number {k % 4}",
            f"a dog number {k % 3}",
            f"a cat number {k % 2}",
            ("spatial", "action")[k % 2],
        )
        for k in range(n)
    ]
    return Benchmark(name, "triplet", items, "a test")


def naive(model, items, *captions):
    "Scores of one item at a time at the full 77 tokens."
    out = []
    with torch.no_grad():
        for i in items:
            image = (
                model.encode_image(model.preprocess(open_image(i.image))[None])
                if not isinstance(i.image, microworld.Scene)
                else model.encode_image(
                    model.normalize(microworld.render([i.image], model.image_size))
                )
            )
            out.append(
                (
                    model.encode_text(
                        model.tokenizer([getattr(i, c) for c in captions]), crop=False
                    )
                    @ image[0]
                ).tolist()
            )
    return np.array(out).T


def test_each_distinct_image_and_caption_is_encoded_once(counted, photos, tmp_path):
    m, seen = counted
    first, second = triplet_benchmark(photos), triplet_benchmark(photos[::-1], "again")
    pairs = Benchmark(
        "pairs",
        "pair",
        [Pair(str(k), photos[k % 6], f"a cat number {k % 4}", "a dog number 0") for k in range(10)],
        "a test",
    )
    df = evaluate(m, [first, second, pairs], cache=tmp_path / "cache", progress=False, n_boot=50)
    captions = {
        getattr(i, k)
        for b in (first, second)
        for i in b.items
        for k in ("caption", "hard_negative", "hard_positive")
    }
    assert (
        len(seen["images"]) == len(set(seen["images"])) == 5
    )  # 58 items, 6 files, 5 distinct pictures
    assert len(seen["texts"]) == len(set(seen["texts"])) == len(captions) == 7
    assert set(df.benchmark) == {"photos", "again", "pairs"}

    seen["images"].clear()
    seen["texts"].clear()
    again = evaluate(m, [first, second, pairs], cache=tmp_path / "cache", progress=False, n_boot=50)
    assert seen == dict(images=[], texts=[])
    pd.testing.assert_frame_equal(df, again)


def test_new_content_is_added_to_the_cache_and_old_content_is_not_repeated(
    counted, photos, tmp_path
):
    m, seen = counted
    evaluate(m, triplet_benchmark(photos[:3]), cache=tmp_path / "c", progress=False, n_boot=10)
    seen["images"].clear()
    seen["texts"].clear()
    longer = triplet_benchmark(photos)
    longer.items.append(replace(longer.items[0], id="new", caption="something new"))
    evaluate(m, longer, cache=tmp_path / "c", progress=False, n_boot=10)
    assert len(seen["images"]) == 2 and len(seen["texts"]) == 1
    Image.new("RGB", (80, 60), "red").save(photos[1])  # a file that changes is another image
    seen["images"].clear()
    evaluate(m, longer, cache=tmp_path / "c", progress=False, n_boot=10)
    assert len(seen["images"]) == 1
    shards = list((tmp_path / "c").rglob("*"))
    assert {p.suffix for p in shards if p.is_file()} == {".safetensors"}


def test_other_weights_share_nothing(model, photos, tmp_path):
    b = triplet_benchmark(photos)
    torch.manual_seed(5)
    other = create_model("micro-clip", device="cpu")
    a = item_scores(model, b, cache=tmp_path, progress=False)
    c = item_scores(other, b, cache=tmp_path, progress=False)
    assert not np.allclose(a.s_c, c.s_c) and np.allclose(
        c.s_c, item_scores(other, b, progress=False).s_c
    )


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p.write_bytes(p.read_bytes()[:-40]),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(b"\0" * 500),
        lambda p: p.write_bytes(p.read_bytes()[:-9] + b"corrupted"),
    ],
    ids=["cut short", "empty", "zeros", "changed"],
)
def test_a_damaged_shard_is_noticed_and_rebuilt(counted, photos, tmp_path, harm):
    m, seen = counted
    b = triplet_benchmark(photos)
    good = item_scores(m, b, cache=tmp_path / "c", progress=False)
    (shard,) = (tmp_path / "c").glob("*/images/*.safetensors")
    harm(shard)
    seen["images"].clear()
    seen["texts"].clear()
    with pytest.warns(UserWarning, match=f"{shard.name} are damaged"):
        again = item_scores(m, b, cache=tmp_path / "c", progress=False)
    assert len(seen["images"]) == 5 and not seen["texts"]
    pd.testing.assert_frame_equal(good, again)
    seen["images"].clear()
    item_scores(m, b, cache=tmp_path / "c", progress=False)
    assert not seen["images"]


@pytest.mark.parametrize(
    "harm, says",
    [
        (lambda p: p.write_bytes(p.read_bytes()[: len(p.read_bytes()) // 2]), "truncated"),
        (lambda p: p.unlink(), "3.jpg"),
        (lambda p: p.write_bytes(b"<html>not found</html>"), "no image"),
    ],
    ids=["truncated", "missing", "not an image"],
)
def test_an_unreadable_image_stops_the_evaluation_but_loses_nothing(
    counted, photos, tmp_path, harm, says
):
    m, seen = counted
    b = triplet_benchmark(photos)
    harm(Path(photos[3]))
    with pytest.raises(CompvlError) as e:
        evaluate(m, b, cache=tmp_path / "c", progress=False)
    message = str(e.value)
    assert (
        photos[3] in message
        and "item photos-3:" in message
        and "skip_damaged=True" in message
        and "4 of 24 items" in message
        and says in message
    )
    assert len(seen["images"]) == 4
    seen["images"].clear()
    with pytest.raises(CompvlError):
        evaluate(m, b, cache=tmp_path / "c", progress=False)
    assert not seen["images"]  # the four good ones were kept

    df, scores = evaluate(
        m, b, cache=tmp_path / "c", progress=False, skip_damaged=True, return_scores=True, n_boot=50
    )
    row = df.set_index(["group", "metric"]).loc[("all", "coverage")]
    assert row.value == pytest.approx(100 * 20 / 24) and row.n == 20
    assert (
        scores["photos"].attrs["skipped"] == [f"photos-{k}" for k in (3, 9, 15, 21)]
        and len(scores["photos"]) == 20
    )
    assert not scores["photos"].id.isin(scores["photos"].attrs["skipped"]).any()


def test_two_paths_to_the_same_broken_bytes(model, photos, tmp_path):
    for k in (0, 5):
        Path(photos[k]).write_bytes(b"broken")
    s = item_scores(model, triplet_benchmark(photos), skip_damaged=True, progress=False)
    assert len(s) == 16 and len(s.attrs["skipped"]) == 8


def test_nothing_readable(model, photos):
    for p in photos:
        Path(p).unlink()
    with pytest.raises(CompvlError, match="not one of its 24 items"):
        evaluate(model, triplet_benchmark(photos), skip_damaged=True, progress=False)


def test_interrupted_encoding_resumes(counted, photos, tmp_path):
    m, seen = counted
    real = m.encode_image

    def fails_late(x):
        if len(seen["images"]) >= 2:
            raise KeyboardInterrupt
        return real(x)

    m.encode_image = fails_late
    with pytest.raises(KeyboardInterrupt):
        evaluate(m, triplet_benchmark(photos), cache=tmp_path / "c", batch_size=1, progress=False)
    m.encode_image = real
    seen["images"].clear()
    evaluate(
        m, triplet_benchmark(photos), cache=tmp_path / "c", batch_size=1, progress=False, n_boot=10
    )
    assert len(seen["images"]) == 3


def test_item_without_hard_positive(model, photos):
    b = triplet_benchmark(photos)
    b.items[7] = replace(b.items[7], hard_positive=None)
    with pytest.raises(CompvlError, match="item photos-7: it has no hard positive"):
        evaluate(model, b, progress=False)


def test_scores_are_those_of_one_item_at_a_time(model, photos):
    b = triplet_benchmark(photos)
    s = item_scores(model, b, progress=False)
    assert np.allclose(
        s[["s_c", "s_n", "s_p"]].to_numpy().T,
        naive(model, b.items, "caption", "hard_negative", "hard_positive"),
        atol=1e-5,
    )
    micro = load_benchmark("swap", n=20)
    s = item_scores(model, micro, batch_size=7, progress=False)
    assert np.allclose(
        s[["s_c", "s_n", "s_p"]].to_numpy().T,
        naive(model, micro.items, "caption", "hard_negative", "hard_positive"),
        atol=1e-5,
    )


def test_table_agrees_with_triplet_metrics_and_crops_are_images_of_their_own(model, photos):
    b = triplet_benchmark(photos)
    b.items[:] = [
        replace(i, image=ImageRef(i.image, (5 * (k % 3), 0, 40, 40))) for k, i in enumerate(b.items)
    ]
    df, scores = evaluate(model, b, progress=False, return_scores=True, n_boot=100)
    s, v = scores["photos"], df.set_index(["group", "metric"]).value
    assert np.allclose(
        s[["s_c", "s_n", "s_p"]].to_numpy().T,
        naive(model, b.items, "caption", "hard_negative", "hard_positive"),
        atol=1e-5,
    )
    for group, t in [("all", s), *s.groupby("group")]:
        for k, x in triplet_metrics(t.s_c, t.s_n, t.s_p).items():
            if k != "n":
                assert v[group, k] == pytest.approx(x, abs=1e-6), (group, k)
    assert v["macro", "aug_acc"] == pytest.approx(
        (v["spatial", "aug_acc"] + v["action", "aug_acc"]) / 2
    )
    assert (
        list(df.columns) == COLUMNS
        and df.config.nunique() == 1
        and (df.model == "micro-clip").all()
    )


def test_retrieval_and_classification_by_hand(model, photos):
    items = [
        RetrievalItem(str(k), p, (f"photo number {k}", f"{k} cats"))
        for k, p in enumerate(photos[:5])
    ]
    classes = ClassificationItem
    r = (
        evaluate(model, Benchmark("r", "retrieval", items, "a test"), progress=False, n_boot=10)
        .set_index("metric")
        .value
    )
    with torch.no_grad():
        I = torch.cat(
            [model.encode_image(model.preprocess(open_image(p))[None]) for p in photos[:5]]
        )
        T = model.encode_text(model.tokenizer([c for i in items for c in i.captions]))
        s = I @ T.T
        prompts = (
            model.encode_text(model.tokenizer(["a cat", "the cat", "a dog", "the dog"]))
            .view(2, 2, -1)
            .mean(1)
        )
    assert r["image_to_text_recall@1"] == pytest.approx(
        100 * np.mean([int(s[k].argmax()) // 2 == k for k in range(5)])
    )
    assert r["text_to_image_recall@1"] == pytest.approx(
        100 * np.mean([int(s[:, j].argmax()) == j // 2 for j in range(10)])
    )
    assert r["image_to_text_recall@10"] == 100
    labels = [0, 1, 1, 0, 1]
    c = Benchmark(
        "c",
        "classification",
        [classes(str(k), photos[k], y) for k, y in enumerate(labels)],
        "a test",
        classes=("cat", "dog"),
        templates=("a {}", "the {}"),
    )
    df, scores = evaluate(model, c, progress=False, n_boot=10, return_scores=True)
    want = (I @ torch.nn.functional.normalize(prompts, dim=-1).T).argmax(1).tolist()
    assert scores["c"].predicted.tolist() == want
    v = df.set_index("metric").value
    assert (
        v["acc@1"] == pytest.approx(100 * np.mean([a == b for a, b in zip(want, labels)]))
        and "acc@5" not in v
    )
    assert v["mean_per_class_recall"] == pytest.approx(
        50 * sum(np.mean([w == y for w, y in zip(want, labels) if y == k]) for k in (0, 1))
    )


def test_mode_and_gradients_are_as_before(model, photos):
    model.clip.train()
    model.clip.visual.eval()
    try:
        evaluate(model, triplet_benchmark(photos), progress=False, n_boot=10)
        assert (
            model.clip.training
            and not model.clip.visual.training
            and model.clip.token_embedding.training
        )
        assert model.encode_text(model.tokenizer(["a cat"])).requires_grad
    finally:
        model.clip.eval()


def test_embedder_shares_features_over_calls(counted, photos):
    m, seen = counted
    emb = Embedder(m, progress=False)
    for _ in range(2):
        evaluate(emb, triplet_benchmark(photos), n_boot=10)
    assert len(seen["images"]) == 5 and dict(emb.encoded) == dict(images=5, texts=7)


def test_what_cannot_be_evaluated(model, photos):
    b = triplet_benchmark(photos)
    with pytest.raises(CompvlError, match="Unknown task 'poetry'"):
        evaluate(model, replace(b, task="poetry"), progress=False)
    with pytest.raises(CompvlError, match="has no items"):
        evaluate(model, replace(b, items=[]), progress=False)
    with pytest.raises(CompvlError, match="more than once"):
        evaluate(model, [b, b], progress=False)


def test_compare_pairs_items_by_id(model, photos):
    b = triplet_benchmark(photos)
    torch.manual_seed(3)
    x, y = (
        item_scores(model, b, progress=False),
        item_scores(create_model("micro-clip", device="cpu"), b, progress=False),
    )
    t = compare(x, y.iloc[::-1]).set_index(["group", "metric"])
    mx, my = (triplet_metrics(s.s_c, s.s_n, s.s_p) for s in (x, y))
    for k in ("orig_acc", "aug_acc", "brittleness"):
        row = t.loc["all", k]
        assert (
            row.a == pytest.approx(mx[k])
            and row.b == pytest.approx(my[k])
            and row["diff"] == pytest.approx(my[k] - mx[k])
            and row.lo <= row["diff"] <= row.hi
        )
    with pytest.raises(CompvlError, match="photos-0"):
        compare(x, y[y.id != "photos-0"])
    assert task_of(pd.read_csv(io.StringIO(x.to_csv(index=False)))) is TASKS["triplet"]


@pytest.mark.skipif(
    not (REAL / "hard_positives").is_dir(),
    reason=f"the released REPLACE files are not at {REAL / 'hard_positives'} (set COMPVL_REAL)",
)
def test_released_replace_shares_images_and_captions(counted, photos):
    "The structure of the real benchmark, on six stand-in photographs."
    m, seen = counted
    items = read_released_replace(REAL / "hard_positives", "relations")[:300]
    paths = {p: photos[k % 5] for k, p in enumerate(dict.fromkeys(i.image for i in items))}
    b = Benchmark(
        "replace-relations",
        "triplet",
        [replace(i, image=paths[i.image]) for i in items],
        "released",
    )
    evaluate(m, b, progress=False, n_boot=10)
    distinct = {c for i in items for c in (i.caption, i.hard_negative, i.hard_positive)}
    assert len(seen["images"]) == 5 and len(seen["texts"]) == len(distinct) < 900


# Kept scores, several models, other kinds of model


def boxes(images, name, n=8):
    return Benchmark(
        name,
        "pair",
        [
            Pair(f"{name}-{k}", images[k % len(images)], f"a cat number {k}", f"a dog number {k}")
            for k in range(n)
        ],
        "a test",
    )


def test_finished_benchmarks_survive_an_interruption(counted, photos, tmp_path):
    m, seen = counted
    one, two = boxes(photos[:3], "one"), boxes(photos[3:5], "two")
    good = Path(photos[4]).read_bytes()
    Path(photos[4]).write_bytes(good[:500])
    with pytest.raises(CompvlError, match="two-1.*truncated"):
        evaluate(m, [one, two], keep=tmp_path / "kept", n_boot=10, progress=False)
    Path(photos[4]).write_bytes(good)
    seen["images"].clear()
    seen["texts"].clear()
    df = evaluate(m, [one, two], keep=tmp_path / "kept", n_boot=10, progress=False)
    assert len(seen["images"]) == 2 and len(seen["texts"]) == 16  # those of the second benchmark
    seen["images"].clear()
    again = evaluate(m, [one, two], keep=tmp_path / "kept", n_boot=10, progress=False)
    assert not seen["images"]
    pd.testing.assert_frame_equal(again, df)


def test_kept_scores_belong_to_weights_items_images_and_skipping(model, photos, tmp_path):
    b, kept = boxes(photos[:5], "one"), tmp_path / "kept"

    def parts(m=model, b=b, **kw):
        evaluate(m, b, keep=kept, n_boot=10, progress=False, **kw)
        return len(list(kept.glob("*.json")))

    assert parts() == parts() == 1
    torch.manual_seed(5)
    assert parts(create_model("micro-clip", device="cpu")) == 2
    assert parts(b=replace(b, items=b.items[:-1] + [replace(b.items[-1], foil="a hen")])) == 3
    assert parts(skip_damaged=True) == 4
    os.utime(photos[0], (1, 1))
    assert parts() == 5
    before = evaluate(model, b, keep=kept, n_boot=10, progress=False)
    for f in kept.glob("*.csv.gz"):
        f.write_bytes(f.read_bytes()[:-9])  # a damaged part is made again
    pd.testing.assert_frame_equal(evaluate(model, b, keep=kept, n_boot=10, progress=False), before)


def test_squares_and_choices_with_a_missing_image(model, photos):
    gone = str(Path(photos[0]).with_name("gone.jpg"))
    items = [
        Square("a", photos[0], photos[1], "a cat", "a dog"),
        Square("b", photos[1], gone, "a cat", "a dog"),
        Square("c", gone, photos[2], "a cat", "a dog"),
    ]
    b = Benchmark("squares", "square", items, "a test")
    assert b.missing == [gone] and b.present == 1
    with pytest.raises(CompvlError, match="item b: .*gone.jpg.*2 of 3 items"):
        evaluate(model, b, progress=False)
    v = evaluate(model, b, skip_damaged=True, n_boot=10, progress=False).set_index("metric")
    assert (
        v.n["text"] == 1 and v.value["coverage"] == pytest.approx(100 / 3) and v.n["coverage"] == 1
    )


def test_sentences_need_no_images(model):
    items = [TextPair(str(k), "a cat " + "and a dog " * k, "a cat", float(-k)) for k in range(6)]
    v = evaluate(
        model, Benchmark("s", "text-similarity", items, "a test"), n_boot=50, progress=False
    ).set_index("metric")
    assert (
        {"spearman", "pearson"} <= set(v.index)
        and -100 <= v.value["spearman"] <= 100
        and v.value["coverage"] == 100
    )
    same = [
        replace(i, sentence_1="a cat") for i in items
    ]  # all as alike as can be: nothing to correlate
    assert (
        evaluate(
            model, Benchmark("s", "text-similarity", same, "a test"), n_boot=50, progress=False
        )
        .set_index("metric")
        .value["spearman"]
        == 0
    )


class Overlap:
    "A cross-encoder that likes captions with many letters a, on bright images; counts its pairs."

    name, device = "overlap", "cpu"

    def __init__(self):
        self.seen = []

    def fingerprint(self):
        return "overlap-1"

    def truncated(self, captions):
        return [False] * len(captions)

    def score(self, images, captions):
        self.seen += captions
        return [c.count("a") + np.asarray(i).mean() / 1e3 for i, c in zip(images, captions)]


def test_cross_encoder_in_every_task_on_images(photos, tmp_path):
    scorer = Overlap()
    found = evaluate(
        scorer,
        [
            load_benchmark(n, n=6)
            for n in (
                "swap",
                "aro-relation",
                "aro-coco-order",
                "svo-probes",
                "winoground",
                "imagenet",
                "coco-retrieval",
            )
        ],
        cache=tmp_path,
        n_boot=10,
        progress=False,
    )
    assert found.model.unique().tolist() == ["overlap"] and found.value.notna().all()
    n = len(scorer.seen)
    evaluate(scorer, [load_benchmark("swap", n=6)], cache=tmp_path, n_boot=10, progress=False)
    assert len(scorer.seen) == n
    with pytest.raises(CompvlError, match="overlap.*leave text similarity out"):
        evaluate(scorer, [load_benchmark("stsb", n=6)], n_boot=10, progress=False)


def test_stored_pictures(counted):
    m, seen = counted
    read = lambda i: Image.new("RGB", (40, 30), (i % 3, 0, 0))
    items = [ClassificationItem(str(k), StoredImage("toy", k, read), k % 2) for k in range(9)]
    b = Benchmark(
        "toy", "classification", items, "a test", classes=("cat", "dog"), templates=("a {}",)
    )
    v = evaluate(m, b, n_boot=10, progress=False).set_index("metric")
    assert v.n["acc@1"] == 9 and len(seen["images"]) == 3  # nine pictures, three different ones


PROCESSES = """
import os, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from accelerate import PartialState
from test_evaluate import scored_by_all
if "WORLD_SIZE" in os.environ: assert PartialState(cpu=True).num_processes == 2
scored_by_all(sys.argv[2], sys.argv[3], os.environ.get("RANK", "one"))
"""


def scored_by_all(photos, out, rank):
    "Features, scores and figures of both kinds of models, whole, then with photographs that cannot be read, and what they complain of."

    class Sharpness:
        name, device = "sharpness", "cpu"

        def fingerprint(self):
            return "sharpness-1"

        def truncated(self, captions):
            return [False] * len(captions)

        def score(self, images, captions):
            return [float(np.asarray(i).std()) * len(c) for i, c in zip(images, captions)]

    out, photos = Path(out), sorted(map(str, Path(photos).glob("*.jpg")))
    torch.manual_seed(0)
    model, found = create_model("micro-clip", device="cpu"), {}
    benchmarks = [
        load_benchmark("swap", n=50),
        load_benchmark("coco-retrieval", n=20),
        triplet_benchmark(photos),
    ]
    for name, m in (("clip", model), ("cross", Sharpness())):
        df, scores = evaluate(
            m,
            benchmarks[::2],
            cache=out / "cache",
            keep=out / "kept",
            n_boot=50,
            batch_size=4,
            progress=False,
            return_scores=True,
        )
        found[name] = df.to_csv(), {k: t.to_csv() for k, t in scores.items()}
    counted, seen = replace(model), []
    counted.encode_image = lambda x: (seen.append(len(x)), model.encode_image(x))[1]
    embedder = Embedder(counted, batch_size=4, progress=False)
    ranks = item_scores(embedder, benchmarks[1], progress=False)
    found["retrieval"] = (
        ranks.to_csv(),
        dict(embedder.encoded),
        embedder.image_store.blocks[0].numpy().tobytes(),
    )
    found["again"] = item_scores(
        Embedder(model, out / "cache", progress=False), benchmarks[2], progress=False
    ).to_csv()
    spoilt = [*photos, *[str(out / f"{k}.jpg") for k in range(3)]]
    try:
        evaluate(model, triplet_benchmark(spoilt), progress=False, batch_size=2)
    except CompvlError as e:
        found["error"] = str(e)
    found["skipped"] = item_scores(
        model, triplet_benchmark(spoilt), progress=False, batch_size=2, skip_damaged=True
    ).to_csv()
    torch.save((found, sum(seen)), out / f"{rank}.pt")


def test_two_processes_find_what_one_does(photos, tmp_path):
    "Scores and figures to the last bit, the same on both, whatever is in the cache."
    (tmp_path / "evaluation.py").write_text(PROCESSES)
    out = tmp_path / "out"
    out.mkdir()
    for k in range(3):
        (out / f"{k}.jpg").write_bytes(b"no picture")
    run = lambda *launch: subprocess.run(
        [
            sys.executable,
            *launch,
            tmp_path / "evaluation.py",
            os.path.dirname(__file__),
            tmp_path,
            out,
        ],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )
    run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert len(list((out / "kept").glob("*.json"))) == 4
    for part in ("kept", "cache"):
        (out / part).rename(tmp_path / part)
    run()
    (one, n), (first, a), (second, b) = (
        torch.load(out / f"{k}.pt", weights_only=True) for k in ("one", "0", "1")
    )
    assert "swap" in one["clip"][1] and "3 of its images" in one["error"] and one == first == second
    assert (n, a, b) == (20, 12, 8)  # each encodes its share of the batches of four
