"""Chunks, processes, workers and faults must not change the numbers of a run.

Tolerances: chunked against plain 1e-12 in double precision, 1e-5 in single; 1 against 2 and 4
processes 1e-5 for a loss and its gradients; metrics of whole runs 1e-3.
"""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import psutil
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from test_train import (  # noqa: F401 - one_thread is a fixture
    CONFIG,
    ENV,
    OPTIONS,
    apart,
    as_floats,
    largest,
    launch,
    one_thread,
    uneven_batch,
    uneven_config,
    weights,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import compvl.train.loop as loop
import compvl.train.setup as setup
from compvl.core import CompvlError
from compvl.data.loading import load_train_data
from compvl.models.clip import Model, create_model
from compvl.models.towers import encode_text
from compvl.train.batches import step_indices
from compvl.train.config import TrainConfig
from compvl.train.loop import train
from compvl.train.lora import add_lora, merge_lora
from compvl.train.run import MetricsFile, load_run, read_curves
from compvl.train.step import Towers, backward_loss, chunks_of, feature_loss
from compvl.train.sweep import sweep
from compvl.train.terms import Features, total_loss


class Double(Model):
    """A model whose features are as precise as its weights."""

    def normalize(self, images):
        return super().normalize(images).double()

    def encode_image(self, images):
        return F.normalize(self.clip.encode_image(images), dim=-1)

    def encode_text(self, tokens, crop=True):
        return F.normalize(encode_text(self.clip, tokens, crop), dim=-1)


def random_model(device="cpu"):
    """micro-CLIP with random weights, always the same."""
    torch.manual_seed(0)
    return create_model("micro-clip", device=device)


def double_model(device="cpu"):
    """The random model in double precision."""
    model = random_model(device)
    return Double(model.clip.double(), model.preprocess, model.tokenizer, model.name)


def single_model(options):
    """The random model, with embeddings that single precision can explain.

    What gradient attribution takes the softmax of is Σ_j |∂S/∂x_ij|, up to 488 with the random
    model. Numbers of that size are 3e-5 apart in single precision, more than the bound on
    gradients. Embeddings five times as large make it 109 at most, where they are 8e-6 apart."""
    model = random_model()
    if options.get("attribution") == "gradient":
        with torch.no_grad():
            model.clip.token_embedding.weight *= 5
            model.clip.positional_embedding *= 5
    return model


def biased_model(device="cpu"):
    """The model in double precision, with a logit bias as SigLIP has one."""
    model = double_model(device)
    bias = torch.tensor(-5.0, dtype=torch.float64, device=device)
    model.clip.logit_bias = nn.Parameter(bias)
    return model


SIGMOID = dict(method="sigmoid+hp+hn", w_itc=0.0)


def config_with(**options):
    """The config of a short run, with other fields.

    With this eps AdamW does not take a whole step where a gradient is nothing but rounding, such as
    that of a key's bias; runs on other ways then end with the same weights."""
    return TrainConfig(**{**CONFIG, "eps": 1e-4, **options})


def quiet_train(config, runs, **options):
    """`train` without a progress bar."""
    return train(config, runs=runs, progress=False, **options)


def step(acc, model, towers, items, **options):
    """Loss with its parts, and all gradients, of a backward pass over items of the uneven batch."""
    config = uneven_config(**options)
    model.clip.zero_grad()
    loss, parts = backward_loss(acc, towers, model, uneven_batch(model, config, items), config)
    values = {name: value.double() for name, value in {"loss": loss, **parts}.items()}
    return values, [p.grad.clone() for p in model.clip.parameters() if p.requires_grad]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunked_is_plain(options):
    """Loss, parts and gradients are the same in chunks."""
    single = single_model(options)
    for model, tolerance, sizes in ((double_model(), 1e-12, (1, 5)), (single, 1e-5, (8,))):
        acc = Accelerator(cpu=True)
        towers = Towers(model).train()
        parts, gradients = step(acc, model, towers, range(16), **options)
        for size in sizes:
            again, others = step(acc, model, towers, range(16), **options, chunk_size=size)
            assert list(again) == list(parts)
            assert as_floats(again) == pytest.approx(as_floats(parts), abs=tolerance)
            assert apart(gradients, others) < tolerance < largest(gradients)


def test_chunked_bias_is_plain():
    """Gradients of a model's logit bias, and of its weights, are the same in chunks."""
    model = biased_model()
    acc = Accelerator(cpu=True)
    whole, gradients = step(acc, model, Towers(model), range(16), **SIGMOID)
    chunked, others = step(acc, model, Towers(model), range(16), chunk_size=5, **SIGMOID)
    assert abs(float(whole["loss"] - chunked["loss"])) < 1e-12
    assert apart(gradients, others) < 1e-12 < abs(float(model.clip.logit_bias.grad))


def loss_of_kept_graphs(model, towers, batch, config):
    """The loss of a batch in chunks whose graphs are all kept, and which draw once."""
    images, texts, scales, order = [], [], [], []
    for items, rows in chunks_of(batch, config.chunk_size):
        image, text, scale, *_ = towers(
            model.normalize(batch["images"][items]), batch["tokens"][rows]
        )
        images.append(image)
        texts.append(text)
        scales.append(scale)
        order.append(rows)
    texts = torch.cat(texts)[torch.cat(order).argsort()]
    return feature_loss(torch.cat(images), texts, scales[0], None, None, None, batch, config)[0]


def test_chunks_draw_the_same_dropout_twice():
    """Against chunks whose graphs are all kept, and which draw once."""
    model = double_model()
    config = TrainConfig("hp+hn", chunk_size=6).resolved()
    for block in (*model.clip.visual.transformer.resblocks, *model.clip.transformer.resblocks):
        block.mlp.add_module("dropout", nn.Dropout(0.3))
    towers = Towers(model).train()
    batch = uneven_batch(model, config, range(16))
    acc = Accelerator(cpu=True)
    torch.manual_seed(1)
    loss, _ = backward_loss(acc, towers, model, batch, config)
    gradients = [parameter.grad.clone() for parameter in model.clip.parameters()]

    torch.manual_seed(1)
    model.clip.zero_grad()
    expected = loss_of_kept_graphs(model, towers, batch, config)
    expected.backward()
    assert abs(float(loss - expected.detach())) < 1e-12
    assert apart(gradients, [parameter.grad for parameter in model.clip.parameters()]) < 1e-12

    torch.manual_seed(2)
    model.clip.zero_grad()
    other, _ = backward_loss(acc, towers, model, batch, config)
    assert abs(float(other - loss)) > 1e-4


def test_chunked_bf16():
    """Chunks round as the whole batch does: loss 2e-2, direction of each gradient .97."""
    model = random_model()
    acc = setup.make_accelerator(TrainConfig(precision="bf16"), ".")
    towers = acc.prepare(Towers(model).train())
    whole, gradients = step(acc, model, towers, range(16))
    chunked, others = step(acc, model, towers, range(16), chunk_size=5)
    assert abs(float(whole["loss"] - chunked["loss"])) < 2e-2
    for a, b in zip(gradients, others, strict=True):
        if a.numel() > 1:
            assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.97


def draw_updates(clip):
    """Random values for the updates' matrices B, which start at zero."""
    with torch.no_grad():
        for name, parameter in clip.named_parameters():
            if name.endswith(".B"):
                parameter.normal_(std=0.1)


def test_chunked_with_frozen_weights():
    """With LoRA only the updates get gradients, in chunks as well."""
    model = double_model()
    add_lora(model.clip)
    draw_updates(model.clip)
    acc = Accelerator(cpu=True)
    towers = Towers(model)
    for options in ({}, dict(method="cae+hn", attribution="gradcam")):
        whole, gradients = step(acc, model, towers, range(16), **options)
        chunked, others = step(acc, model, towers, range(16), chunk_size=5, **options)
        assert abs(float(whole["loss"] - chunked["loss"])) < 1e-12
        assert apart(gradients, others) < 1e-12 < largest(gradients)
        assert len(gradients) == 2 * 25


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.n = max([self.n, *sizes])
        return result


def largest_of_loss(rows):
    """Of a forward and backward pass of each kind of loss over rows of 4 dimensions."""
    torch.manual_seed(0)
    found = {}
    for method in ("hp+hn", "negclip"):
        config = TrainConfig(method).resolved()
        leaves = [torch.randn(rows, 4).requires_grad_() for _ in range(4)]
        images, captions, negatives, positives = (F.normalize(x, dim=-1) for x in leaves)
        features = Features(
            images,
            captions,
            torch.tensor(10.0),
            hard_negatives=negatives,
            has_hard_negative=torch.ones(rows, dtype=bool),
            hard_positives=positives,
            has_hard_positive=torch.ones(rows, dtype=bool),
            batch={"groups": torch.arange(rows)},
        )
        with Largest() as mode:
            total_loss(features, config)[0].backward()
        found[method] = mode.n
    return found


CASES = {  # processes -> which of OPTIONS, chunk_size; two without chunks are in test_train
    2: [(k, 3) for k in range(len(OPTIONS))],
    4: [(0, None), (1, 3), (3, 3)],
}
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
    model = double_model(acc.device)
    items = range(rows * rank, rows * (rank + 1))
    towers = acc.prepare(Towers(model))
    parts, grads = step(acc, model, towers, items, **OPTIONS[k], chunk_size=chunk)
    parts = {
        name: float(acc.reduce(value.clone(), "sum" if name.startswith("with_") else "mean"))
        for name, value in parts.items()
    }
    if acc.is_main_process:
        torch.save((parts, grads), f"{folder}/{world}-{k}-{chunk}.pt")
for chunk in (None, 3):
    model = biased_model(acc.device)
    towers = acc.prepare(Towers(model))
    for _ in range(2):  # a second step fails where a gradient was left out
        _, grads = step(acc, model, towers, items, chunk_size=chunk, **SIGMOID)
    if acc.is_main_process:
        torch.save(grads, f"{folder}/{world}-bias-{chunk}.pt")
largest_n = largest_of_loss(64)
if acc.is_main_process:
    torch.save(largest_n, f"{folder}/{world}-largest.pt")
quiet_train(config_with(), f"{folder}/resumed")  # begun on one process
quiet_train(config_with(chunk_size=3), f"{folder}/on{world}")

def die(row):
    if row["step"] == 7: os.kill(os.getpid(), signal.SIGKILL)

if world == 2:
    quiet_train(config_with(), f"{folder}/killed", on_log=die)
"""


class Stop(Exception):
    """Raised to interrupt a run."""


def stop_at(step):
    """An `on_log` that interrupts a run."""

    def stop(row):
        if row["step"] == step:
            raise Stop

    return stop


def same_run(a, b, tolerance=1e-3):
    """Metrics of two runs agree; returns the largest difference of their weights."""
    same = [name for name in a.metrics if name != "samples_per_s"]
    assert list(a.metrics) == list(b.metrics)
    assert (a.metrics[same] - b.metrics[same]).abs().max().max() <= tolerance
    return apart(weights(a.model), weights(b.model))


def features_apart(a, b):
    """Largest difference of the features of some pictures and captions.

    Weights may differ where they have no effect: the gradient of a key's bias is rounding alone,
    and AdamW takes a whole step in its direction."""
    data = load_train_data("microworld", 16)
    batch = data.batch(range(16))
    found = []
    for model in (a, b):
        with torch.no_grad():
            images = model.encode_image(model.normalize(batch["images"]))
            found.append([images, model.encode_text(model.tokenizer(batch["caption"]))])
    return apart(*found)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_are_one(tmp_path, world):
    """Losses, gradients and runs on several processes are those of one."""
    one = quiet_train(config_with(), tmp_path / "one")
    with pytest.raises(Stop):
        quiet_train(config_with(), tmp_path / "resumed", on_log=stop_at(6))
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    ended = launch(world, script, tmp_path, str(world))
    # One of two processes is killed in the end, and the launcher ends the other.
    assert (ended.returncode == 0) == (world != 2), ended.stderr[-2000:]

    acc = Accelerator(cpu=True)
    model = double_model()
    for k, chunk in CASES[world]:
        parts, gradients = step(acc, model, Towers(model), range(16), **OPTIONS[k])
        their_parts, their_gradients = torch.load(tmp_path / f"{world}-{k}-{chunk}.pt")
        assert their_parts == pytest.approx(as_floats(parts), abs=1e-5)
        assert largest(gradients) > 1e-3
        assert apart(gradients, their_gradients) < 1e-5 * max(1.0, largest(gradients))
    model = biased_model()
    _, gradients = step(acc, model, Towers(model), range(16), **SIGMOID)
    for chunk in (None, 3):
        their_gradients = torch.load(tmp_path / f"{world}-bias-{chunk}.pt")
        assert apart(gradients, their_gradients) < 1e-5 * max(1.0, largest(gradients))
    # B x global B, with as many hard negatives: no (global B)²
    assert torch.load(tmp_path / f"{world}-largest.pt") == {
        "hp+hn": 64 * 64 * world,
        "negclip": 2 * 64 * 64 * world,
    }
    for name in (f"on{world}", "resumed"):
        folder = tmp_path / name / one.folder.name
        run = load_run(folder, "cpu")
        same_run(run, one)
        assert features_apart(run.model, one.model) < 1e-3
        assert json.loads((folder / "environment.json").read_text())["processes"] == world
    if world == 2:
        folder = tmp_path / "killed" / one.folder.name
        assert (folder / "checkpoint" / "state.pt").exists()
        assert not (folder / "DONE").exists()
        ended_on_one = quiet_train(config_with(), tmp_path / "killed")
        assert same_run(ended_on_one, one) < 1e-3


def test_how_a_run_is_computed_is_not_what(tmp_path):
    """Same folder and same numbers with chunks, activation checkpointing and worker processes.

    Those of worker processes are the same bit for bit."""
    plain = quiet_train(config_with(), tmp_path / "plain")
    for options, tolerance in (
        (dict(chunk_size=5), 1e-3),
        (dict(grad_checkpointing=True), 1e-3),
        (dict(workers=2), 0),
        (dict(workers=1), 0),
    ):
        run = quiet_train(config_with(**options), tmp_path / str(options))
        assert run.folder.name == plain.folder.name
        assert same_run(run, plain, tolerance) <= tolerance
        modules = run.model.clip.modules()
        assert not any(getattr(module, "grad_checkpointing", False) for module in modules)


def test_compiled_is_plain(tmp_path, monkeypatch):
    """Compiled blocks give the same run, and are not compiled after it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    plain = quiet_train(config_with(steps=3, method="clip-ft"), tmp_path / "plain")
    compiled = []
    compile_module = nn.Module.compile

    def compile_eagerly(self, *args, **options):
        "Graphs without the minutes of generating code."
        compiled.append(self)
        compile_module(self, *args, backend="aot_eager", **options)

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    run = quiet_train(config_with(steps=3, method="clip-ft", compile=True), tmp_path / "compiled")
    clip = plain.model.clip
    blocks = len(clip.visual.transformer.resblocks) + len(clip.transformer.resblocks)
    assert len(compiled) == blocks
    assert run.folder.name == plain.folder.name
    assert same_run(run, plain) < 1e-3
    assert all(module._compiled_call_impl is None for module in run.model.clip.modules())
    with pytest.raises(CompvlError, match="second derivatives"):
        TrainConfig("cae", attribution="gradcam", compile=True)


def test_low_rank_run(tmp_path):
    """Only weights with updates change; they are saved merged; a run resumes bit for bit."""
    config = config_with(lora_rank=4, lora_alpha=1)
    start = random_model()
    run = quiet_train(config, tmp_path / "whole", model=start)
    full = quiet_train(replace(config, lora_rank=None), tmp_path / "whole", model=start)
    assert run.folder.name != full.folder.name

    before = start.clip.state_dict()
    after = run.model.clip.state_dict()
    updated = ("conv1", "c_fc", "c_proj", "out_proj")
    endings = ("in_proj_weight", *(f"{name}.weight" for name in updated))
    expected = {name for name in before if before[name].ndim > 1 and name.endswith(endings)}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == expected
    for name in changed:
        if "conv1" not in name:
            change = (after[name] - before[name]).flatten(1).double()
            assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 4
    opened = create_model("micro-clip", run.folder, "cpu")
    assert opened.fingerprint() == run.model.fingerprint()
    assert load_run(run.folder, "cpu").model.fingerprint() == run.model.fingerprint()

    with pytest.raises(Stop):
        quiet_train(config, tmp_path / "stopped", model=start, on_log=stop_at(6))
    resumed = quiet_train(config, tmp_path / "stopped", model=start)
    assert resumed.model.fingerprint() == run.model.fingerprint()


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("options", [{}, dict(lora_rank=2), dict(chunk_size=4)], ids=str)
def test_a_frozen_tower_keeps_its_weights(tmp_path, tower, options):
    config = config_with(frozen=tower, **options)
    start = random_model()
    run = quiet_train(config, tmp_path, model=start)
    before = start.clip.state_dict()
    after = run.model.clip.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    in_image_tower = {name.startswith("visual.") for name in changed - {"logit_scale"}}
    assert in_image_tower == {tower == "text"}
    assert run.config["frozen"] == [tower]
    both = quiet_train(replace(config, frozen=()), tmp_path, model=start)
    assert "frozen" not in both.config
    assert both.folder.name != run.folder.name


def test_a_frozen_tower_keeps_its_batch_statistics():
    model = create_model("RN50", device="cpu")
    clip = model.clip
    towers = Towers(model, frozen=["image"]).train()
    norms = [module for module in clip.visual.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) > 50
    assert not any(norm.training for norm in norms)
    assert clip.transformer.training
    assert not towers.eval().clip.transformer.training


def svlc_name(name):
    """The name in a checkpoint of SVLC's code for a parameter of a model with updates."""
    for ours, theirs in {
        ".parametrizations.weight.original": ".weight",
        ".parametrizations.in_proj_weight.original": ".in_proj_weight",
        ".parametrizations.weight.0.": ".lora_",
        ".parametrizations.in_proj_weight.0.": ".in_proj_weight_lora_",
    }.items():
        name = name.replace(ours, theirs)
    return name


def test_low_rank_update_is_that_of_svlc(tmp_path):
    """A checkpoint with A and B as SVLC's code names them gives the model of `merge_lora`."""
    model = random_model()
    add_lora(model.clip, 4, 1.0)
    draw_updates(model.clip)
    state = {svlc_name(name): value for name, value in model.clip.state_dict().items()}
    torch.save(dict(state_dict=state), tmp_path / "svlc.pt")
    merge_lora(model.clip)
    theirs = create_model("micro-clip", tmp_path / "svlc.pt", "cpu", activation="gelu")
    assert apart(weights(model), weights(theirs)) < 1e-6
    assert apart(weights(theirs), weights(random_model())) > 1e-6
    assert all(parameter.requires_grad for parameter in model.clip.parameters())


def test_trackers(tmp_path, monkeypatch):
    """Trackers get what metrics.csv gets, and do not change the run."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked = config_with(steps=3, trackers="tensorboard")
    run = quiet_train(tracked, tmp_path)
    assert run.folder == quiet_train(config_with(steps=3), tmp_path).folder
    events = EventAccumulator(str(run.folder / "compvl"))
    events.Reload()
    losses = [event.value for event in events.Scalars("loss")]
    assert losses == pytest.approx(list(run.metrics.loss), abs=1e-5)
    with pytest.raises(CompvlError, match="tensorboard"):
        TrainConfig(trackers="tensorbored")
    monkeypatch.setattr(setup, "get_available_trackers", lambda: [])
    with pytest.raises(CompvlError, match="not installed"):
        quiet_train(tracked, tmp_path / "none")


def test_what_does_not_go_together_is_named(tmp_path, monkeypatch):
    """Options that cannot be computed are refused."""
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
        quiet_train(config_with(chunk_size=4), tmp_path, model=model)
    for kind in ("FSDP", "DEEPSPEED"):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_USE_{kind}", "true")
            with pytest.raises(CompvlError, match=f"{kind}.*whole weights"):
                quiet_train(config_with(), tmp_path)


FULL = OSError(errno.ENOSPC, "No space left on device")
FAULTY = config_with(checkpoint_every=3, log_every=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of FAULTY without a fault."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield quiet_train(FAULTY, tmp_path_factory.mktemp("whole"))
    torch.set_num_threads(threads)


def half_written(error):
    """In the place of torch.save: the second file is cut short by `error`."""
    calls = []
    save = torch.save

    def broken(state, file):
        calls.append(1)
        if len(calls) != 2:
            return save(state, file)
        file.write(b"half a checkpoint")
        raise error

    return broken


def full_metrics(append):
    """In the place of `MetricsFile.append`: the disk is full at step 8."""

    def full(self, rows):
        if rows[-1]["step"] < 8:
            return append(self, rows)
        with open(self.path, "a") as file:
            file.write("7,0.0")
        raise FULL

    return full


def full_weights(self, path):
    """In the place of `Model.save`: the disk is full."""
    raise FULL


def nan_loss(backward):
    """In the place of `backward_loss`: the loss of the eighth step is NaN."""
    calls = []

    def broken(*args):
        calls.append(1)
        loss, parts = backward(*args)
        return loss * (float("nan") if len(calls) == 8 else 1), parts

    return broken


NO_SPACE = "No space left.*free some space.*resumes"
FAULTS = {  # name -> object, attribute, replacement; error; message; step of the last checkpoint
    "interrupt": (torch, "save", half_written(KeyboardInterrupt()), KeyboardInterrupt, None, 3),
    "checkpoint": (torch, "save", half_written(FULL), CompvlError, NO_SPACE, 3),
    "metrics": (
        MetricsFile,
        "append",
        full_metrics(MetricsFile.append),
        CompvlError,
        NO_SPACE,
        6,
    ),
    "weights": (Model, "save", full_weights, CompvlError, NO_SPACE, 9),
    "nan": (
        loop,
        "backward_loss",
        nan_loss(loop.backward_loss),
        CompvlError,
        "nan at step 8.*kept in",
        6,
    ),
}


def check_resumes(folder, whole, checkpoint):
    """The run in a folder is at a checkpoint, and resumes as one without a fault."""
    state = torch.load(folder / "checkpoint" / "state.pt", weights_only=True)
    assert state["step"] == checkpoint
    assert not (folder / "DONE").exists()
    run = quiet_train(FAULTY, folder.parent)
    assert run.model.fingerprint() == whole.model.fingerprint()
    assert same_run(run, whole, 0) == 0
    assert not list(folder.glob(".*-*"))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_keep_the_last_good_checkpoint(tmp_path, monkeypatch, whole, fault):
    """After a fault, the last checkpoint is whole, and training resumes there bit for bit."""
    target, name, replacement, error, says, checkpoint = FAULTS[fault]
    with monkeypatch.context() as patch:
        patch.setattr(target, name, replacement)
        with pytest.raises(error, match=says):
            quiet_train(FAULTY, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert not list(folder.glob("checkpoint/.*"))
    if fault == "nan":
        assert list(read_curves(tmp_path).step) == [1, 2, 3, 4, 5, 6, 7]
    check_resumes(folder, whole, checkpoint)


KILLED_WRITING = """
import os, signal, sys
from test_scale import *

calls, save = [], torch.save

def kill(state, file):
    calls.append(1)
    if len(calls) == 2:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, file)

torch.save = kill
torch.set_num_threads(1)
quiet_train(FAULTY, sys.argv[1])
"""


def test_killed_while_writing_keeps_the_last_good_checkpoint(tmp_path, whole):
    """A process that is killed while it writes a checkpoint leaves the one before."""
    paths = [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
    environment = {**ENV, "PYTHONPATH": os.pathsep.join(paths)}
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITING, tmp_path], env=environment)
    assert killed.returncode == -signal.SIGKILL
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("checkpoint/.*"))) == 1
    check_resumes(folder, whole, 3)


class Mortal:
    """Data whose worker process is killed when it makes the batch of a given item."""

    def __init__(self, data, item):
        self.data = data
        self.item = item

    def __len__(self):
        return len(self.data)

    def __getattr__(self, name):
        return getattr(self.data, name)

    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__.update(state)

    def batch(self, indices):
        if self.item in list(indices) and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data.batch(indices)


class Damaged(Mortal):
    """Data of which an item is damaged."""

    def batch(self, indices):
        raise CompvlError("item 7 is damaged")


def test_a_worker_dies(tmp_path):
    """The death of a process that makes batches is an error, and the run resumes."""
    config = config_with(workers=2)
    data = load_train_data("microworld", n=48)
    whole = quiet_train(replace(config, workers=0), tmp_path / "whole", data=data)
    _, items = step_indices(8, 48, 16)  # the third batch of an epoch; in others at the latest then
    with pytest.raises(CompvlError, match="process that makes batches has died.*resumes"):
        quiet_train(config, tmp_path / "run", data=Mortal(data, int(items[0, 0])))
    run = quiet_train(config, tmp_path / "run", data=data)
    assert run.model.fingerprint() == whole.model.fingerprint()
    with pytest.raises(CompvlError, match="^item 7 is damaged$"):
        quiet_train(config, tmp_path / "damaged", data=Damaged(data, 0))


def test_sweep_over_devices(tmp_path):
    """Each config is trained in another process; done runs are taken as they are."""
    base = config_with(steps=2, method="clip-ft")
    configs = [base, replace(base, batch_size=64), replace(base, seed=1)]
    table = sweep(configs, tmp_path, devices=["cpu", "cpu"], progress=False)
    assert list(table.status) == ["done", "failed", "done"]
    assert "larger than the 48" in table.error[1]
    assert {"seed", "batch_size"} <= set(table)
    assert "method" not in table
    assert pd.isna(table.run[1])
    runs = [load_run(tmp_path / table.run[i], "cpu") for i in (0, 2)]
    assert runs[1].config["seed"] == 1

    written = (runs[0].folder / "weights.safetensors").stat().st_mtime_ns
    again = sweep(configs[:1], tmp_path, progress=False)
    assert again.loss[0] == table.loss[0]
    assert (runs[0].folder / "weights.safetensors").stat().st_mtime_ns == written
    with pytest.raises(CompvlError, match="no device"):
        sweep(configs, tmp_path, devices=["gpu"])
    assert list(read_curves(runs).seed) == [0, 0, 1, 1]
    with pytest.raises(CompvlError, match="no runs"):
        read_curves(tmp_path / "nothing")


def test_an_interrupted_sweep_ends_its_processes(tmp_path):
    """No process is left behind, and the runs can be resumed."""
    base = config_with(steps=4000, log_every=1)

    def stop(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    configs = [base, replace(base, seed=1), replace(base, seed=2)]
    with pytest.raises(KeyboardInterrupt):
        sweep(configs, tmp_path, ["cpu", "cpu"], progress=False, on_log=stop)
    commands = [" ".join(c.cmdline()) for c in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "serve_configs" in command]
    assert list(tmp_path.glob("*/config.json"))
    assert not list(tmp_path.glob("*/DONE"))


KILLED_AT_ONCE = """
import os, signal
print('{"folder": "run"}', flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_of_a_sweep_is_one_row(tmp_path, monkeypatch):
    """The config that a process was training when it was killed has failed."""
    popen = subprocess.Popen

    def killed_at_once(command, **options):
        return popen([command[0], "-c", KILLED_AT_ONCE], **options)

    monkeypatch.setattr(subprocess, "Popen", killed_at_once)
    table = sweep([config_with()], tmp_path, devices=["cpu"], progress=False)
    assert table.status[0] == "failed"
    assert "status -9" in table.error[0]
    assert table.run[0] == "run"
