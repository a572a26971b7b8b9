"""Experiments as processes meet them: results that were interrupted or damaged, released files, notebooks under papermill."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from compvl.core import CompvlError, notebooks_dir
from compvl.models.clip import create_model
from compvl.paper.evaluation import results
from compvl.paper.loading import TRIPLET_BENCHMARKS
from compvl.paper.profiles import PROFILES, get_profile
from compvl.paper.rows import ROWS, rows
from compvl.paper.table_rows import HP_TABLE1, HP_TABLE8
from compvl.paper.training import SHORT
from compvl.train.recipes import RECIPES
from PIL import Image
from safetensors.torch import load_file

from compvl.models import zoo
from compvl.paper import profiles as experiments

STEPS = dict(
    n_train=16,
    steps=2,
    batch_size=8,
    n_items=12,
    n_retrieval=6,
    n_classification=6,
    n_kind=2,
    n_boot=30,
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    "Random weights that stand in for the shipped base."
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("start") / "start.safetensors"
    create_model(device="cpu").save(path)
    return str(path)


@pytest.fixture
def tiny(start):
    return dataclasses.replace(PROFILES["smoke"], pretrained=start, **STEPS)


def figures(res):
    return (
        res.table.drop(columns="commit")
        .set_index(["method", "seed", "benchmark", "group", "metric"])[["value", "lo", "hi", "n"]]
        .astype(float)
        .sort_index()
    )


def test_damaged_parts_are_made_again(tiny, tmp_path):
    first = results(rows("clip", "hn"), TRIPLET_BENCHMARKS, tiny, tmp_path, "x", progress=False)
    tables, notes = (
        sorted((tmp_path / "results/parts").glob(f"*.{k}")) for k in ("csv.gz", "json")
    )
    assert len(tables) == len(notes) == 6  # two models, three benchmarks
    whole = tables[0].read_bytes()
    tables[0].write_bytes(whole[:40])
    notes[1].unlink()
    again = results(rows("clip", "hn"), TRIPLET_BENCHMARKS, tiny, tmp_path, "x", progress=False)
    pd.testing.assert_frame_equal(figures(first), figures(again))
    assert len(pd.read_csv(tables[0])) == STEPS["n_items"] and notes[1].exists()


def test_other_settings_are_other_results(tiny, tmp_path):
    def configs(profile):
        return set(
            results(rows("clip"), ["swap"], profile, tmp_path, "x", progress=False).table.config
        )

    torch.manual_seed(1)
    create_model(device="cpu").save(tmp_path / "other.safetensors")
    variants = [
        tiny,
        dataclasses.replace(tiny, n_boot=31),
        dataclasses.replace(tiny, n_items=13),
        dataclasses.replace(tiny, pretrained=str(tmp_path / "other.safetensors")),
    ]
    assert len(set.union(*map(configs, variants))) == len(variants)
    assert configs(dataclasses.replace(tiny, lr=1.0)) == configs(
        tiny
    )  # what a pretrained row does not depend on


def test_what_stopped_half_way_is_taken_up(tiny, tmp_path, monkeypatch):
    import compvl.paper.profiles as experiments

    whole, seen = experiments.train, []

    def stops(cfg, **kw):
        seen.append(cfg.method)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return whole(cfg, **kw)

    monkeypatch.setattr(experiments, "train", stops)
    with pytest.raises(KeyboardInterrupt):
        results(
            rows("clip", "hn", "hp+hn"), TRIPLET_BENCHMARKS, tiny, tmp_path, "x", progress=False
        )
    kept = pd.read_csv(tmp_path / "results/x.csv")
    assert set(kept.method) == {"clip", "hn"}
    monkeypatch.setattr(experiments, "train", whole)
    res = results(
        rows("clip", "hn", "hp+hn"), TRIPLET_BENCHMARKS, tiny, tmp_path, "x", progress=False
    )
    assert (
        set(res.table.method) == {"clip", "hn", "hp+hn"}
        and len(list((tmp_path / "runs").iterdir())) == 2
    )


def released(root: Path) -> Path:
    "A data root with a few drawn pictures and texts in the released formats."
    texts = [
        ("cat in box", "cat out of box", "cat within box"),
        ("dog under chair", "dog above chair", "dog beneath chair"),
    ]
    colors = [("red car", "blue car", "crimson car"), ("white dog", "black dog", "ivory dog")]
    for target, items in dict(relations=texts, attributes=colors).items():
        for part, k in dict(original=0, hard_positive=2).items():
            path = root / f"hard_positives/{part}/vl_checklist_{target}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps(
                    [
                        dict(
                            image_id=str(i),
                            true_caption=t[k],
                            false_caption=t[1],
                            image_path=f"VG_100K/{i}.jpg",
                        )
                        for i, t in enumerate(items)
                    ]
                )
            )
    (root / "aro").mkdir()
    (root / "aro/visual_genome_attribution.json").write_text(
        json.dumps(
            [
                dict(
                    image_path="0.jpg",
                    true_caption="the red car and the white dog",
                    false_caption="the white car and the red dog",
                    bbox_x=0,
                    bbox_y=0,
                    bbox_w=20,
                    bbox_h=20,
                    attributes=["red", "white"],
                    obj1_name="car",
                    obj2_name="dog",
                )
            ]
        )
    )
    for folder, names in {
        "VG_100K": ["0.jpg", "1.jpg"],
        "coco/train2017": [f"{i}.jpg" for i in range(4)],
    }.items():
        (root / folder).mkdir(parents=True)
        for i, name in enumerate(names):
            Image.new("RGB", (40, 30), (60 * i, 90, 200 - 50 * i)).save(root / folder / name)
    (root / "coco/annotations").mkdir()
    captions = [
        dict(
            id=i,
            image_id=i % 4,
            caption=f"a picture of {'red green blue white'.split()[i % 4]} number {i}",
        )
        for i in range(16)
    ]
    (root / "coco/annotations/captions_train2017.json").write_text(
        json.dumps(
            dict(images=[dict(id=i, file_name=f"{i}.jpg") for i in range(4)], annotations=captions)
        )
    )
    for side, folder in dict(hp="hard_positives_ft", hn="hard_negatives_ft").items():
        (root / folder).mkdir()
        for kind in ("swap", "replace"):
            (root / folder / f"{kind}_{side}.jsonl").write_text(
                "".join(
                    json.dumps(
                        "None" if kind == "swap" and i % 2 else f"{side} {kind} {c['caption']}"
                    )
                    + "\n"
                    for i, c in enumerate(captions)
                )
            )
    return root


def test_the_paper_profile_on_files_in_the_released_formats(start, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPVL_CACHE", str(tmp_path / "cache"))
    profile = dataclasses.replace(
        get_profile("paper", released(tmp_path / "data")),
        model="micro-clip",
        pretrained=start,
        precision="fp32",
        n_boot=30,
    )
    monkeypatch.setitem(RECIPES, "hp", RECIPES["hp"] | dict(epochs=1, batch_size=8, warmup=1))
    res = results(
        rows("clip", "hn", "hp+hn", "swap-only", "human"),
        [*TRIPLET_BENCHMARKS, "vtab-color"],
        profile,
        tmp_path / "out",
        "paper",
        progress=False,
    )
    assert not res.problems and set(res.table.method) == {"clip", "hn", "hp+hn", "swap-only"}
    assert (
        "microworld" in res.missing["vtab-color"] and "published estimate" in res.missing["human"]
    )
    n = (
        res.table[(res.table.metric == "orig_acc") & (res.table.method == "hn")]
        .set_index(["benchmark", "group"])
        .n
    )
    assert n["replace", "macro"] == 4 and n["swap", "all"] == 1
    shutil.rmtree(tmp_path / "data/hard_negatives_ft")
    monkeypatch.setitem(
        zoo.ZOO,
        "negclip",
        dataclasses.replace(zoo.ZOO["negclip"], architecture="micro-clip", activation="gelu"),
    )  # released checkpoints stand for rows that are not trained here
    (tmp_path / "data/checkpoints/negclip").mkdir(parents=True)
    torch.save(
        {"epoch": 5, "state_dict": {f"module.{k}": v for k, v in load_file(start).items()}},
        tmp_path / "data/checkpoints/negclip/negclip.pth",
    )
    theirs = results(
        rows("clip", "negclip", "svlc"),
        TRIPLET_BENCHMARKS,
        profile,
        tmp_path / "out",
        "released",
        progress=False,
    )
    assert (
        set(theirs.table.method) == {"clip", "negclip"}
        and not theirs.problems
        and "checkpoints/svlc" in theirs.gaps["svlc"]
    )
    assert (
        theirs.difference(("clip", "swap", "all", "mean_c"), ("negclip", "swap", "all", "mean_c"))[
            "diff"
        ]
        == 0
    )  # the same weights
    others = results(
        [r for r in HP_TABLE8 if r.key in ("clip", "clip-small", "rn50")],
        TRIPLET_BENCHMARKS,
        profile,
        tmp_path / "out",
        "others",
        progress=False,
    )
    assert (
        set(others.table.method) == {"clip"}
        and set(others.table.seed) == {0}
        and set(others.missing) == {"clip-small", "rn50"}
        and "no released model" in others.missing["clip-small"]
        and not others.problems
    )
    assert others.table.value.equals(
        theirs.table[theirs.table.method == "clip"].reset_index(drop=True).value
    )  # the profile's start, not what is shipped
    again = results(
        rows("clip", "hn"), TRIPLET_BENCHMARKS, profile, tmp_path / "out", "paper", progress=False
    )
    assert set(again.table.method) == {"clip"} and "replace_hn.jsonl" in again.problems["hn"]
    with pytest.raises(CompvlError, match="1 of 2 rows failed"):
        again.check()


def test_iterated_operators_by_files_that_perturb_writes(start, tmp_path, monkeypatch):
    "`compvl perturb` makes the negatives of k applications, aligned with COCO's captions, and rows are trained on them."
    from compvl.text.pipeline import perturb_file

    monkeypatch.setenv("COMPVL_CACHE", str(tmp_path / "cache"))
    root = released(tmp_path / "data")
    file = root / "coco/annotations/captions_train2017.json"
    coco = json.loads(file.read_text())
    for a, (x, y) in zip(
        coco["annotations"],
        [(x, y) for x in ("dog", "cat", "man", "horse") for y in ("boat", "table", "car", "bench")],
    ):
        a["caption"] = f"A brown {x} next to a large red {y}."
    coco["annotations"][5]["caption"] = "..."  # nothing to work on
    file.write_text(json.dumps(coco))
    profile = dataclasses.replace(
        get_profile("paper", root),
        model="micro-clip",
        pretrained=start,
        precision="fp32",
        n_boot=30,
    )
    monkeypatch.setitem(RECIPES, "hp", RECIPES["hp"] | dict(epochs=1, batch_size=8, warmup=1))
    missing = results(
        rows("clip", "tcl-mix"), ["swap"], profile, tmp_path / "out", "missing", progress=False
    )
    assert all(f"tcl-{k}_hn.jsonl" in missing.problems["tcl-mix"] for k in (1, 2, 3))
    for k in (1, 2, 3):
        made = perturb_file(
            "hn",
            f"tcl-{k}",
            file,
            root / f"hard_negatives_ft/tcl-{k}_hn.jsonl",
            workers=0,
            progress=False,
        )
        lines = [
            json.loads(t)
            for t in (root / f"hard_negatives_ft/tcl-{k}_hn.jsonl").read_text().splitlines()
        ]
        assert (
            made.n == 16
            and made.total == 15
            and [len(r["steps"]) for r in lines] == [k * (i != 5) for i in range(16)]
        )
        assert [r["caption"] for r in lines] == [a["caption"] for a in coco["annotations"]] and all(
            r["hard_negative"] != r["caption"] for r in lines
        )
    res = results(
        rows("clip", "tcl-2", "tcl-mix"), ["swap"], profile, tmp_path / "out", "tcl", progress=False
    )
    assert not res.problems and set(res.table.method) == {"clip", "tcl-2", "tcl-mix"}


def test_a_run_that_fails_beside_others_is_not_made_again(tmp_path, monkeypatch):
    p = dataclasses.replace(PROFILES["smoke"], steps=SHORT, n_train=64, batch_size=8, n_items=30)
    bad = dataclasses.replace(ROWS["hn"], key="bad", data_options=dict(source="nowhere"))
    asked, train = [], experiments.train
    monkeypatch.setattr(experiments, "cores", lambda: 2)
    monkeypatch.setattr(
        experiments, "train", lambda cfg, **k: asked.append(cfg.data_options) or train(cfg, **k)
    )
    res = results([ROWS["clip-coco"], bad], ["swap"], p, tmp_path, "r", progress=False)
    assert "nowhere" in res.problems["bad"] and set(res.table.method) == {"clip-coco"}
    assert asked == [{}]


def test_a_failing_benchmark_file_says_what_is_needed(tiny, tmp_path):
    (tmp_path / "aro").mkdir()
    (tmp_path / "aro/visual_genome_attribution.json").write_text("[{]")
    res = results(
        HP_TABLE1,
        TRIPLET_BENCHMARKS,
        dataclasses.replace(tiny, root=str(tmp_path)),
        tmp_path / "out",
        "x",
        progress=False,
    )
    assert (
        "visual_genome_attribution.json:1" in res.gaps["swap"]
        and "hard_positives" in res.gaps["replace"]
    )


@pytest.mark.parametrize(
    "notebook, table, says",
    [
        ("01_brittleness", "table1", ["visual_genome_attribution.json", "Our HN", "73.9"]),
        ("02_ratio_ablation", "table3", ["visual_genome_attribution.json", "Our HN", "73.9"]),
        ("03_standard_zeroshot", "table10", ["imagenet", "Our HN", "50.4"]),
        ("04_other_models", "table8", ["visual_genome_attribution.json", "ViT-L/14", "61.6"]),
        ("05_attribution", None, []),
        ("06_cae", "table1", ["ComVG.csv", "CLIP-FT", "64.9"]),
        ("07_text_similarity", "table4", ["SICK", "CLIP-FT", "66.3"]),
        ("09_iterated_operators", "table2", ["visual_genome_attribution.json", "HN, k = 1"]),
        ("10_beyond", None, []),
    ],
)
def test_a_paper_notebook_runs_to_its_end_without_any_files(notebook, table, says, tmp_path):
    pytest.importorskip("papermill")
    (tmp_path / "empty").mkdir()
    command = [
        sys.executable,
        "-m",
        "papermill",
        notebooks_dir() / f"{notebook}.ipynb",
        "out.ipynb",
        "-p",
        "profile",
        "paper",
        "-p",
        "data_root",
        tmp_path / "empty",
        "--no-progress-bar",
    ]
    done = subprocess.run(
        list(map(str, command)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "COMPVL_RUNS"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if not table:
        return
    text = (tmp_path / f"reproduction/tables/{notebook}_{table}.md").read_text()
    assert "no data" in text and all(s in text for s in says)
