"""Training a cross-encoder: interrupted and resumed; files that are damaged."""

import pandas as pd
import pytest
import torch

from compvl.core import CompvlError
from compvl.models.matcher import load_matcher
from compvl.models.scorers import open_scorer
from compvl.train.matcher import MatcherConfig, train_matcher

CONFIG = MatcherConfig(
    n_train=24,  # three steps an epoch
    batch_size=8,
    steps=8,
    warmup=2,
    text_width=16,
    text_layers=1,
    cross_layers=1,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never interrupted."""
    return train_matcher(CONFIG, tmp_path_factory.mktemp("whole"), progress=False)


def metrics(run):
    """The log of a run without its speed."""
    return pd.read_csv(run / "metrics.csv").drop(columns="samples_per_s")


def interrupt(folder, step):
    """Train in `folder` up to an interrupt at `step`."""

    def stop(row):
        if row["step"] == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_matcher(CONFIG, folder, progress=False, checkpoint_every=2, on_log=stop)


@pytest.mark.parametrize("step", [1, 3, 4, 8])
def test_interrupted_is_uninterrupted(whole, tmp_path, step):
    interrupt(tmp_path, step)
    assert not (tmp_path / whole.name / "DONE").exists()
    assert not (tmp_path / whole.name / "weights.safetensors").exists()
    again = train_matcher(CONFIG, tmp_path, progress=False)
    assert again.name == whole.name
    assert metrics(again).equals(metrics(whole))
    weights = load_matcher(whole / "weights.safetensors").state_dict()
    resumed = load_matcher(again / "weights.safetensors").state_dict()
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert not (again / "checkpoint.pt").exists()


def test_damaged_checkpoint_is_named(whole, tmp_path):
    interrupt(tmp_path, 5)
    checkpoint = tmp_path / whole.name / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:2000])
    with pytest.raises(CompvlError, match="cannot be read.*train again"):
        train_matcher(CONFIG, tmp_path, progress=False)
    again = train_matcher(CONFIG, tmp_path, resume=False, progress=False)
    assert metrics(again).equals(metrics(whole))


@pytest.mark.parametrize("damage", ["end missing", "beginning only", "other content"])
def test_damaged_weights_are_named(whole, tmp_path, damage):
    content = (whole / "weights.safetensors").read_bytes()
    damaged = {
        "end missing": content[:-100],
        "beginning only": content[:40],
        "other content": b"no weights",
    }
    path = tmp_path / "w.safetensors"
    path.write_bytes(damaged[damage])
    with pytest.raises(CompvlError, match="w.safetensors"):
        load_matcher(path)
    with pytest.raises(CompvlError, match="w.safetensors"):
        open_scorer("micro-xvlm", path)
