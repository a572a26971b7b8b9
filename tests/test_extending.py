"""What CONTRIBUTING.md says: a loss, a row and a benchmark of one's own, by public registries."""

import dataclasses

import pandas as pd
import pytest
import torch
from PIL import Image

from compvl.benchmarks import (
    Loaded,
    Pair,
    list_benchmarks,
    load_benchmark,
    loading,
    register,
    registry,
)
from compvl.benchmarks.files import read_list
from compvl.core import write_json
from compvl.evaluate import evaluate
from compvl.models.clip import create_model
from compvl.paper import PROFILES, ROWS, TABLES, Row, TableSpec
from compvl.paper.columns import ACCURACY
from compvl.paper.evaluation import results
from compvl.paper.rows import rows
from compvl.train import METHODS, TERMS, TrainConfig, register_method, register_term, train

SWAP = [column for column in ACCURACY if column.benchmark == "swap"]


@pytest.fixture
def own_loss():
    """A registered margin loss, and a method that has it."""

    @register_term("margin", needs=("hard_negatives",))
    def margin_term(features, config):
        right = (features.images * features.captions).sum(1)
        wrong = (features.images * features.hard_negatives).sum(1)
        return ((wrong - right + 0.2).clamp(min=0) * features.has_hard_negative).mean()

    register_method("clip+margin", margin=0.5)
    yield "clip+margin"
    TERMS.pop("margin")
    METHODS.pop("clip+margin")


@pytest.fixture
def tiny(tmp_path):
    """The profile smoke from random weights, with two steps on sixteen pairs."""
    torch.manual_seed(0)
    path = tmp_path / "start.safetensors"
    create_model(device="cpu").save(path)
    profile = PROFILES["smoke"].training(pretrained=str(path), n_train=16, steps=2, batch_size=8)
    return dataclasses.replace(profile, n_items=12, n_boot=30)


def test_a_row_and_a_loss_of_ones_own(own_loss, tiny, tmp_path, monkeypatch):
    """A row is trained with a loss that compvl does not know, and is in a table of its own."""
    monkeypatch.setenv("COMPVL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setitem(
        ROWS, "margin", Row("margin", "CLIP with a margin", "own", train=dict(method=own_loss))
    )
    spec = TableSpec("own1", "A loss of our own", rows("clip", "margin"), SWAP, file="table1")
    monkeypatch.setitem(TABLES, "own1", spec)

    res = results(TABLES["own1"].rows, ["swap"], tiny, tmp_path / "out", "own", progress=False)
    res.check()
    trained = res.table[res.table.method == "margin"]
    assert set(trained.benchmark) == {"swap"}
    assert trained.value.notna().all()

    table = TABLES["own1"].table(res)
    assert "CLIP with a margin" in table.markdown()
    metrics = next((tmp_path / "runs").glob("clip+margin-*/metrics.csv"))
    assert (pd.read_csv(metrics).margin > 0).all()


def test_a_benchmark_of_ones_own(tmp_path, monkeypatch):
    """A registered benchmark is listed, loaded, and evaluated with a model."""
    monkeypatch.setattr(registry, "REGISTRY", registry.REGISTRY.copy())
    monkeypatch.setattr(loading, "REGISTRY", registry.REGISTRY)

    @register("toy-colors", "pair", published_n=6, places=("images",))
    def load_toy(request):
        """The color of a picture."""
        entries = read_list(request.file("toy.json"))
        pairs = [Pair(f"{request.name}-{i}", *entry) for i, entry in enumerate(entries)]
        return Loaded(pairs, "toy.json")

    colors = ["red", "green", "blue"]
    entries = []
    for i in range(6):
        color = colors[i % 3]
        path = tmp_path / "images" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (48, 48), color).save(path)
        entries.append([path.name, f"a {color} picture", f"a {colors[(i + 1) % 3]} picture"])
    write_json(tmp_path / "toy.json", entries)

    assert "toy-colors" in list_benchmarks()
    benchmark = load_benchmark("toy-colors", tmp_path)
    assert benchmark.coverage == 1
    torch.manual_seed(0)
    model = create_model(device="cpu")
    figures = evaluate(model, benchmark, n_boot=10, progress=False).set_index("metric")
    assert figures.n["accuracy"] == 6
    assert 0 <= figures.value["accuracy"] <= 100


class OwnItems:
    """Sixteen grey pictures with bags of captions, and with pictures of their hard negatives."""

    def __len__(self):
        return 16

    def describe(self):
        return dict(data="own items")

    def set_epoch(self, epoch):
        self.epoch = epoch

    def batch(self, indices):
        n = len(indices)
        images = torch.full((n, 3, 48, 48), 99, dtype=torch.uint8)
        return dict(
            images=images,
            caption=["A red cat."] * n,
            hard_negative=["A blue cat."] * n,
            hard_positive=[None] * n,
            id=list(map(str, indices)),
            bag=[["A cat.", "A pet."]] * n,
            bag_negative=[["A dog.", None]] * n,
            counterpart=["A blue cat."] * n,
            counterpart_images=images // 2,
        )


@pytest.mark.parametrize("method, column", [("dac", "with_mil"), ("triplet-clip", "with_triplet")])
def test_a_dataset_of_ones_own(method, column, tmp_path):
    """It may have what no file has: bags of captions, and pictures of hard negatives."""
    config = TrainConfig(method, data="coco", pretrained=None, steps=2, batch_size=8)
    run = train(config, data=OwnItems(), runs=tmp_path, progress=False)
    assert list(run.metrics[column]) == [8, 8]
