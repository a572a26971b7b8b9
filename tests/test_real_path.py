"""The real path on real photographs: COCO-format captions, a ViT-B/32, the command line; and what it says of bad material.

The photographs are COCO's, in their own sizes, some greyscale; captions, hard negatives and hard positives are composed from their object labels."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from compvl.benchmarks.items import Benchmark, RetrievalItem
from compvl.core import CompvlError, write_json
from compvl.data.captions import CocoCaptions
from compvl.data.images import decode
from compvl.evaluate.embed import Embedder
from compvl.evaluate.engine import evaluate
from compvl.models.clip import create_model
from compvl.train.config import TrainConfig
from compvl.train.loop import train
from PIL import Image
from safetensors.torch import save_file

REAL = (
    Path(os.environ.get("COMPVL_REAL") or Path(__file__).resolve().parents[2] / "shared" / "real")
    / "coco128"
)
pytestmark = pytest.mark.skipif(
    not REAL.is_dir(), reason=f"no real photographs at {REAL} (COMPVL_REAL names another folder)"
)

COCO = """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse,
sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove,
skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut,
cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book,
clock, vase, scissors, teddy bear, hair drier, toothbrush""".replace("\n", " ").split(", ")
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


def material(folder, n=None):
    "captions.json, negatives.jsonl and the positives' two files: every photograph gets one caption from its two most frequent labels, or its only one."
    a = lambda w: (
        w if w in ("skis", "scissors", "broccoli") else f"{'an' if w[0] in 'aeiou' else 'a'} {w}"
    )
    images, annotations, neg, swap, replace = [], [], [], [], []
    for i, photo in enumerate(sorted(REAL.glob("*.jpg"))[:n]):
        labels = REAL / "labels" / f"{photo.stem}.txt"
        count = (
            Counter(COCO[int(l.split()[0])] for l in labels.read_text().splitlines())
            if labels.exists()
            else Counter()
        )
        if not count:
            continue
        objects = [w for w, _ in count.most_common(2)]
        images.append(dict(id=int(photo.stem), file_name=photo.name))
        annotations.append(
            dict(
                id=i,
                image_id=int(photo.stem),
                caption=" and ".join(map(a, objects)).capitalize() + ".",
            )
        )
        other = next(w for w in COCO[i % 80 :] + COCO if w not in count)
        neg.append(" and ".join(map(a, [other, *objects[1:]])).capitalize() + ".")
        swap.append(
            " and ".join(map(a, objects[::-1])).capitalize() + "." if len(objects) == 2 else "None"
        )
        known = next((w for w in objects if w in SYNONYM), None)
        replace.append(
            " and ".join(a(SYNONYM[w] if w == known else w) for w in objects).capitalize() + "."
            if known
            else None
        )
    write_json(folder / "captions.json", dict(images=images, annotations=annotations))
    for name, values in (("negatives", neg), ("swap_hp", swap), ("replace_hp", replace)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))
    return len(annotations)


def dataset(folder, **options):
    return CocoCaptions(
        folder / "captions.json",
        REAL,
        folder / "negatives.jsonl",
        [folder / "swap_hp.jsonl", folder / "replace_hp.jsonl"],
        cache=folder / "cache",
        **options,
    )


def test_photographs_and_captions(tmp_path):
    n = material(tmp_path)
    ds = dataset(tmp_path, progress=False)
    about = ds.describe()
    assert (
        len(ds) == n > 100
        and about["with_hard_negative"] == n
        and 0 < about["with_hard_positive"] < n
        and ds.skipped == []
    )
    b = ds.batch(range(n))
    assert b["images"].shape == (n, 3, 224, 224) and b["images"].dtype == torch.uint8
    grey = (b["images"][:, 0] == b["images"][:, 1]).flatten(1).all(1) & (
        b["images"][:, 1] == b["images"][:, 2]
    ).flatten(1).all(1)
    assert 0 < grey.sum() < n  # greyscale photographs became RGB
    i = next(i for i in range(n) if " and " in b["caption"][i] and b["hard_positive"][i])
    print(b["caption"][i], "|", b["hard_negative"][i], "|", b["hard_positive"][i])
    assert len({b["caption"][i], b["hard_negative"][i], b["hard_positive"][i]}) == 3
    name = json.loads((tmp_path / "captions.json").read_text())["images"][i]["file_name"]
    assert torch.equal(b["images"][i], decode(REAL / name, 224))


def compvl(*args, runs, wait=True):
    process = subprocess.Popen(
        [sys.executable, "-m", "compvl.app.cli", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(COMPVL_CACHE=str(runs / "cache"), COLUMNS="200"),
    )
    if not wait:
        return process
    out, err = process.communicate()
    return process.returncode, out, err


def test_vit_b_32_trains_and_resumes(tmp_path):
    material(tmp_path)
    write_json(
        tmp_path / "config.json",
        dict(
            model="ViT-B-32",
            pretrained=None,
            method="hp+hn",
            data="coco",
            n_train=8,
            batch_size=8,
            steps=5,
            lr=2e-5,
            warmup=1,
            checkpoint_every=3,
            log_every=1,
        ),
    )
    command = [
        "train",
        "--config",
        tmp_path / "config.json",
        "--train-captions",
        tmp_path / "captions.json",
        "--image-root",
        REAL,
        "--hard-negatives",
        tmp_path / "negatives.jsonl",
        "--hard-positives",
        tmp_path / "swap_hp.jsonl",
        "--hard-positives",
        tmp_path / "replace_hp.jsonl",
        "--runs",
        tmp_path / "runs",
        "--json",
    ]
    first, start = compvl(*command, runs=tmp_path, wait=False), time.time()
    while not list((tmp_path / "runs").glob("*/checkpoint/state.pt")):
        assert first.poll() is None and time.time() - start < 300, first.communicate()
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / "DONE").exists()
    code, out, err = compvl(*command, runs=tmp_path)
    assert code == 0, err
    json.loads(out)
    assert "step 5/5" in err and "step 1/5" not in err  # it went on from the checkpoint
    run = pd.read_csv(folder / "metrics.csv")
    assert (
        list(run.step) == [1, 2, 3, 4, 5] and (run.with_hn == 8).all() and (run.with_hp > 0).all()
    )
    assert run.loss.is_monotonic_decreasing and run.loss.iloc[-1] < run.loss.iloc[0] / 2
    assert (
        (folder / "DONE").exists()
        and not (folder / "checkpoint").exists()
        and (folder / "weights.safetensors").stat().st_size > 6e8
    )
    model = create_model("ViT-B-32", folder, "cpu")
    b = dataset(tmp_path, n=8, progress=False).batch(range(8))
    with torch.no_grad():
        logits = (
            model.encode_image(model.normalize(b["images"]))
            @ model.encode_text(model.tokenizer(b["caption"])).T
        )
    assert logits.isfinite().all()
    root = replace_root(tmp_path, 6)
    score = [
        "evaluate",
        "--model",
        "ViT-B-32",
        "--pretrained",
        folder,
        "--benchmark",
        "replace-relations",
        "--root",
        root,
        "--device",
        "cpu",
        "--cache",
        tmp_path / "emb",
        "--json",
    ]
    code, out, err = compvl(*score, runs=tmp_path)
    assert code == 0, err
    figures = {r["metric"]: r for r in json.loads(out)["figures"] if r["group"] == "all"}
    assert (
        figures["coverage"]["value"] == 100
        and figures["orig_acc"]["n"] == 6
        and 0 <= figures["brittleness"]["value"] <= 100
    )
    next(
        (root / "VG_100K").glob("*.jpg")
    ).unlink()  # one photograph goes: a clear refusal, or a figure that says what it covers
    code, out, err = compvl(*score, runs=tmp_path)
    assert (
        code == 2
        and "--skip-damaged".replace("--", "").replace("-", "_") in err
        and "Traceback" not in err
    )
    code, out, err = compvl(*score, "--skip-damaged", runs=tmp_path)
    assert (
        code == 0
        and {r["metric"]: r for r in json.loads(out)["figures"] if r["group"] == "all"}["coverage"][
            "n"
        ]
        == 5
    ), err
    (folder / "weights.safetensors").unlink()


def test_photographs_are_retrieved_by_the_whole_path(tmp_path):
    """Photographs of every size and mode through decoding, pixel cache, preprocessing, ViT-B/32 (random weights) and retrieval against captions of their labels: as one at a time by hand."""
    root, names = replace_root(tmp_path, 10), {}
    photos = sorted((root / "VG_100K").glob("*.jpg"))
    for p in photos:
        names[p] = list(
            dict.fromkeys(
                COCO[int(l.split()[0])]
                for l in (REAL / "labels" / f"{p.stem}.txt").read_text().splitlines()
            )
        )
    grey = [
        p
        for p in sorted(REAL.glob("*.jpg"))
        if Image.open(p).mode == "L" and p.name not in {q.name for q in photos}
    ][:2]
    items = [
        RetrievalItem(
            p.stem,
            str(p),
            tuple(
                f"{frame} {' and '.join(names.get(p, ['something grey']))} in picture {p.stem}"
                for frame in ("a photo of", "there is", "we see", "this is", "look at")
            ),
        )
        for p in [*photos, *grey]
    ]
    b, n = Benchmark("photographs", "retrieval", items, "labels"), len(items)
    torch.manual_seed(0)
    model = create_model("ViT-B-32", device="cpu")
    embedder = Embedder(model, tmp_path / "cache", pixels=tmp_path / "pixels", progress=False)
    figures = evaluate(embedder, b, n_boot=10, progress=False).set_index("metric").value
    assert (
        dict(embedder.encoded) == dict(images=n, texts=5 * n)
        and len(list((tmp_path / "pixels").rglob("*.npy"))) == n
    )
    with torch.no_grad():
        I = torch.cat(
            [
                model.encode_image(model.preprocess(Image.open(i.image).convert("RGB"))[None])
                for i in items
            ]
        )
        T = torch.cat(
            [model.encode_text(model.tokenizer([c]), crop=False) for i in items for c in i.captions]
        )
    assert torch.allclose(embedder.images([i.image for i in items]), I, atol=1e-5)
    own, S = torch.arange(n).repeat_interleave(5), (I @ T.T).numpy()
    for k in (1, 5):
        assert figures[f"text_to_image_recall@{k}"] == pytest.approx(
            100 * np.mean([own[t] in np.argsort(-S[:, t])[:k] for t in range(5 * n)])
        )
        assert figures[f"image_to_text_recall@{k}"] == pytest.approx(
            100 * np.mean([i in own[np.argsort(-S[i])[:k].copy()] for i in range(n)])
        )
    again = Embedder(model, tmp_path / "cache", progress=False)
    assert (
        evaluate(again, b, n_boot=10, progress=False).value.equals(figures.reset_index(drop=True))
        and again.encoded.total() == 0
    )
    other = create_model(
        "ViT-B-32-quickgelu", device="cpu"
    )  # other weights: nothing of the cache fits, the decoded images do
    fresh = Embedder(other, tmp_path / "cache", pixels=tmp_path / "pixels", progress=False)
    evaluate(fresh, b, n_boot=10, progress=False)
    assert (
        dict(fresh.encoded) == dict(images=n, texts=5 * n)
        and len(list((tmp_path / "pixels").rglob("*.npy"))) == n
    )


def replace_root(folder, n):
    "A data root with n items in REPLACE's released form, about two objects of a photograph each."
    root, original, positive = folder / "root", [], []
    (root / "VG_100K").mkdir(parents=True)
    for photo in sorted(REAL.glob("*.jpg")):
        labels = REAL / "labels" / f"{photo.stem}.txt"
        objects = (
            list(dict.fromkeys(COCO[int(l.split()[0])] for l in labels.read_text().splitlines()))
            if labels.exists()
            else []
        )
        if len(objects) < 2 or len(original) == n:
            continue
        (root / "VG_100K" / photo.name).write_bytes(photo.read_bytes())
        item = lambda c: dict(
            image_id=photo.stem,
            image_path=f"data/VG_100K/{photo.name}",
            true_caption=c,
            false_caption=f"{objects[0]} far from {objects[1]}",
        )
        original.append(item(f"{objects[0]} near {objects[1]}"))
        positive.append(item(f"{objects[0]} next to {objects[1]}"))
    for part, items in (("original", original), ("hard_positive", positive)):
        write_json(root / "hard_positives" / part / "vl_checklist_relations.json", items)
    return root


def test_bad_material_is_named(tmp_path):
    n = material(tmp_path, 12)
    config = dict(model="micro-clip", pretrained=None, data="coco", batch_size=4, steps=1)
    photos = tmp_path / "photos"
    photos.mkdir()
    for p in sorted(REAL.glob("*.jpg"))[:12]:
        (photos / p.name).write_bytes(p.read_bytes())
    options = dict(
        captions_json=tmp_path / "captions.json",
        image_root=photos,
        hard_negatives=tmp_path / "negatives.jsonl",
        cache=tmp_path / "cache",
    )
    fit = lambda **k: train(
        TrainConfig(
            **config | {k: v for k, v in k.items() if k not in options},
            data_options=options | {o: v for o, v in k.items() if o in options},
        ),
        runs=tmp_path / "runs",
        progress=False,
    )
    names = [
        im["file_name"] for im in json.loads((tmp_path / "captions.json").read_text())["images"]
    ]
    whole = (photos / names[3]).read_bytes()

    (photos / names[3]).write_bytes(whole[: len(whole) // 2])  # truncated
    with pytest.raises(CompvlError, match=f"{names[3]} .*truncated.*skip_damaged"):
        fit()
    options["skip_damaged"] = True
    run = fit()
    assert (
        run.config["train_data"]["skipped_images"] == 1 and run.config["train_data"]["n"] == n - 1
    )
    del options["skip_damaged"]
    (photos / names[3]).unlink()  # missing
    with pytest.raises(CompvlError, match=f"missing from .*{names[3]}"):
        fit()
    (photos / names[3]).write_bytes(whole)

    lines = (tmp_path / "negatives.jsonl").read_text().splitlines()
    (tmp_path / "short.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # misaligned
    with pytest.raises(CompvlError, match=f"short.jsonl has {n - 1} lines and .* has {n} captions"):
        fit(hard_negatives=tmp_path / "short.jsonl")
    (tmp_path / "broken.jsonl").write_text(
        "\n".join([*lines[:4], lines[4][:-1], *lines[5:]])
    )  # a malformed line
    with pytest.raises(CompvlError, match="broken.jsonl:5"):
        fit(hard_negatives=tmp_path / "broken.jsonl")

    # weights of another architecture
    save_file(
        {"visual.conv1.weight": torch.zeros(768, 3, 32, 32)},
        tmp_path / "other.safetensors",
        metadata=dict(name="ViT-B-32", activation="gelu"),
    )
    with pytest.raises(CompvlError, match="another architecture than micro-clip.*ViT-B-32"):
        fit(pretrained=str(tmp_path / "other.safetensors"))
    assert len(list((tmp_path / "runs").iterdir())) == 1  # only the one that was fit to run


def test_the_command_line_says_so_in_one_line(tmp_path):
    material(tmp_path, 12)
    (tmp_path / "short.jsonl").write_text('"a dog"\n')
    code, out, err = compvl(
        "train",
        "--data",
        "coco",
        "--train-captions",
        tmp_path / "captions.json",
        "--image-root",
        REAL,
        "--hard-negatives",
        tmp_path / "short.jsonl",
        "--runs",
        tmp_path / "runs",
        "--set",
        "pretrained=null",
        "--steps",
        1,
        runs=tmp_path,
    )
    assert (
        code != 0 and "short.jsonl has 1 lines" in err.replace("\n", " ") and "Traceback" not in err
    )
