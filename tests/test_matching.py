"""Training a cross-encoder: interrupted and resumed; files that are damaged."""

import pandas as pd
import pytest
import torch

from compvl.core import CompvlError
from compvl.models.scorers import open_scorer
from compvl.models.matcher import load_matcher
from compvl.train.matcher import MatcherConfig, train_matcher

CONFIG = MatcherConfig(
    n_train=24, batch_size=8, steps=8, warmup=2, text_width=16, text_layers=1, cross_layers=1
)  # three steps an epoch


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train_matcher(CONFIG, tmp_path_factory.mktemp("whole"), progress=False)


def metrics(run):
    return pd.read_csv(run / "metrics.csv").drop(columns="samples_per_s")


@pytest.mark.parametrize("stop_at", [1, 3, 4, 8])
def test_interrupted_is_uninterrupted(whole, tmp_path, stop_at):
    def stop(row):
        if row["step"] == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_matcher(CONFIG, tmp_path, progress=False, checkpoint_every=2, on_log=stop)
    assert (
        not (tmp_path / whole.name / "DONE").exists()
        and not (tmp_path / whole.name / "weights.safetensors").exists()
    )
    again = train_matcher(CONFIG, tmp_path, progress=False)
    assert again.name == whole.name and metrics(again).equals(metrics(whole))
    a, b = (load_matcher(f / "weights.safetensors").state_dict() for f in (whole, again))
    assert all(torch.equal(a[k], b[k]) for k in a) and not (again / "checkpoint.pt").exists()


def test_damaged_checkpoint_is_named(whole, tmp_path):
    def stop(row):
        if row["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_matcher(CONFIG, tmp_path, progress=False, checkpoint_every=2, on_log=stop)
    state = tmp_path / whole.name / "checkpoint.pt"
    state.write_bytes(state.read_bytes()[:2000])
    with pytest.raises(CompvlError, match="cannot be read.*train again"):
        train_matcher(CONFIG, tmp_path, progress=False)
    again = train_matcher(CONFIG, tmp_path, resume=False, progress=False)
    assert metrics(again).equals(metrics(whole))


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b[:40], lambda b: b"no weights"])
def test_damaged_weights_are_named(whole, tmp_path, damage):
    path = tmp_path / "w.safetensors"
    path.write_bytes(damage((whole / "weights.safetensors").read_bytes()))
    with pytest.raises(CompvlError, match="w.safetensors"):
        load_matcher(path)
    with pytest.raises(CompvlError, match="w.safetensors"):
        open_scorer("micro-xvlm", path)
