"""Models of any make, evaluated by the names that the guide gives.

Small networks with random weights stand for the released ones. They keep the flags of the released
configs, and are saved in the released formats."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import warnings
from unittest.mock import patch

import numpy as np
import open_clip
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from compvl.app.cli import app
from compvl.attribution import attribute
from compvl.benchmarks import Benchmark, Pair, load_benchmark
from compvl.core import CompvlError
from compvl.evaluate import Embedder, compare, compare_models, evaluate, item_scores
from compvl.images import StoredImage
from compvl.models.clip import create_model
from compvl.models.dual_encoders import DualEncoder, load_dual_encoder
from compvl.models.scorers import open_scorer
from compvl.models.texts import wrap_text_encoder
from compvl.models.towers import encode_text, text_tower
from compvl.models.wrap import wrap_model
from compvl.models.zoo import open_model
from compvl.train import TrainConfig, load_run, train

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install 'compvl[transformers]')"
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # as in XLM-R: padding 1, end of text 2


@pytest.fixture(scope="module")
def swap():
    return load_benchmark("swap", n=6)


@pytest.fixture(scope="module")
def captions(swap):
    found = []
    for item in swap.items:
        found += [item.caption, item.hard_negative, item.hard_positive]
    return [*found, "A", "a " * 20, ""]


@pytest.fixture(scope="module")
def words(captions):
    return sorted({word for caption in captions for word in caption.lower().split()})


def small_tokenizer(words, length, start="<s> ", pad="<pad>"):
    """A tokenizer of whole words that ends with `</s>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start}$A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=length,
    )


# -- open_clip

TIMM = {"map": "test_vit", "token": "test_vit", "avg": "test_byobnet"}  # small, by their pooling
OPEN_CLIP = {  # name: whether its text features may be computed from cropped captions
    "ViT-B-16-SigLIP": False,
    "ViT-B-16-SigLIP2": False,
    "PE-Core-B-16": True,
    "MobileCLIP2-S0": False,
    "MobileCLIP2-B": True,
    "ViT-H-14-worldwide-quickgelu": True,
    "EVA02-B-16": True,
}


def shrunk(name, vocabulary):
    """A released config with few layers and little width; its flags stay."""
    config = open_clip.get_model_config(name)
    config["embed_dim"] = 64
    text = config["text_cfg"]
    text.update(width=64, heads=4, layers=2)
    if "hf_tokenizer_name" in text:
        text["vocab_size"] = vocabulary
    vision = config["vision_cfg"]
    if "timm_model_name" in vision:
        vision.update(timm_model_name=TIMM[vision["timm_pool"]], image_size=160)
    else:
        vision.update(width=64, head_width=32, layers=1, image_size=28)
    return config


def write_folder(folder, name, words):
    """A model of open_clip with random weights, as it is published."""
    config = shrunk(name, len(words) + len(SPECIAL))
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    torch.manual_seed(0)
    clip = kind(**config).eval()
    with torch.no_grad():
        for parameter in clip.parameters():  # far from their start, so that every position counts
            if parameter.ndim > 1:
                parameter.mul_(2)
    if kind is open_clip.CustomTextCLIP:
        config["custom_text"] = True
    about = {"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    folder.mkdir(exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")
    if "hf_tokenizer_name" in config["text_cfg"]:
        start = "" if "SigLIP" in name else "<s> "
        small_tokenizer(words, 77, start).save_pretrained(folder)
    return clip


@pytest.mark.parametrize("name", OPEN_CLIP)
def test_open_clip_folder_is_evaluated(tmp_path, swap, captions, words, name):
    clip = write_folder(tmp_path, name, words)
    model = open_model(f"local-dir:{tmp_path}", device="cpu")
    tokens = model.tokenizer(captions)
    assert bool(text_tower(model.clip)) == OPEN_CLIP[name]
    with torch.no_grad():
        full = clip.encode_text(tokens)
        cropped = encode_text(model.clip, tokens)
        assert torch.allclose(F.normalize(cropped, dim=-1), F.normalize(full, dim=-1), atol=1e-5)
        if not OPEN_CLIP[name] and "Mobile" not in name:
            cut = tokens[:1, :12]  # what follows the caption counts here
            assert not torch.allclose(F.normalize(clip.text(cut)), F.normalize(full[:1]), atol=1e-3)
        sizes = full - full.mean(0)
        assert sizes.norm(dim=1).max() > 1e-2  # captions differ
    figures = evaluate(model, [swap], n_boot=20, progress=False).set_index("metric")
    assert figures.n["orig_acc"] == len(swap.items)
    assert set(figures.index) >= {"aug_acc", "brittleness", "text_only_acc"}


def test_non_causal_tower_sees_what_follows(tmp_path, words):
    clip = write_folder(tmp_path, "MobileCLIP2-S0", words)
    tokens = open_clip.get_tokenizer("MobileCLIP2-S0")(["a red star"])
    with torch.no_grad():
        full = clip.encode_text(tokens)
        cut = clip.text.ln_final(clip.text.transformer(clip.text._embeds(tokens[:, :5])[0]))
        cut = cut[:, 4] @ clip.text.text_projection
    assert not torch.allclose(F.normalize(full), F.normalize(cut), atol=1e-3)


def test_command_takes_names_with_a_colon(tmp_path, words):
    write_folder(tmp_path / "pe", "PE-Core-B-16", words)
    command = ["evaluate", "--benchmark", "swap", "--n", "4", "--device", "cpu", "--no-cache"]
    model = ["--model", f"local-dir:{tmp_path / 'pe'}"]
    table = tmp_path / "table.csv"
    run = CliRunner().invoke(app, [*command, *model, "--csv", str(table)])
    assert run.exit_code == 0, run.output
    assert "orig_acc" in table.read_text()
    run = CliRunner().invoke(app, [*command, *model, "--pretrained", "openai"])
    assert run.exit_code != 0


def test_folders_that_are_not_whole(tmp_path, words):
    folder = tmp_path / "model"
    with pytest.raises(CompvlError, match="no open_clip_config.json"):
        create_model(f"local-dir:{folder}")
    write_folder(folder, "ViT-B-16-SigLIP2", words)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CompvlError, match="could not be opened"):
        create_model(f"local-dir:{folder}", device="cpu")
    write_folder(folder, "PE-Core-B-16", words)
    (folder / "open_clip_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CompvlError, match="could not be opened"):
        create_model(f"local-dir:{folder}", device="cpu")
    (folder / "open_clip_model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CompvlError, match="could not be opened"):
        create_model(f"local-dir:{folder}", device="cpu")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CompvlError, match="weights .*could not be loaded"):
        create_model(f"local-dir:{folder}", device="cpu")
    with pytest.raises(CompvlError, match="has weights of its own"):
        create_model(f"local-dir:{folder}", "openai", device="cpu")
    (folder / "open_clip_config.json").write_text("{")
    with pytest.raises(CompvlError, match="could not be opened"):
        create_model(f"local-dir:{folder}", device="cpu")


def test_no_network():
    no_proxy = {"HTTPS_PROXY": "", "https_proxy": "", "ALL_PROXY": ""}
    unreachable = patch("socket.getaddrinfo", side_effect=OSError("no name server"))
    with unreachable, patch.dict(os.environ, no_proxy):
        for name in ("hf-hub:org/none", "transformers:org/none", "clic"):
            with pytest.raises(CompvlError, match="cannot be reached: fetch them from https"):
                open_scorer(name)


# -- transformers

TOWER = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_act="gelu",
)
VISION = dict(TOWER, image_size=16, patch_size=8)


def text_config(words, **options):
    size = len(words) + len(SPECIAL)
    tokens = dict(vocab_size=size, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    return TOWER | tokens | dict(max_position_embeddings=24) | options


def clip_like(name, words, **text_options):
    """A model of transformers by its prefix, with CLIP's constructor."""
    config = getattr(transformers, f"{name}Config")(
        text_config=text_config(words, projection_dim=8, **text_options),
        vision_config=dict(VISION, projection_dim=8),
        projection_dim=8,
    )
    return getattr(transformers, f"{name}Model")(config)


def clip_images():
    sizes = dict(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return transformers.CLIPImageProcessor(**sizes)


def siglip_like(name, words, **vision_options):
    config = getattr(transformers, f"{name}Config")(
        text_config=text_config(words, max_position_embeddings=64, projection_size=16),
        vision_config=VISION | vision_options,
    )
    return getattr(transformers, f"{name}Model")(config)


def letter_tokenizer():
    """SigLIP 2's own kind of tokenizer, with letters for words."""
    letters = ["<pad>", "<eos>", "<bos>", "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    return transformers.Siglip2Tokenizer(vocabulary, [], model_max_length=64)


def dual_encoder(kind, words):
    """Network, image processor and tokenizer of a small dual encoder."""
    if kind == "SigLIP":
        images = transformers.SiglipImageProcessor(size={"height": 16, "width": 16})
        return siglip_like("Siglip", words), images, small_tokenizer(words, 64, "", "</s>")
    if kind == "SigLIP 2 NaFlex":
        network = siglip_like("Siglip2", "abcdefghijklmnopqrstuvwxyz!", num_patches=16)
        images = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
        return network, images, letter_tokenizer()
    if kind == "AltCLIP":
        network = clip_like("AltCLIP", words, project_dim=16, max_position_embeddings=26)
        return network, clip_images(), small_tokenizer(words, 99)
    if kind == "ChineseCLIP":
        return clip_like("ChineseCLIP", words), clip_images(), small_tokenizer(words, 99)
    name = {"CLIP": "CLIP", "MetaCLIP 2": "MetaClip2"}[kind]
    return clip_like(name, words), clip_images(), small_tokenizer(words, 99)


PROCESSORS = {
    "SigLIP": "SiglipProcessor",
    "SigLIP 2 NaFlex": "Siglip2Processor",
    "AltCLIP": "AltCLIPProcessor",
    "ChineseCLIP": "ChineseCLIPProcessor",
}


def write_dual_encoder(folder, kind, words):
    torch.manual_seed(0)
    network, images, tokenizer = dual_encoder(kind, words)
    network = network.eval()
    processor = getattr(transformers, PROCESSORS.get(kind, "CLIPProcessor"))(images, tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network.save_pretrained(folder)
        processor.save_pretrained(folder)
    return network, tokenizer


def features(output):
    return output if isinstance(output, torch.Tensor) else output.pooler_output


KINDS = ["CLIP", "SigLIP", "SigLIP 2 NaFlex", "MetaCLIP 2", "AltCLIP", "ChineseCLIP"]


def text_features_alone(network, tokenizer, captions, kind, **padded):
    """Normalised features of captions as transformers computes them, without compvl."""
    inputs = tokenizer(captions, return_tensors="pt", truncation=True, **padded)
    if kind.startswith("SigLIP"):
        inputs.pop("attention_mask")  # trained without one
    inputs.pop("token_type_ids", None)
    return F.normalize(features(network.get_text_features(**inputs)), dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_dual_encoder_is_evaluated(tmp_path, swap, captions, words, kind):
    network, tokenizer = write_dual_encoder(tmp_path, kind, words)
    model = open_model(f"transformers:{tmp_path}", device="cpu")
    captions = [caption.lower() for caption in captions]
    whole = dict(padding="max_length", max_length=24)
    if kind.startswith("SigLIP"):
        whole = dict(padding="max_length", max_length=64, padding_side="right")
    assert model.context_length == whole["max_length"]
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))
    with torch.no_grad():
        found = model.encode_text(model.tokenizer(captions))
        expected = text_features_alone(network, tokenizer, captions, kind, **whole)
        assert torch.allclose(found, expected, atol=1e-5)
        if not kind.startswith("SigLIP"):  # which reads its padding, up to the whole context
            longest = max(len(tokens) for tokens in tokenizer(captions)["input_ids"])
            assert longest < model.context_length  # so that something is cut off
            cut = dict(padding=True, max_length=24)
            expected = text_features_alone(network, tokenizer, captions, kind, **cut)
            assert torch.allclose(found, expected, atol=1e-5)
        images = transformers.AutoProcessor.from_pretrained(tmp_path).image_processor
        inputs = images(images=[picture], return_tensors="pt")
        expected = F.normalize(features(network.get_image_features(**inputs)), dim=-1)
        assert torch.allclose(
            model.encode_image(model.preprocess(picture)[None]), expected, atol=1e-5
        )
    figures = evaluate(model, [swap], n_boot=20, progress=False).set_index("metric")
    assert figures.n["orig_acc"] == len(swap.items)
    assert model.fingerprint() == load_dual_encoder(tmp_path, "cpu", model.name).fingerprint()


def test_siglip_lowers_case_and_pads(tmp_path, words):
    write_dual_encoder(tmp_path, "SigLIP", words)
    model = load_dual_encoder(tmp_path, "cpu")
    tokens = model.tokenizer([words[0].upper(), words[0]])
    assert torch.equal(tokens[0], tokens[1])
    assert tokens.shape == (2, 64)
    assert tokens.min() >= 0  # padding is read


def test_features_as_tensors():
    """transformers 4 returns tensors, transformers 5 objects with `pooler_output`."""

    class Four(nn.Module):
        def get_text_features(self, input_ids, attention_mask):
            return (input_ids * attention_mask).float()

    class Five(Four):
        def get_text_features(self, input_ids, attention_mask):
            found = super().get_text_features(input_ids, attention_mask)
            return transformers.modeling_outputs.BaseModelOutputWithPooling(pooler_output=found)

    tokens = torch.tensor([[2, 5, -1, -1], [2, 5, 6, -1]])
    for network in (Four(), Five()):
        found = DualEncoder(network, 1).encode_text(tokens)
        assert found.tolist() == [[2, 5, 0], [2, 5, 6]]


def test_dual_encoders_that_are_not_whole(tmp_path, words):
    network, _ = write_dual_encoder(tmp_path, "CLIP", words)
    state = network.state_dict()
    state.pop("text_projection.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompvlError, match="text_projection.weight is missing"):
        load_dual_encoder(tmp_path, "cpu")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CompvlError, match="could not be opened"):
        load_dual_encoder(tmp_path, "cpu")
    with pytest.raises(CompvlError, match="weights and an activation of its own"):
        open_model(f"transformers:{tmp_path}", "openai")


# -- the hub's cache

CACHED = """
from compvl.benchmarks import load_benchmark
from compvl.evaluate import evaluate
from compvl.models import open_model

swap = load_benchmark("swap", n=4)
for name in ("hf-hub:org/pe-core", "transformers:org/clip"):
    figures = evaluate(open_model(name, device="cpu"), [swap], n_boot=20, progress=False)
    print(name, figures.n.max())
"""


def in_cache(cache, repository):
    """The folder in which the hub's cache keeps the files of a repository."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots").mkdir()
    return folder / "snapshots" / ("0" * 40)


def test_names_of_the_hub_are_read_from_its_cache(tmp_path, words):
    write_folder(in_cache(tmp_path, "org/pe-core"), "PE-Core-B-16", words)
    write_dual_encoder(in_cache(tmp_path, "org/clip"), "CLIP", words)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CACHED]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["hf-hub:org/pe-core", "4", "transformers:org/clip", "4"]


# -- texts alone


class Sentences(nn.Module):
    """Mean of letters, with the methods of sentence-transformers that are used."""

    max_seq_length = 40

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(128, 16)

    def tokenizer(self, sentences):
        return {"input_ids": [list(sentence) for sentence in sentences]}

    def encode(self, sentences, batch_size=32):
        rows = [self.letters(torch.tensor([ord(c) % 128 for c in s])).mean(0) for s in sentences]
        return torch.stack(rows).detach().numpy()


def longest_only(texts):
    """Tokens of letters, padded to the longest text of the call, and never cut."""
    longest = max(map(len, texts))
    return torch.tensor([[ord(c) % 128 for c in text.ljust(longest, chr(0))] for text in texts])


class LetterSum(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(128, 16, padding_idx=0)

    def encode_text(self, tokens):
        return self.letters(tokens).sum(1)


def text_models():
    return [
        wrap_text_encoder(Sentences(), "sentences"),
        wrap_model(LetterSum(), None, longest_only, "letters"),
    ]


@pytest.mark.filterwarnings("ignore:.*longer than the context")
def test_texts_alone(swap):
    for model in text_models():
        figures = evaluate(model, [swap, "stsb"], n_boot=20, progress=False)
        of_swap = figures[figures.benchmark == "swap"]
        assert set(of_swap.metric) == {"text_only_acc", "text_only_acc_both", "coverage", "cut"}
        assert set(figures[figures.benchmark == "stsb"].metric) >= {"spearman", "pearson"}
        assert figures.value.notna().all()


def test_texts_alone_give_the_figures_of_the_texts(swap):
    whole = create_model(device="cpu")
    alone = wrap_model(whole.clip, None, whole.tokenizer, "texts of micro-CLIP")
    scores = {}
    for model in (whole, alone):
        scores[model.name] = {"swap": item_scores(model, swap, progress=False)}
    differences = compare_models(scores, n_boot=20).set_index("metric")
    assert set(differences.index) == {"text_only_acc", "text_only_acc_both"}
    assert (differences["diff"] == 0).all()


@pytest.mark.parametrize(
    "name", ["aro-relation", "comvg", "winoground", "coco-retrieval", "imagenet", "aro-coco-order"]
)
def test_texts_alone_refuse_images(name):
    for model in text_models():
        with pytest.raises(
            CompvlError, match=f"{name}: the task .* needs images, and {model.name}"
        ):
            evaluate(model, [load_benchmark(name, n=4)], progress=False)


def test_texts_alone_need_no_image_files(tmp_path, swap):
    items = [dataclasses.replace(item, image=tmp_path / "none.jpg") for item in swap.items]
    missing = dataclasses.replace(swap, items=items)
    model = text_models()[1]
    figures = evaluate(model, [missing], keep=tmp_path / "kept", n_boot=20, progress=False)
    again = evaluate(model, [missing], keep=tmp_path / "kept", n_boot=20, progress=False)
    assert figures.equals(again)


def test_tokenizer_that_pads_to_the_longest():
    model = text_models()[1]
    texts = [f"text {k}" for k in range(4100)] + ["a longer text, in the second part"]
    found = Embedder(model, progress=False).texts(texts)
    with torch.no_grad():
        for k in (0, 4099, 4100):
            one = model.encode_text(model.tokenizer([texts[k]]))[0]
            assert torch.allclose(found[k], one, atol=1e-6)


def test_wrapping_says_what_is_missing():
    with pytest.raises(CompvlError, match="None as preprocess"):
        wrap_model(LetterSum(), lambda picture: picture, longest_only, "letters")
    with pytest.raises(CompvlError, match="returns a dict for two captions"):
        wrap_model(LetterSum(), None, lambda texts: {"input_ids": texts}, "letters")
    with pytest.raises(CompvlError, match="has no method encode"):
        wrap_text_encoder(nn.Linear(2, 2))
    with pytest.raises(CompvlError, match="a row for each"):
        wrap_text_encoder(Sentences(), encode=lambda texts: np.zeros(3))


def test_dual_encoder_is_trained_by_its_name(tmp_path, words):
    """With its own mean and std, and one tower where it is asked for; its run is opened by name."""
    write_dual_encoder(tmp_path / "siglip", "SigLIP", words)
    name = f"transformers:{tmp_path / 'siglip'}"
    sizes = dict(n_train=16, steps=2, batch_size=8, lr=1e-3, warmup=0)
    config = TrainConfig("clip-ft", model=name, frozen="image", **sizes)
    run = train(config, runs=tmp_path, progress=False)
    assert run.model.mean == (0.5, 0.5, 0.5)
    start = open_model(name, device="cpu")
    before = dict(start.clip.named_parameters())
    changed = set()
    for key, weight in run.model.clip.named_parameters():
        if not torch.equal(weight, before[key]):
            changed.add(key.split(".")[1])
    assert changed == {"text_model", "logit_scale"}
    assert run.config["start"] != "random"
    assert train(config, runs=tmp_path, progress=False, model=start).folder == run.folder
    opened = load_run(run.folder, "cpu").model
    tokens = start.tokenizer(["a red star"])
    with torch.no_grad():
        assert torch.equal(opened.encode_text(tokens), run.model.encode_text(tokens))

    command = ["evaluate", "--model", str(run.folder), "--benchmark", "swap", "--n", "6"]
    csv = tmp_path / "figures.csv"
    done = CliRunner().invoke(app, [*command, "--device", "cpu", "--csv", str(csv)])
    assert done.exit_code == 0, done.output
    swap = load_benchmark("swap", n=6)
    expected = evaluate(opened, [swap], progress=False)
    assert list(pd.read_csv(csv).value) == pytest.approx(list(expected.value), abs=1e-6)
    with pytest.raises(CompvlError, match="weights of its own"):
        train(TrainConfig("clip-ft", model=name, pretrained="openai"), runs=tmp_path)


def test_patches_are_not_trained_as_pictures(tmp_path, words):
    """NaFlex has no mean and std that make a picture the network's input."""
    write_dual_encoder(tmp_path, "SigLIP 2 NaFlex", words)
    config = TrainConfig("clip-ft", model=f"transformers:{tmp_path}", n_train=16, batch_size=8)
    with pytest.raises(CompvlError, match="to be trained, .* lacks .*mean"):
        train(config, runs=tmp_path, progress=False)


# Arguments that are not what they should be


SIZES = itertools.count(4)


def varying_size(picture):
    return torch.zeros(3, next(SIZES), 8)


PREPROCESSINGS = {
    "a dict for one picture.*pixel_values": lambda picture: {"pixel_values": torch.zeros(1)},
    "a Image for one picture": lambda picture: picture,
    r"shape \[1, 3, 48, 48\] for one picture": lambda picture: torch.zeros(1, 3, 48, 48),
    r"several shapes, \[3, .*, 8\] and \[3, .*, 8\]": varying_size,
}


@pytest.mark.parametrize("message", PREPROCESSINGS)
def test_preprocessing_has_to_return_one_image_of_a_fixed_size(swap, message):
    micro = create_model("micro-clip", device="cpu")
    model = wrap_model(micro.clip, PREPROCESSINGS[message], micro.tokenizer)
    with pytest.raises(CompvlError, match=message):
        item_scores(model, swap, progress=False)


def test_preprocessing_and_tokenizer_that_are_exchanged_are_refused():
    micro = create_model("micro-clip", device="cpu")
    with pytest.raises(CompvlError, match="the third argument, after the preprocessing"):
        wrap_model(micro.clip, micro.tokenizer, micro.preprocess)


@pytest.mark.parametrize("device", ["gpu0", "cuda:99"])
def test_a_device_that_is_not_there_is_named(swap, device):
    model = create_model("micro-clip", device="cpu")
    for call in (
        lambda: evaluate(model, [swap], device=device, progress=False),
        lambda: create_model("micro-clip", device=device),
    ):
        with pytest.raises(CompvlError, match=f"device '{device}' cannot be used"):
            call()


def test_numbers_of_resamples_are_whole(swap):
    model = create_model("micro-clip", device="cpu")
    scores = item_scores(model, swap, progress=False)
    for n_boot in (0, 1.5):
        for call in (
            lambda: evaluate(model, [swap], n_boot=n_boot, progress=False),  # noqa: B023
            lambda: compare(scores, scores, n_boot=n_boot),  # noqa: B023
        ):
            with pytest.raises(CompvlError, match=f"n_boot={n_boot}: give a whole number"):
                call()
    with pytest.raises(CompvlError, match="no model's scores"):
        compare_models({})


def test_pictures_in_memory_are_given_with_a_function_that_reads_them():
    pictures = [Image.new("RGB", (48, 48), color) for color in ("red", "blue")]
    model = create_model("micro-clip", device="cpu")

    def of(image):
        return Benchmark("own", "pair", [Pair("0", image, "a red star", "a blue star")], "mine")

    with pytest.raises(CompvlError, match="of type Image.*StoredImage"):
        item_scores(model, of(pictures[0]), progress=False)
    scores = item_scores(model, of(StoredImage("mine", 0, pictures.__getitem__)), progress=False)
    assert len(scores) == 1


def test_calls_with_something_else_than_a_model_or_a_config_say_what_to_give(tmp_path):
    model = create_model("micro-clip", device="cpu")
    with pytest.raises(CompvlError, match="a str cannot be explained: give a compvl Model"):
        attribute("micro-clip", Image.new("RGB", (48, 48)), "a red star")
    with pytest.raises(CompvlError, match="of type NoneType"):
        attribute(model, None, "a red star")
    with pytest.raises(CompvlError, match="config is a str: give a TrainConfig"):
        train("hn", tmp_path)
    (tmp_path / "DONE").touch()
    with pytest.raises(CompvlError, match="model is a CLIP: give wrap_model"):
        load_run(tmp_path, model=model.clip)
