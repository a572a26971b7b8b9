"""The shipped base is as weak as CLIP, has its own record, and can be trained again."""

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
BENCHMARKS = ("replace-relations", "replace-attributes", "swap", "coco-retrieval")
RANGES = [  # benchmark, group, metric; lowest and highest value, in percent
    (("swap", "all", "orig_acc"), 52, 75),
    (("replace-relations", "all", "orig_acc"), 45, 65),
    (("swap", "all", "brittleness"), 10, 100),
    (("replace", "macro", "brittleness"), 10, 100),
    (("replace-attributes", "all", "brittleness"), 5, 30),
    (("coco-retrieval", "all", "image_to_text_recall@1"), 5, 100),
    (("coco-retrieval", "all", "text_to_image_recall@1"), 5, 100),
]


@pytest.fixture(scope="module")
def figures():
    """Figures of the base on 1,000 items of each benchmark: (benchmark, group, metric) -> value."""
    benchmarks = [load_benchmark(name, n=1000) for name in BENCHMARKS]
    base = create_model("micro-clip", "base", device="cpu")
    table = evaluate(base, benchmarks, n_boot=20, progress=False)
    return table.set_index(["benchmark", "group", "metric"]).value


@pytest.mark.parametrize("at, low, high", RANGES)
def test_base_is_in_clips_regime(figures, at, low, high):
    assert low <= figures[at] <= high, (at, figures[at])


def test_base_is_small_and_its_record_belongs_to_it():
    path = data_dir() / "microworld" / "base.safetensors"
    assert path.stat().st_size <= 20e6
    config, environment, metrics = base_record()
    wanted = base_config(get_profile("micro"))
    for field in ("steps", "batch_size", "lr", "seed"):
        assert config[field] == getattr(wanted, field)
    assert config["train_data"]["n"] == wanted.n_train
    assert len(metrics) == wanted.steps
    meta = read_weights(path)[1]
    assert meta["name"] == "micro-clip"
    assert meta["commit"] == environment["commit"]
    assert "dirty" not in meta["commit"]


def test_base_can_be_made_again(tmp_path):
    out = tmp_path / "out"
    parameters = dict(profile="smoke", out=out, retrain="True")
    command = [sys.executable, "-m", "papermill", "nbs/paper/00_base.ipynb", tmp_path / "00.ipynb"]
    for name, value in parameters.items():
        command += ["-p", name, value]
    command.append("--no-progress-bar")
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    weights = out / "base" / "microworld" / "base.safetensors"
    assert create_model("micro-clip", weights, device="cpu").name == "micro-clip"
    config = json.loads((out / "base" / "results" / "base" / "config.json").read_text())
    assert config["steps"] == get_profile("smoke").pretrain_steps
