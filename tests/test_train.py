"""Training over several processes, killed and resumed: the numbers must not change."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from compvl.core import CompvlError
from compvl.data.loading import load_train_data
from compvl.models.clip import create_model
from compvl.train.batches import Collate
from compvl.train.config import TrainConfig
from compvl.train.loop import train
from compvl.train.step import Towers, batch_loss

CONFIG = dict(
    method="hp+hn",
    pretrained=None,
    n_train=48,
    steps=10,
    batch_size=16,
    lr=1e-3,
    warmup=2,
    checkpoint_every=4,
    log_every=1,
)
ENV = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
SAME = ["step", "lr", "loss", "itc", "hn", "hp", "logit_scale", "with_hn", "with_hp"]


@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def uneven(ds, indices):
    "A batch whose halves differ in how many hard negatives and hard positives they have."
    b = ds.batch(indices)
    b["hard_negative"] = [
        t if i in (0, 3, 9, 10, 11, 12, 15) else None for i, t in zip(indices, b["hard_negative"])
    ]
    b["hard_positive"] = [
        t if i in (8, 9, 14) else None for i, t in zip(indices, b["hard_positive"])
    ]
    b["image_id"] = ["shared" if i in (2, 9) else str(i) for i in indices]
    return b


def loss_and_gradients(towers, model, indices, backward, **options):
    cfg = TrainConfig(**dict(method="hp+hn", mask_same_image=True) | options).resolved()
    loss, parts = batch_loss(
        towers,
        model,
        Collate(model, cfg)(uneven(load_train_data("microworld", n=16), indices)),
        cfg,
    )
    backward(loss)
    return {k: v.double() for k, v in dict(loss=loss.detach(), **parts).items()}, [
        p.grad.clone() for p in model.clip.parameters()
    ]


ATTRIBUTION = [
    dict(method="cae+hn", w_hp=1.0, attribution=a, attr_margin=0.1)
    for a in ("attention", "gradcam", "perturbation", "gradient")
]
OPTIONS = [dict(w_hn=0.5), dict(negatives_in_batch=True), *ATTRIBUTION]

PROCESSES = """
import sys, json, torch
sys.path.insert(0, sys.argv[1])
from test_train import *
from accelerate import Accelerator
folder = sys.argv[2]
acc = Accelerator()
assert acc.num_processes == 2
for k, options in enumerate(OPTIONS):
    torch.manual_seed(0)
    model = create_model("micro-clip", device=acc.device)
    towers = acc.prepare(Towers(model))
    parts, grads = loss_and_gradients(towers, model, range(8*acc.process_index, 8*acc.process_index + 8), acc.backward, **options)
    parts = {n: float(acc.reduce(v.clone(), "sum" if n.startswith("with_") else "mean")) for n, v in parts.items()}
    if acc.is_main_process: torch.save((parts, grads), f"{folder}/{k}.pt")
torch.manual_seed(0)
train(TrainConfig(**CONFIG | dict(steps=4)), runs=f"{folder}/two", progress=False)
"""


def test_two_processes_are_one(tmp_path):
    (tmp_path / "processes.py").write_text(PROCESSES)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            tmp_path / "processes.py",
            os.path.dirname(__file__),
            tmp_path,
        ],
        env=ENV,
        check=True,
    )
    for k, options in enumerate(OPTIONS):
        torch.manual_seed(0)
        model = create_model("micro-clip", device="cpu")
        parts, grads = loss_and_gradients(
            Towers(model), model, range(16), lambda loss: loss.backward(), **options
        )
        theirs, their_grads = torch.load(tmp_path / f"{k}.pt")
        assert (parts["with_hn"], parts["with_hp"], parts.get("with_attr", 16)) == (7, 3, 16)
        assert theirs == pytest.approx({n: float(v) for n, v in parts.items()}, abs=1e-5)
        worst = max(float((a - b).abs().max()) for a, b in zip(grads, their_grads))
        assert worst < 1e-5 and max(float(g.abs().max()) for g in grads) > 1e-3
    one = train(TrainConfig(**CONFIG | dict(steps=4)), runs=tmp_path / "one", progress=False)
    (folder,) = (tmp_path / "two").iterdir()
    assert folder.name == one.folder.name  # the number of processes is no part of a run's identity
    two = train(TrainConfig(**CONFIG | dict(steps=4)), runs=tmp_path / "two", progress=False)
    assert (
        len(two.metrics) == 4 and (two.metrics[SAME] - one.metrics[SAME]).abs().max().max() < 1e-3
    )
    assert json.loads((folder / "environment.json").read_text())["processes"] == 2


KILL = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from compvl.train.config import TrainConfig
from compvl.train.loop import train
def die(row):
    if row["step"] == 7: os.kill(os.getpid(), signal.SIGKILL)
train(TrainConfig(**json.loads(sys.argv[1])), runs=sys.argv[2], progress=False, on_log=die)
"""


@pytest.mark.parametrize("options", [{}, ATTRIBUTION[2]], ids=["hp+hn", "cae"])
def test_killed_and_resumed_is_uninterrupted(tmp_path, options):
    config, same = CONFIG | options, SAME + ["attr", "with_attr"] * bool(options)
    whole = train(TrainConfig(**config), runs=tmp_path / "whole", progress=False)
    killed = subprocess.run(
        [sys.executable, "-c", KILL, json.dumps(config), tmp_path / "killed"], env=ENV
    )
    assert killed.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "killed").iterdir()
    assert (
        folder.name == whole.folder.name
        and (folder / "checkpoint" / "state.pt").exists()
        and not (folder / "DONE").exists()
    )
    with open(folder / "metrics.csv", "a") as f:
        f.write("8,0.00")  # a line that the kill cut short
    run = train(TrainConfig(**config), runs=tmp_path / "killed", progress=False)
    assert run.model.fingerprint() == whole.model.fingerprint()
    assert (
        run.metrics[same].equals(whole.metrics[same])
        and (folder / "DONE").exists()
        and not (folder / "checkpoint").exists()
    )


def test_micro_batches(tmp_path):
    "Two micro-batches are each contrasted within itself; their losses are averaged."
    cfg = TrainConfig(**CONFIG | dict(steps=2, grad_accum=2, method="clip-ft"))
    model, data = create_model("micro-clip", device="cpu"), load_train_data("microworld", n=48)
    from compvl.train.batches import step_indices

    want = [
        batch_loss(
            Towers(model), model, Collate(model, cfg.resolved())(data.batch(i)), cfg.resolved()
        )[0].item()
        for i in step_indices(0, 48, 16, 0, 2)[1]
    ]
    run = train(cfg, runs=tmp_path, progress=False, data=data, model=model)
    assert run.metrics.loss[0] == pytest.approx(sum(want) / 2, abs=1e-5) and list(
        run.metrics.columns
    ) == [c for c in SAME if c not in ("hn", "hp")] + ["samples_per_s"]
    assert run.model.clip is not model.clip


def test_infinite_loss_keeps_the_checkpoint(tmp_path):
    cfg = TrainConfig(**CONFIG | dict(lr=1e18, warmup=0, checkpoint_every=1, method="clip-ft"))
    with pytest.raises(CompvlError, match="lower lr.*kept in"):
        train(cfg, runs=tmp_path, progress=False)
    (folder,) = tmp_path.iterdir()
    saved = torch.load(folder / "checkpoint" / "state.pt", weights_only=True)
    assert saved["step"] >= 1 and all(v.isfinite().all() for v in saved["model"].values())
    assert (folder / "metrics.csv").exists() and not (folder / "DONE").exists()


def test_mistakes_are_named(tmp_path):
    for options, says in [
        (dict(method="hnhp"), "clip-ft.*hp\\+hn"),
        (dict(steps=3, epochs=1), "not both"),
        (dict(precision="int8"), "bf16"),
        (dict(batch_size=1), "batch_size=1"),
        (dict(lr=-1.0), "lr=-1"),
        (dict(method="cae"), "needs an attribution.*gradcam"),
        (dict(method="cae", attribution="shapley"), "shapley.*gradcam"),
    ]:
        with pytest.raises(CompvlError, match=says):
            TrainConfig(**options)
    with pytest.raises(CompvlError, match="does not divide into 3"):
        train(TrainConfig(**CONFIG | dict(grad_accum=3)), runs=tmp_path, progress=False)
    with pytest.raises(CompvlError, match="larger than the 48"):
        train(TrainConfig(**CONFIG | dict(batch_size=64)), runs=tmp_path, progress=False)
    if not torch.cuda.is_available():
        with pytest.raises(CompvlError, match="fp16 needs a CUDA"):
            train(TrainConfig(**CONFIG | dict(precision="fp16")), runs=tmp_path, progress=False)
    (tmp_path / "broken.safetensors").write_bytes(b"0" * 100)
    with pytest.raises(CompvlError, match="broken.safetensors"):
        train(
            TrainConfig(**CONFIG | dict(pretrained=str(tmp_path / "broken.safetensors"))),
            runs=tmp_path,
            progress=False,
        )
    assert not list(tmp_path.glob("hp+hn-*"))
