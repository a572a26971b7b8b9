"""Training with bags of captions (DAC) and with a diffusion model's help (SDS-CLIP): interrupted, on two processes, and refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace

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
)
CONFIGS = {
    "dac": CONFIG,
    "sds-clip": replace(
        CONFIG, method="sds-clip", kinds=("swap", "replace"), data_options={}, lora_rank=None
    ),
}
ENV = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def weights(run):
    return run.model.clip.state_dict()


@pytest.mark.parametrize("method", CONFIGS)
def test_interrupted_is_uninterrupted(tmp_path, method):
    torch.manual_seed(0)
    start = create_model("micro-clip", device="cpu")
    whole = train(CONFIGS[method], runs=tmp_path / "a", progress=False, model=start)

    def stop(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(CONFIGS[method], runs=tmp_path / "b", progress=False, model=start, on_log=stop)
    again = train(CONFIGS[method], runs=tmp_path / "b", progress=False, model=start)
    assert again.folder.name == whole.folder.name
    for (k, a), b in zip(weights(whole).items(), weights(again).values()):
        assert torch.equal(a, b), k
    part = {"dac": ["mil", "mil_hn", "with_mil"], "sds-clip": ["sds"]}[method]
    assert whole.metrics[part].gt(0).all(axis=None) and all(
        p.requires_grad for p in again.model.clip.parameters()
    )


def test_only_layernorms_are_taught_by_the_teacher(tmp_path):
    start = create_model("micro-clip", device="cpu")
    changed = {
        k
        for (k, a), b in zip(
            start.clip.state_dict().items(),
            weights(
                train(CONFIGS["sds-clip"], runs=tmp_path, progress=False, model=start)
            ).values(),
        )
        if not torch.equal(a, b)
    }
    assert (
        changed
        and all("ln_" in k for k in changed)
        and any(k.startswith("visual") for k in changed)
    )


@pytest.mark.parametrize("method", CONFIGS)
def test_two_processes(tmp_path, method):
    code = f"""
import json, torch
from compvl.train.config import TrainConfig
from compvl.train.loop import train
cfg = TrainConfig(**{json.loads(json.dumps({f: getattr(CONFIGS[method], f) for f in CONFIGS[method].__dataclass_fields__}))!r})
torch.manual_seed(0)
from compvl.models.clip import create_model
train(cfg, runs={str(tmp_path)!r}, progress=False, model=create_model("micro-clip", device="cpu"))"""
    script = tmp_path / "run.py"
    script.write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            f"--master_port={29711 + len(method)}",
            str(script),
        ],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    torch.manual_seed(0)
    two = train(
        CONFIGS[method],
        runs=tmp_path,
        progress=False,
        model=create_model("micro-clip", device="cpu"),
    )  # returned: it is finished
    torch.manual_seed(0)
    one = train(
        CONFIGS[method],
        runs=tmp_path / "one",
        progress=False,
        model=create_model("micro-clip", device="cpu"),
    )
    assert two.folder.parent == tmp_path and len(two.metrics) == 4
    columns = (
        ["itc", "hn", "mil", "mil_hn"] if method == "dac" else ["itc"]
    )  # the noise of L_SDS is each process's own
    assert (two.metrics[columns] - one.metrics[columns]).abs().max(axis=None) < (
        1e-3 if method == "dac" else 2e-2
    )


def test_what_does_not_go_together(tmp_path):
    with pytest.raises(CompvlError, match="dense="):
        train(replace(CONFIG, data_options={}, kinds=("swap",)), runs=tmp_path, progress=False)
    for options in (dict(chunk_size=4), dict(lora_rank=4)):
        with pytest.raises(CompvlError, match="L_SDS"):
            replace(CONFIGS["sds-clip"], **options)
    with pytest.raises(CompvlError, match="no diffusion model"):
        train(
            replace(CONFIGS["sds-clip"], teacher=str(tmp_path / "none.safetensors")),
            runs=tmp_path,
            progress=False,
        )
