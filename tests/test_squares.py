"""Benchmarks with two images and two captions: small files in the released formats, the same items
from a table of the hub, and values beside those of the published programs on the same scores."""

import csv
import json
import pickle

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from released import with_other_column

from compvl.benchmarks import hub
from compvl.benchmarks.bivlc import BIVLC_METRICS
from compvl.benchmarks.items import item_images
from compvl.benchmarks.loading import GROUPS, load_benchmark
from compvl.benchmarks.registry import REGISTRY
from compvl.core import CompvlError, read_json
from compvl.evaluate.engine import evaluate
from compvl.evaluate.tasks import SquareTask
from compvl.images import image_key, open_image
from compvl.models.clip import create_model

LINKS = "https://cs-people.bu.edu/array/data/vg_gqa_images"
NATURAL = "naturalbench/NaturalBench-Retrieval"
EQBEN = "eqben/eqben_subset_10percent_final.json"
COLA = "cola/COLA_multiobjects_matching_benchmark.json"


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    shade = sum(map(ord, path.name)) % 256
    Image.new("RGB", (24, 16), (shade, 90, 120)).save(path)


def colorswap_row(k):
    """An entry as in the README of Top34051/colorswap."""
    return dict(
        id=k,
        caption_1="someone holding a yellow umbrella wearing a white dress",
        caption_2="someone holding a white umbrella wearing a yellow dress",
        image_1=f"images/img_{k}_1.png",
        image_2=f"images/img_{k}_2.png",
        image_source="midjourney",
        caption_source="human",
    )


def bivlc_row(k):
    """An instance as in the README of IMirandaM/BiVLC."""
    return dict(
        image=f"images/image_{k}.png",
        caption="A man throwing a ball while smiling and on a field.",
        negative_caption="A man throwing a ball while a child is smiling on a field.",
        negative_image=f"images/negative_image_{k}.png",
        type=("replace", "swap", "add")[k % 3],
        subtype="obj",
    )


def vismin_row(k):
    """A sample with the columns that `vismin-bench/eval.py` of rabiulcste/vismin reads."""
    return dict(
        id=str(k),
        image_0=f"images/image_0_{k}.png",
        text_0="Two men in a van.",
        image_1=f"images/image_1_{k}.png",
        text_1="Three men in a van.",
        category=("object", "attribute", "counting", "relation")[k % 4],
    )


HUB = {  # benchmark: (rows, their file, columns of pictures, data set on the hub)
    "colorswap-test": (colorswap_row, "data/test.json", ("image_1", "image_2")),
    "bivlc": (bivlc_row, "test.json", ("image", "negative_image")),
    "vismin": (vismin_row, "test.json", ("image_0", "image_1")),
}
FOLDERS = {"colorswap-test": "colorswap", "bivlc": "bivlc", "vismin": "vismin"}


def write_plain(root, name, n=6):
    """A benchmark of the hub as annotations and image files."""
    row, file, columns = HUB[name]
    path = root / FOLDERS[name] / file
    rows = [row(k) for k in range(n)]
    write_json(path, rows)
    for entry in rows:
        for column in columns:
            picture(path.parent / entry[column])
    return path, rows


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root with small files of each benchmark in the released formats."""
    root = tmp_path_factory.mktemp("root")
    for name in HUB:
        write_plain(root, name)
    write_json(root / "colorswap/data/train.json", [colorswap_row(k) for k in range(6, 8)])

    pair = [f"{LINKS}/7.jpg", "brown giraffe", f"{LINKS}/8.jpg", "white giraffe"]
    gone = [f"{LINKS}/7.jpg", "brown giraffe", f"{LINKS}/9.jpg", "white giraffe"]
    write_json(root / COLA, [pair, gone])
    for number in (7, 8):
        picture(root / f"visual_genome/VG_100K/{number}.jpg")

    questions = [["Question ID", "Type", "Statement"]]
    for k in range(4):
        questions.append([k + 1, "Orientation", f"a dog facing {k}"])
        picture(root / f"mmvp-vlm/MLLM_VLM Images/Orientation/{k + 1}.jpg")
    with open(root / "mmvp-vlm/Questions.csv", "w", newline="") as file:
        csv.writer(file).writerows(questions)

    captions = dict(caption_0="A man holds a dog.", caption_1="A dog is beside a man.")
    entry = dict(index=0, image_0="a.jpg", image_1="b.jpg")
    write_json(root / f"{NATURAL}/metadata.json", [entry | captions])
    picture(root / f"{NATURAL}/images/a.jpg")
    picture(root / f"{NATURAL}/images/b.jpg")

    folder = "eqbenkubric_cnt/12"
    images = dict(image0=f"{folder}/image0.png", image1=f"{folder}/image1.png")
    write_json(root / EQBEN, [images | dict(caption0="two bottles", caption1="three bottles")])
    for name in images.values():
        picture(root / f"eqben/image_subset/{name}")
    return root


@pytest.fixture(scope="module")
def model():
    return create_model("micro-clip", device="cpu")


EXPECTED = {  # items, those with both images
    "colorswap": (8, 6),
    "colorswap-test": (6, 6),
    "bivlc": (6, 6),
    "cola": (2, 1),
    "mmvp-vlm": (2, 2),
    "vismin": (6, 6),
    "naturalbench": (1, 1),
    "eqben": (1, 1),
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_released_format_is_read_and_evaluated(name, root, model):
    n, present = EXPECTED[name]
    benchmark = load_benchmark(name, root)
    assert (len(benchmark), benchmark.present) == (n, present)
    assert f"images of {present} of {n}" in repr(benchmark)
    table = evaluate(model, benchmark.covered(), n_boot=20, progress=False)
    overall = table[table.group == "all"].set_index("metric")
    assert overall.n["image"] == overall.n["image_1_to_text"] == present


def test_captions_and_images_stand_in_their_places(root):
    items = {name: load_benchmark(name, root).items[0] for name in EXPECTED}
    assert items["bivlc"].group == "replace"
    assert items["bivlc"].image_1.endswith("bivlc/images/negative_image_0.png")
    assert items["bivlc"].caption_1.startswith("A man throwing a ball while a child")
    assert items["colorswap-test"].image_0.endswith("colorswap/data/images/img_0_1.png")
    assert items["vismin"].caption_0 == "Two men in a van."
    assert items["mmvp-vlm"].caption_1 == "a photo of a dog facing 1"
    assert items["mmvp-vlm"].image_1.endswith("Orientation/2.jpg")
    assert items["cola"].image_1.endswith("VG_100K/8.jpg")
    assert items["eqben"].group == "eqbenkubric_cnt"


def table_of(rows, columns, folder):
    """The rows as a table of the library, with the pictures inside."""
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    rows = [row | {c: Image.open(folder / row[c]) for c in columns} for row in rows]
    table = datasets.Dataset.from_list(rows)
    for column in columns:
        table = table.cast_column(column, datasets.Image())
    return table


@pytest.mark.parametrize("name", list(HUB))
@pytest.mark.parametrize("form", ["table", "released table", "parquet"])
def test_the_same_items_from_a_folder_and_from_a_table(name, form, tmp_path):
    plain = tmp_path / "plain"
    path, rows = write_plain(plain, name)
    table = table_of(rows, HUB[name][2], path.parent)
    folder = tmp_path / "hub" / FOLDERS[name]
    if form == "parquet":
        (folder / "data").mkdir(parents=True)
        table.to_parquet(str(folder / "data/test-00000-of-00001.parquet"))
    else:
        place = "table/test" if form == "table" else "data/test"
        table.save_to_disk(str(folder / place))
    first = load_benchmark(name, plain).items
    benchmark = load_benchmark(name, tmp_path / "hub")
    assert benchmark.coverage == 1
    keys = set()
    for a, b in zip(first, benchmark.items, strict=True):
        assert (a.id, a.caption_0, a.caption_1, a.group) == (
            b.id,
            b.caption_0,
            b.caption_1,
            b.group,
        )
        for image_a, image_b in zip(item_images(a), item_images(b), strict=True):
            assert open_image(image_a).tobytes() == open_image(image_b).tobytes()
            keys.add(image_key(image_b))
    assert len(keys) == 2 * len(first)


def test_a_table_gives_the_same_scores_as_a_folder(tmp_path, model):
    path, rows = write_plain(tmp_path / "plain", "bivlc")
    table = table_of(rows, HUB["bivlc"][2], path.parent)
    table.save_to_disk(str(tmp_path / "hub/bivlc/table/test"))
    found = []
    for folder in ("plain", "hub"):
        benchmark = load_benchmark("bivlc", tmp_path / folder)
        found.append(evaluate(model, benchmark, n_boot=20, progress=False))
    pd.testing.assert_frame_equal(*found)
    item = load_benchmark("bivlc", tmp_path / "hub").items[0]
    again = pickle.loads(pickle.dumps(item))  # as another process gets it
    assert open_image(again.image_0).tobytes() == open_image(item.image_0).tobytes()


def test_the_hub_is_asked_for_the_pinned_commit(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    path, rows = write_plain(tmp_path / "plain", "bivlc")
    table = table_of(rows, HUB["bivlc"][2], path.parent)
    asked = []

    class Info:
        sha = "29ab400891942f8111f3dd6ddfecfe61a3409a17"

    def info(self, repo, revision):
        asked.append((repo, revision))
        return Info

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda repo, **about: asked.append((repo, about)) or table
    )
    root = tmp_path / "root"
    root.mkdir()
    benchmark = load_benchmark("bivlc", root, source="hub")
    assert len(benchmark) == 6
    assert asked == [
        ("imirandam/BiVLC", Info.sha),
        ("imirandam/BiVLC", dict(split="test", revision=Info.sha)),
    ]
    about = read_json(root / "bivlc/table/test.json")
    assert (about["commit"], about["rows"]) == (Info.sha, 6)
    monkeypatch.undo()
    assert load_benchmark("bivlc", root).items == benchmark.items  # without the hub


def test_a_hub_that_cannot_be_reached_is_said(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the extra `hub` is not installed")

    def fail(self, repo, revision):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    with pytest.raises(CompvlError, match="imirandam/BiVLC .*no route to host.*bivlc/"):
        load_benchmark("bivlc", tmp_path, source="hub")


@pytest.mark.parametrize("name", list(HUB))
def test_every_wrong_column_is_refused_by_name(name, tmp_path):
    row, _, columns = HUB[name]
    read = set(row(0)) - {"id", "caption_source", "subtype"}
    assert len(read) == 5
    for column in sorted(read):
        path, rows = write_plain(tmp_path / column, name)
        rows[2]["other"] = rows[2].pop(column)
        write_json(path, rows)
        with pytest.raises(CompvlError, match=f"{path.name}, item 2: no column {column}"):
            load_benchmark(name, tmp_path / column)
        picture_folder = path.parent
        whole = [row(k) for k in range(6)]
        table = table_of(whole, columns, picture_folder).rename_column(column, "other")
        table.save_to_disk(str(tmp_path / f"table-{column}" / FOLDERS[name] / "table/test"))
        with pytest.raises(CompvlError, match=f"test has no column {column}"):
            load_benchmark(name, tmp_path / f"table-{column}")


FILES = {  # benchmark without a table on the hub: its file, what is read of it
    "mmvp-vlm": ("mmvp-vlm/Questions.csv", ("Question ID", "Type", "Statement")),
    "naturalbench": (
        f"{NATURAL}/metadata.json",
        ("index", "image_0", "image_1", "caption_0", "caption_1"),
    ),
    "eqben": (EQBEN, ("image0", "image1", "caption0", "caption1")),
}


@pytest.mark.parametrize("name", list(FILES))
def test_every_wrong_column_of_a_file_is_refused_by_name(name, root, tmp_path):
    file, columns = FILES[name]
    for column in columns:
        path = with_other_column(root, file, column, tmp_path / column)
        with pytest.raises(CompvlError, match=rf"{path.name}.* '?{column}\b"):
            load_benchmark(name, tmp_path / column)


def test_a_pair_of_cola_without_its_second_caption_is_refused(root, tmp_path):
    entries = read_json(root / COLA)
    write_json(tmp_path / COLA, [entries[0], entries[1][:3]])
    with pytest.raises(CompvlError, match="item 1: not of the form .link, caption 1, link"):
        load_benchmark("cola", tmp_path)


def test_a_column_without_pictures_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    rows = [bivlc_row(k) for k in range(2)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "bivlc/table/test"))
    with pytest.raises(CompvlError, match="no pictures under image"):
        load_benchmark("bivlc", tmp_path)


def published_bivlc(c0_i0, c0_i1, c1_i0, c1_i1):
    """The seven values as `evaluate_BiVLC` computes them.

    IMirandaM/BiVLC, src/CLIP_fine_tuning/CLIP_utils.py, MIT License, Copyright (c) 2024 HiTZ
    Zentroa."""
    found = {name: [] for name in BIVLC_METRICS}
    for s_C0_I0, s_C0_I1, s_C1_I0, s_C1_I1 in zip(c0_i0, c0_i1, c1_i0, c1_i1, strict=True):
        Ipos_2T = s_C0_I0 > s_C1_I0
        Ineg_2T = s_C1_I1 > s_C0_I1
        Tpos_2I = s_C0_I0 > s_C0_I1
        Tneg_2I = s_C1_I1 > s_C1_I0
        I2T = Ipos_2T and Ineg_2T
        T2I = Tpos_2I and Tneg_2I
        found["I2T"].append(I2T)
        found["T2I"].append(T2I)
        found["Group"].append(I2T and T2I)
        found["Ipos_2T"].append(Ipos_2T)
        found["Ineg_2T"].append(Ineg_2T)
        found["Tpos_2I"].append(Tpos_2I)
        found["Tneg_2I"].append(Tneg_2I)
    return {name: np.mean(right) for name, right in found.items()}


def published_cola(preds):
    """`ColaMultiObjAcc` of arijitray1993/COLA, scripts/eval.py; `preds`: 2 x 2, image and caption.

    MIT License, Copyright (c) 2024 Arijit Ray."""
    return preds[0, 0] > preds[1, 0] and preds[1, 1] > preds[0, 1]


def published_mmvp(preds, qid1=1, qid2=2):
    """Whether a pair is right in tsb0601/MMVP, scripts/evaluate_vlm.py, MIT License."""
    img1_score1 = 1 / (1 + np.exp(preds[1, 0] - preds[0, 0]))  # softmax over the images
    img1_score2 = 1 / (1 + np.exp(preds[1, 1] - preds[0, 1]))
    pred1 = "img1" if img1_score1 > 0.5 else "img2"
    pred2 = "img1" if img1_score2 > 0.5 else "img2"
    gt1 = "img1" if qid1 % 2 == 1 else "img2"
    gt2 = "img1" if qid2 % 2 == 1 else "img2"
    return pred1 == gt1 and pred2 == gt2


def published_vismin(preds):
    """text, image, group of rabiulcste/vismin, vismin-bench/metric.py."""
    d = {f"T{c}_I{i}": preds[i, c] for i in (0, 1) for c in (0, 1)}
    text_correct = d["T0_I0"] > d["T1_I0"] and d["T1_I1"] > d["T0_I1"]
    image_correct = d["T0_I0"] > d["T0_I1"] and d["T1_I1"] > d["T1_I0"]
    return text_correct, image_correct, text_correct and image_correct


@pytest.fixture(scope="module")
def scores():
    """[N, image, caption]: the published programs and the task get the same."""
    return np.random.default_rng(0).normal(size=(600, 2, 2))


def outcomes_of(scores):
    columns = dict(zip(SquareTask.columns, scores.reshape(-1, 4).T, strict=True))
    table = pd.DataFrame(columns | dict(id=range(len(scores)), group=""))
    return SquareTask().outcomes(table)


def test_bivlc_has_its_seven_values(scores):
    ties = np.round(scores)  # every comparison is strict
    for values in (scores, ties):
        outcomes = outcomes_of(values)
        arguments = (values[:, i, c] for c in (0, 1) for i in (0, 1))
        for name, value in published_bivlc(*arguments).items():
            assert outcomes[BIVLC_METRICS[name]].mean() == pytest.approx(value, abs=1e-12), name


def test_pairs_are_counted_as_the_authors_count_them(scores):
    outcomes = outcomes_of(scores)
    assert outcomes["image"].tolist() == [published_cola(preds) for preds in scores]
    assert outcomes["image"].tolist() == [published_mmvp(preds) for preds in scores]
    for right, *expected in zip(
        outcomes["text"],
        outcomes["image"],
        outcomes["group"],
        map(published_vismin, scores),
        strict=True,
    ):
        assert (right, *expected[:2]) == expected[2]


def test_squares_are_part_of_compositional():
    assert set(EXPECTED) == set(GROUPS["squares"]) <= set(GROUPS["compositional"])
    for name in GROUPS["squares"]:
        assert REGISTRY[name].files and REGISTRY[name].micro
        assert REGISTRY[name].doc
    published = {name: REGISTRY[name].published_n for name in GROUPS["squares"]}
    assert published == {
        "colorswap": 1_000,
        "colorswap-test": 300,
        "bivlc": 2_933,
        "cola": 210,
        "mmvp-vlm": 9 * 15,
        "vismin": 579 + 294 + 589 + 622,
        "naturalbench": None,
        "eqben": None,
    }


def test_a_missing_library_is_said(tmp_path, monkeypatch):
    (tmp_path / "bivlc/table/test").mkdir(parents=True)

    def missing(module, extra):
        raise CompvlError(f"{module} is not installed: compvl[{extra}]")

    monkeypatch.setattr(hub, "require", missing)
    with pytest.raises(CompvlError, match=r"datasets is not installed: compvl\[hub\]"):
        load_benchmark("bivlc", tmp_path)
