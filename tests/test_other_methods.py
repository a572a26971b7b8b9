"""Training with what a plain batch does not have: bags of captions (DAC), a diffusion model's help
(SDS-CLIP), units of captions (CS-CLIP), pictures of hard negatives (TripletCLIP), alternative
images (NegCLIP) and a margin from the step before (CE-CLIP); and their losses beside the released
ones."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from compvl.core import CompvlError
from compvl.data.loading import load_train_data
from compvl.losses import rank_loss
from compvl.models.clip import create_model
from compvl.paper.evaluation import results
from compvl.paper.profiles import PROFILES
from compvl.paper.rows import ROWS, rows
from compvl.paper.table_rows import HP_TABLE1, SINCE_2024
from compvl.train import terms
from compvl.train.batches import Collate, Steps
from compvl.train.config import TrainConfig
from compvl.train.loop import train
from compvl.train.neighbours import nearest_alternatives
from compvl.train.terms import MOST_MARGIN, Features, total_loss

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
PLAIN = replace(SDS, method="hn")
CONFIGS = {
    "dac": CONFIG,
    "sds-clip": SDS,
    "cs-clip": replace(PLAIN, **ROWS["cs-clip"].train),
    "triplet-clip": replace(PLAIN, **ROWS["triplet-clip"].train),
    "negclip": replace(PLAIN, **ROWS["negclip"].train),
    "ce-clip": replace(PLAIN, **ROWS["ce-clip"].train),
    "ce-clip-released": replace(PLAIN, **ROWS["ce-clip-released"].train),
}
TERMS = {
    "dac": ["mil", "mil_hn", "with_mil"],
    "sds-clip": ["sds"],
    "cs-clip": ["units", "with_units"],
    "triplet-clip": ["triplet", "with_triplet"],
    "negclip": ["itc", "with_hn"],
    "ce-clip": ["imc"],
    "ce-clip-released": ["imc_released"],
}
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


def training_script(configs, runs) -> str:
    """A program that trains each of the configs from random weights."""
    fields = [json.loads(json.dumps(asdict(config))) for config in configs]
    return f"""
import torch
from compvl.models.clip import create_model
from compvl.train.config import TrainConfig
from compvl.train.loop import train
for fields in {fields!r}:
    config = TrainConfig(**fields)
    torch.manual_seed(0)
    model = create_model("micro-clip", device="cpu")
    train(config, runs={str(runs)!r}, progress=False, model=model)"""


@pytest.fixture(scope="module")
def runs_of_two(tmp_path_factory):
    """The folder of the runs of all methods, each on two processes."""
    folder = tmp_path_factory.mktemp("two")
    script = folder / "run.py"
    script.write_text(training_script(CONFIGS.values(), folder))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("method", CONFIGS)
def test_two_processes(runs_of_two, tmp_path, method):
    config = CONFIGS[method]
    two = train(config, runs=runs_of_two, progress=False, model=new_model())  # it is finished
    one = train(config, runs=tmp_path, progress=False, model=new_model())
    assert two.folder.parent == runs_of_two
    assert len(two.metrics) == 4
    # the noise of L_SDS is each process's own
    tolerance = 2e-2 if method == "sds-clip" else 1e-3
    columns = [name for name in two.metrics if name not in ("samples_per_s", "sds", "loss")]
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


# The losses beside the released ones, on the same features.


def unit_vectors(*shape):
    """Random unit vectors, float32."""
    generator = torch.Generator().manual_seed(sum(shape))
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1)


def parts_of(method, features, **options):
    """The parts of a method's loss."""
    return total_loss(features, TrainConfig(method, **options).resolved())[1]


def released_negclip(images, texts, negatives, scale):
    """`negclip_loss` of tripletclip/TripletCLIP; NegCLIP's own code has the same."""
    labels = torch.arange(len(images))
    to_texts = torch.cat([scale * images @ texts.T, scale * images @ negatives.T], dim=-1)
    by_text = F.cross_entropy(scale * texts @ images.T, labels)
    return (F.cross_entropy(to_texts, labels) + by_text) / 2


def test_negclip_is_the_released_loss():
    images, texts, negatives = unit_vectors(3, 8, 16)
    scale = torch.tensor(20.0)
    logits_per_image = scale * images @ torch.cat([texts, negatives]).T  # ClipLoss, vinid/neg_clip
    logits_per_text = scale * torch.cat([texts, negatives]) @ images.T
    labels = torch.arange(8)
    released = F.cross_entropy(logits_per_image, labels)
    released = (released + F.cross_entropy(logits_per_text[:8], labels)) / 2
    has_one = torch.ones(8, dtype=torch.bool)
    found = parts_of("negclip", Features(images, texts, scale, negatives, has_one))["itc"]
    assert abs(found - released) < 1e-6
    assert abs(found - released_negclip(images, texts, negatives, scale)) < 1e-6


def test_triplet_is_the_released_loss():
    images, texts, other_images, other_texts = unit_vectors(4, 8, 16)
    scale = torch.tensor(20.0)
    released = released_negclip(images, texts, other_texts, scale)
    released = released + released_negclip(other_images, other_texts, texts, scale)
    both = Features(
        torch.cat([images, other_images]),
        torch.cat([texts, other_texts]),
        scale,
        batch={"present": torch.ones(16, dtype=torch.bool)},
    )
    assert abs(parts_of("triplet-clip", both, w_itc=0.0)["triplet"] - released) < 1e-6


def released_units(images, units, foils, temperature, valid):
    """`_compute_negclip_hard_loss_for_components` of kargibora/CS-CLIP."""
    losses = []
    for k in range(units.shape[1]):
        rows = valid[:, k]
        if not rows.any():
            losses.append(torch.tensor(0.0))
            continue
        logits = images[rows] @ units[rows, k].T / temperature
        to_foil = (images[rows] * foils[rows, k]).sum(-1, keepdim=True) / temperature
        labels = torch.arange(len(logits))
        by_image = F.cross_entropy(torch.cat([logits, to_foil], dim=1), labels)
        by_unit = F.cross_entropy(units[rows, k] @ images[rows].T / temperature, labels)
        losses.append((by_image + by_unit) / 2)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("missing", [(), (1, 4, 5), range(8)])
def test_units_are_the_released_loss(missing):
    images, texts, negatives = unit_vectors(3, 8, 16)
    units, foils = unit_vectors(2, 8, 2, 16)
    valid = torch.ones(8, 2, dtype=torch.bool)
    valid[list(missing), 1] = False
    features = Features(
        images,
        texts,
        torch.tensor(20.0),
        negatives,
        torch.ones(8, dtype=torch.bool),
        bags=units,
        in_bags=valid,
        bag_negatives=foils,
        in_bag_negatives=valid,
    )
    parts = parts_of("cs-clip", features)
    assert abs(parts["units"] - released_units(images, units, foils, 0.05, valid)) < 1e-6
    full = released_negclip(images, texts, negatives, 20.0)  # L_full of the same code
    assert abs(parts["itc"] - full) < 1e-6


def released_ranks(right, wrong, thresholds):
    """`get_cmr_loss` of lezhang7/Enhance-FineGrained: the loss, and the thresholds from then on."""
    loss = F.relu(thresholds + wrong - right[:, None]).mean()
    return loss, (right.mean() - wrong.mean(0)).clamp(0, 10)


@pytest.mark.parametrize("scale", [5.0, 100.0])
def test_ce_clip_is_the_published_loss_and_its_released_head(scale):
    kept = {}
    thresholds = 0.0
    for k in range(3):
        images, texts = unit_vectors(2, 8, 16 + k)
        negatives = unit_vectors(8, 4, 16 + k)
        texts = F.normalize(texts + 2 * images, dim=-1)
        has_one = torch.ones(8, 4, dtype=torch.bool)
        batch = {"carried": kept}
        features = Features(images, texts, torch.tensor(scale), negatives, has_one, batch=batch)
        parts = parts_of("ce-clip", features)
        right = scale * (images * texts).sum(-1)
        wrong = scale * torch.einsum("bd,bkd->bk", images, negatives)
        released, thresholds = released_ranks(right, wrong, thresholds)
        assert abs(parts["cmr"] - released) < 1e-6 * max(1, released)
        assert torch.allclose(kept["cmr_margin"], thresholds)
        among_texts = scale * texts @ negatives.flatten(0, 1).T
        rows = torch.cat([right[:, None], among_texts], dim=-1)  # as of its commit 2d07821
        released = F.cross_entropy(rows, torch.zeros(8, dtype=torch.long))
        assert abs(parts["imc"] - released) < 1e-6 * max(1, released)
        released = F.cross_entropy(among_texts, torch.zeros(8, dtype=torch.long))  # the code now
        found = parts_of("ce-clip-released", replace(features, batch={"carried": {}}))
        assert abs(found["imc_released"] - released) < 1e-6 * max(1, released)
    assert (thresholds == MOST_MARGIN).all() == (scale == 100)


def test_paraphrases_are_aligned_as_in_the_released_code():
    images, captions, paraphrases, negatives = unit_vectors(4, 8, 16)
    has_one = torch.ones(8, dtype=torch.bool)
    scale = torch.tensor(20.0)
    features = Features(images, captions, scale, negatives, has_one, paraphrases, has_one)
    found = parts_of("hn+hp-distance", features)["hp_distance"]
    assert abs(found - F.mse_loss(captions, paraphrases, reduction="none").sum(1).mean()) < 1e-6
    # READ-CLIP has paraphrases in the rows and captions in the columns
    exchanged = replace(features, captions=paraphrases, hard_positives=captions)
    released = F.cross_entropy(20.0 * paraphrases @ captions.T, torch.arange(8))
    assert abs(parts_of("hn+hp-text", exchanged)["hp_text"] - released) < 1e-6


def released_focal(logits, gamma, smoothing):
    """`_focal_loss_with_nsr` of ytaek-oh/fsc-clip for rows with all hard negatives."""
    labels = torch.full_like(logits, smoothing / logits.shape[1])
    labels[:, 0] += 1 - smoothing
    losses = -F.log_softmax(logits, dim=-1)
    losses = losses * torch.pow(1 - torch.exp(-losses), gamma)
    return (labels * losses).sum(-1).mean()


def test_fsc_clip_is_the_released_global_loss():
    images, texts = unit_vectors(2, 8, 16)
    negatives = unit_vectors(8, 3, 16)
    has_one = torch.ones(8, 3, dtype=torch.bool)
    features = Features(images, texts, torch.tensor(20.0), negatives, has_one)
    every = torch.cat([texts[:, None], negatives], 1)
    logits = 20.0 * torch.einsum("bd,bkd->bk", images, every)
    found = parts_of("fsc-clip", features)["hn_calibrated"]
    assert abs(found - released_focal(logits, 2.0, 0.02)) < 1e-6


# What a batch contains.


def test_alternatives_bring_their_own_texts():
    data = load_train_data("microworld", n=64, kinds=("negclip",), source="text", sound=False)
    model = new_model()
    alternatives = nearest_alternatives(model, data, 3)
    config = replace(CONFIGS["negclip"], n_train=64).resolved()
    steps = Steps(data, Collate(model, config), config, 0, 1, alternatives)
    plain = Steps(data, Collate(model, config), config, 0, 1)
    seen = set()
    for step in range(16):  # two epochs
        (batch,) = steps[step]
        (without,) = plain[step]
        assert torch.equal(batch["images"][:8], without["images"])
        assert torch.equal(batch["tokens"][:8], without["tokens"][:8])
        epoch, items = step // 8, np.random.default_rng([0, step // 8]).permutation(64)
        items = items[8 * (step % 8) :][:8]
        others = alternatives.draw(items, epoch, config.seed)
        seen |= set(zip(items.tolist(), others.tolist(), strict=True))
        expected = data.batch(others)
        assert torch.equal(batch["images"][8:], expected["images"])
        assert torch.equal(batch["tokens"][8:16], model.tokenizer(expected["caption"]))
        rows = [i for i, text in enumerate(expected["hard_negative"]) if text]
        assert batch["hard_negative_rows"][batch["hard_negative_rows"] >= 8].sub(8).tolist() == rows
    assert len(seen) > 64, "another epoch draws other alternatives"


def test_alternatives_of_photographs_show_another_image(tmp_path):
    colors = ["red", "green", "blue", "white", "black"]
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(5)]
    captions = [
        {"image_id": k % 5, "id": k, "caption": f"a {colors[k % 5]} field"} for k in range(15)
    ]
    for i, color in enumerate(colors):
        Image.new("RGB", (48, 48), color).save(tmp_path / f"{i}.png")
    file = tmp_path / "captions.json"
    file.write_text(json.dumps({"images": images, "annotations": captions}))
    files = dict(captions_json=file, image_root=tmp_path, cache=tmp_path / "cache")
    data = load_train_data("coco", image_size=48, progress=False, **files)
    alternatives = nearest_alternatives(new_model(), data, 3)
    assert alternatives.nearest.shape == (5, 3)
    drawn = np.stack([alternatives.draw(np.arange(15), epoch) for epoch in range(40)])
    of_image = drawn % 5
    assert (of_image != np.arange(15) % 5).all()
    assert all(set(of_image[:, k]) == set(alternatives.nearest[k % 5]) for k in range(15))
    assert set(drawn[:, 0]) > set(of_image[:, 0]), "captions of an image are drawn as well"


def test_alternatives_are_of_the_starting_weights(tmp_path):
    """A resumed run draws what the whole one does, though its weights have changed since."""
    config = replace(CONFIGS["negclip"], steps=4, lr=0.1, warmup=0)
    whole = train(config, runs=tmp_path / "a", progress=False, model=new_model())
    data = load_train_data("microworld", 32)
    before, after = (nearest_alternatives(m, data, 3) for m in (new_model(), whole.model))
    assert (before.nearest != after.nearest).any()

    def stop(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, runs=tmp_path / "b", progress=False, model=new_model(), on_log=stop)
    again = train(config, runs=tmp_path / "b", progress=False, model=new_model())
    assert again.metrics.with_hn.equals(whole.metrics.with_hn)
    assert again.metrics.loss.equals(whole.metrics.loss)


def test_the_margin_begins_anew_with_each_epoch(tmp_path, monkeypatch):
    margins = []

    def watched(*features, margin):
        margins.append(margin)
        return rank_loss(*features, margin=margin)

    monkeypatch.setattr(terms, "rank_loss", watched)
    config = replace(CONFIGS["ce-clip"], steps=6)  # epochs of four steps
    train(config, runs=tmp_path, progress=False, model=new_model())
    assert margins[0] == margins[4] == 0
    # The others are carried over from the step before; they may be 0 as well, if no caption leads.
    is_carried = [isinstance(margin, torch.Tensor) for margin in margins]
    assert is_carried == [False, True, True, True, False, True]


def test_their_rows_have_results(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPVL_RUNS", str(tmp_path / "runs"))
    keys = ["negclip", "cs-clip", "triplet-clip"]
    found = results(rows(*keys), ["swap"], PROFILES["smoke"], tmp_path, "later")
    assert not found.gaps
    figures = found.summary().query("metric == 'aug_acc'")
    assert sorted(figures.method) == sorted(keys)
    assert set(keys) <= {row.key for row in HP_TABLE1 + SINCE_2024}


@pytest.mark.parametrize("key", ["cs-clip", "triplet-clip"])
def test_what_the_data_lacks_is_said(tmp_path, key):
    if key == "triplet-clip":
        with pytest.raises(CompvlError, match="counterparts=True"):
            train(replace(CONFIGS[key], data_options={}), runs=tmp_path, progress=False)
        with pytest.raises(CompvlError, match="source='oracle'"):
            load_train_data("microworld", 8, source="text", counterparts=True)
    else:
        with pytest.raises(CompvlError, match="same place"):
            replace(CONFIGS[key], w_mil=1.0)
