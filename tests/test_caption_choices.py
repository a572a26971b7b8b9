"""Benchmarks with one image and several captions: small files in the released formats, and values
beside those of the published programs on the same scores."""

import csv
import dataclasses
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from released import with_other_column

from compvl.benchmarks.items import CaptionChoice, SetChoice
from compvl.benchmarks.loading import GROUPS, load_benchmark
from compvl.benchmarks.registry import REGISTRY
from compvl.benchmarks.whatsup import read_whatsup
from compvl.core import CompvlError
from compvl.evaluate.engine import evaluate
from compvl.evaluate.failures import item_table
from compvl.evaluate.kept import identity
from compvl.evaluate.tasks import CaptionChoiceTask
from compvl.metrics import figures
from compvl.models.clip import create_model

WORDS = {
    "whatsup-a": ("left_of", "right_of", "on", "under"),
    "whatsup-b": ("left_of", "right_of", "in-front_of", "behind"),
}
FILES = {
    "whatsup-a": ("controlled_images_dataset.json", "controlled_images"),
    "whatsup-b": ("controlled_clevr_dataset.json", "controlled_clevr"),
}


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (60, 40), (len(path.name) * 7 % 256, 90, 120)).save(path)


def whatsup_entries(name, things=("mug", "beer-bottle", "plate")):
    """Annotations of sets in the released format: the first caption is the true one."""
    file, folder = FILES[name]
    entries = []
    for thing in things:
        texts = [f"A {thing} {word.replace('_', ' ')} a table" for word in WORDS[name]]
        for k, word in enumerate(WORDS[name]):
            path = f"data/{folder}/{thing}_{word}_table.jpeg"
            options = [texts[k], *texts[:k], *texts[k + 1 :]]
            entries.append(dict(image_path=path, caption_options=options))
    return file, entries


def published_whatsup(entries, scores, subset):
    """Individual, pair and set accuracy as `Controlled_Images.evaluate_scores` computes them.

    amitakamath/whatsup_vlms, dataset_zoo/aro_datasets.py, MIT License, Copyright (c) 2023 Amita
    Kamath. `scores`: [N, 1, 4], the true caption first."""
    preds = np.argmax(np.squeeze(scores, axis=1), axis=-1)
    correct_mask = preds == 0
    eval_dict = {}
    for d, correct in zip(entries, correct_mask, strict=True):
        file = d["image_path"].split("/")[-1]
        key = (file.split("_")[0], file.split("_")[-1][:-5])
        eval_dict.setdefault(key, {})[file.split("_")[1]] = correct
    pair_correct = 0
    set_correct = 0
    for correct_dict in eval_dict.values():
        if correct_dict["left"] and correct_dict["right"]:
            pair_correct += 1
        if subset == "A":
            if correct_dict["on"] and correct_dict["under"]:
                pair_correct += 1
        elif correct_dict["in-front"] and correct_dict["behind"]:
            pair_correct += 1
        if sum(correct_dict.values()) == 4:
            set_correct += 1
    n = len(entries)
    return [np.mean(correct_mask) * 100, pair_correct * 100 / (n / 2), set_correct * 100 / (n / 4)]


def score_table(items, scores):
    """A table of scores as the task makes it; `scores`: [N, captions], the true one first."""
    table = pd.DataFrame(
        dict(
            id=[item.id for item in items],
            group=[item.group for item in items],
            s_c=scores[:, 0],
            s_foil=scores[:, 1:].max(1),
            rank=(scores[:, 1:] >= scores[:, :1]).sum(1),
            foils=scores.shape[1] - 1,
        )
    )
    if isinstance(items[0], SetChoice):
        table["pair"] = [item.pair for item in items]
        table["set"] = [item.set for item in items]
    return table


@pytest.mark.parametrize("name", list(WORDS))
def test_pairs_and_sets_as_the_authors_count_them(name, tmp_path):
    things = [f"thing-{k}" for k in range(80)]
    file, entries = whatsup_entries(name, things)
    write_json(tmp_path / file, entries)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(entries))  # sets need not be together
    entries = [entries[k] for k in order]
    write_json(tmp_path / file, entries)
    items = read_whatsup(tmp_path / file, name)
    scores = rng.normal(size=(len(entries), 4))
    scores[:, 0] += 1.5
    outcomes = CaptionChoiceTask().outcomes(score_table(items, scores))
    found = [100 * outcomes[f"{what}accuracy"].mean() for what in ("", "pair_", "set_")]
    expected = published_whatsup(entries, scores[:, None], name[-1].upper())
    assert found == pytest.approx(expected, abs=1e-9)
    assert 5 < expected[2] < expected[1] < expected[0] < 95
    assert [len(outcomes[f"{what}accuracy"]) for what in ("", "pair_", "set_")] == [320, 160, 80]


def test_intervals_of_sets_resample_sets():
    """80 sets of four equal outcomes vary as 80 numbers do, not as 320."""
    right = np.repeat(np.arange(80) % 2 == 0, 4)
    rows = dict(id=range(320), group=["on", "under", "left of", "right of"] * 80, s_c=1.0 * right)
    table = pd.DataFrame(rows).assign(s_foil=0.5, rank=0, foils=3)
    table["pair"] = np.repeat(np.arange(160), 2).astype(str)
    table["set"] = np.repeat(np.arange(80), 4).astype(str)
    found = figures(CaptionChoiceTask().outcomes(table), table.group, 2000)
    overall = found[found.group == "all"].set_index("metric")
    width = overall.hi - overall.lo
    assert overall.n["set_accuracy"] == 80
    assert width["set_accuracy"] / width["accuracy"] == pytest.approx(2, rel=0.15)
    of_sets = found[found.metric.isin(["pair_accuracy", "set_accuracy"])]
    assert of_sets.group.tolist() == ["all", "all"]


def test_ties_as_right_is_aro_s_argmax():
    """ARO's programs put the caption first and take `np.argmax`, which returns the first maximum
    (mertyg/vision-language-models-are-bows, dataset_zoo/aro_datasets.py, MIT License)."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 4, (400, 5)) / 4
    items = [CaptionChoice(str(k), None, "c", ("f",) * 4) for k in range(400)]
    outcomes = CaptionChoiceTask().outcomes(score_table(items, scores))
    preds = np.argmax(scores, axis=-1)
    assert outcomes["accuracy_ties_right"].mean() == np.mean(preds == 0)
    assert outcomes["accuracy"].mean() < np.mean(preds == 0)
    assert "pair_accuracy" not in outcomes


def test_recalls_and_mean_rank_are_those_of_a_ranking():
    """CREPE ranks the caption among its hard negatives, from 1, and takes recall at 1, 3, 5, 10."""
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(300, 12))
    items = [CaptionChoice(str(k), None, "c", ("f",) * 11) for k in range(300)]
    outcomes = CaptionChoiceTask().outcomes(score_table(items, scores))
    ranks = (np.argsort(-scores, axis=1) == 0).argmax(1)
    assert outcomes["mean_rank"].mean() == pytest.approx(ranks.mean() + 1)
    for k in (1, 3, 5, 10):
        assert outcomes[f"recall@{k}"].mean() == np.mean(ranks < k)
    few = CaptionChoiceTask().outcomes(score_table(items, scores[:, :5]))
    assert [name for name in few if name.startswith("recall")] == ["recall@1", "recall@3"]


def question(image, right, template):
    """A row of NegBench."""
    captions = {f"caption_{k}": f"Caption {k} of {image}." for k in range(4)}
    return dict(
        correct_answer=right,
        **captions,
        correct_answer_template=template,
        image_path=f"/data/coco/images/val2017/{image}",
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root with small files of each benchmark in the released formats."""
    root = tmp_path_factory.mktemp("root")
    for name in FILES:
        file, entries = whatsup_entries(name)
        write_json(root / "whatsup" / file, entries)
        for entry in entries:
            picture(root / "whatsup" / entry["image_path"].removeprefix("data/"))
    one = [[139, "A photo of a dog on the left", "A photo of a dog on the right"]]
    two = [["285", "A photo of a cup above a jug", "A photo of a cup below a jug"]]
    for stem in ("coco", "vg"):
        write_json(root / f"whatsup/{stem}_qa_one_obj.json", one)
        write_json(root / f"whatsup/{stem}_qa_two_obj.json", two)
    for k in (139, 285):
        picture(root / f"coco/val2017/{k:012d}.jpg")
        picture(root / f"whatsup/vg_images/{k}.jpg")

    rows = [question("000000000139.jpg", 0, "positive"), question("000000000285.jpg", 3, "hybrid")]
    rows.append(question("000000000999.jpg", 1, "negative"))  # its image is missing
    write_csv(root / "negbench/images/COCO_val_mcq_llama3.1_rephrased.csv", rows)
    row = dict(filepath="x/000000000139.jpg", captions="['A dog.', 'No cat.']")
    write_csv(root / "negbench/images/COCO_val_retrieval.csv", [row])

    region = dict(image_id=7, x=3, y=4, width=30, height=20, caption="a red wall and a door")
    foils = ["a blue wall and a door", "a red door and a wall"]
    for kind in ("atom", "swap", "negate"):
        for n in range(4, 13):
            file = f"{kind}/prod_vg_hard_negs_{kind}_complexity_{n}.csv"
            rows = [region | dict(hard_negs=str(foils))]
            write_csv(root / "crepe/prod_hard_negatives" / file, rows)
    columns = {f"valid_hard_negs_{kind}": str(foils) for kind in ("atom", "comp", "combined")}
    for split in ("seen", "unseen"):
        file = f"syst_vg_hard_negs_{split}_compounds_in_cc12m.csv"
        write_csv(root / "crepe/syst_hard_negatives" / file, [region | columns])
    picture(root / "visual_genome/VG_100K/7.jpg")

    units = dict(
        sample_id="coco_1_2",
        original_caption="A dog on a sofa.",
        entities=["dog", "sofa"],
        negative_entities={"sofa": [dict(negative="table", change_type="object_change")]},
        relations=[dict(subject="dog", relation_type="lying on", object="sofa", negatives=[])],
        image_path="datasets/COCO/val2014/COCO_val2014_000000000001.jpg",
    )
    write_json(root / "half_truths/coco_val.json", [units])
    picture(root / "coco/val2014/COCO_val2014_000000000001.jpg")
    return root


@pytest.fixture(scope="module")
def model():
    return create_model("micro-clip", device="cpu")


EXPECTED = {  # items, share of them with images
    "whatsup-a": (12, 100),
    "whatsup-b": (12, 100),
    "whatsup-coco-one": (1, 100),
    "whatsup-coco-two": (1, 100),
    "whatsup-gqa-one": (1, 100),
    "whatsup-gqa-two": (1, 100),
    "half-truths-entity": (1, 100),
    "half-truths-relation": (2, 100),
    "negbench-coco": (3, 200 / 3),
    "negbench-coco-retrieval": (1, 100),
    "crepe-productivity-atom": (9, 100),
    "crepe-productivity-swap": (9, 100),
    "crepe-productivity-negate": (9, 100),
    "crepe-systematicity": (6, 100),
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_released_format_is_read_and_evaluated(name, root, model):
    n, coverage = EXPECTED[name]
    benchmark = load_benchmark(name, root)
    assert len(benchmark) == n
    assert 100 * benchmark.coverage == pytest.approx(coverage)
    assert f"images of {benchmark.present} of {n}" in repr(benchmark)
    table, scores = evaluate(
        model, [benchmark.covered()], n_boot=50, progress=False, return_scores=True
    )
    overall = table[table.group == "all"].set_index("metric")
    assert overall.n["coverage"] == benchmark.present
    assert len(item_table(benchmark.covered(), scores[name])) == len(scores[name])
    if name in WORDS:
        assert overall.n[["accuracy", "pair_accuracy", "set_accuracy"]].tolist() == [12, 6, 3]


HALF_TRUTHS = (
    "half_truths/coco_val.json",
    "sample_id image_path entities negative_entities relations",
)
COLUMNS = {  # benchmark: its file, what is read of it
    "whatsup-a": ("whatsup/controlled_images_dataset.json", "image_path caption_options"),
    "whatsup-b": ("whatsup/controlled_clevr_dataset.json", "image_path caption_options"),
    "half-truths-entity": HALF_TRUTHS,
    "half-truths-relation": HALF_TRUTHS,
    "negbench-coco": (
        "negbench/images/COCO_val_mcq_llama3.1_rephrased.csv",
        "image_path caption_0 caption_1 caption_2 caption_3 correct_answer correct_answer_template",
    ),
    "negbench-coco-retrieval": ("negbench/images/COCO_val_retrieval.csv", "filepath captions"),
    "crepe-productivity-swap": (
        "crepe/prod_hard_negatives/swap/prod_vg_hard_negs_swap_complexity_12.csv",
        "image_id x y width height caption hard_negs",
    ),
    "crepe-systematicity": (
        "crepe/syst_hard_negatives/syst_vg_hard_negs_unseen_compounds_in_cc12m.csv",
        "image_id x y width height caption valid_hard_negs_atom valid_hard_negs_comp "
        "valid_hard_negs_combined",
    ),
}


@pytest.mark.parametrize("name", list(COLUMNS))
def test_every_wrong_column_is_refused_by_name(name, root, tmp_path):
    file, columns = COLUMNS[name]
    for column in columns.split():
        path = with_other_column(root, file, column, tmp_path / column)
        with pytest.raises(CompvlError, match=rf"{path.name}.* '?{column}\b"):
            load_benchmark(name, tmp_path / column)


@pytest.mark.parametrize("stem", ["coco", "gqa"])
@pytest.mark.parametrize("objects", ["one", "two"])
def test_entries_of_another_length_are_refused(stem, objects, root, tmp_path):
    shutil.copytree(root, tmp_path / "root")
    file = f"{'vg' if stem == 'gqa' else stem}_qa_{objects}_obj.json"
    path = tmp_path / "root/whatsup" / file
    (entry,) = json.loads(path.read_text())
    write_json(path, [entry, entry[:2]])
    with pytest.raises(CompvlError, match=f"{file}, item 1: not of the form"):
        load_benchmark(f"whatsup-{stem}-{objects}", tmp_path / "root")


def test_a_set_without_one_of_its_images_is_left_out(root, model):
    whole = load_benchmark("whatsup-a", root)
    part = [item for item in whole.items if "mug_on" not in item.image]
    benchmark = dataclasses.replace(whole, items=part)
    table = evaluate(model, [benchmark], n_boot=50, progress=False)
    n = table[table.group == "all"].set_index("metric").n
    assert n[["accuracy", "pair_accuracy", "set_accuracy"]].tolist() == [11, 5, 2]


def test_items_without_pairs_are_identified_as_before():
    """Fields of a pair or a set belong to `SetChoice` alone, so nothing changes for others."""
    item = CaptionChoice("a", None, "c", ("f",), "g")
    assert list(vars(item)) == ["id", "image", "caption", "foils", "group"]
    order = load_benchmark("aro-coco-order", n=4)
    assert all(type(item) is CaptionChoice for item in order.items)
    assert identity(order) == identity(load_benchmark("aro-coco-order", n=4))


NEW = ("whatsup", "half-truths", "negbench", "crepe")


@pytest.mark.parametrize("group", NEW)
def test_every_member_of_compositional_has_a_counterpart(group):
    assert set(GROUPS[group]) <= set(GROUPS["compositional"])
    for name in GROUPS[group]:
        assert REGISTRY[name].files and REGISTRY[name].micro
        assert REGISTRY[name].doc


def test_crepe_shows_the_region_of_the_photograph(root):
    item = load_benchmark("crepe-productivity-swap", root).items[0]
    assert item.image.box == (3, 4, 30, 20)
    assert item.image.path.endswith("visual_genome/VG_100K/7.jpg")


def test_half_truths_need_two_foils_of_a_relation(root):
    pairs = load_benchmark("half-truths-relation", root).items
    assert [(pair.caption, pair.foil, pair.group) for pair in pairs] == [
        ("dog", "sofa lying on dog", "swap"),
        ("dog", "dog lying on table", "object"),
    ]


def test_a_wrong_source_of_systematicity_is_refused(root):
    with pytest.raises(CompvlError, match="seen_compounds_in_laion"):
        load_benchmark("crepe-systematicity", root, source="laion")
    with pytest.raises(CompvlError, match="cc12m, yfcc, laion"):
        load_benchmark("crepe-systematicity", root, source="cc3m")
