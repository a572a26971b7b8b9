"""Chunks, processes, workers, options and faults: what changes how a run is computed must not change its numbers.

Tolerances: chunked against plain 1e-12 in double precision, 1e-5 in single; 1 against 2 and 4 processes 1e-5 for a loss and its gradients; metrics of whole runs 1e-3."""

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pandas as pd
import psutil
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import compvl.train.config as T
from compvl.core import CompvlError
from compvl.data.loading import load_train_data
from compvl.losses import total_loss
from compvl.models.clip import Model, create_model
from compvl.models.towers import encode_text
from compvl.train.batches import Collate
from compvl.train.config import TrainConfig
from compvl.train.loop import train
from compvl.train.lora import add_lora, merge_lora
from compvl.train.run import load_run, read_curves
from compvl.train.step import Towers, backward_loss
from compvl.train.sweep import sweep
from test_train import CONFIG, ENV, OPTIONS, SAME, one_thread, uneven  # noqa: F401


class Double(Model):
    "A model whose features are as precise as its weights."

    def normalize(self, images):
        return super().normalize(images).double()

    def encode_image(self, images):
        return F.normalize(self.clip.encode_image(images), dim=-1)

    def encode_text(self, tokens, crop=True):
        return F.normalize(encode_text(self.clip, tokens, crop), dim=-1)


def random_model(device="cpu"):
    torch.manual_seed(0)
    return create_model("micro-clip", device=device)


def double_model():
    m = random_model()
    return Double(m.clip.double(), m.preprocess, m.tokenizer, m.name)


def step(acc, model, towers, rows, **options):
    "Loss, its parts and all gradients of a backward pass over `rows` of the uneven batch."
    cfg = TrainConfig(**dict(method="hp+hn", mask_same_image=True) | options).resolved()
    model.clip.zero_grad()
    loss, parts = backward_loss(
        acc,
        towers,
        model,
        Collate(model, cfg)(uneven(load_train_data("microworld", n=16), rows)),
        cfg,
    )
    return {k: v.double() for k, v in dict(loss=loss, **parts).items()}, [
        p.grad.clone() for p in model.clip.parameters() if p.requires_grad
    ]


def apart(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def weights(model):
    return [v for _, v in sorted(model.clip.state_dict().items())]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunked_is_plain(options):
    for model, tolerance, sizes in ((double_model(), 1e-12, (1, 5)), (random_model(), 1e-5, (8,))):
        acc, towers = Accelerator(cpu=True), Towers(model).train()
        parts, grads = step(acc, model, towers, range(16), **options)
        for size in sizes:
            again, others = step(acc, model, towers, range(16), **options, chunk_size=size)
            assert list(again) == list(parts) and {
                k: float(v) for k, v in again.items()
            } == pytest.approx({k: float(v) for k, v in parts.items()}, abs=tolerance)
            assert apart(grads, others) < tolerance < max(float(g.abs().max()) for g in grads)


def test_chunks_draw_the_same_dropout_twice():
    "Against chunks whose graphs are all kept, and which draw once."
    model, cfg = double_model(), TrainConfig("hp+hn", chunk_size=6).resolved()
    for block in (*model.clip.visual.transformer.resblocks, *model.clip.transformer.resblocks):
        block.mlp.add_module("dropout", nn.Dropout(0.3))
    towers, b = (
        Towers(model).train(),
        Collate(model, cfg)(uneven(load_train_data("microworld", n=16), range(16))),
    )
    torch.manual_seed(1)
    loss, _ = backward_loss(Accelerator(cpu=True), towers, model, b, cfg)
    grads = [p.grad.clone() for p in model.clip.parameters()]

    torch.manual_seed(1)
    model.clip.zero_grad()
    chunks = T._chunks(b, 6)
    I, X, scale, *_ = zip(
        *(towers(model.normalize(b["images"][i]), b["tokens"][t]) for i, t in chunks)
    )
    want, _ = T.feature_loss(
        torch.cat(I),
        torch.cat(X)[torch.cat([t for _, t in chunks]).argsort()],
        scale[0],
        None,
        None,
        b,
        cfg,
    )
    want.backward()
    assert (
        abs(float(loss - want.detach())) < 1e-12
        and apart(grads, [p.grad for p in model.clip.parameters()]) < 1e-12
    )
    torch.manual_seed(2)
    model.clip.zero_grad()
    assert abs(float(backward_loss(Accelerator(cpu=True), towers, model, b, cfg)[0] - loss)) > 1e-4


def test_chunked_bf16_and_frozen_weights():
    "In bf16 chunks round as the whole batch does (loss 2e-2, direction of each gradient .97); with LoRA only the updates get gradients, in chunks as well."
    model = random_model()
    acc = T._accelerator(TrainConfig(precision="bf16"), ".")
    towers = acc.prepare(Towers(model).train())
    (a, grads), (b, others) = (step(acc, model, towers, range(16), chunk_size=c) for c in (None, 5))
    assert abs(float(a["loss"] - b["loss"])) < 2e-2
    assert all(
        F.cosine_similarity(g.flatten(), h.flatten(), dim=0) > 0.97
        for g, h in zip(grads, others)
        if g.numel() > 1
    )
    model = double_model()
    add_lora(model.clip)
    with torch.no_grad():
        for n, p in model.clip.named_parameters():
            if n.endswith(".B"):
                p.normal_(std=0.1)
    acc, towers = Accelerator(cpu=True), Towers(model)
    for options in ({}, dict(method="cae+hn", attribution="gradcam")):
        (a, grads), (b, others) = (
            step(acc, model, towers, range(16), chunk_size=c, **options) for c in (None, 5)
        )
        assert (
            abs(float(a["loss"] - b["loss"])) < 1e-12
            and apart(grads, others) < 1e-12 < apart(grads, map(torch.zeros_like, grads))
            and len(grads) == 2 * 25
        )


class Largest(TorchDispatchMode):
    "The number of elements of the largest tensor that any operation returns."

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.n = max(
            [self.n] + [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        )
        return out


def largest_of_loss(B):
    "Of a forward and backward pass of each kind of loss over B rows a process, in 4 dimensions."
    torch.manual_seed(0)
    out = {}
    for name, options in (
        ("hp+hn", dict(w_hn=1.0, w_hp=1.0)),
        ("negclip", dict(negatives_in_batch=True)),
    ):
        I, X, N, P = (F.normalize(torch.randn(B, 4), dim=-1).requires_grad_() for _ in range(4))
        with Largest() as largest:
            total_loss(
                I,
                X,
                torch.tensor(10.0),
                N,
                P,
                n_mask=torch.ones(B, dtype=bool),
                p_mask=torch.ones(B, dtype=bool),
                groups=torch.arange(B),
                **options,
            )[0].backward()
        out[name] = largest.n
    return out


CASES = {
    2: [(k, 3) for k in range(len(OPTIONS))],
    4: [(0, None), (1, 3), (3, 3)],
}  # which of OPTIONS, chunk_size; two processes without chunks are in test_train
PROCESSES = """
import sys
sys.path.insert(0, sys.argv[1])
from test_scale import *
torch.set_num_threads(1)
folder, world = sys.argv[2], int(sys.argv[3])
acc = Accelerator()
rank, rows = acc.process_index, 16 // world
assert acc.num_processes == world
for k, chunk in CASES[world]:
    model = random_model(acc.device)
    parts, grads = step(acc, model, acc.prepare(Towers(model)), range(rows*rank, rows*(rank + 1)), **OPTIONS[k], chunk_size=chunk)
    parts = {n: float(acc.reduce(v.clone(), "sum" if n.startswith("with_") else "mean")) for n, v in parts.items()}
    if acc.is_main_process: torch.save((parts, grads), f"{folder}/{world}-{k}-{chunk}.pt")
largest = largest_of_loss(64)
if acc.is_main_process: torch.save(largest, f"{folder}/{world}-largest.pt")
run = train(TrainConfig(**CONFIG), runs=f"{folder}/resumed", progress=False)        # begun on one process
run = train(TrainConfig(**CONFIG, chunk_size=3), runs=f"{folder}/on{world}", progress=False)
def die(row):
    if row["step"] == 7: os.kill(os.getpid(), signal.SIGKILL)
if world == 2: train(TrainConfig(**CONFIG), runs=f"{folder}/killed", progress=False, on_log=die)
"""


class Stop(Exception):
    pass


def stop_at(n):
    def stop(row):
        if row["step"] == n:
            raise Stop

    return stop


def same_run(a, b, tolerance=1e-3):
    "Metrics and weights of two runs agree."
    ma, mb = a.metrics, b.metrics
    same = [c for c in ma if c != "samples_per_s"]
    assert list(ma) == list(mb) and (ma[same] - mb[same]).abs().max().max() <= tolerance
    return apart(weights(a.model), weights(b.model))


@pytest.mark.parametrize("world", [2, 4])
def test_processes_are_one(tmp_path, world):
    one = train(TrainConfig(**CONFIG), runs=tmp_path / "one", progress=False)
    with pytest.raises(Stop):
        train(TrainConfig(**CONFIG), runs=tmp_path / "resumed", progress=False, on_log=stop_at(6))
    (tmp_path / "processes.py").write_text(PROCESSES)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(world),
            tmp_path / "processes.py",
            os.path.dirname(__file__),
            tmp_path,
            str(world),
        ],
        env=ENV,
        capture_output=True,
        text=True,
    )
    folder = one.folder.name
    assert (ended.returncode == 0) == (world != 2), ended.stderr[
        -2000:
    ]  # one of two processes was killed, and the launcher ended the other
    acc, model = Accelerator(cpu=True), random_model()
    for k, chunk in CASES[world]:
        parts, grads = step(acc, model, Towers(model), range(16), **OPTIONS[k])
        theirs, their_grads = torch.load(tmp_path / f"{world}-{k}-{chunk}.pt")
        assert theirs == pytest.approx({n: float(v) for n, v in parts.items()}, abs=1e-5)
        assert apart(grads, their_grads) < 1e-5 < 1e-3 < max(float(g.abs().max()) for g in grads)
    assert torch.load(tmp_path / f"{world}-largest.pt") == {
        "hp+hn": 64 * 64 * world,
        "negclip": 2 * 64 * 64 * world,
    }  # B x global B, with as many hard negatives: no (global B)²
    for name in (f"on{world}", "resumed"):
        assert same_run(load_run(tmp_path / name / folder, "cpu"), one) < 1e-3
        assert (
            json.loads((tmp_path / name / folder / "environment.json").read_text())["processes"]
            == world
        )
    if world == 2:
        assert (tmp_path / "killed" / folder / "checkpoint" / "state.pt").exists() and not (
            tmp_path / "killed" / folder / "DONE"
        ).exists()
        assert (
            same_run(train(TrainConfig(**CONFIG), runs=tmp_path / "killed", progress=False), one)
            < 1e-3
        )  # begun on two, ended on one


def test_how_a_run_is_computed_is_not_what(tmp_path):
    "Same folder and same numbers with chunks, activation checkpointing and worker processes; the workers' to the bit."
    plain = train(TrainConfig(**CONFIG), runs=tmp_path / "plain", progress=False)
    for options, tolerance in (
        (dict(chunk_size=5), 1e-3),
        (dict(grad_checkpointing=True), 1e-3),
        (dict(workers=2), 0),
        (dict(workers=1), 0),
    ):
        run = train(TrainConfig(**CONFIG, **options), runs=tmp_path / str(options), progress=False)
        assert run.folder.name == plain.folder.name
        assert same_run(run, plain, tolerance) <= tolerance
        assert not any(getattr(m, "grad_checkpointing", False) for m in run.model.clip.modules())


def test_compiled_is_plain(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    config = CONFIG | dict(steps=3, method="clip-ft")
    plain = train(TrainConfig(**config), runs=tmp_path / "plain", progress=False)
    compiled, modules = [], nn.Module.compile
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self, *a, **k: (compiled.append(self), modules(self, *a, backend="aot_eager", **k)),
    )  # graphs without the minutes of generating code
    run = train(TrainConfig(**config, compile=True), runs=tmp_path / "compiled", progress=False)
    assert len(compiled) == len(plain.model.clip.visual.transformer.resblocks) + len(
        plain.model.clip.transformer.resblocks
    )
    assert run.folder.name == plain.folder.name and same_run(run, plain) < 1e-3
    assert all(m._compiled_call_impl is None for m in run.model.clip.modules())
    with pytest.raises(CompvlError, match="second derivatives"):
        TrainConfig("cae", attribution="gradcam", compile=True)


def test_low_rank_run(tmp_path):
    "Only weights with updates change; they are saved merged; an interrupted run resumes to the bit."
    config, start = TrainConfig(**CONFIG, lora_rank=4, lora_alpha=1), random_model()
    run = train(config, runs=tmp_path / "whole", progress=False, model=start)
    assert (
        run.folder.name
        != train(
            replace(config, lora_rank=None), runs=tmp_path / "whole", progress=False, model=start
        ).folder.name
    )
    before, after = start.clip.state_dict(), run.model.clip.state_dict()
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert before.keys() == after.keys() and changed == {
        k
        for k in before
        if before[k].ndim > 1
        and k.endswith(
            ("conv1.weight", "in_proj_weight", "out_proj.weight", "c_fc.weight", "c_proj.weight")
        )
    }
    assert all(
        torch.linalg.matrix_rank((after[k] - before[k]).flatten(1).double(), rtol=1e-3) <= 4
        for k in changed
        if "conv1" not in k
    )
    assert (
        create_model("micro-clip", run.folder, "cpu").fingerprint()
        == run.model.fingerprint()
        == load_run(run.folder, "cpu").model.fingerprint()
    )
    with pytest.raises(Stop):
        train(config, runs=tmp_path / "stopped", progress=False, model=start, on_log=stop_at(6))
    assert (
        train(config, runs=tmp_path / "stopped", progress=False, model=start).model.fingerprint()
        == run.model.fingerprint()
    )


def test_low_rank_update_is_that_of_svlc(tmp_path):
    "A and B in a checkpoint as SVLC's code names them, which `create_model` merges, make the model that `merge_lora` makes."
    model = random_model()
    add_lora(model.clip, 4, 1.0)
    with torch.no_grad():
        for n, p in model.clip.named_parameters():
            if n.endswith(".B"):
                p.normal_(std=0.1)
    names = {
        ".parametrizations.weight.original": ".weight",
        ".parametrizations.in_proj_weight.original": ".in_proj_weight",
        ".parametrizations.weight.0.": ".lora_",
        ".parametrizations.in_proj_weight.0.": ".in_proj_weight_lora_",
    }

    def renamed(k):
        for a, b in names.items():
            k = k.replace(a, b)
        return k

    torch.save(
        dict(state_dict={renamed(k): v for k, v in model.clip.state_dict().items()}),
        tmp_path / "svlc.pt",
    )
    merge_lora(model.clip)
    theirs = create_model("micro-clip", tmp_path / "svlc.pt", "cpu", activation="gelu")
    assert (
        apart(weights(model), weights(theirs))
        < 1e-6
        < apart(weights(theirs), weights(random_model()))
    )
    assert all(p.requires_grad for p in model.clip.parameters())


def test_trackers(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = CONFIG | dict(steps=3)
    run = train(TrainConfig(**config, trackers="tensorboard"), runs=tmp_path, progress=False)
    assert run.folder == train(TrainConfig(**config), runs=tmp_path, progress=False).folder
    events = EventAccumulator(str(run.folder / "compvl"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(
        list(run.metrics.loss), abs=1e-5
    )
    with pytest.raises(CompvlError, match="tensorboard"):
        TrainConfig(trackers="tensorbored")
    monkeypatch.setattr(T, "get_available_trackers", lambda: [])
    with pytest.raises(CompvlError, match="not installed"):
        train(TrainConfig(**config, trackers="tensorboard"), runs=tmp_path / "none", progress=False)


def test_what_does_not_go_together_is_named(tmp_path, monkeypatch):
    for options, says in [
        (dict(chunk_size=0), "chunk_size=0"),
        (dict(workers=-1), "workers=-1"),
        (dict(lora_rank=0), "lora_rank=0"),
    ]:
        with pytest.raises(CompvlError, match=says):
            TrainConfig(**options)
    model = random_model()
    model.clip.visual.extra = nn.BatchNorm1d(2)
    with pytest.raises(CompvlError, match="batch normalisation"):
        train(TrainConfig(**CONFIG, chunk_size=4), runs=tmp_path, progress=False, model=model)
    for k in ("FSDP", "DEEPSPEED"):
        with monkeypatch.context() as m:
            m.setenv(f"ACCELERATE_USE_{k}", "true")
            with pytest.raises(CompvlError, match=f"{k}.*whole weights"):
                train(TrainConfig(**CONFIG), runs=tmp_path, progress=False)


def half_written(error):
    "In the place of torch.save: the second file is cut short by `error`."
    calls, save = [], torch.save

    def broken(state, f):
        calls.append(1)
        if len(calls) != 2:
            return save(state, f)
        f.write(b"half a checkpoint")
        raise error

    return broken


FULL = OSError(errno.ENOSPC, "No space left on device")


FAULTY = TrainConfig(**CONFIG | dict(checkpoint_every=3, log_every=2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train(FAULTY, runs=tmp_path_factory.mktemp("whole"), progress=False)
    torch.set_num_threads(n)


@pytest.mark.parametrize(
    "fault", ["interrupt", "checkpoint", "metrics", "weights", "nan", "killed writing"]
)
def test_faults_keep_the_last_good_checkpoint(tmp_path, monkeypatch, whole, fault):
    config = FAULTY
    with monkeypatch.context() as m:
        raises = pytest.raises(CompvlError, match="No space left.*free some space.*resumes")
        if fault == "interrupt":
            m.setattr(torch, "save", half_written(KeyboardInterrupt()))
            raises = pytest.raises(KeyboardInterrupt)
        elif fault == "checkpoint":
            m.setattr(torch, "save", half_written(FULL))
        elif fault == "metrics":
            append = T._Metrics.append

            def full(self, rows):
                if rows[-1]["step"] < 8:
                    return append(self, rows)
                with open(self.path, "a") as f:
                    f.write("7,0.0")
                raise FULL

            m.setattr(T._Metrics, "append", full)
        elif fault == "weights":

            def full(self, path):
                raise FULL

            m.setattr(Model, "save", full)
        elif fault == "nan":
            calls, backward = [], T.backward_loss

            def broken(*args):
                calls.append(1)
                loss, parts = backward(*args)
                return loss * (float("nan") if len(calls) == 8 else 1), parts

            m.setattr(T, "backward_loss", broken)
            raises = pytest.raises(CompvlError, match="nan at step 8.*kept in")
        else:
            raises = nullcontext()
        if fault == "killed writing":
            code = (
                "import os, signal, sys, json\nfrom test_scale import *\n"
                "def kill(state, f, n=[]):\n    n.append(1)\n    if len(n) == 2: f.write(b'half'); f.flush(); os.kill(os.getpid(), signal.SIGKILL)\n    save(state, f)\n"
                "save, torch.save = torch.save, kill\ntorch.set_num_threads(1)\ntrain(FAULTY, runs=sys.argv[1], progress=False)"
            )
            assert (
                subprocess.run(
                    [sys.executable, "-c", code, tmp_path / "faulty"],
                    env=ENV
                    | dict(
                        PYTHONPATH=os.pathsep.join(
                            [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
                        )
                    ),
                ).returncode
                == -signal.SIGKILL
            )
        with raises:
            if fault != "killed writing":
                train(config, runs=tmp_path / "faulty", progress=False)
    (folder,) = (tmp_path / "faulty").iterdir()
    last = dict(interrupt=3, checkpoint=3, metrics=6, weights=9, nan=6)
    assert (
        torch.load(folder / "checkpoint" / "state.pt", weights_only=True)["step"]
        == last.get(fault, 3)
        and not (folder / "DONE").exists()
    )
    assert len(list(folder.glob("checkpoint/.*"))) == (fault == "killed writing")
    if fault == "nan":
        assert list(read_curves(tmp_path / "faulty").step) == [1, 2, 3, 4, 5, 6, 7]
    run = train(config, runs=tmp_path / "faulty", progress=False)
    assert (
        run.model.fingerprint() == whole.model.fingerprint()
        and same_run(run, whole, 0) == 0
        and not list(folder.glob(".*-*"))
    )


class Mortal:
    "Data whose worker process is killed when it makes the batch of a given item."

    def __init__(self, data, item):
        self.data, self.item = data, item

    def __len__(self):
        return len(self.data)

    def __getattr__(self, k):
        return getattr(self.data, k)

    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, d):
        self.__dict__.update(d)

    def batch(self, indices):
        if self.item in list(indices) and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data.batch(indices)


class Damaged(Mortal):
    def batch(self, indices):
        raise CompvlError("item 7 is damaged")


def test_a_worker_dies(tmp_path):
    config, data = TrainConfig(**CONFIG, workers=2), load_train_data("microworld", n=48)
    whole = train(replace(config, workers=0), runs=tmp_path / "whole", progress=False, data=data)
    item = int(
        T.step_indices(8, 48, 16)[1][0, 0]
    )  # of the third batch of every epoch, at the latest
    with pytest.raises(CompvlError, match="process that makes batches has died.*resumes"):
        train(config, runs=tmp_path / "run", progress=False, data=Mortal(data, item))
    assert (
        train(config, runs=tmp_path / "run", progress=False, data=data).model.fingerprint()
        == whole.model.fingerprint()
    )
    with pytest.raises(CompvlError, match="^item 7 is damaged$"):
        train(config, runs=tmp_path / "damaged", progress=False, data=Damaged(data, 0))


def test_sweep_over_devices(tmp_path):
    "Each config in a process of its own: one fails, and the others are done; asked again, done runs are taken as they are."
    base = TrainConfig(**CONFIG | dict(steps=2, method="clip-ft"))
    configs = [base, replace(base, batch_size=64), replace(base, seed=1)]
    table = sweep(configs, tmp_path, devices=["cpu", "cpu"], progress=False)
    assert (
        list(table.status) == ["done", "failed", "done"] and "larger than the 48" in table.error[1]
    )
    assert {"seed", "batch_size"} <= set(table) and "method" not in table and pd.isna(table.run[1])
    assert load_run(tmp_path / table.run[2], "cpu").config["seed"] == 1
    done = (tmp_path / table.run[0] / "weights.safetensors").stat().st_mtime_ns
    again = sweep(configs[:1], tmp_path, progress=False)
    assert (
        again.loss[0] == table.loss[0]
        and (tmp_path / table.run[0] / "weights.safetensors").stat().st_mtime_ns == done
    )
    with pytest.raises(CompvlError, match="no device"):
        sweep(configs, tmp_path, devices=["gpu"])
    assert list(read_curves([load_run(tmp_path / table.run[i], "cpu") for i in (0, 2)]).seed) == [
        0,
        0,
        1,
        1,
    ]
    with pytest.raises(CompvlError, match="no runs"):
        read_curves(tmp_path / "nothing")


def test_an_interrupted_sweep_ends_its_processes(tmp_path):
    base = TrainConfig(**CONFIG | dict(steps=4000, log_every=1))

    def stop(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(
            [base, replace(base, seed=1), replace(base, seed=2)],
            tmp_path,
            ["cpu", "cpu"],
            progress=False,
            on_log=stop,
        )
    assert not [
        c for c in psutil.Process().children(recursive=True) if "_child" in " ".join(c.cmdline())
    ]
    assert list(tmp_path.glob("*/config.json")) and not list(tmp_path.glob("*/DONE"))


def test_a_killed_child_of_a_sweep_is_one_row(tmp_path, monkeypatch):
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **k: popen(
            [
                command[0],
                "-c",
                'import os, signal; print(\'{"folder": "run"}\', flush=True); os.kill(os.getpid(), signal.SIGKILL)',
            ],
            **k,
        ),
    )
    table = sweep([TrainConfig(**CONFIG)], tmp_path, devices=["cpu"], progress=False)
    assert table.status[0] == "failed" and "status -9" in table.error[0] and table.run[0] == "run"
