"""The shipped base stands where CLIP stands, its record is its own, and the notebook that made it can make it again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compvl.benchmarks.loading import load_benchmark
from compvl.core import data_dir
from compvl.evaluate.engine import evaluate
from compvl.models.clip import create_model
from compvl.models.weights import read_weights
from compvl.paper.bases import base_config, base_record
from compvl.paper.profiles import get_profile

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def figures():
    """Figures of the base on 1,000 items of each benchmark: (benchmark, group, metric) -> value."""
    names = [
        load_benchmark(n, n=1000)
        for n in ("replace-relations", "replace-attributes", "swap", "coco-retrieval")
    ]
    return (
        evaluate(create_model("micro-clip", "base", device="cpu"), names, n_boot=20, progress=False)
        .set_index(["benchmark", "group", "metric"])
        .value
    )


@pytest.mark.parametrize(
    "at, low, high",
    [
        (("swap", "all", "orig_acc"), 52, 75),
        (("replace-relations", "all", "orig_acc"), 45, 65),
        (("swap", "all", "brittleness"), 10, 100),
        (("replace", "macro", "brittleness"), 10, 100),
        (("replace-attributes", "all", "brittleness"), 5, 30),
        (("coco-retrieval", "all", "image_to_text_recall@1"), 5, 100),
        (("coco-retrieval", "all", "text_to_image_recall@1"), 5, 100),
    ],
)
def test_base_is_in_clips_regime(figures, at, low, high):
    assert low <= figures[at] <= high, (at, figures[at])


def test_base_is_small_and_its_record_belongs_to_it():
    path = data_dir() / "microworld" / "base.safetensors"
    assert path.stat().st_size <= 20e6
    config, environment, metrics = base_record()
    meta = read_weights(path)[1]
    wanted = base_config(get_profile("micro"))
    assert {k: config[k] for k in ("steps", "batch_size", "lr", "seed")} == {
        k: getattr(wanted, k) for k in ("steps", "batch_size", "lr", "seed")
    }
    assert config["train_data"]["n"] == wanted.n_train and len(metrics) == wanted.steps
    assert (
        meta["name"] == "micro-clip"
        and meta["commit"] == environment["commit"]
        and "dirty" not in meta["commit"]
    )


def test_base_can_be_made_again(tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "papermill",
        "nbs/paper/00_base.ipynb",
        tmp_path / "00.ipynb",
        "-p",
        "profile",
        "smoke",
        "-p",
        "out",
        out,
        "-p",
        "retrain",
        "True",
        "--no-progress-bar",
    ]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        create_model(
            "micro-clip", out / "base" / "microworld" / "base.safetensors", device="cpu"
        ).name
        == "micro-clip"
    )
    assert (
        json.loads((out / "base" / "results" / "base" / "config.json").read_text())["steps"]
        == get_profile("smoke").pretrain_steps
    )
