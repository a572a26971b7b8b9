"""Decoding images once: interrupted, in parallel, and with files that are not what they should be."""
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from compvl import data
from compvl.core import CompvlError, write_json
from compvl.data import CocoCaptions, ImageCache, decode, load_train_data


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path/"photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(600):
        Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(folder/f"{i:03}.jpg")
    return folder


def names(n=600): return [f"{i:03}.jpg" for i in range(n)]


KILLED = """
import os, signal, sys
from compvl import data
true = data.decode
def decode(path, size):
    if path.name == "550.jpg": os.kill(os.getpid(), signal.SIGKILL)
    return true(path, size)
data.decode = decode
data.ImageCache(sys.argv[1], [f"{i:03}.jpg" for i in range(600)], 16, sys.argv[2], workers=1, progress=False)
"""


def test_killed_while_decoding_goes_on_where_it_stopped(photos, tmp_path, monkeypatch):
    killed = subprocess.run([sys.executable, "-c", KILLED, photos, tmp_path/"cache"])
    assert killed.returncode == -signal.SIGKILL
    decoded = []
    monkeypatch.setattr(data, "decode", lambda path, size: (decoded.append(path.name), decode(path, size))[1])
    cache = ImageCache(photos, names(), 16, tmp_path/"cache", progress=False)
    assert sorted(decoded) == names()[512:]
    assert all(np.array_equal(cache.images[i], decode(photos/n, 16).numpy()) for i, n in enumerate(names()) if i % 50 == 0)
    decoded.clear()
    os.utime(photos/"007.jpg", (1, 1))
    ImageCache(photos, names(), 16, tmp_path/"cache", progress=False)
    assert decoded == ["007.jpg"]


def test_two_processes_share_one_cache(photos, tmp_path):
    program = KILLED.replace("550.jpg", "none")
    both = [subprocess.Popen([sys.executable, "-c", program, photos, tmp_path/"cache"]) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0]
    folder, = (tmp_path/"cache").iterdir()
    assert (np.load(folder/"stamps.npy") > 0).all() and np.load(folder/"images.npy").any((1, 2, 3)).all()


def test_bad_files_lose_nothing(photos, tmp_path, monkeypatch):
    (photos/"400.jpg").write_bytes((photos/"400.jpg").read_bytes()[:200])
    (photos/"401.jpg").write_bytes(b"")
    with pytest.raises(CompvlError, match="2 of 600 .* first 400.jpg .*skip_damaged"):
        ImageCache(photos, names(), 16, tmp_path/"cache", progress=False)
    decoded = []
    monkeypatch.setattr(data, "decode", lambda path, size: (decoded.append(path.name), decode(path, size))[1])
    Image.new("L", (9, 40), 77).save(photos/"400.jpg")
    Image.new("RGBA", (20, 20)).save(photos/"401.jpg", "PNG")
    cache = ImageCache(photos, names(), 16, tmp_path/"cache", progress=False)
    assert sorted(decoded[:2]) == ["400.jpg", "401.jpg"] and (cache.images[400] == 77).all()
    (photos/"400.jpg").unlink()
    with pytest.raises(CompvlError, match="1 of 600 images are missing .* 400.jpg"):
        ImageCache(photos, names(), 16, tmp_path/"cache", progress=False)
    with pytest.raises(CompvlError, match="no image folder"):
        ImageCache(tmp_path/"nowhere", names(), 16, tmp_path/"cache", progress=False)


def test_a_full_disk_is_told_before_decoding(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(data.shutil, "disk_usage", lambda p: type("Usage", (), {"free": 1000}))
    with pytest.raises(CompvlError, match="COMPVL_CACHE"):
        ImageCache(photos, names(), 16, tmp_path/"cache", progress=False)


def test_paths_are_not_content(photos, tmp_path):
    "The same material elsewhere is the same data: a run's identity must not change with the machine."
    doc = dict(images=[dict(id=i, file_name=n) for i, n in enumerate(names(8))],
               annotations=[dict(id=i, image_id=i, caption=f"caption {i}") for i in range(8)])
    described = []
    for place in (tmp_path, tmp_path/"elsewhere"):
        (place/"photos").mkdir(parents=True, exist_ok=True)
        for n in names(8): (place/"photos"/n).write_bytes((photos/n).read_bytes())
        write_json(place/"captions.json", doc)
        described.append(CocoCaptions(place/"captions.json", place/"photos", image_size=16, cache=tmp_path/"cache").describe())
    assert described[0] == described[1]


def test_unknown_names_and_options():
    with pytest.raises(CompvlError, match="microworld, .*coco"): load_train_data("imagenet")
    with pytest.raises(CompvlError, match="image_folder"): load_train_data("coco", captions_json="c.json", image_folder="x")
    with pytest.raises(CompvlError, match="rarity"): load_train_data("microworld", n=8, rarity=1)
