"""Training with bags of captions (DAC) and with a diffusion model's help (SDS-CLIP)."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from compvl.core import CompvlError
from compvl.models.clip import create_model
from compvl.train.config import TrainConfig
from compvl.train.loop import train

CONFIG = TrainConfig(
    "dac",
    pretrained=None,
    n_train=32,
    steps=4,
    batch_size=8,
    lr=1e-3,
    warmup=1,
    checkpoint_every=2,
    log_every=1,
    kinds=("svlc-rules",),
    lora_rank=4,
    data_options=dict(source="text", sound=False, dense="text", bag=3),
    precision="fp32",
)
SDS = replace(CONFIG, method="sds-clip", kinds=("swap", "replace"), data_options={}, lora_rank=None)
CONFIGS = {"dac": CONFIG, "sds-clip": SDS}
TERMS = {"dac": ["mil", "mil_hn", "with_mil"], "sds-clip": ["sds"]}
ENV = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def new_model():
    """Micro-CLIP with the random weights of seed 0."""
    torch.manual_seed(0)
    return create_model("micro-clip", device="cpu")


def weights(run):
    """The weights of a finished run."""
    return run.model.clip.state_dict()


@pytest.mark.parametrize("method", CONFIGS)
def test_interrupted_is_uninterrupted(tmp_path, method):
    start = new_model()
    config = CONFIGS[method]
    whole = train(config, runs=tmp_path / "a", progress=False, model=start)

    def stop(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, runs=tmp_path / "b", progress=False, model=start, on_log=stop)
    again = train(config, runs=tmp_path / "b", progress=False, model=start)
    assert again.folder.name == whole.folder.name
    resumed = weights(again)
    assert len(resumed) == len(weights(whole))
    for name, value in weights(whole).items():
        assert torch.equal(value, resumed[name]), name
    assert whole.metrics[TERMS[method]].gt(0).all(axis=None)
    assert all(parameter.requires_grad for parameter in again.model.clip.parameters())


def test_only_layernorms_are_taught_by_the_teacher(tmp_path):
    start = create_model("micro-clip", device="cpu")
    before = start.clip.state_dict()
    after = weights(train(SDS, runs=tmp_path, progress=False, model=start))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("ln_" in name for name in changed)
    assert any(name.startswith("visual") for name in changed)


def training_script(config, runs) -> str:
    """A program that trains `config` from random weights."""
    fields = json.loads(json.dumps(asdict(config)))
    return f"""
import json, torch
from compvl.models.clip import create_model
from compvl.train.config import TrainConfig
from compvl.train.loop import train
cfg = TrainConfig(**{fields!r})
torch.manual_seed(0)
train(cfg, runs={str(runs)!r}, progress=False, model=create_model("micro-clip", device="cpu"))"""


@pytest.mark.parametrize("method", CONFIGS)
def test_two_processes(tmp_path, method):
    config = CONFIGS[method]
    script = tmp_path / "run.py"
    script.write_text(training_script(config, tmp_path))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    port = f"--master_port={29711 + len(method)}"
    done = subprocess.run(
        [sys.executable, *launcher, port, str(script)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    two = train(config, runs=tmp_path, progress=False, model=new_model())  # it is finished
    one = train(config, runs=tmp_path / "one", progress=False, model=new_model())
    assert two.folder.parent == tmp_path
    assert len(two.metrics) == 4
    # the noise of L_SDS is each process's own
    columns = ["itc", "hn", "mil", "mil_hn"] if method == "dac" else ["itc"]
    tolerance = 1e-3 if method == "dac" else 2e-2
    assert (two.metrics[columns] - one.metrics[columns]).abs().max(axis=None) < tolerance


def test_what_does_not_go_together(tmp_path):
    with pytest.raises(CompvlError, match="dense="):
        train(replace(CONFIG, data_options={}, kinds=("swap",)), runs=tmp_path, progress=False)
    for options in (dict(chunk_size=4), dict(lora_rank=4)):
        with pytest.raises(CompvlError, match="L_SDS"):
            replace(SDS, **options)
    absent = replace(SDS, teacher=str(tmp_path / "none.safetensors"))
    with pytest.raises(CompvlError, match="no diffusion model"):
        train(absent, runs=tmp_path, progress=False)
