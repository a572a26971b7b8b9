"""Training data: interrupted, in parallel, and with files that are not what they should be."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from webdataset import ShardWriter, TarWriter

from compvl.core import CompvlError, write_json
from compvl.data import images as data
from compvl.data.captions import CocoCaptions
from compvl.data.images import ImageCache, ImageFolder, decode
from compvl.data.loading import load_train_data
from compvl.data.shards import ShardCaptions
from compvl.models.clip import create_model
from compvl.train.batches import step_indices
from compvl.train.config import TrainConfig
from compvl.train.loop import train
from compvl.train.setup import open_parts


@pytest.fixture
def photos(tmp_path):
    """A folder of 600 small JPEG files."""
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(600):
        Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(
            folder / f"{i:03}.jpg"
        )
    return folder


def names(n=600):
    """Names of the first photos."""
    return [f"{i:03}.jpg" for i in range(n)]


def open_cache(photos, tmp_path, n=600, **options):
    """The images of the first photos, decoded at 16 pixels."""
    source = ImageFolder(photos, names(n))
    return ImageCache(source, 16, tmp_path / "cache", progress=False, **options)


@pytest.fixture
def decoded(monkeypatch):
    """Names of the files that are decoded from now on."""
    found = []

    def recorded(path, size, **resize):
        found.append(path.name)
        return decode(path, size, **resize)

    monkeypatch.setattr(data, "decode", recorded)
    return found


KILLED = """
import os, signal, sys
from compvl.data import images as data

true = data.decode

def decode(path, size):
    if path.name == "550.jpg": os.kill(os.getpid(), signal.SIGKILL)
    return true(path, size)

data.decode = decode
folder = data.ImageFolder(sys.argv[1], [f"{i:03}.jpg" for i in range(600)])
data.ImageCache(folder, 16, sys.argv[2], workers=1, progress=False)
"""


def test_killed_while_decoding_resumes_where_it_stopped(photos, tmp_path, decoded):
    """What was decoded before stays; later, only a file that changed is decoded again."""
    killed = subprocess.run([sys.executable, "-c", KILLED, photos, tmp_path / "cache"])
    assert killed.returncode == -signal.SIGKILL
    cache = open_cache(photos, tmp_path)
    assert sorted(decoded) == names()[512:]
    for i in range(0, 600, 50):
        assert np.array_equal(cache.images[i], decode(photos / names()[i], 16).numpy())
    decoded.clear()
    os.utime(photos / "007.jpg", (1, 1))
    open_cache(photos, tmp_path)
    assert decoded == ["007.jpg"]


def test_two_processes_share_one_cache(photos, tmp_path):
    """Two processes may fill the same cache."""
    program = KILLED.replace("550.jpg", "none")
    command = [sys.executable, "-c", program, photos, tmp_path / "cache"]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    (folder,) = (tmp_path / "cache").iterdir()
    assert (np.load(folder / "stamps.npy") > 0).all()
    assert np.load(folder / "images.npy").any((1, 2, 3)).all()


def test_bad_files_lose_nothing(photos, tmp_path, decoded):
    """Damaged and missing files are named, and the others stay decoded."""
    (photos / "400.jpg").write_bytes((photos / "400.jpg").read_bytes()[:200])
    (photos / "401.jpg").write_bytes(b"")
    with pytest.raises(CompvlError, match="2 of 600 .* first 400.jpg .*skip_damaged"):
        open_cache(photos, tmp_path)
    decoded.clear()
    Image.new("L", (9, 40), 77).save(photos / "400.jpg")
    Image.new("RGBA", (20, 20)).save(photos / "401.jpg", "PNG")
    cache = open_cache(photos, tmp_path)
    assert sorted(decoded[:2]) == ["400.jpg", "401.jpg"]
    assert (cache.images[400] == 77).all()
    (photos / "400.jpg").unlink()
    with pytest.raises(CompvlError, match="1 of 600 images are missing .* 400.jpg"):
        open_cache(photos, tmp_path)
    with pytest.raises(CompvlError, match="no image folder"):
        ImageFolder(tmp_path / "nowhere", names())


def test_a_full_disk_is_reported_before_decoding(photos, tmp_path, monkeypatch):
    """The size of the decoded images is known beforehand."""
    monkeypatch.setattr(data.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CompvlError, match="COMPVL_CACHE"):
        open_cache(photos, tmp_path)


def write_captions(path):
    """A captions file in COCO's format with a caption for each of eight photos."""
    images = [dict(id=i, file_name=name) for i, name in enumerate(names(8))]
    annotations = [dict(id=i, image_id=i, caption=f"caption {i}") for i in range(8)]
    write_json(path, dict(images=images, annotations=annotations))


def test_paths_are_not_content(photos, tmp_path):
    """The same files elsewhere are the same data: a run's identity is that of any machine."""
    described = []
    for place in (tmp_path, tmp_path / "elsewhere"):
        (place / "photos").mkdir(parents=True, exist_ok=True)
        for name in names(8):
            (place / "photos" / name).write_bytes((photos / name).read_bytes())
        write_captions(place / "captions.json")
        coco = CocoCaptions(
            place / "captions.json", place / "photos", image_size=16, cache=tmp_path / "cache"
        )
        described.append(coco.describe())
    assert described[0] == described[1]


def test_unknown_names_and_options():
    """Unknown data and options are named, with those that are known."""
    with pytest.raises(CompvlError, match="microworld, .*coco"):
        load_train_data("imagenet")
    with pytest.raises(CompvlError, match="image_folder"):
        load_train_data("coco", captions_json="c.json", image_folder="x")
    with pytest.raises(CompvlError, match="rarity"):
        load_train_data("microworld", n=8, rarity=1)


@pytest.fixture
def shards(photos, tmp_path):
    """Three shards of 20, 20 and 8 samples, as `TarWriter` writes them."""
    with ShardWriter(str(tmp_path / "cc-%d.tar"), maxcount=20, verbose=0) as writer:
        for i in range(48):
            jpg = (photos / f"{i:03}.jpg").read_bytes()
            writer.write(dict(__key__=f"{i:03}", jpg=jpg, txt=f"caption {i}"))
    return [tmp_path / f"cc-{k}.tar" for k in range(3)]


def open_shards(shards, tmp_path, **options):
    """The samples of shards as training data."""
    return ShardCaptions(shards, image_size=16, cache=tmp_path / "cache", progress=False, **options)


def test_shards_in_one_order_whatever_the_processes(shards, tmp_path, photos):
    """What a step sees follows from seed, epoch and step: not from threads, processes, or what was
    read before."""
    one = open_shards(shards, tmp_path, workers=1)
    many = open_shards(shards, tmp_path, workers=5)
    for step in (5, 0, 4):  # 4 steps an epoch of 48 samples
        epoch, (whole,) = step_indices(step, len(one), 12, seed=7)
        shares = [step_indices(step, len(one), 12, seed=7, rank=r, world=2)[1][0] for r in range(2)]
        assert sorted(np.concatenate(shares)) == sorted(whole)
        assert len(set(whole)) == 12
        one.set_epoch(epoch)
        many.set_epoch(epoch)
        for share in shares:
            a = one.batch(share)
            b = many.batch(share)
            assert torch.equal(a.pop("images"), b.pop("images"))
            assert a == b

    item = one.batch([33])
    assert torch.equal(item["images"][0], decode(photos / "033.jpg", 16))
    assert item["id"] == ["cc-1.tar/033"]
    seen = []
    for step in range(4):
        seen += one.batch(step_indices(step, 48, 12, seed=7)[1][0])["id"]
    assert len(set(seen)) == 48
    assert len(list((tmp_path / "cache").glob("*.json"))) == 3


def test_a_damaged_image_stops_or_is_counted(shards, tmp_path):
    """An image that cannot be decoded raises, or the next one stands in for it."""
    content = shards[1].read_bytes()
    at = open_shards(shards, tmp_path).source.offsets[25]
    shards[1].write_bytes(content[:at] + bytes(400) + content[at + 400 :])
    check_raises(shards, tmp_path, "cc-1.tar/025 .*UnidentifiedImageError")

    streamed = open_shards(shards, tmp_path, skip_damaged=True)
    with pytest.warns(UserWarning, match="cc-1.tar/025"):
        batch = streamed.batch([24, 25, 26])
    assert batch["id"] == ["cc-1.tar/024", "cc-1.tar/026", "cc-1.tar/026"]
    assert streamed.skipped == ["cc-1.tar/025"]
    assert torch.equal(batch["images"][1], batch["images"][2])
    check_kept(shards, tmp_path, 47)


def check_raises(shards, tmp_path, says):
    """Damage raises when images are decoded once, and at the latest in a batch."""
    with pytest.raises(CompvlError, match=says):
        open_shards(shards, tmp_path, decode_once=True)
    with pytest.raises(CompvlError, match=says):
        open_shards(shards, tmp_path).batch(range(48))


def check_kept(shards, tmp_path, n):
    """Without what is damaged, n samples are kept decoded, and the others counted."""
    kept = open_shards(shards, tmp_path, skip_damaged=True, decode_once=True)
    assert len(kept) == n
    assert kept.describe()["skipped_images"] == len(kept.skipped) > 0
    assert "cc-1.tar/025" not in kept.ids


def cut_short(content, at):
    """A shard that ends before its sample 25."""
    return content[:at]


def damaged_header(content, at):
    """A shard with a damaged header of sample 25."""
    return content[: at - 512] + b"?" + content[at - 511 :]


def no_tar_file(content, at):
    """A page in place of a shard."""
    return b"<html>404</html>" * 100


@pytest.mark.parametrize(
    "damage, says, left",
    [
        (cut_short, "cc-1.tar .*breaks off at byte .* after 024", 33),
        (damaged_header, "cc-1.tar .*breaks off at byte", 33),
        (no_tar_file, "cc-1.tar .*breaks off", 28),
        (None, "cc-1.tar .*no such file", 28),
    ],
)
def test_damaged_shards_stop_or_are_counted(shards, tmp_path, damage, says, left):
    """A damaged or missing shard raises, or what is left of it is used."""
    content = shards[1].read_bytes()
    at = open_shards(shards, tmp_path).source.offsets[25]
    shards[1].unlink()
    if damage is not None:
        shards[1].write_bytes(damage(content, at))
    check_raises(shards, tmp_path, says)
    data = open_shards(shards, tmp_path, skip_damaged=True)
    assert len(data) == left
    assert data.skipped[0] == "cc-1.tar"
    check_kept(shards, tmp_path, left)


def test_samples_without_image_or_caption(tmp_path, photos):
    """Samples that lack something are named, or skipped and counted."""
    jpg = (photos / "000.jpg").read_bytes()
    samples = dict(
        good=dict(jpg=jpg, json=dict(caption="a cat")),
        empty=dict(jpg=jpg, txt=" "),
        text=dict(txt="a dog"),
        odd=dict(jpg=jpg, json=b"{"),
        latin=dict(jpg=jpg, txt=b"caf\xe9"),
    )
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        for key, parts in samples.items():
            writer.write(dict(__key__=key, **parts))
    with pytest.raises(CompvlError, match="a.tar/empty .*no caption"):
        open_shards(tmp_path / "a.tar", tmp_path)
    data = open_shards(str(tmp_path / "a.tar"), tmp_path, skip_damaged=True)
    assert data.captions == ["a cat"]
    assert data.skipped == [f"a.tar/{key}" for key in ("empty", "latin", "odd", "text")]
    assert data.describe()["skipped_images"] == 4
    with pytest.raises(CompvlError, match="no shard is named .*b"):
        open_shards([str(tmp_path / "b*.tar")], tmp_path)


def test_other_captions_in_a_shard_are_other_data(photos, tmp_path):
    """A shard that is written again with other texts of the same length is not the same data."""
    described = []
    for about in ({}, dict(caption="a dog red"), dict(hard_negative="a cat")):
        texts = {"caption": "a red dog", **about}
        sample = dict(__key__="0", jpg=(photos / "000.jpg").read_bytes(), json=texts)
        with ShardWriter(str(tmp_path / "cc-%d.tar"), verbose=0) as writer:
            writer.write(sample)
        described.append(open_shards([tmp_path / "cc-0.tar"], tmp_path).describe())
    assert len({about["texts"] for about in described}) == 3
    assert described[0]["shards"] == described[1]["shards"], "names and sizes are the same"


def test_a_draw_is_an_identity_only_where_there_is_one(photos, tmp_path):
    """Options that do not change what a batch shows do not change the description."""
    write_captions(tmp_path / "captions.json")
    for name in "ab":
        lines = [f'"{name} {i}"\n' for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def about(*files, **options):
        return CocoCaptions(
            tmp_path / "captions.json",
            photos,
            [tmp_path / f"{name}.jsonl" for name in files],
            image_size=16,
            cache=tmp_path / "cache",
            **options,
        ).describe()

    assert about("a") == about("a", draw=3) == about("a", draw=None)
    assert about("a") == about("a", resident="memory")
    assert len({str(about("a", "b", draw=draw)) for draw in (0, 1, None)}) == 3
    assert about("a", "b") == about("a", "b", draw=0)
    crops = (
        {},
        dict(crop_from=20),
        dict(crop_from=20, flip=True),
        dict(crop_from=20, augment_seed=1),
    )
    assert len({str(about("a", **options)) for options in crops}) == 4


def test_images_that_do_not_fit_into_memory(photos, tmp_path, monkeypatch):
    """Images are loaded into memory only if they fit."""
    memory = SimpleNamespace(available=1000)
    monkeypatch.setattr(data.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(CompvlError, match="leave resident out"):
        open_cache(photos, tmp_path, n=8, resident="memory")
    with pytest.raises(CompvlError, match="memory, cuda"):
        open_cache(photos, tmp_path, n=8, resident="gpu")


class ImagesOf(torch.utils.data.Dataset):
    """Images of lists of items, for a loader."""

    def __init__(self, data, steps):
        self.data = data
        self.steps = steps

    def __len__(self):
        return len(self.steps)

    def __getitem__(self, k):
        return self.data.batch(self.steps[k])["images"]


@pytest.mark.parametrize("options", [{}, dict(decode_once=True, crop_from=20, flip=True)], ids=str)
def test_workers_of_a_loader_see_the_same(shards, tmp_path, options):
    """Forked after the data was in use, as the training loop's loader forks."""
    steps = [list(range(k, 48, 6)) for k in range(6)]
    images = ImagesOf(open_shards(shards, tmp_path, **options), steps)
    here = [images[k] for k in range(6)]
    loader = torch.utils.data.DataLoader(images, batch_size=None, num_workers=2)
    assert all(torch.equal(a, b) for a, b in zip(here, loader, strict=True))


def test_a_model_is_trained_on_images_as_its_preprocessing_resizes_them(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    captions = tmp_path / "captions.json"
    files = [{"id": 0, "file_name": "wide.png"}]
    write_json(captions, {"images": files, "annotations": [{"image_id": 0, "caption": "noise"}]})
    options = dict(captions_json=captions, image_root=tmp_path, cache=tmp_path / "cache")
    config = TrainConfig("clip-ft", data="coco", data_options=options).resolved()
    descriptions = []
    for resize_mode in ("shortest", "squash"):
        model = create_model(device="cpu", preprocessing={"resize_mode": resize_mode})
        model, data, _ = open_parts(config, "cpu", model=model)
        seen = model.normalize(data.batch([0])["images"])[0]
        with Image.open(tmp_path / "wide.png") as picture:
            assert (seen - model.preprocess(picture)).abs().max() < 1e-5, resize_mode
        descriptions.append(data.describe())
    assert "resize" not in descriptions[0], "names of runs with usual models stay as they are"
    assert descriptions[1]["resize"] == {"resize_mode": "squash"}
    with pytest.raises(CompvlError, match="--hard-negatives"):
        open_parts(TrainConfig("hn", data="coco", data_options=options).resolved(), "cpu")


def test_a_run_with_held_out_captions_is_resumed(photos, tmp_path):
    """Its held-out losses are those of an uninterrupted run."""
    for name, numbers in (("training", range(8)), ("held_out", range(8, 12))):
        rows = [f"{i:03}.jpg,A dog and {i} cats" for i in numbers]
        (tmp_path / f"{name}.csv").write_text("\n".join(["image,caption", *rows]) + "\n")
    options = dict(table=tmp_path / "training.csv", image_root=photos, cache=tmp_path / "cache")
    options["validation"] = dict(table=tmp_path / "held_out.csv")
    config = TrainConfig(
        "clip-ft",
        pretrained=None,
        data="table",
        data_options=options,
        steps=4,
        batch_size=4,
        precision="fp32",
        checkpoint_every=2,
        log_every=1,
        validate_every=1,
    )

    def interrupt(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    whole = train(config, runs=tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(config, runs=tmp_path / "cut", progress=False, on_log=interrupt)
    run = train(config, runs=tmp_path / "cut", progress=False)
    assert run.folder.name == whole.folder.name
    assert run.validation.equals(whole.validation)
    assert list(run.validation.step.unique()) == [0, 1, 2, 3, 4]
    assert run.model.fingerprint() == whole.model.fingerprint()
