"""Experiments as processes meet them: interrupted or damaged results, released files, papermill."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from compvl.benchmarks.loading import load_benchmark
from compvl.core import CompvlError, notebooks_dir
from compvl.models import zoo
from compvl.models.clip import create_model
from compvl.paper import evaluation, runs, training
from compvl.paper.advice import recommend
from compvl.paper.columns import ACCURACY
from compvl.paper.comparisons import carried
from compvl.paper.evaluation import results
from compvl.paper.lengths import gains_by_length
from compvl.paper.loading import TRIPLET_BENCHMARKS
from compvl.paper.profiles import PROFILES, get_profile
from compvl.paper.results import Results
from compvl.paper.returns import diminishing
from compvl.paper.rows import ROWS, rows
from compvl.paper.table_rows import HP_TABLE1, HP_TABLE8, rows_in
from compvl.paper.table_specs import ORACLE, TABLES
from compvl.paper.training import SHORT
from compvl.train.recipes import RECIPES

TRAINING = dict(n_train=16, steps=2, batch_size=8)
SIZES = dict(n_items=12, n_retrieval=6, n_classification=6, n_kind=2, n_boot=30)
FIGURE = ["method", "seed", "benchmark", "group", "metric"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Random weights in place of the shipped base."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("start") / "start.safetensors"
    create_model(device="cpu").save(path)
    return str(path)


@pytest.fixture
def tiny(start):
    """The profile smoke with two steps on sixteen pairs."""
    profile = PROFILES["smoke"].training(pretrained=start, **TRAINING)
    return dataclasses.replace(profile, **SIZES)


def evaluate(rows, out, profile, name="x", benchmarks=TRIPLET_BENCHMARKS):
    """Results without a progress line."""
    return results(rows, benchmarks, profile, out, name, progress=False)


def figures(res):
    """Figures with their intervals, whatever commit they were made at."""
    table = res.table.drop(columns="commit").set_index(FIGURE)
    return table[["value", "lo", "hi", "n"]].astype(float).sort_index()


def test_damaged_parts_are_made_again(tiny, tmp_path):
    first = evaluate(rows("clip", "hn"), tmp_path, tiny)
    parts = tmp_path / "results/parts"
    tables = sorted(parts.glob("*.csv.gz"))
    notes = sorted(parts.glob("*.json"))
    assert len(tables) == len(notes) == 6  # two models, three benchmarks
    n = len(pd.read_csv(tables[0]))
    tables[0].write_bytes(tables[0].read_bytes()[:40])
    notes[1].unlink()
    again = evaluate(rows("clip", "hn"), tmp_path, tiny)
    pd.testing.assert_frame_equal(figures(first), figures(again))
    assert len(pd.read_csv(tables[0])) == n
    assert notes[1].exists()


def test_other_settings_are_other_results(tiny, tmp_path):
    def configs(profile):
        return set(evaluate(rows("clip"), tmp_path, profile, benchmarks=["swap"]).table.config)

    torch.manual_seed(1)
    create_model(device="cpu").save(tmp_path / "other.safetensors")
    variants = [
        tiny,
        dataclasses.replace(tiny, n_boot=31),
        dataclasses.replace(tiny, n_items=13),
        tiny.training(pretrained=str(tmp_path / "other.safetensors")),
    ]
    assert len(set.union(*map(configs, variants))) == len(variants)
    # a pretrained row does not depend on the learning rate
    assert configs(tiny.training(lr=1.0)) == configs(tiny)


def test_what_stopped_half_way_is_taken_up(tiny, tmp_path, monkeypatch):
    whole = runs.train
    seen = []

    def stops(config, **options):
        seen.append(config.method)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return whole(config, **options)

    monkeypatch.setattr(runs, "train", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate(rows("clip", "hn", "hp+hn"), tmp_path, tiny)
    kept = pd.read_csv(tmp_path / "results/x.csv")
    assert set(kept.method) == {"clip", "hn"}
    monkeypatch.setattr(runs, "train", whole)
    res = evaluate(rows("clip", "hn", "hp+hn"), tmp_path, tiny)
    assert set(res.table.method) == {"clip", "hn", "hp+hn"}
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_row_starts_from_another_shipped_model(tiny, tmp_path):
    """Not from the profile's start, and with the seeds that every trained row has."""
    profile = dataclasses.replace(tiny, seeds=(0, 1), base_seeds=(0,))
    res = evaluate(rows("roberta-hn", "hn"), tmp_path, profile, benchmarks=["swap"])
    assert not res.problems
    models = res.table.groupby("method").model.unique()
    assert models["roberta-hn"].tolist() == ["micro-clip-bidir"]
    assert models["hn"].tolist() == ["micro-clip"]
    seeds = res.table.groupby("method").seed.unique()
    assert seeds["roberta-hn"].tolist() == [0, 1]
    starts = {}
    for file in (tmp_path / "runs").glob("*/config.json"):
        config = json.loads(file.read_text())
        starts.setdefault(config["model"], set()).add(config["start"])
    shipped = create_model("micro-clip-bidir", "base", device="cpu").fingerprint()
    assert starts["micro-clip-bidir"] == {shipped}
    assert len(starts["micro-clip"]) == 1


def test_the_microworld_leaves_out_models_without_counterpart(tiny, tmp_path):
    """They are no failures, and no empty lines of a table."""
    few = rows("clip", "rn50x16", "coca")
    res = evaluate(few, tmp_path, tiny, benchmarks=["swap"])
    assert not res.gaps
    assert set(res.table.method) == {"clip"}
    text = TABLES["hp8"].table(res).markdown()
    there = [row.label for row in rows_in(HP_TABLE8, tiny)]
    assert "RN50: ResNet image tower" in there
    for row in HP_TABLE8:
        if row.source != "bound":
            assert (f"| {row.label} |" in text) == (row.label in there)
    with pytest.raises(CompvlError, match="RN50x16 has no counterpart"):
        runs.row_model(ROWS["rn50x16"], tiny)


def test_the_oracle_is_called_human_by_the_paper_alone(tiny, tmp_path):
    human = ROWS["human"].label
    few = rows("clip", "chance", "human")
    res = evaluate(few, tmp_path, tiny)
    text = TABLES["hp1"].table(res).markdown()
    line = next(line for line in text.splitlines() if line.startswith(f"| {ORACLE} |"))
    assert f"| {human} |" not in text
    assert "97.0" in line  # what was published
    profile = dataclasses.replace(tiny.training(data="coco"), root=str(tmp_path / "empty"))
    theirs = evaluate(few, tmp_path / "paper", profile)
    text = TABLES["hp1"].table(theirs).markdown()
    assert f"| {human} |" in text
    assert ORACLE not in text


TEXTS = dict(
    relations=[
        ("cat in box", "cat out of box", "cat within box"),
        ("dog under chair", "dog above chair", "dog beneath chair"),
    ],
    attributes=[
        ("red car", "blue car", "crimson car"),
        ("white dog", "black dog", "ivory dog"),
    ],
)
SWAP = dict(
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


def write_json(path: Path, value):
    """Write JSON, with the folders that lead to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_benchmarks(root: Path):
    """REPLACE and SWAP with two items a part, or one."""
    for target, texts in TEXTS.items():
        for part, k in dict(original=0, hard_positive=2).items():
            items = []
            for i, text in enumerate(texts):
                captions = dict(true_caption=text[k], false_caption=text[1])
                items.append(dict(image_id=str(i), **captions, image_path=f"VG_100K/{i}.jpg"))
            write_json(root / f"hard_positives/{part}/vl_checklist_{target}.json", items)
    write_json(root / "aro/visual_genome_attribution.json", [SWAP])


def write_images(root: Path):
    """Pictures of one colour each."""
    names = {"VG_100K": ["0.jpg", "1.jpg"], "coco/train2017": [f"{i}.jpg" for i in range(4)]}
    for folder, files in names.items():
        (root / folder).mkdir(parents=True)
        for i, file in enumerate(files):
            color = (60 * i, 90, 200 - 50 * i)
            Image.new("RGB", (40, 30), color).save(root / folder / file)


def write_training_files(root: Path):
    """Sixteen captions of four images, with hard positives and hard negatives of two kinds."""
    captions = []
    for i in range(16):
        caption = f"a picture of {'red green blue white'.split()[i % 4]} number {i}"
        captions.append(dict(id=i, image_id=i % 4, caption=caption))
    images = [dict(id=i, file_name=f"{i}.jpg") for i in range(4)]
    coco = dict(images=images, annotations=captions)
    write_json(root / "coco/annotations/captions_train2017.json", coco)
    folders = dict(hp="hard_positives_ft", hn="hard_negatives_ft")
    for side, kind in product(folders, ("swap", "replace")):
        texts = [f"{side} {kind} {caption['caption']}" for caption in captions]
        if kind == "swap":
            texts[1::2] = ["None"] * 8
        path = root / folders[side] / f"{kind}_{side}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(text) + "\n" for text in texts))


def released(root: Path) -> Path:
    """A data root with a few drawn pictures and texts in the released formats."""
    write_benchmarks(root)
    write_images(root)
    write_training_files(root)
    return root


def paper_profile(root: Path, start: str):
    """The profile paper on these files, from a small model."""
    profile = get_profile("paper", root).training(
        model="micro-clip", pretrained=start, precision="fp32"
    )
    return dataclasses.replace(profile, n_boot=30)


@pytest.fixture
def released_profile(start, tmp_path, monkeypatch):
    """The profile paper on files in the released formats, with a short recipe."""
    monkeypatch.setenv("COMPVL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(RECIPES, "hp", RECIPES["hp"] | dict(epochs=1, batch_size=8, warmup=1))
    return paper_profile(released(tmp_path / "data"), start)


def release_negclip(root: Path, start: str, monkeypatch):
    """Put the start where NegCLIP's checkpoint is expected, in its format."""
    entry = dataclasses.replace(zoo.ZOO["negclip"], architecture="micro-clip", activation="gelu")
    monkeypatch.setitem(zoo.ZOO, "negclip", entry)
    (root / "checkpoints/negclip").mkdir(parents=True)
    state = {f"module.{name}": value for name, value in load_file(start).items()}
    torch.save(
        {"epoch": 5, "state_dict": state},
        root / "checkpoints/negclip/negclip.pth",
    )


def test_the_paper_profile_on_files_in_the_released_formats(
    start, released_profile, tmp_path, monkeypatch
):
    profile = released_profile
    out = tmp_path / "out"
    trained = rows("clip", "hn", "hp+hn", "swap-only", "human")
    res = evaluate(trained, out, profile, "paper", [*TRIPLET_BENCHMARKS, "vtab-color"])
    assert not res.problems
    assert set(res.table.method) == {"clip", "hn", "hp+hn", "swap-only"}
    assert "microworld" in res.missing["vtab-color"]
    assert "published estimate" in res.missing["human"]
    accuracy = res.table[(res.table.metric == "orig_acc") & (res.table.method == "hn")]
    n = accuracy.set_index(["benchmark", "group"]).n
    assert n["replace", "macro"] == 4
    assert n["swap", "all"] == 1

    # a released checkpoint is used for a row that is not trained here
    shutil.rmtree(tmp_path / "data/hard_negatives_ft")
    release_negclip(tmp_path / "data", start, monkeypatch)
    theirs = evaluate(rows("clip", "negclip", "svlc"), out, profile, "released")
    assert set(theirs.table.method) == {"clip", "negclip"}
    assert not theirs.problems
    assert "checkpoints/svlc" in theirs.gaps["svlc"]
    score = ("swap", "all", "mean_c")
    same_weights = theirs.difference(("clip", *score), ("negclip", *score))
    assert same_weights["diff"] == 0

    keys = ("clip", "clip-small", "rn50", "rn101")
    relatives = [row for row in HP_TABLE8 if row.key in keys]
    others = evaluate([*relatives, ROWS["roberta-hn"]], out, profile, "others")
    assert set(others.table.method) == {"clip"}
    assert set(others.table.seed) == {0}
    assert set(others.missing) == {"clip-small", "rn50", "rn101", "roberta-hn"}
    assert "microworld only" in others.missing["roberta-hn"]
    assert "no released model" in others.missing["clip-small"]
    assert not others.problems
    clip = theirs.table[theirs.table.method == "clip"].reset_index(drop=True)
    assert others.table.value.equals(clip.value)  # the profile's start, not what is shipped

    again = evaluate(rows("clip", "hn"), out, profile, "paper")
    assert set(again.table.method) == {"clip"}
    assert "replace_hn.jsonl" in again.problems["hn"]
    with pytest.raises(CompvlError, match="1 of 2 rows failed"):
        again.check()


def rewrite_captions(file: Path) -> list[dict]:
    """Captions that three operators can be applied to, and one with nothing to work on."""
    coco = json.loads(file.read_text())
    nouns = product(("dog", "cat", "man", "horse"), ("boat", "table", "car", "bench"))
    for annotation, (first, second) in zip(coco["annotations"], nouns, strict=True):
        annotation["caption"] = f"A brown {first} next to a large red {second}."
    coco["annotations"][5]["caption"] = "..."
    file.write_text(json.dumps(coco))
    return coco["annotations"]


def test_iterated_operators_by_files_that_perturb_writes(released_profile, tmp_path):
    """`compvl perturb` makes aligned negatives of k applications, and rows are trained on them."""
    from compvl.text.pipeline import perturb_file

    profile = released_profile
    root = tmp_path / "data"
    out = tmp_path / "out"
    file = root / "coco/annotations/captions_train2017.json"
    annotations = rewrite_captions(file)
    missing = evaluate(rows("clip", "tcl-mix"), out, profile, "missing", ["swap"])
    for k in (1, 2, 3):
        assert f"tcl-{k}_hn.jsonl" in missing.problems["tcl-mix"]
    for k in (1, 2, 3):
        negatives = root / f"hard_negatives_ft/tcl-{k}_hn.jsonl"
        made = perturb_file("hn", f"tcl-{k}", file, negatives, workers=0, progress=False)
        lines = [json.loads(line) for line in negatives.read_text().splitlines()]
        assert made.n == 16
        assert made.total == 15
        steps = [k] * 16
        steps[5] = 0
        assert [len(line["steps"]) for line in lines] == steps
        assert [line["caption"] for line in lines] == [a["caption"] for a in annotations]
        assert all(line["hard_negative"] != line["caption"] for line in lines)
    res = evaluate(rows("clip", "tcl-2", "tcl-mix"), out, profile, "tcl", ["swap"])
    assert not res.problems
    assert set(res.table.method) == {"clip", "tcl-2", "tcl-mix"}


def test_a_run_that_fails_beside_others_is_not_made_again(tmp_path, monkeypatch):
    profile = PROFILES["smoke"].training(steps=SHORT, n_train=64, batch_size=8)
    profile = dataclasses.replace(profile, n_items=30)
    bad = dataclasses.replace(ROWS["hn"], key="bad").training(data_options=dict(source="nowhere"))
    train = runs.train
    trained_here = []

    def recorded(config, **options):
        trained_here.append(config.data_options)
        return train(config, **options)

    monkeypatch.setattr(training, "cores", lambda: 2)
    monkeypatch.setattr(runs, "train", recorded)
    res = evaluate([ROWS["clip-coco"], bad], tmp_path, profile, "r", ["swap"])
    assert "nowhere" in res.problems["bad"]
    assert set(res.table.method) == {"clip-coco"}
    assert trained_here == [{}]


def test_a_row_that_fails_in_a_later_seed_leaves_the_table_on_disk(tiny, tmp_path, monkeypatch):
    evaluate_row = evaluation._evaluate_row

    def failing(row, seed, *arguments):
        if row.key == "hn" and seed == 1:
            raise CompvlError("made up")
        return evaluate_row(row, seed, *arguments)

    monkeypatch.setattr(evaluation, "_evaluate_row", failing)
    profile = dataclasses.replace(tiny, seeds=(0, 1))
    res = evaluate(rows("clip", "hn"), tmp_path, profile, "r", ["swap"])
    assert res.problems == {"hn": "made up"}
    written = pd.read_csv(tmp_path / "results/r.csv")
    assert set(written.method) == set(res.table.method) == {"clip"}


def test_a_failing_benchmark_file_says_what_is_needed(tiny, tmp_path):
    (tmp_path / "aro").mkdir()
    (tmp_path / "aro/visual_genome_attribution.json").write_text("[{]")
    profile = dataclasses.replace(tiny, root=str(tmp_path))
    res = evaluate(HP_TABLE1, tmp_path / "out", profile)
    assert "visual_genome_attribution.json:1" in res.gaps["swap"]
    assert "hard_positives" in res.gaps["replace"]


ATTRIBUTION = "visual_genome_attribution.json"
NOTEBOOKS = [  # notebook, its table, and what the table has to contain
    ("01_brittleness", "table1", [ATTRIBUTION, "Our HN", "73.9"]),
    ("02_ratio_ablation", "table3", [ATTRIBUTION, "Our HN", "73.9"]),
    ("03_standard_zeroshot", "table10", ["imagenet", "Our HN", "50.4"]),
    ("04_other_models", "table8", [ATTRIBUTION, "ViT-L/14", "61.6"]),
    ("05_attribution", None, []),
    ("06_cae", "table1", ["ComVG.csv", "CLIP-FT", "64.9"]),
    ("07_text_similarity", "table4", ["SICK", "CLIP-FT", "66.3"]),
    ("09_iterated_operators", "table2", [ATTRIBUTION, "HN, k = 1"]),
    ("10_beyond", None, []),
    ("12_since_2024", None, []),
]


# One process for all notebooks: each kernel of its own would import everything again.
RUN_NOTEBOOKS = """
import os, sys
from pathlib import Path
from traceback import format_exception

from execnb.shell import CaptureShell
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

out = Path(sys.argv[1])
for source in sys.argv[2:]:
    folder = out / Path(source).stem
    (folder / "empty").mkdir(parents=True)
    os.chdir(folder)
    parameters = dict(profile="paper", data_root=str(folder / "empty"))
    shell = CaptureShell()
    for cell in parameterize_notebook(load_notebook_node(source), parameters).cells:
        if cell.cell_type == "code":
            shell.run(cell.source)
        if shell.exc:
            (folder / "error.txt").write_text("".join(format_exception(shell.exc)))
            break
"""


def without_own_runs():
    """The environment, without a folder of training runs."""
    return {name: value for name, value in os.environ.items() if name != "COMPVL_RUNS"}


def check_without_files(notebook, table, contains, folder):
    """A notebook that ran without any files of benchmarks shows published figures, and no other."""
    if not table:
        return
    text = (folder / f"reproduction/tables/{notebook}_{table}.md").read_text()
    assert "no data" in text
    assert all(part in text for part in contains)


@pytest.fixture(scope="module")
def without_files(tmp_path_factory):
    """A folder of what all notebooks made in the profile paper, without any files of benchmarks."""
    pytest.importorskip("papermill")
    out = tmp_path_factory.mktemp("without_files")
    sources = [notebooks_dir() / f"{notebook}.ipynb" for notebook, *_ in NOTEBOOKS]
    command = [sys.executable, "-c", RUN_NOTEBOOKS, out, *sources]
    done = subprocess.run(command, capture_output=True, text=True, env=without_own_runs())
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("notebook, table, contains", NOTEBOOKS)
def test_a_paper_notebook_runs_to_its_end_without_any_files(
    notebook, table, contains, without_files
):
    error = without_files / notebook / "error.txt"
    assert not error.exists(), error.read_text()[-2000:]
    check_without_files(notebook, table, contains, without_files / notebook)


def test_papermill_runs_a_notebook_by_its_own_command(tmp_path):
    pytest.importorskip("papermill")
    (tmp_path / "empty").mkdir()
    notebook, table, contains = NOTEBOOKS[0]
    source = notebooks_dir() / f"{notebook}.ipynb"
    options = ["-p", "profile", "paper", "-p", "data_root", str(tmp_path / "empty")]
    command = [sys.executable, "-m", "papermill", str(source), "out.ipynb", *options]
    done = subprocess.run(
        [*command, "--no-progress-bar"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=without_own_runs(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    check_without_files(notebook, table, contains, tmp_path)


SEEDS_OF_ROWS = {"clip": 1, "clip-coco": 8, "tcl-1": 3, "tcl-2": 2, "hn": 5}


@pytest.fixture(scope="module")
def other_numbers_of_seeds():
    """Made-up results on SWAP of rows with other numbers of seeds."""
    swap = load_benchmark("swap", n=200)
    rng = np.random.default_rng(0)

    def scores():
        n = len(swap.items)
        return pd.DataFrame(
            dict(
                id=[item.id for item in swap.items],
                group="",
                s_c=rng.random(n),
                s_n=rng.random(n),
                s_p=rng.random(n),
            )
        )

    by_row = {}
    for key, n_seeds in SEEDS_OF_ROWS.items():
        by_row[key] = {seed: {"swap": scores()} for seed in range(n_seeds)}
    profile = dataclasses.replace(PROFILES["micro-full"], n_boot=50)
    return Results(profile, rows(*SEEDS_OF_ROWS), [swap], pd.DataFrame(), by_row)


ON_SWAP = ("swap", "all", "orig_acc")


def of_shared_seeds(res, after: str, before: str):
    """The difference in accuracy over the seeds that two rows share."""
    shared = sorted(set(res.scores[after]) & set(res.scores[before]))

    def mean(key):
        seeds = shared if len(res.scores[key]) > 1 else [0]
        outcomes = [res.outcome(key, seed, "swap")["orig_acc"].mean() for seed in seeds]
        return 100 * np.mean(outcomes)

    return mean(after) - mean(before)


def test_rows_are_compared_by_the_seeds_that_they_share(other_numbers_of_seeds):
    res = other_numbers_of_seeds
    expected = of_shared_seeds(res, "hn", "clip-coco")
    gain = carried(res, res, ("clip-coco", "hn"), ON_SWAP)
    assert np.isclose(gain["known"], expected)
    assert np.isclose(gain["diff"], 0)

    tokenizer = create_model("micro-clip", device="cpu").tokenizer
    gains = gains_by_length(res, [("clip-coco", "hn")], tokenizer).set_index("length")
    assert np.isclose(gains.loc["same", "diff"].iloc[0], expected)

    path = ["clip-coco", "tcl-1", "tcl-2"]
    column = next(column for column in ACCURACY if column.figure == ON_SWAP)
    returns = diminishing(res, path, [column]).iloc[0]
    sharing = res.sharing_seeds(path)
    first = sharing.difference(("clip-coco", *ON_SWAP), ("tcl-1", *ON_SWAP))["diff"]
    assert np.isclose(returns.a, first)
    assert not np.isclose(returns.a, of_shared_seeds(res, "tcl-1", "clip-coco"))  # of two seeds

    chosen = recommend(res, SEEDS_OF_ROWS, {"accuracy": ON_SWAP}).iloc[0]
    assert chosen.verdict in ("ahead", "behind", "undecided")
