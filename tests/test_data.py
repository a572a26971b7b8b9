"""Training data: interrupted, in parallel, and with files that are not what they should be."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from compvl.data import images as data
from compvl.core import CompvlError, write_json
from compvl.data.captions import CocoCaptions
from compvl.data.images import ImageCache, ImageFolder, decode
from compvl.data.loading import load_train_data
from compvl.data.shards import ShardCaptions
from compvl.train.batches import step_indices


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(600):
        Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(
            folder / f"{i:03}.jpg"
        )
    return folder


def names(n=600):
    return [f"{i:03}.jpg" for i in range(n)]


KILLED = """
import os, signal, sys
from compvl.data import images as data
true = data.decode
def decode(path, size):
    if path.name == "550.jpg": os.kill(os.getpid(), signal.SIGKILL)
    return true(path, size)
data.decode = decode
data.ImageCache(data.ImageFolder(sys.argv[1], [f"{i:03}.jpg" for i in range(600)]), 16, sys.argv[2], workers=1, progress=False)
"""


def test_killed_while_decoding_goes_on_where_it_stopped(photos, tmp_path, monkeypatch):
    killed = subprocess.run([sys.executable, "-c", KILLED, photos, tmp_path / "cache"])
    assert killed.returncode == -signal.SIGKILL
    decoded = []
    monkeypatch.setattr(
        data, "decode", lambda path, size: (decoded.append(path.name), decode(path, size))[1]
    )
    cache = ImageCache(ImageFolder(photos, names()), 16, tmp_path / "cache", progress=False)
    assert sorted(decoded) == names()[512:]
    assert all(
        np.array_equal(cache.images[i], decode(photos / n, 16).numpy())
        for i, n in enumerate(names())
        if i % 50 == 0
    )
    decoded.clear()
    os.utime(photos / "007.jpg", (1, 1))
    ImageCache(ImageFolder(photos, names()), 16, tmp_path / "cache", progress=False)
    assert decoded == ["007.jpg"]


def test_two_processes_share_one_cache(photos, tmp_path):
    program = KILLED.replace("550.jpg", "none")
    both = [
        subprocess.Popen([sys.executable, "-c", program, photos, tmp_path / "cache"])
        for _ in range(2)
    ]
    assert [p.wait() for p in both] == [0, 0]
    (folder,) = (tmp_path / "cache").iterdir()
    assert (np.load(folder / "stamps.npy") > 0).all() and np.load(folder / "images.npy").any(
        (1, 2, 3)
    ).all()


def test_bad_files_lose_nothing(photos, tmp_path, monkeypatch):
    (photos / "400.jpg").write_bytes((photos / "400.jpg").read_bytes()[:200])
    (photos / "401.jpg").write_bytes(b"")
    with pytest.raises(CompvlError, match="2 of 600 .* first 400.jpg .*skip_damaged"):
        ImageCache(ImageFolder(photos, names()), 16, tmp_path / "cache", progress=False)
    decoded = []
    monkeypatch.setattr(
        data, "decode", lambda path, size: (decoded.append(path.name), decode(path, size))[1]
    )
    Image.new("L", (9, 40), 77).save(photos / "400.jpg")
    Image.new("RGBA", (20, 20)).save(photos / "401.jpg", "PNG")
    cache = ImageCache(ImageFolder(photos, names()), 16, tmp_path / "cache", progress=False)
    assert sorted(decoded[:2]) == ["400.jpg", "401.jpg"] and (cache.images[400] == 77).all()
    (photos / "400.jpg").unlink()
    with pytest.raises(CompvlError, match="1 of 600 images are missing .* 400.jpg"):
        ImageCache(ImageFolder(photos, names()), 16, tmp_path / "cache", progress=False)
    with pytest.raises(CompvlError, match="no image folder"):
        ImageFolder(tmp_path / "nowhere", names())


def test_a_full_disk_is_told_before_decoding(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(data.shutil, "disk_usage", lambda p: type("Usage", (), {"free": 1000}))
    with pytest.raises(CompvlError, match="COMPVL_CACHE"):
        ImageCache(ImageFolder(photos, names()), 16, tmp_path / "cache", progress=False)


def test_paths_are_not_content(photos, tmp_path):
    "The same material elsewhere is the same data: a run's identity must not change with the machine."
    doc = dict(
        images=[dict(id=i, file_name=n) for i, n in enumerate(names(8))],
        annotations=[dict(id=i, image_id=i, caption=f"caption {i}") for i in range(8)],
    )
    described = []
    for place in (tmp_path, tmp_path / "elsewhere"):
        (place / "photos").mkdir(parents=True, exist_ok=True)
        for n in names(8):
            (place / "photos" / n).write_bytes((photos / n).read_bytes())
        write_json(place / "captions.json", doc)
        described.append(
            CocoCaptions(
                place / "captions.json", place / "photos", image_size=16, cache=tmp_path / "cache"
            ).describe()
        )
    assert described[0] == described[1]


def test_unknown_names_and_options():
    with pytest.raises(CompvlError, match="microworld, .*coco"):
        load_train_data("imagenet")
    with pytest.raises(CompvlError, match="image_folder"):
        load_train_data("coco", captions_json="c.json", image_folder="x")
    with pytest.raises(CompvlError, match="rarity"):
        load_train_data("microworld", n=8, rarity=1)


@pytest.fixture
def shards(photos, tmp_path):
    "Three shards of 20, 20 and 8 samples; they lie as `TarWriter` writes them."
    from webdataset import ShardWriter

    with ShardWriter(str(tmp_path / "cc-%d.tar"), maxcount=20, verbose=0) as w:
        for i in range(48):
            w.write(
                dict(
                    __key__=f"{i:03}", jpg=(photos / f"{i:03}.jpg").read_bytes(), txt=f"caption {i}"
                )
            )
    return [tmp_path / f"cc-{k}.tar" for k in range(3)]


def open_shards(shards, tmp_path, **options):
    return ShardCaptions(shards, image_size=16, cache=tmp_path / "cache", progress=False, **options)


def test_shards_in_one_order_whatever_the_processes(shards, tmp_path, photos):
    "What a step sees follows from seed, epoch and step: not from threads, processes, or what was read before."
    one, many = open_shards(shards, tmp_path, workers=1), open_shards(shards, tmp_path, workers=5)
    for step in (5, 0, 4):  # 4 steps an epoch of 48 samples
        epoch, (whole,) = step_indices(step, len(one), 12, seed=7)
        shares = [step_indices(step, len(one), 12, seed=7, rank=r, world=2)[1][0] for r in range(2)]
        assert sorted(np.concatenate(shares)) == sorted(whole) and len(set(whole)) == 12
        for ds in (one, many):
            ds.set_epoch(epoch)
        for share in shares:
            a, b = one.batch(share), many.batch(share)
            assert torch.equal(a.pop("images"), b.pop("images")) and a == b
    assert torch.equal(one.batch([33])["images"][0], decode(photos / "033.jpg", 16)) and one.batch(
        [33]
    )["id"] == ["cc-1.tar/033"]
    seen = [
        i for step in range(4) for i in one.batch(step_indices(step, 48, 12, seed=7)[1][0])["id"]
    ]
    assert len(set(seen)) == 48
    assert len(list((tmp_path / "cache").glob("*.json"))) == 3


def test_damaged_shards_stop_or_are_counted(shards, tmp_path):
    whole = shards[1].read_bytes()
    at = open_shards(shards, tmp_path).source.offsets[25]
    bad_image = whole[:at] + bytes(400) + whole[at + 400 :]
    for name, content, says, left in (
        ("an image that is none", bad_image, "cc-1.tar/025 .*UnidentifiedImageError", None),
        ("cut short", whole[:at], "cc-1.tar .*breaks off at byte .* after 024", 33),
        (
            "a damaged header",
            whole[: at - 512] + b"?" + whole[at - 511 :],
            "cc-1.tar .*breaks off at byte",
            33,
        ),
        ("no tar file", b"<html>404</html>" * 100, "cc-1.tar .*breaks off", 28),
        ("missing", None, "cc-1.tar .*no such file", 28),
    ):
        shards[1].unlink(missing_ok=True)
        if content is not None:
            shards[1].write_bytes(content)
        with pytest.raises(CompvlError, match=says):
            open_shards(shards, tmp_path, decode_once=True)
        with pytest.raises(CompvlError, match=says):
            open_shards(shards, tmp_path).batch(range(48))
        ds = open_shards(shards, tmp_path, skip_damaged=True)
        if left is None:
            with pytest.warns(UserWarning, match="cc-1.tar/025"):
                b = ds.batch([24, 25, 26])
            assert b["id"] == ["cc-1.tar/024", "cc-1.tar/026", "cc-1.tar/026"] and ds.skipped == [
                "cc-1.tar/025"
            ]
            assert torch.equal(b["images"][1], b["images"][2])
        else:
            assert (len(ds), ds.skipped[0]) == (left, "cc-1.tar"), name
        kept = open_shards(shards, tmp_path, skip_damaged=True, decode_once=True)
        assert (
            len(kept) == (left or 47) and kept.describe()["skipped_images"] == len(kept.skipped) > 0
        )
        assert "cc-1.tar/025" not in kept.ids


def test_samples_without_image_or_caption(tmp_path, photos):
    from webdataset import TarWriter

    jpg = (photos / "000.jpg").read_bytes()
    with TarWriter(str(tmp_path / "a.tar")) as w:
        for key, parts in dict(
            good=dict(jpg=jpg, json=dict(caption="a cat")),
            empty=dict(jpg=jpg, txt=" "),
            text=dict(txt="a dog"),
            odd=dict(jpg=jpg, json=b"{"),
            latin=dict(jpg=jpg, txt=b"caf\xe9"),
        ).items():
            w.write(dict(__key__=key, **parts))
    with pytest.raises(CompvlError, match="a.tar/empty .*no caption"):
        open_shards(tmp_path / "a.tar", tmp_path)
    ds = open_shards(str(tmp_path / "a.tar"), tmp_path, skip_damaged=True)
    assert (
        ds.captions == ["a cat"]
        and ds.skipped == [f"a.tar/{k}" for k in ("empty", "latin", "odd", "text")]
        and ds.describe()["skipped_images"] == 4
    )
    with pytest.raises(CompvlError, match="no shard is named .*b"):
        open_shards([str(tmp_path / "b*.tar")], tmp_path)


def test_a_draw_is_an_identity_only_where_there_is_one(photos, tmp_path):
    write_json(
        tmp_path / "captions.json",
        dict(
            images=[dict(id=i, file_name=n) for i, n in enumerate(names(8))],
            annotations=[dict(id=i, image_id=i, caption=f"caption {i}") for i in range(8)],
        ),
    )
    for k in "ab":
        (tmp_path / f"{k}.jsonl").write_text("".join(f'"{k} {i}"\n' for i in range(8)))
    about = lambda *files, **options: CocoCaptions(
        tmp_path / "captions.json",
        photos,
        [tmp_path / f"{f}.jsonl" for f in files],
        image_size=16,
        cache=tmp_path / "cache",
        **options,
    ).describe()
    assert (
        about("a") == about("a", draw=3) == about("a", draw=None) == about("a", resident="memory")
    )
    assert len({str(about("a", "b", draw=d)) for d in (0, 1, None)}) == 3 and about(
        "a", "b"
    ) == about("a", "b", draw=0)
    assert (
        len(
            {
                str(about("a", **o))
                for o in (
                    {},
                    dict(crop_from=20),
                    dict(crop_from=20, flip=True),
                    dict(crop_from=20, augment_seed=1),
                )
            }
        )
        == 4
    )


def test_images_that_do_not_fit_into_memory(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(
        data.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})
    )
    with pytest.raises(CompvlError, match="leave resident out"):
        ImageCache(ImageFolder(photos, names(8)), 16, tmp_path / "cache", resident="memory")
    with pytest.raises(CompvlError, match="memory, cuda"):
        ImageCache(ImageFolder(photos, names(8)), 16, tmp_path / "cache", resident="gpu")


def test_workers_of_a_loader_see_the_same(shards, tmp_path):
    "Forked after the data was in use, as the training loop's loader forks."
    for options in ({}, dict(decode_once=True, crop_from=20, flip=True)):
        ds = open_shards(shards, tmp_path, **options)
        steps = [list(range(k, 48, 6)) for k in range(6)]
        here = [ds.batch(s)["images"] for s in steps]
        loader = torch.utils.data.DataLoader(
            type(
                "Steps",
                (),
                dict(
                    __len__=lambda self: 6, __getitem__=lambda self, k: ds.batch(steps[k])["images"]
                ),
            )(),
            batch_size=None,
            num_workers=2,
        )
        assert all(torch.equal(a, b) for a, b in zip(here, loader, strict=True))
