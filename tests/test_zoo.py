"""Every format in which models are released, made here from a small model: read without running its code, merged, renamed, loaded whole, or refused with a reason."""

import argparse
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from compvl.core import CompvlError
from compvl.downloads import DATASETS, status
from compvl.models.clip import Model, create_model, register_configs
from compvl.models.wrap import wrap_model
from compvl.models.weights import activation, read_weights
from compvl.models.zoo import load_zoo, open_model, zoo_table
from compvl.models.releases import ZOO

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
    "Image and text features of any CLIP, on fixed inputs."
    images = torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return clip.encode_image(images), clip.encode_text(
            open_clip.get_tokenizer("micro-clip")(CAPTIONS)
        )


def same(a, b, atol=1e-6):
    return all(
        torch.allclose(x.float(), y.float(), atol=atol) for x, y in zip(features(a), features(b))
    )


@pytest.fixture(scope="module")
def original():
    "A micro-CLIP that computes with QuickGELU, its weights far enough from their start for the activation to tell."
    register_configs()
    torch.manual_seed(0)
    clip = open_clip.create_model("micro-clip", force_quick_gelu=True).eval()
    with torch.no_grad():
        for k, p in clip.named_parameters():
            if "mlp" in k:
                p.mul_(4)
    return clip


def opened(path, activation="quick_gelu", **kw):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return create_model("micro-clip", path, device="cpu", activation=activation, **kw).clip


def numpy1(path):
    "Rewrite a PyTorch file as NumPy 1 would have named its numbers."
    with zipfile.ZipFile(path) as z:
        entries = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
        for n, data in entries.items():
            z.writestr(
                n,
                data.replace(b"cnumpy._core.multiarray\nscalar", b"cnumpy.core.multiarray\nscalar")
                if n.endswith("data.pkl")
                else data,
            )


# -- a training script's files


def prefixed(sd, p):
    return {p + k: v for k, v in sd.items()}


WRAPPED = {
    "bare": lambda sd: sd,
    "state_dict": lambda sd: dict(epoch=5, name="run", state_dict=sd),
    "module": lambda sd: dict(
        state_dict=prefixed(sd, "module."),
        optimizer=dict(
            state={0: dict(step=torch.tensor(3.0), exp_avg=torch.zeros(2))},
            param_groups=[dict(lr=1e-6, betas=(0.9, 0.98))],
        ),
        scaler=dict(scale=65536.0),
    ),
    "options and numbers": lambda sd: dict(
        args=argparse.Namespace(lr=1e-6, tags=["a"]),
        loss=np.float64(0.5),
        step=np.int64(7),
        best=np.float32(1),
        done=np.bool_(True),
        state_dict=sd,
    ),
    "model": lambda sd: dict(model=sd, step=3),
    "nested": lambda sd: dict(state_dict=dict(model=prefixed(sd, "module."))),
    "compiled": lambda sd: prefixed(sd, "_orig_mod."),
    "wrapper": lambda sd: prefixed(sd, "module.model."),
    "clip": lambda sd: dict(model_state_dict=prefixed(sd, "clip.")),
    "half": lambda sd: {k: v.half() for k, v in sd.items()},
    "extras": lambda sd: (
        sd
        | dict(attn_mask=torch.zeros(77, 77), logit_scale=sd["logit_scale"].reshape(1))
        | {"text.embeddings.position_ids": torch.arange(77)}
    ),
    "custom text": lambda sd: {
        k if k.startswith("visual") or k == "logit_scale" else f"text.{k}": v for k, v in sd.items()
    },
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_training_checkpoints(original, tmp_path, wrap):
    torch.save(WRAPPED[wrap](original.state_dict()), path := tmp_path / "epoch_5.pt")
    assert same(opened(path), original, 2e-2 if wrap == "half" else 1e-6)
    if wrap == "options and numbers":
        numpy1(path)
        assert b"numpy.core.multiarray" in zipfile.ZipFile(path).read("epoch_5/data.pkl") and same(
            opened(path), original
        )


def test_old_pytorch_format_and_safetensors(original, tmp_path):
    torch.save(
        dict(state_dict=original.state_dict()),
        tmp_path / "old.pt",
        _use_new_zipfile_serialization=False,
    )
    save_file(prefixed(original.state_dict(), "module."), tmp_path / "bare.safetensors")
    assert same(opened(tmp_path / "old.pt"), original) and same(
        opened(tmp_path / "bare.safetensors"), original
    )


def test_custom_text_model_takes_the_plain_layout(original, tmp_path):
    torch.save(original.state_dict(), tmp_path / "w.pt")
    from compvl.models.weights import load_weights

    custom = open_clip.create_model(
        "micro-clip", force_custom_text=True, force_quick_gelu=True
    ).eval()
    with pytest.warns(UserWarning, match="does not say"):
        load_weights(custom, tmp_path / "w.pt")
    assert same(custom, original)


# -- OpenAI's archives


class OpenAI(nn.Module):
    "A CLIP as OpenAI exports it: the three sizes among its buffers."

    def __init__(self, clip):
        super().__init__()
        for k, m in clip.named_children():
            setattr(self, k, m)
        for k, p in clip.named_parameters(recurse=False):
            setattr(self, k, p)
        for k, v in dict(input_resolution=48, context_length=77, vocab_size=49408).items():
            self.register_buffer(k, torch.tensor(v))
        object.__setattr__(self, "of", clip)

    def forward(self, image, text):
        return self.of.encode_image(image) @ self.of.encode_text(text).T


def script(clip, path):
    tokens = open_clip.get_tokenizer("micro-clip")(["a star"])
    torch.jit.trace(OpenAI(clip), (torch.rand(1, 3, 48, 48), tokens), check_trace=False).save(path)


def test_torchscript_archive(original, tmp_path, monkeypatch):
    script(original, tmp_path / "ViT.pt")
    monkeypatch.setattr(torch.jit, "load", None)  # its code is not even loaded
    sd, meta = read_weights(tmp_path / "ViT.pt")
    assert meta == dict(activation="quick_gelu") and sd.keys() == original.state_dict().keys() | {
        "input_resolution",
        "context_length",
        "vocab_size",
    }
    torch.save(sd, tmp_path / "kept.pt")
    for f in "ViT.pt", "kept.pt":  # OpenAI's three sizes tell the activation in any container
        m = opened(tmp_path / f, None)
        assert activation(m) == "quick_gelu" and same(m, original)


def test_torchscript_half_precision(original, tmp_path):
    half = open_clip.create_model("micro-clip", force_quick_gelu=True).eval()
    half.load_state_dict(original.state_dict())
    traced = torch.jit.trace_module(
        half, dict(encode_text=open_clip.get_tokenizer("micro-clip")(["a star"])), check_trace=False
    )
    traced.half().save(tmp_path / "half.pt")
    assert all(
        v.dtype == torch.float16 for v in read_weights(tmp_path / "half.pt")[0].values()
    ) and same(opened(tmp_path / "half.pt"), original, 2e-2)


def test_scripted_module_is_read_by_attribute(tmp_path):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.scale = (
                nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)]),
                nn.Parameter(torch.ones(())),
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.scale

    torch.jit.script(block := Block()).save(tmp_path / "b.pt")
    assert {k: v.tolist() for k, v in read_weights(tmp_path / "b.pt")[0].items()} == {
        k: v.tolist() for k, v in block.state_dict().items()
    }


# -- Hugging Face


@transformers_here
@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_hugging_face_layout(tmp_path, act):
    from transformers import CLIPConfig, CLIPModel

    cfg = open_clip.get_model_config("micro-clip")
    v, t = cfg["vision_cfg"], cfg["text_cfg"]
    torch.manual_seed(0)
    hf = CLIPModel(
        CLIPConfig(
            projection_dim=cfg["embed_dim"],
            text_config=dict(
                hidden_size=t["width"],
                intermediate_size=4 * t["width"],
                num_hidden_layers=t["layers"],
                num_attention_heads=t["heads"],
                vocab_size=t.get("vocab_size", 49408),
                max_position_embeddings=t["context_length"],
                hidden_act=act,
                eos_token_id=49407,
                bos_token_id=49406,
                projection_dim=cfg["embed_dim"],
            ),
            vision_config=dict(
                hidden_size=v["width"],
                intermediate_size=4 * v["width"],
                num_hidden_layers=v["layers"],
                num_attention_heads=v["width"] // v.get("head_width", 64),
                image_size=v["image_size"],
                patch_size=v["patch_size"],
                hidden_act=act,
                projection_dim=cfg["embed_dim"],
            ),
        )
    ).eval()
    with torch.no_grad():
        for k, p in hf.named_parameters():
            p.normal_(std=0.1) if "norm" not in k else p.add_(torch.rand_like(p) * 0.1)
    hf.save_pretrained(tmp_path / "hf")
    m = opened(tmp_path / "hf", None)  # config.json says the activation
    assert activation(m) == act
    images, tokens = torch.rand(2, 3, 48, 48), open_clip.get_tokenizer("micro-clip")(CAPTIONS)
    with torch.no_grad():
        text = hf.text_projection(hf.text_model(input_ids=tokens).pooler_output)
        image = hf.visual_projection(hf.vision_model(pixel_values=images).pooler_output)
        assert torch.allclose(m.encode_text(tokens), text, atol=1e-5) and torch.allclose(
            m.encode_image(images), image, atol=1e-5
        )

    torch.save(
        prefixed(hf.state_dict(), "model.")
        | {"model.text_model.embeddings.position_ids": torch.arange(77)},
        tmp_path / "w.bin",
    )
    assert same(opened(tmp_path / "w.bin", act), m)
    sd = hf.state_dict()
    del sd["text_model.encoder.layers.0.self_attn.k_proj.weight"]
    torch.save(sd, tmp_path / "hole.bin")
    with pytest.raises(CompvlError, match="transformer.resblocks.0.attn.in_proj_weight is missing"):
        opened(tmp_path / "hole.bin", act)


# -- LoRA, as SVLC and DAC patch open_clip: rank 4, alpha 1


class LoraLinear(nn.Module):
    def __init__(self, of, r=4):
        super().__init__()
        self.weight, self.bias, self.lora_A, self.lora_B = (
            of.weight,
            of.bias,
            nn.Parameter(torch.randn(r, of.in_features)),
            nn.Parameter(torch.randn(of.out_features, r) * 0.05),
        )

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + x @ self.lora_A.T @ self.lora_B.T / len(
            self.lora_A
        )


class LoraConv(nn.Module):
    def __init__(self, of, r=4):
        super().__init__()
        k = of.kernel_size[0]
        self.weight, self.stride = of.weight, of.stride
        self.lora_A, self.lora_B = (
            nn.Parameter(torch.randn(r * k, of.in_channels * k)),
            nn.Parameter(torch.randn(of.out_channels * k, r * k) * 0.01),
        )

    def forward(self, x):
        return F.conv2d(
            x,
            self.weight + (self.lora_B @ self.lora_A).view(self.weight.shape) / 4,
            stride=self.stride,
        )


class LoraAttention(nn.Module):
    def __init__(self, of, r=4):
        super().__init__()
        self.heads = of.num_heads
        self.in_proj_weight, self.in_proj_bias, self.out_proj = (
            of.in_proj_weight,
            of.in_proj_bias,
            LoraLinear(of.out_proj, r),
        )
        self.in_proj_weight_lora_A, self.in_proj_weight_lora_B = (
            nn.Parameter(torch.randn(r, of.embed_dim)),
            nn.Parameter(torch.randn(3 * of.embed_dim, r) * 0.05),
        )

    def forward(self, q, k=None, v=None, need_weights=False, attn_mask=None, **_):
        B, L, D = q.shape
        x = (
            F.linear(q, self.in_proj_weight, self.in_proj_bias)
            + F.linear(F.linear(q, self.in_proj_weight_lora_A), self.in_proj_weight_lora_B) / 4
        )
        q, k, v = (t.view(B, L, self.heads, -1).transpose(1, 2) for t in x.chunk(3, -1))
        return self.out_proj(
            F.scaled_dot_product_attention(q, k, v, attn_mask).transpose(1, 2).reshape(B, L, D)
        ), None


@pytest.fixture
def patched(original):
    register_configs()
    torch.manual_seed(1)
    clip = open_clip.create_model("micro-clip", force_quick_gelu=True).eval()
    clip.load_state_dict(original.state_dict())
    for blocks in clip.transformer.resblocks, clip.visual.transformer.resblocks:
        for b in blocks:
            b.attn, b.mlp.c_fc, b.mlp.c_proj = (
                LoraAttention(b.attn),
                LoraLinear(b.mlp.c_fc),
                LoraLinear(b.mlp.c_proj),
            )
    clip.visual.conv1 = LoraConv(clip.visual.conv1)
    return clip


def test_lora_is_merged(original, patched, tmp_path):
    assert not same(patched, original, 1e-3)
    torch.save(
        dict(
            epoch=5,
            state_dict=prefixed(patched.state_dict(), "module."),
            optimizer=dict(lr=np.float64(1e-6)),
        ),
        path := tmp_path / "LLM_cp.pt",
    )
    merged = opened(path)
    assert same(merged, patched, 1e-5) and not any("lora" in k for k in merged.state_dict())
    assert not same(opened(path, lora_alpha=2), patched, 1e-3)


def test_lora_updates_need_a_home_and_an_alpha(original, patched, tmp_path):
    def message(sd, **kw):
        torch.save(sd, tmp_path / "w.pt")
        with pytest.raises(CompvlError) as e:
            opened(tmp_path / "w.pt", **kw)
        return str(e.value)

    sd = patched.state_dict()
    assert "visual.conv1.lora_A" in message(
        {k: v for k, v in sd.items() if k != "visual.conv1.weight"}
    )
    assert "c_fc.lora_A" in message(
        {k: v for k, v in sd.items() if k != "transformer.resblocks.0.mlp.c_fc.lora_B"}
    )
    assert "belong to no weight" in message(sd | {"visual.conv1.lora_A": torch.zeros(5, 7)})
    others = original.state_dict() | {
        "transformer.resblocks.0.mlp.c_fc.lora_A": torch.zeros(
            4, original.ln_final.normalized_shape[0]
        ),
        "transformer.resblocks.0.mlp.c_fc.lora_B": torch.zeros(
            4 * original.ln_final.normalized_shape[0], 4
        ),
    }
    assert "alpha" in message(others)
    torch.save(others, tmp_path / "w.pt")
    assert same(opened(tmp_path / "w.pt", lora_alpha=8), original)


# -- what must not run, and what cannot be read


class Evil:
    def __init__(self, f, *args):
        self.call = f, args

    def __reduce__(self):
        return self.call


def rescript(path, data):
    "A TorchScript archive with another data.pkl."
    torch.jit.script(nn.Linear(1, 1)).save(path)
    with zipfile.ZipFile(path) as z:
        entries = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(path, "w") as z:
        for n, old in entries.items():
            z.writestr(n, data if n.endswith("/data.pkl") else old)


def hidden(call):
    "A TorchScript pickle of a module whose attribute, two levels down, is `call`."
    part = lambda name, state: b"c__torch__.x\n" + name + b"\n)\x81}(" + state + b"ub"
    return (
        b"\x80\x02"
        + part(b"Top", b"X\x03\x00\x00\x00sub" + part(b"Sub", b"X\x01\x00\x00\x00w" + call))
        + b"."
    )


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
    ran, path = tmp_path / "ran", tmp_path / "w.pt"
    evil = Evil(os.system, f"touch {ran}")
    if kind == "zip":
        torch.save(dict(state_dict=dict(a=torch.ones(1)), note=evil), path)
    elif kind == "zip, eval":
        torch.save(
            dict(state_dict=dict(a=torch.ones(1)), note=Evil(eval, f"open({str(ran)!r}, 'w')")),
            path,
        )
    elif kind == "legacy":
        torch.save(dict(a=evil), path, _use_new_zipfile_serialization=False)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(evil, protocol=2))
    elif kind == "script":
        rescript(path, pickle.dumps(evil, protocol=2))
    elif kind == "script, nested":
        rescript(
            path,
            hidden(
                b"cposix\nsystem\n(X"
                + len(c := f"touch {ran}".encode()).to_bytes(4, "little")
                + c
                + b"tR"
            ),
        )
    else:
        rescript(
            path,
            hidden(
                b"ctorch\nload\n(X" + len(c := str(path).encode()).to_bytes(4, "little") + c + b"tR"
            ),
        )
    with pytest.raises(CompvlError, match="holds more than tensors .*does not run code"):
        read_weights(path)
    assert not ran.exists()


def test_torchscript_tensors_stay_within_their_storage(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "ok.pt")
    with zipfile.ZipFile(tmp_path / "ok.pt") as z:
        data = z.read("ok/data.pkl")
    assert set(read_weights(tmp_path / "ok.pt")[0]) == {"weight", "bias"}
    rescript(
        tmp_path / "w.pt",
        data.replace(b"K\x02K\x02\x86", b"K\x7fK\x7f\x86")
        if b"K\x02K\x02\x86" in data
        else data.replace(b"(K\x02K\x02t", b"(K\x7fK\x7ft"),
    )
    with pytest.raises(CompvlError, match="cannot be read"):
        read_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("kind", ["zip", "legacy", "script", "safetensors"])
@pytest.mark.parametrize("share", [0, 0.02, 0.5, 0.999])
def test_half_a_file_is_damaged(original, tmp_path, kind, share):
    path = tmp_path / f"w.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "script":
        torch.jit.script(nn.Linear(300, 300)).save(path)
    elif kind == "safetensors":
        save_file(original.state_dict(), path)
    else:
        torch.save(
            dict(state_dict=original.state_dict()),
            path,
            _use_new_zipfile_serialization=kind == "zip",
        )
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CompvlError, match="cannot be read as weights"):
        read_weights(path)


@pytest.mark.parametrize("kind", ["zip", "script"])
def test_flipped_byte_is_noticed(tmp_path, kind):
    path, layer = tmp_path / "w.pt", nn.Linear(300, 300)
    torch.jit.script(layer).save(path) if kind == "script" else torch.save(layer.state_dict(), path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CompvlError, match="cannot be read as weights.*does not fit"):
        read_weights(path)


def test_what_holds_no_weights(tmp_path):
    (tmp_path / "page.pt").write_text(
        "<!DOCTYPE html><title>Google Drive - Virus scan warning</title>"
    )
    torch.save(dict(epoch=3, optimizer=dict(lr=1)), tmp_path / "empty.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    loop = {}
    loop["model"] = loop
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(CompvlError, match="no weights but model"):
        read_weights(tmp_path / "loop.pt")
    with pytest.raises(CompvlError, match="web page"):
        read_weights(tmp_path / "page.pt")
    with pytest.raises(CompvlError, match="no weights but epoch, optimizer"):
        read_weights(tmp_path / "empty.pt")
    with pytest.raises(CompvlError, match="no weights but a list"):
        read_weights(tmp_path / "list.pt")
    with pytest.raises(CompvlError, match="no weights file"):
        read_weights(tmp_path / "none.pt")


def test_every_weight_finds_its_place(original, tmp_path):
    sd = original.state_dict()
    del sd["ln_final.bias"]
    sd |= {
        "text_projection": torch.zeros(3, 3),
        "head.weight": torch.zeros(2),
        "tail.weight": torch.zeros(2),
    }
    torch.save(sd, tmp_path / "w.pt")
    with pytest.raises(CompvlError) as e:
        opened(tmp_path / "w.pt")
    for part in (
        "text_projection (3, 3) instead of",
        "ln_final.bias is missing",
        "head.weight is not part of micro-clip",
        "and 1 more",
    ):
        assert part in str(e.value)
    torch.save(original.state_dict(), tmp_path / "w.pt")
    with (
        pytest.raises(CompvlError, match="another architecture than RN50"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        create_model("RN50", tmp_path / "w.pt", device="cpu")


# -- activation


def test_activation(original, tmp_path):
    torch.save(original.state_dict(), tmp_path / "w.pt")
    with pytest.warns(UserWarning, match="does not say whether"):
        wrong = create_model("micro-clip", tmp_path / "w.pt", device="cpu").clip
    assert activation(wrong) == "gelu" and not same(
        wrong, original, 1e-4
    )  # nobody said it: loaded as the name says, with a warning
    assert same(opened(tmp_path / "w.pt", "quick_gelu"), original)
    Model(original, None, None, "micro-clip").save(tmp_path / "w.safetensors")
    assert activation(opened(tmp_path / "w.safetensors", None)) == "quick_gelu"  # the file says it
    with pytest.warns(UserWarning, match="trained with quick_gelu and computes gelu"):
        assert same(
            create_model("micro-clip", tmp_path / "w.safetensors", "cpu", "gelu").clip, wrong
        )
    with pytest.raises(CompvlError, match="activation"):
        create_model("micro-clip", tmp_path / "w.pt", activation="relu")
    from compvl.models.weights import load_weights

    with pytest.raises(CompvlError, match="trained with quick_gelu and micro-clip computes gelu"):
        load_weights(wrong, tmp_path / "w.safetensors", "micro-clip")


# -- other people's models and tokenizers


class Words:
    "A tokenizer of words with start, end and padding as BERT-like models have them."

    def __init__(self, context_length=8, pad=1):
        self.context_length, self.pad = context_length, pad

    def __call__(self, texts, context_length=None):
        n = context_length or self.context_length
        rows = [[0, *(5 + len(w) for w in t.split()), 2] for t in texts]
        rows = [r if len(r) <= n else r[: n - 1] + [2] for r in rows]
        return torch.tensor([r + [self.pad] * (n - len(r)) for r in rows])


def test_truncated(original):
    micro = Model(original, None, open_clip.get_tokenizer("micro-clip"), "micro-clip")
    captions = [
        " ".join(["star"] * n) + end for n in (1, 60, 74, 75, 76, 90) for end in ("", "!", " é")
    ] + ["", "x" * 400, "ü" * 60]
    exact = [len(micro.tokenizer.encode(c)) + 2 > 77 for c in captions]
    assert micro.truncated(captions) == exact and any(exact) and not all(exact)
    words = Model(original, None, Words(), "words")
    captions = [
        "one two three",
        "one two three four five six",
        "one two three four five six seven",
        "one two three four five six seven eight nine",
        "",
    ]
    assert words.truncated(captions) == [False, False, True, True, False]
    plain = Model(
        original, None, lambda texts: Words()(texts), "plain"
    )  # cannot be asked for more: full to the brim counts as cut
    assert plain.truncated(captions) == [False, True, True, True, False]


def test_wrapped_model_keeps_its_fingerprint_in_another_process(capsys):
    code = """
import torch, numpy as np
from torch import nn
from compvl.models.wrap import wrap_model
class Toy(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.arange(3.))
    def encode_image(self, x): return x.mean((2, 3))*self.w
    def encode_text(self, t): return t[:, :3].float()
print(wrap_model(Toy(), lambda im: torch.tensor(np.asarray(im.resize((4, 4)))).permute(2, 0, 1)/255, lambda s: torch.ones(len(s), 5), 'toy').fingerprint())
"""
    exec(code, {})
    here, there = (
        capsys.readouterr().out,
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout,
    )
    assert here == there and re.fullmatch(r"[0-9a-f]{32}\n", here)


def test_wrap_model_refuses_what_it_cannot_tell_apart():
    class Plain:
        def encode_image(self, x): ...
        def encode_text(self, t): ...

    with pytest.raises(CompvlError, match="no weights"):
        wrap_model(Plain(), None, None)
    with pytest.raises(CompvlError, match="no encode_image and no encode_text"):
        wrap_model(nn.Linear(2, 2), None, None)


# -- the zoo


def test_entries_are_whole():
    names = register_configs()
    for e in ZOO.values():
        assert e.row and e.homepage.startswith("https://") and e.licence and e.formats or e.note, (
            e.name
        )
        if not e.pairwise:
            assert (
                e.architecture in names
                and e.activation in ("gelu", "quick_gelu")
                and bool(e.tag) != bool(e.dataset)
            ), e.name
        if e.tag:
            assert open_clip.get_pretrained_cfg(e.architecture, e.tag), e.name
        if e.dataset:
            assert (
                DATASETS[e.dataset].kind == "checkpoint"
                and DATASETS[e.dataset].files[0].path == f"checkpoints/{e.name}/{e.file}"
            ), e.name
    rows = {e.row for e in ZOO.values()}
    import csv
    from compvl.core import data_dir

    def labels(f):
        return {r["model"] for r in csv.DictReader(open(data_dir() / "paper" / f))} - {
            "Random Chance",
            "Human Estimate",
            "CLIP",
            "SDS-CLIP",
            "CLIP-FT",
            "Avg.",
        }

    for f in (
        "hard_positives_table1.csv",
        "hard_positives_table3.csv",
        "hard_positives_table10.csv",
        "cae_table1.csv",
    ):
        assert labels(f) <= rows, (f, labels(f) - rows)


def test_weights_are_found_under_the_root(original, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "compvl.models.zoo.ZOO",
        {
            **ZOO,
            "negclip": __import__("dataclasses").replace(ZOO["negclip"], architecture="micro-clip"),
        },
    )
    monkeypatch.delenv("COMPVL_DATA_ROOT", raising=False)
    with pytest.raises(CompvlError, match="no data root.*1ooVVPxB"):
        load_zoo("negclip", device="cpu")
    with pytest.raises(CompvlError, match="not on this machine. Get Google Drive"):
        load_zoo("negclip", tmp_path, device="cpu")
    folder = tmp_path / "checkpoints/negclip"
    folder.mkdir(parents=True)
    torch.save(
        dict(state_dict=prefixed(original.state_dict(), "module.")), folder / "negCLIP.pt"
    )  # another name, and the only one there
    assert (
        zoo_table(tmp_path).set_index("name").state["negclip"] == "present"
        and zoo_table().set_index("name").state["negclip"] == "absent"
    )
    monkeypatch.setenv("COMPVL_DATA_ROOT", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m = open_model("NegCLIP", device="cpu")
        assert same(m.clip, original) and (m.name, m.pretrained) == ("micro-clip", "negclip")
        assert same(open_model("negclip", folder / "negCLIP.pt", device="cpu").clip, original)
        assert activation(open_model("negclip", device="cpu", activation="gelu").clip) == "gelu"
    (folder / "other.pt").write_bytes(b"")
    with pytest.raises(CompvlError, match="2 weights files"):
        open_model("negclip", device="cpu")
    (folder / "negCLIP.pt").rename(folder / "negclip.pth")  # the published name wins
    assert same(open_model("negclip", device="cpu").clip, original)
    assert status(tmp_path, ["negclip"]).state[0] == "present"


def test_names_that_nobody_knows():
    with pytest.raises(CompvlError, match="did you mean negclip"):
        open_model("negclop")
    with pytest.raises(CompvlError, match="did you mean ViT-B-32"):
        open_model("ViT-B/32")
    with pytest.raises(CompvlError, match="load_cross_encoder"):
        open_model("blip-itm-base-coco")
    assert open_model("micro-clip", "base", device="cpu").pretrained == "base"


@transformers_here
def test_cross_encoder_under_the_root(tmp_path):
    from compvl.models.blip import load_cross_encoder
    from compvl.models.pairs import PairScorer
    import transformers as t

    (words := tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "star", "red", "a"])
    )
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tok = Tokenizer(
        models.WordPiece(
            {w: i for i, w in enumerate(words.read_text().split("\n"))}, unk_token="[UNK]"
        )
    )
    tok.pre_tokenizer, tok.post_processor = (
        pre_tokenizers.BertPreTokenizer(),
        processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    )
    tok = t.BertTokenizerFast(tokenizer_object=tok)
    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = t.BlipConfig(
        text_config=dict(
            size,
            vocab_size=8,
            encoder_hidden_size=16,
            max_position_embeddings=9,
            pad_token_id=0,
            bos_token_id=2,
        ),
        vision_config=dict(size, image_size=16, patch_size=8),
        image_text_hidden_size=8,
    )
    folder = tmp_path / "checkpoints/blip-itm-base-coco"
    t.BlipForImageTextRetrieval(config).save_pretrained(folder)
    t.BlipProcessor(t.BlipImageProcessor(size=dict(height=16, width=16)), tok).save_pretrained(
        folder
    )
    assert zoo_table(tmp_path).set_index("name").state["blip-itm-base-coco"] == "present"
    blip = load_cross_encoder("blip-itm-base-coco", "cpu", tmp_path, batch_size=2)
    assert isinstance(blip, PairScorer) and blip.name == "blip-itm-base-coco"
    images = [Image.new("RGB", (20, 20), c) for c in ("red", "blue", "red")]
    long = ["a red star", "star " * 30, "red"]
    scores = blip.score(images, long)
    assert (
        scores.shape == (3,)
        and torch.isfinite(scores).all()
        and blip.truncated(long) == [False, True, False]
        and blip.score([], []).shape == (0,)
    )
    pixels = [
        blip.processor.image_processor(images=[im], return_tensors="pt")["pixel_values"][0]
        for im in images
    ]
    assert torch.allclose(blip.score(pixels, long), scores, atol=1e-6)
    t.BlipForConditionalGeneration(
        t.BlipConfig(
            text_config=config.text_config.to_dict(), vision_config=config.vision_config.to_dict()
        )
    ).save_pretrained(tmp_path / "captioner")
    t.BlipProcessor(t.BlipImageProcessor(size=dict(height=16, width=16)), tok).save_pretrained(
        tmp_path / "captioner"
    )
    with pytest.raises(CompvlError, match="no BLIP with a matching head"):
        load_cross_encoder(str(tmp_path / "captioner"), "cpu")
