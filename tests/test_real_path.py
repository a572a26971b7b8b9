"""The real path on real photographs: COCO-format captions, a ViT-B/32, the command line, and what
is reported about bad files.

The photographs are COCO's, in their own sizes, some greyscale. Captions, hard negatives and hard
positives are composed from their object labels.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from released import REAL
from safetensors.torch import save_file

from compvl.benchmarks.items import Benchmark, RetrievalItem
from compvl.core import CompvlError, write_json
from compvl.data.captions import CocoCaptions
from compvl.data.images import decode
from compvl.evaluate.embed import Embedder
from compvl.evaluate.engine import evaluate
from compvl.models.clip import create_model
from compvl.train.config import TrainConfig
from compvl.train.loop import train

PHOTOS = REAL / "coco128"
pytestmark = pytest.mark.skipif(
    not PHOTOS.is_dir(),
    reason=f"no real photographs at {PHOTOS} (COMPVL_REAL names another folder)",
)

COCO = """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear,
zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball,
kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup,
fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut,
cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard,
cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear,
hair drier, toothbrush""".replace("\n", " ").split(", ")
SYNONYM = {
    "person": "human",
    "bicycle": "bike",
    "car": "automobile",
    "motorcycle": "motorbike",
    "airplane": "plane",
    "bird": "fowl",
    "cat": "feline",
    "dog": "hound",
    "couch": "sofa",
    "tv": "television",
    "cell phone": "mobile phone",
    "cup": "mug",
    "boat": "vessel",
    "truck": "lorry",
    "dining table": "table",
    "donut": "doughnut",
}
NO_ARTICLE = ("skis", "scissors", "broccoli")


def labels_of(photo):
    """The objects in a photograph, once for each box; empty without a file of labels."""
    path = PHOTOS / "labels" / f"{photo.stem}.txt"
    if not path.exists():
        return []
    return [COCO[int(line.split()[0])] for line in path.read_text().splitlines()]


def with_article(word):
    """A noun with its article."""
    if word in NO_ARTICLE:
        return word
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def sentence(words):
    """A caption that names these objects."""
    return " and ".join(map(with_article, words)).capitalize() + "."


def with_synonym(objects):
    """The caption with a synonym for its first object that has one, or None."""
    known = next((word for word in objects if word in SYNONYM), None)
    if known is None:
        return None
    return sentence([SYNONYM[word] if word == known else word for word in objects])


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def write_captions(folder, n=None):
    """Write captions.json, negatives.jsonl and two files of hard positives; returns the number.

    Every photograph has one caption from its two most frequent labels, or its only one.
    """
    images = []
    annotations = []
    negatives = []
    swapped = []
    replaced = []
    for i, photo in enumerate(sorted(PHOTOS.glob("*.jpg"))[:n]):
        count = Counter(labels_of(photo))
        if not count:
            continue
        objects = [word for word, _ in count.most_common(2)]
        number = int(photo.stem)
        images.append(dict(id=number, file_name=photo.name))
        annotations.append(dict(id=i, image_id=number, caption=sentence(objects)))
        other = next(word for word in COCO[i % 80 :] + COCO if word not in count)
        negatives.append(sentence([other, *objects[1:]]))
        swapped.append(sentence(objects[::-1]) if len(objects) == 2 else "None")
        replaced.append(with_synonym(objects))
    write_json(folder / "captions.json", dict(images=images, annotations=annotations))
    write_lines(folder / "negatives.jsonl", negatives)
    write_lines(folder / "swap_hp.jsonl", swapped)
    write_lines(folder / "replace_hp.jsonl", replaced)
    return len(annotations)


def dataset(folder, **options):
    """The training set of `write_captions`."""
    return CocoCaptions(
        folder / "captions.json",
        PHOTOS,
        folder / "negatives.jsonl",
        [folder / "swap_hp.jsonl", folder / "replace_hp.jsonl"],
        cache=folder / "cache",
        **options,
    )


def test_photographs_and_captions(tmp_path):
    n = write_captions(tmp_path)
    ds = dataset(tmp_path, progress=False)
    about = ds.describe()
    assert len(ds) == n > 100
    assert about["with_hard_negative"] == n
    assert 0 < about["with_hard_positive"] < n
    assert ds.skipped == []

    batch = ds.batch(range(n))
    images = batch["images"]
    assert images.shape == (n, 3, 224, 224)
    assert images.dtype == torch.uint8
    red_is_green = (images[:, 0] == images[:, 1]).flatten(1).all(1)
    green_is_blue = (images[:, 1] == images[:, 2]).flatten(1).all(1)
    grey = red_is_green & green_is_blue
    assert 0 < grey.sum() < n  # greyscale photographs became RGB

    captions = batch["caption"]
    positives = batch["hard_positive"]
    i = next(i for i in range(n) if " and " in captions[i] and positives[i])
    assert len({captions[i], batch["hard_negative"][i], positives[i]}) == 3
    name = json.loads((tmp_path / "captions.json").read_text())["images"][i]["file_name"]
    assert torch.equal(images[i], decode(PHOTOS / name, 224))


def start_compvl(*arguments, runs):
    """Start the command line in a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "compvl.app.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(COMPVL_CACHE=str(runs / "cache"), COLUMNS="200"),
    )


def compvl(*arguments, runs):
    """Run the command line: its exit code, stdout and stderr."""
    process = start_compvl(*arguments, runs=runs)
    out, err = process.communicate()
    return process.returncode, out, err


def training_command(folder):
    """The command that trains a ViT-B/32 for four steps on four photographs."""
    config = dict(
        model="ViT-B-32",
        pretrained=None,
        method="hp+hn",
        data="coco",
        n_train=4,
        batch_size=4,
        steps=4,
        lr=2e-5,
        warmup=1,
        checkpoint_every=2,
        log_every=1,
    )
    write_json(folder / "config.json", config)
    return [
        "train",
        *("--config", folder / "config.json"),
        *("--train-captions", folder / "captions.json"),
        *("--image-root", PHOTOS),
        *("--hard-negatives", folder / "negatives.jsonl"),
        *("--hard-positives", folder / "swap_hp.jsonl"),
        *("--hard-positives", folder / "replace_hp.jsonl"),
        *("--runs", folder / "runs"),
        "--json",
    ]


def kill_after_checkpoint(command, folder):
    """Start a training run and kill it once it has written a checkpoint; its folder."""
    process = start_compvl(*command, runs=folder)
    start = time.time()
    while not list((folder / "runs").glob("*/checkpoint/state.pt")):
        assert process.poll() is None, process.communicate()
        assert time.time() - start < 300, process.communicate()
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (run,) = (folder / "runs").iterdir()
    assert not (run / "DONE").exists()
    return run


def overall(out):
    """Figures over all items, from the JSON of `compvl evaluate`."""
    figures = json.loads(out)["figures"]
    return {figure["metric"]: figure for figure in figures if figure["group"] == "all"}


def check_evaluation(run, folder):
    """A trained model is evaluated on real photographs, all of them and without one."""
    root = write_replace(folder, 6)
    command = [
        "evaluate",
        *("--model", "ViT-B-32"),
        *("--pretrained", run),
        *("--benchmark", "replace-relations"),
        *("--root", root),
        *("--device", "cpu"),
        *("--cache", folder / "emb"),
        "--json",
    ]
    code, out, err = compvl(*command, runs=folder)
    assert code == 0, err
    figures = overall(out)
    assert figures["coverage"]["value"] == 100
    assert figures["orig_acc"]["n"] == 6
    assert 0 <= figures["brittleness"]["value"] <= 100

    # without a photograph: a clear refusal, or a figure with its coverage
    next((root / "VG_100K").glob("*.jpg")).unlink()
    code, out, err = compvl(*command, runs=folder)
    assert code == 2
    assert "skip_damaged" in err
    assert "Traceback" not in err
    code, out, err = compvl(*command, "--skip-damaged", runs=folder)
    assert code == 0, err
    assert overall(out)["coverage"]["n"] == 5


def test_vit_b_32_trains_and_resumes(tmp_path):
    write_captions(tmp_path)
    command = training_command(tmp_path)
    run = kill_after_checkpoint(command, tmp_path)
    code, out, err = compvl(*command, runs=tmp_path)
    assert code == 0, err
    json.loads(out)
    assert "step 4/4" in err
    assert "step 1/4" not in err  # it went on from the checkpoint

    metrics = pd.read_csv(run / "metrics.csv")
    assert list(metrics.step) == [1, 2, 3, 4]
    assert (metrics.with_hn == 4).all()
    assert (metrics.with_hp > 0).all()
    assert metrics.loss.is_monotonic_decreasing
    assert metrics.loss.iloc[-1] < metrics.loss.iloc[0] / 2
    assert (run / "DONE").exists()
    assert not (run / "checkpoint").exists()
    assert (run / "weights.safetensors").stat().st_size > 6e8

    model = create_model("ViT-B-32", run, "cpu")
    batch = dataset(tmp_path, n=4, progress=False).batch(range(4))
    with torch.no_grad():
        images = model.encode_image(model.normalize(batch["images"]))
        texts = model.encode_text(model.tokenizer(batch["caption"]))
    assert (images @ texts.T).isfinite().all()

    check_evaluation(run, tmp_path)
    (run / "weights.safetensors").unlink()


def write_replace(folder, n):
    """A data root with n items in REPLACE's released form, about two objects of a photograph."""
    root = folder / "root"
    (root / "VG_100K").mkdir(parents=True)
    originals = []
    positives = []
    for photo in sorted(PHOTOS.glob("*.jpg")):
        objects = list(dict.fromkeys(labels_of(photo)))
        if len(objects) < 2 or len(originals) == n:
            continue
        (root / "VG_100K" / photo.name).write_bytes(photo.read_bytes())
        first, second = objects[:2]
        item = dict(
            image_id=photo.stem,
            image_path=f"data/VG_100K/{photo.name}",
            false_caption=f"{first} far from {second}",
        )
        originals.append(item | dict(true_caption=f"{first} near {second}"))
        positives.append(item | dict(true_caption=f"{first} next to {second}"))
    for part, items in (("original", originals), ("hard_positive", positives)):
        write_json(root / "hard_positives" / part / "vl_checklist_relations.json", items)
    return root


FRAMES = ("a photo of", "there is", "we see", "this is", "look at")


def retrieval_items(folder):
    """Twelve photographs, two of them greyscale, each with five captions of its labels."""
    labelled = sorted((write_replace(folder, 10) / "VG_100K").glob("*.jpg"))
    taken = {photo.name for photo in labelled}
    others = [photo for photo in sorted(PHOTOS.glob("*.jpg")) if photo.name not in taken]
    grey = [photo for photo in others if Image.open(photo).mode == "L"][:2]
    items = []
    for photo in [*labelled, *grey]:
        words = dict.fromkeys(labels_of(photo)) if photo in labelled else ["something grey"]
        what = f"{' and '.join(words)} in picture {photo.stem}"
        captions = tuple(f"{frame} {what}" for frame in FRAMES)
        items.append(RetrievalItem(photo.stem, str(photo), captions))
    return items


def features_one_by_one(model, items):
    """Features of images [N, D] and of captions [5 N, D], each encoded on its own."""
    images = []
    texts = []
    with torch.no_grad():
        for item in items:
            picture = Image.open(item.image).convert("RGB")
            images.append(model.encode_image(model.preprocess(picture)[None]))
            for caption in item.captions:
                texts.append(model.encode_text(model.tokenizer([caption]), crop=False))
    return torch.cat(images), torch.cat(texts)


def check_recall(figures, scores):
    """Recall of both directions, from the scores of images and captions: [N, 5 N]."""
    n = len(scores)
    owner = np.arange(n).repeat(5)
    for k in (1, 5):
        to_image = [owner[t] in np.argsort(-scores[:, t])[:k] for t in range(5 * n)]
        to_text = [i in owner[np.argsort(-scores[i])[:k]] for i in range(n)]
        assert figures[f"text_to_image_recall@{k}"] == pytest.approx(100 * np.mean(to_image))
        assert figures[f"image_to_text_recall@{k}"] == pytest.approx(100 * np.mean(to_text))


def test_photographs_are_retrieved_by_the_whole_path(tmp_path):
    """Decoding, pixel cache, preprocessing, ViT-B/32 (random weights) and retrieval, on photographs
    of every size and mode: the same as for one photograph at a time."""
    items = retrieval_items(tmp_path)
    benchmark = Benchmark("photographs", "retrieval", items, "labels")
    n = len(items)
    cache = tmp_path / "cache"
    pixels = tmp_path / "pixels"
    torch.manual_seed(0)
    model = create_model("ViT-B-32", device="cpu")
    embedder = Embedder(model, cache, pixels=pixels, progress=False)
    figures = evaluate(embedder, benchmark, n_boot=10, progress=False).set_index("metric").value
    assert dict(embedder.encoded) == dict(images=n, texts=5 * n)
    assert len(list(pixels.rglob("*.npy"))) == n

    images, texts = features_one_by_one(model, items)
    assert torch.allclose(embedder.images([item.image for item in items]), images, atol=1e-5)
    check_recall(figures, (images @ texts.T).numpy())

    again = Embedder(model, cache, progress=False)
    repeated = evaluate(again, benchmark, n_boot=10, progress=False).value
    assert repeated.equals(figures.reset_index(drop=True))
    assert again.encoded.total() == 0

    # other weights: nothing of the cache fits, but the decoded images do
    other = create_model("ViT-B-32-quickgelu", device="cpu")
    fresh = Embedder(other, cache, pixels=pixels, progress=False)
    evaluate(fresh, benchmark, n_boot=10, progress=False)
    assert dict(fresh.encoded) == dict(images=n, texts=5 * n)
    assert len(list(pixels.rglob("*.npy"))) == n


class Photographs:
    """Twelve photographs with captions and hard negatives, and a training run on them."""

    def __init__(self, folder):
        self.folder = folder
        self.n = write_captions(folder, 12)
        self.photos = folder / "photos"
        self.photos.mkdir()
        for photo in sorted(PHOTOS.glob("*.jpg"))[:12]:
            (self.photos / photo.name).write_bytes(photo.read_bytes())
        captions = json.loads((folder / "captions.json").read_text())
        self.names = [image["file_name"] for image in captions["images"]]
        self.options = dict(
            captions_json=folder / "captions.json",
            image_root=self.photos,
            hard_negatives=folder / "negatives.jsonl",
            cache=folder / "cache",
        )

    def train(self, pretrained=None, **options):
        """Train one step, with these options of the data in place of the usual ones."""
        config = TrainConfig(
            model="micro-clip",
            method="hn",
            pretrained=pretrained,
            data="coco",
            batch_size=4,
            steps=1,
            data_options=self.options | options,
        )
        return train(config, runs=self.folder / "runs", progress=False)


@pytest.fixture
def photographs(tmp_path):
    return Photographs(tmp_path)


def test_a_damaged_photograph_is_named(photographs):
    name = photographs.names[3]
    photo = photographs.photos / name
    photo.write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    with pytest.raises(CompvlError, match=f"{name} .*truncated.*skip_damaged"):
        photographs.train()
    run = photographs.train(skip_damaged=True)
    assert run.config["train_data"]["skipped_images"] == 1
    assert run.config["train_data"]["n"] == photographs.n - 1
    photo.unlink()
    with pytest.raises(CompvlError, match=f"missing from .*{name}"):
        photographs.train()
    assert len(list((photographs.folder / "runs").iterdir())) == 1  # only what could be trained


def test_misaligned_and_malformed_texts_are_named(photographs):
    n = photographs.n
    lines = (photographs.folder / "negatives.jsonl").read_text().splitlines()
    short = photographs.folder / "short.jsonl"
    short.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(CompvlError, match=f"short.jsonl has {n - 1} lines and .* has {n} captions"):
        photographs.train(hard_negatives=short)
    broken = photographs.folder / "broken.jsonl"
    broken.write_text("\n".join([*lines[:4], lines[4][:-1], *lines[5:]]))
    with pytest.raises(CompvlError, match="broken.jsonl:5"):
        photographs.train(hard_negatives=broken)
    assert not list(photographs.folder.glob("runs/*"))


def test_weights_of_another_architecture_are_named(photographs):
    path = photographs.folder / "other.safetensors"
    save_file(
        {"visual.conv1.weight": torch.zeros(768, 3, 32, 32)},
        path,
        metadata=dict(name="ViT-B-32", activation="gelu"),
    )
    with pytest.raises(CompvlError, match="another architecture than micro-clip.*ViT-B-32"):
        photographs.train(pretrained=str(path))
    assert not list(photographs.folder.glob("runs/*"))


def test_the_command_line_says_so_in_one_line(tmp_path):
    write_captions(tmp_path, 12)
    (tmp_path / "short.jsonl").write_text('"a dog"\n')
    code, out, err = compvl(
        "train",
        *("--data", "coco"),
        *("--train-captions", tmp_path / "captions.json"),
        *("--image-root", PHOTOS),
        *("--hard-negatives", tmp_path / "short.jsonl"),
        *("--runs", tmp_path / "runs"),
        *("--set", "pretrained=null"),
        *("--steps", 1),
        runs=tmp_path,
    )
    assert code != 0
    assert "short.jsonl has 1 lines" in err.replace("\n", " ")
    assert "Traceback" not in err
