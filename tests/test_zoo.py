"""Released models in every format, made here from a small model.

They are read without running their code, merged, renamed, loaded whole, or refused."""

import argparse
import csv
import dataclasses
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
from unittest.mock import patch

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from compvl.app.cli import app
from compvl.core import CompvlError, data_dir
from compvl.downloads import DATASETS, status
from compvl.models.blip import load_cross_encoder
from compvl.models.clip import Model, create_model, is_repository, register_configs
from compvl.models.pairs import PairScorer
from compvl.models.releases import ZOO
from compvl.models.weights import activation, load_weights, read_weights
from compvl.models.wrap import wrap_model
from compvl.models.zoo import load_zoo, open_model, zoo_table

CAPTIONS = [
    "a red star",
    "a small dotted fish to the left of an old blue house",
    "a star and a fish",
]
transformers_here = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"),
    reason="transformers is not installed (pip install 'compvl[transformers]')",
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(torch.jit|TorchScript|legacy).*",
    "ignore::torch.jit.TracerWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


def features(clip):
    """Image and text features of any CLIP, on fixed inputs."""
    images = torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    tokens = open_clip.get_tokenizer("micro-clip")(CAPTIONS)
    with torch.no_grad():
        return clip.encode_image(images), clip.encode_text(tokens)


def same(a, b, atol=1e-6):
    """Whether two CLIPs have the same features."""
    pairs = zip(features(a), features(b), strict=True)
    return all(torch.allclose(x.float(), y.float(), atol=atol) for x, y in pairs)


def quick_clip():
    """A micro-CLIP that computes with QuickGELU, with random weights."""
    register_configs()
    return open_clip.create_model("micro-clip", force_quick_gelu=True).eval()


@pytest.fixture(scope="module")
def original():
    """`quick_clip` with weights so far from their start that the activation makes a difference."""
    torch.manual_seed(0)
    clip = quick_clip()
    with torch.no_grad():
        for name, parameter in clip.named_parameters():
            if "mlp" in name:
                parameter.mul_(4)
    return clip


def opened(path, activation="quick_gelu", **options):
    """The module that `create_model` makes of a file; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = create_model("micro-clip", path, device="cpu", activation=activation, **options)
    return model.clip


def rewrite_zip(path, change):
    """Rewrite a zip archive with `change(name, data)` for the data of each entry."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(name, change(name, data))


# -- a training script's files


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


def bare(state):
    return state


def under_state_dict(state):
    return dict(epoch=5, name="run", state_dict=state)


def under_module(state):
    moments = dict(step=torch.tensor(3.0), exp_avg=torch.zeros(2))
    optimizer = dict(state={0: moments}, param_groups=[dict(lr=1e-6, betas=(0.9, 0.98))])
    return dict(
        state_dict=prefixed(state, "module."),
        optimizer=optimizer,
        scaler=dict(scale=65536.0),
    )


def with_options_and_numbers(state):
    return dict(
        args=argparse.Namespace(lr=1e-6, tags=["a"]),
        loss=np.float64(0.5),
        step=np.int64(7),
        best=np.float32(1),
        done=np.bool_(True),
        state_dict=state,
    )


def under_model(state):
    return dict(model=state, step=3)


def nested(state):
    return dict(state_dict=dict(model=prefixed(state, "module.")))


def compiled(state):
    return prefixed(state, "_orig_mod.")


def in_a_wrapper(state):
    return prefixed(state, "module.model.")


def in_a_clip(state):
    return dict(model_state_dict=prefixed(state, "clip."))


def beside_a_head(state):  # CS-CLIP
    return prefixed(state, "model.") | {"head.logit_scale": torch.ones(())}


def with_options_of_a_run(state):  # CoN-CLIP
    args = argparse.Namespace(lr=1e-6, clip_model_name="ViT-B/32", device="cuda:0")
    return dict(model=state, optimizer=dict(state={}, param_groups=[dict(lr=1e-6)]), args=args)


def under_model_state_dict(state):  # TripletCLIP
    return dict(model_state_dict=state, optimizer_state_dict=dict(state={}), epoch=9)


def half(state):
    return {name: value.half() for name, value in state.items()}


def with_extras(state):
    extras = {
        "attn_mask": torch.zeros(77, 77),
        "logit_scale": state["logit_scale"].reshape(1),
        "text.embeddings.position_ids": torch.arange(77),
    }
    return state | extras


def custom_text(state):
    renamed = {}
    for name, value in state.items():
        plain = name.startswith("visual") or name == "logit_scale"
        renamed[name if plain else f"text.{name}"] = value
    return renamed


@pytest.mark.parametrize(
    "wrap",
    [
        bare,
        under_state_dict,
        under_module,
        with_options_and_numbers,
        under_model,
        nested,
        compiled,
        in_a_wrapper,
        in_a_clip,
        beside_a_head,
        with_options_of_a_run,
        under_model_state_dict,
        half,
        with_extras,
        custom_text,
    ],
)
def test_training_checkpoints(original, tmp_path, wrap):
    path = tmp_path / "epoch_5.pt"
    torch.save(wrap(original.state_dict()), path)
    assert same(opened(path), original, 2e-2 if wrap is half else 1e-6)


def test_numbers_as_numpy_1_names_them(original, tmp_path):
    def numpy_1(name, data):
        if not name.endswith("data.pkl"):
            return data
        return data.replace(b"cnumpy._core.multiarray\nscalar", b"cnumpy.core.multiarray\nscalar")

    path = tmp_path / "epoch_5.pt"
    torch.save(with_options_and_numbers(original.state_dict()), path)
    rewrite_zip(path, numpy_1)
    with zipfile.ZipFile(path) as archive:
        assert b"numpy.core.multiarray" in archive.read("epoch_5/data.pkl")
    assert same(opened(path), original)


def test_old_pytorch_format_and_safetensors(original, tmp_path):
    state = original.state_dict()
    old = tmp_path / "old.pt"
    torch.save(dict(state_dict=state), old, _use_new_zipfile_serialization=False)
    save_file(prefixed(state, "module."), tmp_path / "bare.safetensors")
    assert same(opened(old), original)
    assert same(opened(tmp_path / "bare.safetensors"), original)


def test_custom_text_model_takes_the_plain_layout(original, tmp_path):
    torch.save(original.state_dict(), tmp_path / "w.pt")
    custom = open_clip.create_model("micro-clip", force_custom_text=True, force_quick_gelu=True)
    with pytest.warns(UserWarning, match="does not say"):
        load_weights(custom, tmp_path / "w.pt")
    assert same(custom.eval(), original)


# -- OpenAI's archives

OPENAI_SIZES = dict(input_resolution=48, context_length=77, vocab_size=49408)


class OpenAI(nn.Module):
    """A CLIP as OpenAI exports it: the three sizes among its buffers."""

    def __init__(self, clip):
        super().__init__()
        for name, module in clip.named_children():
            setattr(self, name, module)
        for name, parameter in clip.named_parameters(recurse=False):
            setattr(self, name, parameter)
        for name, size in OPENAI_SIZES.items():
            self.register_buffer(name, torch.tensor(size))
        object.__setattr__(self, "of", clip)

    def forward(self, image, text):
        return self.of.encode_image(image) @ self.of.encode_text(text).T


def test_torchscript_archive(original, tmp_path, monkeypatch):
    tokens = open_clip.get_tokenizer("micro-clip")(["a star"])
    inputs = (torch.rand(1, 3, 48, 48), tokens)
    torch.jit.trace(OpenAI(original), inputs, check_trace=False).save(tmp_path / "ViT.pt")
    monkeypatch.setattr(torch.jit, "load", None)  # its code is not even loaded
    state, metadata = read_weights(tmp_path / "ViT.pt")
    assert metadata == dict(activation="quick_gelu")
    assert state.keys() == original.state_dict().keys() | OPENAI_SIZES.keys()
    torch.save(state, tmp_path / "kept.pt")
    for file in ("ViT.pt", "kept.pt"):  # the three sizes tell the activation in any container
        clip = opened(tmp_path / file, None)
        assert activation(clip) == "quick_gelu"
        assert same(clip, original)


def test_torchscript_half_precision(original, tmp_path):
    clip = quick_clip()
    clip.load_state_dict(original.state_dict())
    inputs = dict(encode_text=open_clip.get_tokenizer("micro-clip")(["a star"]))
    traced = torch.jit.trace_module(clip, inputs, check_trace=False)
    traced.half().save(tmp_path / "half.pt")
    state, _ = read_weights(tmp_path / "half.pt")
    assert all(value.dtype == torch.float16 for value in state.values())
    assert same(opened(tmp_path / "half.pt"), original, 2e-2)


class Block(nn.Module):
    """Modules in a list, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def test_scripted_module_is_read_by_attribute(tmp_path):
    block = Block()
    torch.jit.script(block).save(tmp_path / "b.pt")
    state, _ = read_weights(tmp_path / "b.pt")
    own = block.state_dict()
    assert state.keys() == own.keys()
    assert all(value.tolist() == own[name].tolist() for name, value in state.items())


# -- Hugging Face


def hugging_face_clip(activation):
    """transformers' CLIPModel with the sizes of micro-CLIP and random weights."""
    from transformers import CLIPConfig, CLIPModel

    config = open_clip.get_model_config("micro-clip")
    vision = config["vision_cfg"]
    text = config["text_cfg"]
    text_config = dict(
        hidden_size=text["width"],
        intermediate_size=4 * text["width"],
        num_hidden_layers=text["layers"],
        num_attention_heads=text["heads"],
        vocab_size=text.get("vocab_size", 49408),
        max_position_embeddings=text["context_length"],
        hidden_act=activation,
        eos_token_id=49407,
        bos_token_id=49406,
        projection_dim=config["embed_dim"],
    )
    vision_config = dict(
        hidden_size=vision["width"],
        intermediate_size=4 * vision["width"],
        num_hidden_layers=vision["layers"],
        num_attention_heads=vision["width"] // vision.get("head_width", 64),
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        hidden_act=activation,
        projection_dim=config["embed_dim"],
    )
    config = CLIPConfig(
        projection_dim=config["embed_dim"], text_config=text_config, vision_config=vision_config
    )
    torch.manual_seed(0)
    clip = CLIPModel(config).eval()
    with torch.no_grad():
        for name, parameter in clip.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) * 0.1)
            else:
                parameter.normal_(std=0.1)
    return clip


@transformers_here
@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_hugging_face_layout(tmp_path, act):
    theirs = hugging_face_clip(act)
    theirs.save_pretrained(tmp_path / "hf")
    clip = opened(tmp_path / "hf", None)  # config.json states the activation
    assert activation(clip) == act
    images = torch.rand(2, 3, 48, 48)
    tokens = open_clip.get_tokenizer("micro-clip")(CAPTIONS)
    with torch.no_grad():
        text = theirs.text_projection(theirs.text_model(input_ids=tokens).pooler_output)
        image = theirs.vision_model(pixel_values=images).pooler_output
        image = theirs.visual_projection(image)
        assert torch.allclose(clip.encode_text(tokens), text, atol=1e-5)
        assert torch.allclose(clip.encode_image(images), image, atol=1e-5)

    state = prefixed(theirs.state_dict(), "model.")
    state["model.text_model.embeddings.position_ids"] = torch.arange(77)
    torch.save(state, tmp_path / "w.bin")
    assert same(opened(tmp_path / "w.bin", act), clip)

    state = theirs.state_dict()
    del state["text_model.encoder.layers.0.self_attn.k_proj.weight"]
    torch.save(state, tmp_path / "hole.bin")
    with pytest.raises(CompvlError, match="transformer.resblocks.0.attn.in_proj_weight is missing"):
        opened(tmp_path / "hole.bin", act)


# -- LoRA, as SVLC and DAC patch open_clip: rank 4, alpha 1

RANK = 4


class LoraLinear(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.weight = of.weight
        self.bias = of.bias
        self.lora_A = nn.Parameter(torch.randn(RANK, of.in_features))
        self.lora_B = nn.Parameter(torch.randn(of.out_features, RANK) * 0.05)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + x @ self.lora_A.T @ self.lora_B.T / RANK


class LoraConv(nn.Module):
    def __init__(self, of):
        super().__init__()
        k = of.kernel_size[0]
        self.weight = of.weight
        self.stride = of.stride
        self.lora_A = nn.Parameter(torch.randn(RANK * k, of.in_channels * k))
        self.lora_B = nn.Parameter(torch.randn(of.out_channels * k, RANK * k) * 0.01)

    def forward(self, x):
        update = (self.lora_B @ self.lora_A).view(self.weight.shape) / RANK
        return F.conv2d(x, self.weight + update, stride=self.stride)


class LoraAttention(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.heads = of.num_heads
        self.in_proj_weight = of.in_proj_weight
        self.in_proj_bias = of.in_proj_bias
        self.out_proj = LoraLinear(of.out_proj)
        self.in_proj_weight_lora_A = nn.Parameter(torch.randn(RANK, of.embed_dim))
        self.in_proj_weight_lora_B = nn.Parameter(torch.randn(3 * of.embed_dim, RANK) * 0.05)

    def forward(self, q, k=None, v=None, need_weights=False, attn_mask=None, **_):
        batch, length, width = q.shape
        update = F.linear(F.linear(q, self.in_proj_weight_lora_A), self.in_proj_weight_lora_B)
        x = F.linear(q, self.in_proj_weight, self.in_proj_bias) + update / RANK
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in x.chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask)
        return self.out_proj(y.transpose(1, 2).reshape(batch, length, width)), None


@pytest.fixture
def patched(original):
    """`original` with LoRA in both towers."""
    torch.manual_seed(1)
    clip = quick_clip()
    clip.load_state_dict(original.state_dict())
    for blocks in (clip.transformer.resblocks, clip.visual.transformer.resblocks):
        for block in blocks:
            block.attn = LoraAttention(block.attn)
            block.mlp.c_fc = LoraLinear(block.mlp.c_fc)
            block.mlp.c_proj = LoraLinear(block.mlp.c_proj)
    clip.visual.conv1 = LoraConv(clip.visual.conv1)
    return clip


def test_lora_is_merged(original, patched, tmp_path):
    assert not same(patched, original, 1e-3)
    path = tmp_path / "LLM_cp.pt"
    state = prefixed(patched.state_dict(), "module.")
    torch.save(dict(epoch=5, state_dict=state, optimizer=dict(lr=np.float64(1e-6))), path)
    merged = opened(path)
    assert same(merged, patched, 1e-5)
    assert not any("lora" in name for name in merged.state_dict())
    assert not same(opened(path, lora_alpha=2), patched, 1e-3)


C_FC = "transformer.resblocks.0.mlp.c_fc.lora_"


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def test_lora_updates_need_a_weight(patched, tmp_path):
    def message(state):
        torch.save(state, tmp_path / "w.pt")
        with pytest.raises(CompvlError) as error:
            opened(tmp_path / "w.pt")
        return str(error.value)

    state = patched.state_dict()
    assert "visual.conv1.lora_A" in message(without(state, "visual.conv1.weight"))
    assert "c_fc.lora_A" in message(without(state, f"{C_FC}B"))
    misfit = state | {"visual.conv1.lora_A": torch.zeros(5, 7)}
    assert "belong to no weight" in message(misfit)


def test_lora_updates_need_an_alpha(original, tmp_path):
    width = original.ln_final.normalized_shape[0]
    updates = {f"{C_FC}A": torch.zeros(4, width), f"{C_FC}B": torch.zeros(4 * width, 4)}
    torch.save(original.state_dict() | updates, tmp_path / "w.pt")
    with pytest.raises(CompvlError, match="alpha"):
        opened(tmp_path / "w.pt")
    assert same(opened(tmp_path / "w.pt", lora_alpha=8), original)


# -- what must not run, and what cannot be read


class Evil:
    """Its pickle calls a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def rescript(path, pickled):
    """A TorchScript archive with another data.pkl."""
    torch.jit.script(nn.Linear(1, 1)).save(path)
    rewrite_zip(path, lambda name, data: pickled if name.endswith("/data.pkl") else data)


def hidden(function, argument):
    """A TorchScript pickle of a module with a call two levels down, as an attribute."""

    def module(name, state):
        return b"c__torch__.x\n" + name + b"\n)\x81}(" + state + b"ub"

    text = argument.encode()
    call = function + b"\n(X" + len(text).to_bytes(4, "little") + text + b"tR"
    inner = module(b"Sub", b"X\x01\x00\x00\x00w" + call)
    return b"\x80\x02" + module(b"Top", b"X\x03\x00\x00\x00sub" + inner) + b"."


def write_evil(kind, path, ran):
    """Write a weights file of this kind to `path` which, where it is run, makes the file `ran`."""
    evil = Evil(os.system, f"touch {ran}")
    if kind == "zip":
        torch.save(dict(state_dict=dict(a=torch.ones(1)), note=evil), path)
    elif kind == "zip, eval":
        evil = Evil(eval, f"open({str(ran)!r}, 'w')")
        torch.save(dict(state_dict=dict(a=torch.ones(1)), note=evil), path)
    elif kind == "legacy":
        torch.save(dict(a=evil), path, _use_new_zipfile_serialization=False)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(evil, protocol=2))
    elif kind == "script":
        rescript(path, pickle.dumps(evil, protocol=2))
    elif kind == "script, nested":
        rescript(path, hidden(b"cposix\nsystem", f"touch {ran}"))
    elif kind == "script with a PyTorch name":
        rescript(path, hidden(b"ctorch\nload", str(path)))


@pytest.mark.parametrize(
    "kind",
    [
        "zip",
        "legacy",
        "pickle",
        "script",
        "script, nested",
        "script with a PyTorch name",
        "zip, eval",
    ],
)
def test_code_is_refused_and_not_run(tmp_path, kind):
    write_evil(kind, tmp_path / "w.pt", tmp_path / "ran")
    with pytest.raises(CompvlError, match="holds more than tensors .*does not run code"):
        read_weights(tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()


def test_torchscript_tensors_stay_within_their_storage(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "ok.pt")
    with zipfile.ZipFile(tmp_path / "ok.pt") as archive:
        data = archive.read("ok/data.pkl")
    assert set(read_weights(tmp_path / "ok.pt")[0]) == {"weight", "bias"}
    if b"K\x02K\x02\x86" in data:
        larger = data.replace(b"K\x02K\x02\x86", b"K\x7fK\x7f\x86")
    else:
        larger = data.replace(b"(K\x02K\x02t", b"(K\x7fK\x7ft")
    rescript(tmp_path / "w.pt", larger)
    with pytest.raises(CompvlError, match="cannot be read"):
        read_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("kind", ["zip", "legacy", "script", "safetensors"])
@pytest.mark.parametrize("share", [0, 0.02, 0.5, 0.999])
def test_part_of_a_file_is_damaged(original, tmp_path, kind, share):
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    if kind == "script":
        torch.jit.script(nn.Linear(300, 300)).save(path)
    elif kind == "safetensors":
        save_file(original.state_dict(), path)
    else:
        content = dict(state_dict=original.state_dict())
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CompvlError, match="cannot be read as weights"):
        read_weights(path)


@pytest.mark.parametrize("kind", ["zip", "script"])
def test_flipped_byte_is_noticed(tmp_path, kind):
    path = tmp_path / "w.pt"
    layer = nn.Linear(300, 300)
    if kind == "script":
        torch.jit.script(layer).save(path)
    else:
        torch.save(layer.state_dict(), path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CompvlError, match="cannot be read as weights.*does not fit"):
        read_weights(path)


def test_files_without_weights(tmp_path):
    page = "<!DOCTYPE html><title>Google Drive - Virus scan warning</title>"
    (tmp_path / "page.pt").write_text(page)
    torch.save(dict(epoch=3, optimizer=dict(lr=1)), tmp_path / "empty.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    loop = {}
    loop["model"] = loop
    torch.save(loop, tmp_path / "loop.pt")
    for file, message in {
        "loop.pt": "no weights but model",
        "page.pt": "web page",
        "empty.pt": "no weights but epoch, optimizer",
        "list.pt": "no weights but a list",
        "none.pt": "no weights file",
    }.items():
        with pytest.raises(CompvlError, match=message):
            read_weights(tmp_path / file)


def test_every_weight_finds_its_place(original, tmp_path):
    state = without(original.state_dict(), "ln_final.bias")
    state["text_projection"] = torch.zeros(3, 3)
    state["head.weight"] = torch.zeros(2)
    state["tail.weight"] = torch.zeros(2)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CompvlError) as error:
        opened(tmp_path / "w.pt")
    for part in (
        "text_projection (3, 3) instead of",
        "ln_final.bias is missing",
        "head.weight is not part of micro-clip",
        "and 1 more",
    ):
        assert part in str(error.value)


@pytest.mark.filterwarnings("ignore")
def test_weights_of_another_architecture(original, tmp_path):
    torch.save(original.state_dict(), tmp_path / "w.pt")
    with pytest.raises(CompvlError, match="another architecture than RN50"):
        create_model("RN50", tmp_path / "w.pt", device="cpu")


# -- activation


def test_unknown_activation(original, tmp_path):
    path = tmp_path / "w.pt"
    torch.save(original.state_dict(), path)
    with pytest.warns(UserWarning, match="does not say whether"):
        wrong = create_model("micro-clip", path, device="cpu").clip
    assert activation(wrong) == "gelu"  # that of the name
    assert not same(wrong, original, 1e-4)
    assert same(opened(path, "quick_gelu"), original)
    with pytest.raises(CompvlError, match="activation"):
        create_model("micro-clip", path, activation="relu")


def test_activation_in_the_file(original, tmp_path):
    path = tmp_path / "w.safetensors"
    Model(original, None, None, "micro-clip").save(path)
    assert activation(opened(path, None)) == "quick_gelu"

    torch.save(original.state_dict(), tmp_path / "w.pt")
    wrong = opened(tmp_path / "w.pt", "gelu")
    with pytest.warns(UserWarning, match="trained with quick_gelu and computes gelu"):
        assert same(create_model("micro-clip", path, "cpu", "gelu").clip, wrong)
    message = "trained with quick_gelu and micro-clip computes gelu"
    with pytest.raises(CompvlError, match=message):
        load_weights(wrong, path, "micro-clip")


# -- other people's models and tokenizers


class Words:
    """A tokenizer of words with start, end and padding as BERT-like models have them."""

    context_length = 8

    def __call__(self, texts, context_length=None):
        n = context_length or self.context_length
        rows = []
        for text in texts:
            row = [0, *(5 + len(word) for word in text.split()), 2]
            if len(row) > n:
                row = row[: n - 1] + [2]
            rows.append(row + [1] * (n - len(row)))
        return torch.tensor(rows)


def test_truncated(original):
    micro = Model(original, None, open_clip.get_tokenizer("micro-clip"), "micro-clip")
    captions = ["", "x" * 400, "ü" * 60]
    for n in (1, 60, 74, 75, 76, 90):
        stars = " ".join(["star"] * n)
        captions += [stars, f"{stars}!", f"{stars} é"]
    exact = [len(micro.tokenizer.encode(caption)) + 2 > 77 for caption in captions]
    assert micro.truncated(captions) == exact
    assert any(exact)
    assert not all(exact)


def test_truncated_by_other_tokenizers(original):
    captions = [
        "one two three",
        "one two three four five six",
        "one two three four five six seven",
        "one two three four five six seven eight nine",
        "",
    ]
    words = Model(original, None, Words(), "words")
    assert words.truncated(captions) == [False, False, True, True, False]

    def plain(texts):
        return Words()(texts)

    # It takes no other context length: a caption that fills the context counts as cut.
    model = Model(original, None, plain, "plain")
    assert model.truncated(captions) == [False, True, True, True, False]


WRAPPED = """
import numpy as np
import torch
from torch import nn

from compvl.models.wrap import wrap_model


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(3.0))

    def encode_image(self, x):
        return x.mean((2, 3)) * self.w

    def encode_text(self, t):
        return t[:, :3].float()


def preprocess(image):
    return torch.tensor(np.asarray(image.resize((4, 4)))).permute(2, 0, 1) / 255


def tokenize(texts):
    return torch.ones(len(texts), 5)


print(wrap_model(Toy(), preprocess, tokenize, "toy").fingerprint())
"""


def test_wrapped_model_keeps_its_fingerprint_in_another_process(capsys):
    exec(WRAPPED, {"__name__": "here"})
    here = capsys.readouterr().out
    command = [sys.executable, "-c", WRAPPED]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert here == there
    assert re.fullmatch(r"[0-9a-f]{32}\n", here)


def test_wrap_model_refuses_networks_without_weights_or_methods():
    class Plain:
        def encode_image(self, x): ...
        def encode_text(self, t): ...

    with pytest.raises(CompvlError, match="no weights"):
        wrap_model(Plain(), None, None)
    with pytest.raises(CompvlError, match="no encode_image and no encode_text"):
        wrap_model(nn.Linear(2, 2), None, None)


# -- the zoo


@pytest.mark.parametrize("name", ZOO)
def test_entry_is_whole(name):
    entry = ZOO[name]
    described = entry.row and entry.homepage.startswith("https://") and entry.licence
    assert (described and entry.formats) or entry.note
    repository = is_repository(entry.architecture)
    if not entry.pairwise:
        assert repository or entry.architecture in register_configs()
        assert entry.activation in ("gelu", "quick_gelu")
        assert sum([bool(entry.tag), bool(entry.dataset), repository]) == 1
    if entry.tag:
        assert open_clip.get_pretrained_cfg(entry.architecture, entry.tag)
    if entry.dataset:
        data = DATASETS[entry.dataset]
        assert data.kind == "checkpoint"
        assert data.files[0].path == f"checkpoints/{entry.name}/{entry.file}"


@pytest.mark.parametrize("name", ZOO)
def test_entry_says_what_is_confirmed(name):
    shown = CliRunner().invoke(app, ["models", name]).output
    confirmed = re.search(r"^confirmed: .+?(?=^not confirmed: )", shown, re.MULTILINE | re.DOTALL)
    assert confirmed and len(confirmed[0]) > 40
    assert "never opened" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 160  # a long address may not be broken
    row = zoo_table().set_index("name").loc[name]
    for text in (row.confirmed, row.note):
        assert text.endswith(".")
        assert "  " not in text


# Names that the tables of methods since 2024 use.
RECENT = [
    "ce-clip",
    "fsc-clip",
    "clic",
    "read-clip",
    "degla",
    "tripletclip",
    "spec-clip",
    "cs-clip",
    "con-clip",
]


@pytest.mark.parametrize("name", RECENT)
def test_methods_since_2024_say_how_to_get_them(name, monkeypatch):
    monkeypatch.delenv("COMPVL_DATA_ROOT", raising=False)
    unreachable = patch("socket.getaddrinfo", side_effect=OSError("no name server"))
    proxies = {"HTTPS_PROXY": "", "https_proxy": "", "ALL_PROXY": ""}
    with unreachable, patch.dict(os.environ, proxies), pytest.raises(CompvlError) as error:
        load_zoo(name, device="cpu")
    assert re.search("Get |compvl data fetch|fetch them from", str(error.value))


@pytest.mark.parametrize("name", [name for name in ZOO if ZOO[name].tag])
def test_activation_of_a_tag(name):
    """The zoo's activation is the one that open_clip records for the weights."""
    entry = ZOO[name]
    recorded = open_clip.get_pretrained_cfg(entry.architecture, entry.tag).get("quick_gelu")
    recorded = recorded or open_clip.get_model_config(entry.architecture).get("quick_gelu")
    assert entry.activation == ("quick_gelu" if recorded else "gelu")


NO_RELEASE = {"Random Chance", "Human Estimate", "CLIP", "SDS-CLIP", "CLIP-FT", "Avg."}


@pytest.mark.parametrize(
    "table",
    [
        "hard_positives_table1.csv",
        "hard_positives_table3.csv",
        "hard_positives_table10.csv",
        "cae_table1.csv",
    ],
)
def test_rows_of_the_papers_have_entries(table):
    with open(data_dir() / "paper" / table) as file:
        labels = {row["model"] for row in csv.DictReader(file)} - NO_RELEASE
    assert labels <= {entry.row for entry in ZOO.values()}


def test_weights_are_found_under_the_root(original, tmp_path, monkeypatch):
    small = dataclasses.replace(ZOO["negclip"], architecture="micro-clip")
    monkeypatch.setitem(ZOO, "negclip", small)
    monkeypatch.delenv("COMPVL_DATA_ROOT", raising=False)
    with pytest.raises(CompvlError, match="no data root.*1ooVVPxB"):
        load_zoo("negclip", device="cpu")
    with pytest.raises(CompvlError, match="not on this machine. Get Google Drive"):
        load_zoo("negclip", tmp_path, device="cpu")

    folder = tmp_path / "checkpoints" / "negclip"
    folder.mkdir(parents=True)
    other_name = folder / "negCLIP.pt"  # the only file there
    torch.save(dict(state_dict=prefixed(original.state_dict(), "module.")), other_name)
    assert zoo_table(tmp_path).set_index("name").state["negclip"] == "present"
    assert zoo_table().set_index("name").state["negclip"] == "absent"

    monkeypatch.setenv("COMPVL_DATA_ROOT", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = open_model("NegCLIP", device="cpu")
        assert same(model.clip, original)
        assert (model.name, model.pretrained) == ("micro-clip", "negclip")
        assert same(open_model("negclip", other_name, device="cpu").clip, original)
        assert activation(open_model("negclip", device="cpu", activation="gelu").clip) == "gelu"

    (folder / "other.pt").write_bytes(b"")
    with pytest.raises(CompvlError, match="2 weights files"):
        open_model("negclip", device="cpu")
    other_name.rename(folder / "negclip.pth")  # the published name wins
    assert same(open_model("negclip", device="cpu").clip, original)
    assert status(tmp_path, ["negclip"]).state[0] == "present"


def test_repository_of_the_zoo_under_the_root(original, tmp_path, monkeypatch):
    monkeypatch.delenv("COMPVL_DATA_ROOT", raising=False)
    folder = tmp_path / "checkpoints" / "clic"
    folder.mkdir(parents=True)
    config = open_clip.get_model_config("micro-clip")  # says nothing of its activation
    (folder / "open_clip_config.json").write_text(json.dumps(dict(model_cfg=config)))
    save_file(original.state_dict(), folder / "open_clip_model.safetensors")
    states = zoo_table(tmp_path).set_index("name").state
    assert (states["clic"], states["clic-vit-l-14"]) == ("present", "absent")
    model = open_model("clic", root=tmp_path, device="cpu")
    assert activation(model.clip) == "quick_gelu"
    assert same(model.clip, original)


def test_unknown_names():
    with pytest.raises(CompvlError, match="did you mean negclip"):
        open_model("negclop")
    with pytest.raises(CompvlError, match="did you mean ViT-B-32"):
        open_model("ViT-B/32")
    with pytest.raises(CompvlError, match="load_cross_encoder"):
        open_model("blip-itm-base-coco")
    assert open_model("micro-clip", "base", device="cpu").pretrained == "base"


# -- cross-encoders


def tiny_processor():
    """BLIP's processor for images of 16 pixels and a vocabulary of three words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "star", "red", "a"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.BertTokenizerFast(tokenizer_object=tokenizer)
    images = transformers.BlipImageProcessor(size=dict(height=16, width=16))
    return transformers.BlipProcessor(images, tokenizer)


def tiny_configs():
    """Configs of BLIP's text and vision towers, one layer each."""
    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = dict(
        size,
        vocab_size=8,
        encoder_hidden_size=16,
        max_position_embeddings=9,
        pad_token_id=0,
        bos_token_id=2,
    )
    return text, dict(size, image_size=16, patch_size=8)


@transformers_here
def test_cross_encoder_under_the_root(tmp_path):
    import transformers

    text, vision = tiny_configs()
    config = transformers.BlipConfig(
        text_config=text, vision_config=vision, image_text_hidden_size=8
    )
    folder = tmp_path / "checkpoints" / "blip-itm-base-coco"
    transformers.BlipForImageTextRetrieval(config).save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    assert zoo_table(tmp_path).set_index("name").state["blip-itm-base-coco"] == "present"
    blip = load_cross_encoder("blip-itm-base-coco", "cpu", tmp_path, batch_size=2)
    assert isinstance(blip, PairScorer)
    assert blip.name == "blip-itm-base-coco"

    images = [Image.new("RGB", (20, 20), color) for color in ("red", "blue", "red")]
    captions = ["a red star", "star " * 30, "red"]
    scores = blip.score(images, captions)
    assert scores.shape == (3,)
    assert torch.isfinite(scores).all()
    assert blip.truncated(captions) == [False, True, False]
    assert blip.score([], []).shape == (0,)
    process = blip.processor.image_processor
    pixels = [process(images=[image], return_tensors="pt")["pixel_values"][0] for image in images]
    assert torch.allclose(blip.score(pixels, captions), scores, atol=1e-6)


@transformers_here
def test_captioner_is_no_cross_encoder(tmp_path):
    import transformers

    text, vision = tiny_configs()
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    transformers.BlipForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    with pytest.raises(CompvlError, match="no BLIP with a matching head"):
        load_cross_encoder(str(tmp_path), "cpu")
