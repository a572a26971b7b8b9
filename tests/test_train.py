"""Training over several processes, killed and resumed: the numbers must not change."""

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from open_clip import image_transform
from PIL import Image
from torch import nn

from compvl.core import CompvlError
from compvl.data.loading import load_train_data
from compvl.models.clip import create_model
from compvl.models.wrap import wrap_model
from compvl.train.batches import Collate, step_indices
from compvl.train.config import METHODS, TrainConfig, register_method
from compvl.train.loop import run_name, train
from compvl.train.run import load_run
from compvl.train.setup import open_parts
from compvl.train.step import Towers, batch_loss
from compvl.train.sweep import sweep
from compvl.train.terms import TERMS

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
    precision="fp32",
    validate_every=3,
    validate_on=("swap",),
    n_validation=32,
)
ENV = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
SAME = ["step", "lr", "loss", "itc", "hn", "hp", "logit_scale", "with_hn", "with_hp"]


@pytest.fixture(autouse=True)
def one_thread():
    """All tests run on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def uneven(data, indices):
    """A batch whose halves differ in how many hard negatives and hard positives they have."""
    items = data.batch(indices)
    for side, kept in (
        ("hard_negative", (0, 3, 9, 10, 11, 12, 15)),
        ("hard_positive", (8, 9, 14)),
    ):
        texts = zip(indices, items[side], strict=True)
        items[side] = [text if i in kept else None for i, text in texts]
    items["image_id"] = ["shared" if i in (2, 9) else str(i) for i in indices]
    return items


def uneven_batch(model, config, indices):
    """The collated micro-batch of `uneven` items."""
    data = load_train_data("microworld", n=16)
    return Collate(model, config)(uneven(data, indices))


def uneven_config(**options):
    """A resolved config, by default of HP+HN with captions of one image masked."""
    return TrainConfig(**{"method": "hp+hn", "mask_same_image": True, **options}).resolved()


def loss_and_gradients(towers, model, indices, backward, **options):
    """Loss with its parts, and gradients, of some items of the uneven batch."""
    config = uneven_config(**options)
    loss, parts = batch_loss(towers, model, uneven_batch(model, config, indices), config)
    backward(loss)
    values = {"loss": loss.detach(), **parts}
    gradients = [parameter.grad.clone() for parameter in model.clip.parameters()]
    return {name: value.double() for name, value in values.items()}, gradients


def as_floats(parts):
    """Parts of a loss as numbers."""
    return {name: float(value) for name, value in parts.items()}


def largest(gradients):
    """The largest absolute value in gradients."""
    return max(float(gradient.abs().max()) for gradient in gradients)


def apart(a, b):
    """The largest absolute difference of tensors in two lists."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def weights(model):
    """The tensors of a model, by name."""
    return [value for _, value in sorted(model.clip.state_dict().items())]


def launch(processes, script, *arguments):
    """Run a script in several distributed processes; returns the completed launcher."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node", str(processes), script, os.path.dirname(__file__)]
    return subprocess.run([*command, *arguments], env=ENV, capture_output=True, text=True)


ATTRIBUTION = [
    dict(method="cae+hn", w_hp=1.0, attribution=attribution, attr_margin=0.1)
    for attribution in ("attention", "gradcam", "perturbation", "gradient")
]
OPTIONS = [dict(w_hn=0.5), dict(negatives_in_batch=True), *ATTRIBUTION]

PROCESSES = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_train import *
from accelerate import Accelerator

folder = sys.argv[2]
acc = Accelerator()
assert acc.num_processes == 2
items = range(8 * acc.process_index, 8 * acc.process_index + 8)
for k, options in enumerate(OPTIONS):
    torch.manual_seed(0)
    model = create_model("micro-clip", device=acc.device)
    towers = acc.prepare(Towers(model))
    parts, grads = loss_and_gradients(towers, model, items, acc.backward, **options)
    parts = {
        name: float(acc.reduce(value.clone(), "sum" if name.startswith("with_") else "mean"))
        for name, value in parts.items()
    }
    if acc.is_main_process:
        torch.save((parts, grads), f"{folder}/{k}.pt")
torch.manual_seed(0)
train(TrainConfig(**{**CONFIG, "steps": 4}), runs=f"{folder}/two", progress=False)
"""


def test_two_processes_are_one(tmp_path):
    """Losses, gradients and runs of two processes are those of one."""
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    ended = launch(2, script, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for k, options in enumerate(OPTIONS):
        torch.manual_seed(0)
        model = create_model("micro-clip", device="cpu")
        parts, gradients = loss_and_gradients(
            Towers(model), model, range(16), torch.Tensor.backward, **options
        )
        counts = (parts["with_hn"], parts["with_hp"], parts.get("with_attr", 16))
        assert counts == (7, 3, 16)
        their_parts, their_gradients = torch.load(tmp_path / f"{k}.pt")
        assert their_parts == pytest.approx(as_floats(parts), abs=1e-5)
        assert apart(gradients, their_gradients) < 1e-5
        assert largest(gradients) > 1e-3

    config = TrainConfig(**{**CONFIG, "steps": 4})
    one = train(config, runs=tmp_path / "one", progress=False)
    (folder,) = (tmp_path / "two").iterdir()
    assert folder.name == one.folder.name  # the number of processes is no part of a run's identity
    two = train(config, runs=tmp_path / "two", progress=False)
    assert len(two.metrics) == 4
    assert (two.metrics[SAME] - one.metrics[SAME]).abs().max().max() < 1e-3
    losses = [run.validation[run.validation.benchmark == "loss"] for run in (one, two)]
    assert list(losses[0].step.unique()) == [0, 3, 4]
    assert (losses[0].value - losses[1].value).abs().max() < 1e-3
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
    """A run that was killed resumes bit for bit."""
    config = {**CONFIG, **options}
    same = [*SAME, "attr", "with_attr"] if options else SAME
    whole = train(TrainConfig(**config), runs=tmp_path / "whole", progress=False)
    killed = subprocess.run(
        [sys.executable, "-c", KILL, json.dumps(config), tmp_path / "killed"], env=ENV
    )
    assert killed.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "killed").iterdir()
    assert folder.name == whole.folder.name
    assert (folder / "checkpoint" / "state.pt").exists()
    assert not (folder / "DONE").exists()

    with open(folder / "metrics.csv", "a") as file:
        file.write("8,0.00")  # a line that the kill cut short
    run = train(TrainConfig(**config), runs=tmp_path / "killed", progress=False)
    assert run.model.fingerprint() == whole.model.fingerprint()
    assert run.metrics[same].equals(whole.metrics[same])
    assert run.validation.equals(whole.validation)
    assert list(run.validation.step.unique()) == [0, 3, 6, 9, 10]
    assert (folder / "DONE").exists()
    assert not (folder / "checkpoint").exists()


def test_looking_does_not_change_what_is_learned(tmp_path):
    """A run with figures on held-out items has the name and the weights of one without."""
    looked = train(TrainConfig(**CONFIG), runs=tmp_path / "looked", progress=False)
    config = TrainConfig(**{**CONFIG, "validate_every": None})
    plain = train(config, runs=tmp_path / "plain", progress=False)
    assert plain.folder.name == looked.folder.name
    assert plain.model.fingerprint() == looked.model.fingerprint()
    assert not len(plain.validation)


def test_only_the_words_of_the_data_are_trained(tmp_path):
    """The loss is that of training all token embeddings; only embeddings of words change."""
    config = TrainConfig(**{**CONFIG, "steps": 3, "validate_every": None})
    model = create_model("micro-clip", device="cpu")
    data = load_train_data("microworld", n=48)
    known = model.tokenizer(data.words).unique()
    cut = train(config, runs=tmp_path / "cut", progress=False, data=data, model=model)
    with patch.object(type(data), "words", None):
        whole = train(config, runs=tmp_path / "whole", progress=False, data=data, model=model)
    assert cut.metrics[SAME].equals(whole.metrics[SAME])
    before = model.clip.token_embedding.weight
    after = cut.model.clip.token_embedding.weight
    changed = (after != before).any(1).nonzero().flatten()
    assert set(changed.tolist()) <= set(known.tolist())
    assert torch.equal(after[known], whole.model.clip.token_embedding.weight[known])


def test_a_word_that_the_data_did_not_name(tmp_path):
    """A text with a word that is not trained is refused by its name."""
    data = load_train_data("microworld", n=48)
    with (
        patch.object(type(data), "words", ["a", "ball"]),
        pytest.raises(CompvlError, match="has a word that the `words` of the training data lack"),
    ):
        train(TrainConfig(**CONFIG), runs=tmp_path, progress=False, data=data)


def test_micro_batches(tmp_path):
    """Two micro-batches are each contrasted within itself; their losses are averaged."""
    config = TrainConfig(**{**CONFIG, "steps": 2, "grad_accum": 2, "method": "clip-ft"})
    resolved = config.resolved()
    model = create_model("micro-clip", device="cpu")
    data = load_train_data("microworld", n=48)
    expected = []
    for items in step_indices(0, 48, 16, 0, 2)[1]:
        batch = Collate(model, resolved)(data.batch(items))
        expected.append(batch_loss(Towers(model), model, batch, resolved)[0].item())
    run = train(config, runs=tmp_path, progress=False, data=data, model=model)
    assert run.metrics.loss[0] == pytest.approx(sum(expected) / 2, abs=1e-5)
    columns = [name for name in SAME if name not in ("hn", "hp")]
    assert list(run.metrics.columns) == [*columns, "samples_per_s"]
    assert run.model.clip is not model.clip


def test_infinite_loss_keeps_the_checkpoint(tmp_path):
    """The last checkpoint before a loss that is not finite has finite weights."""
    options = dict(lr=1e18, warmup=0, checkpoint_every=1, method="clip-ft")
    config = TrainConfig(**{**CONFIG, **options})
    with pytest.raises(CompvlError, match="lower lr.*kept in"):
        train(config, runs=tmp_path, progress=False)
    (folder,) = tmp_path.iterdir()
    saved = torch.load(folder / "checkpoint" / "state.pt", weights_only=True)
    assert saved["step"] >= 1
    assert all(value.isfinite().all() for value in saved["model"].values())
    assert (folder / "metrics.csv").exists()
    assert not (folder / "DONE").exists()


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(method="hnhp"), "clip-ft.*hp\\+hn"),
        (dict(steps=3, epochs=1), "not both"),
        (dict(precision="int8"), "bf16"),
        (dict(batch_size=1), "batch_size=1"),
        (dict(lr=-1.0), "lr=-1"),
        (dict(method="cae"), "needs an attribution.*gradcam"),
        (dict(method="cae", attribution="shapley"), "shapley.*gradcam"),
        (dict(weights={"hinge": 1.0}), "hinge.*itc"),
        (dict(weights={"hn": 1.0}), "w_hn"),
        (dict(frozen="vision"), "vision.*image"),
        (dict(frozen=("image", "text")), "both towers"),
        (dict(method="cae", attribution="attention", frozen="text"), "L_attr"),
        (dict(method="sds-clip", frozen="image"), "L_SDS"),
    ],
    ids=str,
)
def test_mistakes_in_a_config_are_named(options, says):
    """A config that cannot be trained is refused when it is made."""
    with pytest.raises(CompvlError, match=says):
        TrainConfig(**options)


def test_mistakes_are_named_before_training(tmp_path):
    """What the config, the data or the weights lack is said before there is a run folder."""
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"0" * 100)
    mistakes = [
        (dict(grad_accum=3), "does not divide into 3"),
        (dict(batch_size=64), "larger than the 48"),
        (dict(pretrained=str(broken)), "broken.safetensors"),
    ]
    if not torch.cuda.is_available():
        mistakes.append((dict(precision="fp16"), "fp16 needs a CUDA"))
    for options, says in mistakes:
        with pytest.raises(CompvlError, match=says):
            train(TrainConfig(**{**CONFIG, **options}), runs=tmp_path, progress=False)
    assert not list(tmp_path.glob("hp+hn-*"))


class Averages(torch.nn.Module):
    """A network of a user: the mean colour of an image and the mean embedding of a caption."""

    def __init__(self):
        super().__init__()
        self.pixels = torch.nn.Linear(3, 8)
        self.words = torch.nn.Embedding(49408, 8)
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.0))

    def encode_image(self, images):
        return self.pixels(images.mean((2, 3)))

    def encode_text(self, tokens):
        return self.words(tokens).mean(1)


def test_a_network_of_a_user_is_trained_and_opened_again(tmp_path):
    """Its run is opened with the network, which the message names where it is left out."""
    tokenizer = create_model("micro-clip", device="cpu").tokenizer
    own = wrap_model(Averages(), image_transform(48, is_train=False), tokenizer, "own")
    config = TrainConfig(**{**CONFIG, "validate_every": None})
    run = train(config, runs=tmp_path, progress=False, model=own)
    with pytest.raises(CompvlError, match="no model 'own'.*model="):
        load_run(run.folder, "cpu")
    opened = load_run(run.folder, "cpu", model=own)
    assert opened.model.fingerprint() == run.model.fingerprint() != own.fingerprint()
    assert opened.model.pretrained == str(run.folder)


def test_photographs_are_resized_as_by_a_wrapped_model(tmp_path):
    """Training sees what evaluation sees, and refuses a preprocessing that it cannot repeat."""
    wide = Image.new("RGB", (96, 48))
    wide.paste((255, 255, 255), (0, 0, 16, 48))  # a centre crop loses this white stripe
    wide.save(tmp_path / "wide.png")
    captions = tmp_path / "captions.json"
    entry = {"id": 1, "image_id": 1, "caption": "a white stripe"}
    image = {"id": 1, "file_name": "wide.png"}
    captions.write_text(json.dumps({"images": [image], "annotations": [entry]}))
    files = dict(captions_json=str(captions), image_root=str(tmp_path), cache=str(tmp_path / "c"))
    config = TrainConfig("clip-ft", data="coco", data_options=files).resolved()
    tokenizer = create_model("micro-clip", device="cpu").tokenizer
    squash = image_transform(48, is_train=False, resize_mode="squash")
    own = wrap_model(Averages(), squash, tokenizer, "own")
    model, data, _ = open_parts(config, "cpu", model=own)
    seen = model.normalize(data.images.take([0]))[0]
    assert torch.allclose(seen, squash(wide), atol=1e-6)

    padding = image_transform(48, is_train=False, resize_mode="longest")
    size_mean_std = (48, own.mean, own.std)
    own = wrap_model(Averages(), padding, tokenizer, "own", *size_mean_std)
    with pytest.raises(CompvlError, match="none of the ways"):
        open_parts(config, "cpu", model=own)
    chosen = dict(files, resize_mode="shortest", interpolation="bicubic")
    open_parts(replace(config, data_options=chosen), "cpu", model=own)


class WithHead(nn.Module):
    """micro-CLIP with a layer that its features do not use, as a head of another loss."""

    def __init__(self):
        super().__init__()
        self.network = create_model("micro-clip", device="cpu").clip
        self.logit_scale = self.network.logit_scale
        self.head = nn.Linear(4, 4)

    def encode_image(self, images):
        return self.network.encode_image(images)

    def encode_text(self, tokens):
        return self.network.encode_text(tokens)


HEADS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_train import *

torch.set_num_threads(1)
for frozen in (False, True):
    micro = create_model("micro-clip", device="cpu")
    network = WithHead()
    network.head.requires_grad_(not frozen)
    own = wrap_model(network, micro.preprocess, micro.tokenizer, "own", image_size=48)
    config = TrainConfig("clip-ft", n_train=16, steps=2, batch_size=8, precision="fp32")
    try:
        train(config, runs=f"{sys.argv[2]}/{frozen}", progress=False, model=own)
        assert frozen
    except CompvlError as error:
        assert not frozen and "head.weight, head.bias" in str(error)
"""


def test_a_weight_without_gradient_on_two_processes(tmp_path):
    """The error names the weights; where they are frozen, the network is trained."""
    script = tmp_path / "heads.py"
    script.write_text(HEADS)
    ended = launch(2, script, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert list(tmp_path.glob("True/*/DONE"))


OWN_TERM = """
import os, torch
from compvl.train import register_method, register_term

@register_term("hinge", needs=("hard_negatives",))
def hinge(features, config):
    right = (features.images * features.captions).sum(1)
    wrong = (features.images * features.hard_negatives).sum(1)
    return ((wrong - right + 0.2).clamp(min=0) * features.has_hard_negative).mean()

register_method("clip+hinge", hinge=0.5)
print("a line of Python")
os.write(1, b"a line of a library in C\\n")
"""


def test_a_term_of_a_user(tmp_path, monkeypatch):
    """A registered term is trained, logged, part of the identity, and the same in chunks and in
    the processes of a sweep."""
    (tmp_path / "own_term.py").write_text(OWN_TERM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    # Sums are rounded differently with another number of threads.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    without = run_name(TrainConfig(**{**CONFIG, "method": "hn"}))
    importlib.import_module("own_term")
    try:
        assert run_name(TrainConfig(**{**CONFIG, "method": "hn"})) == without
        config = TrainConfig(**{**CONFIG, "steps": 3, "method": "clip+hinge"})
        run = train(config, runs=tmp_path / "here", progress=False)
        metrics = run.metrics
        assert run.folder.name.startswith("clip+hinge-")
        assert (metrics.hinge > 0).all()
        assert metrics.loss.to_numpy() == pytest.approx(metrics.itc + 0.5 * metrics.hinge)
        assert run.config["weights"] == {"hinge": 0.5}
        heavier = replace(config, weights={"hinge": 1.0})
        assert run_name(heavier) != run.folder.name

        chunked = train(replace(config, chunk_size=5), runs=tmp_path / "chunks", progress=False)
        assert chunked.folder.name == run.folder.name
        assert apart(weights(chunked.model), weights(run.model)) < 1e-3
        register_method("half-hn", hn=0.5)  # here, and in no module
        half = replace(config, method="half-hn")
        table = sweep([config, heavier, half], tmp_path / "there", ["cpu"], progress=False)
        assert list(table.status) == ["done", "done", "done"], table.error
        assert table.run[0] == run.folder.name
        assert load_run(tmp_path / "there" / table.run[0], "cpu").model.fingerprint() == (
            run.model.fingerprint()
        )
    finally:
        TERMS.pop("hinge")
        METHODS.pop("clip+hinge")
        METHODS.pop("half-hn", None)
