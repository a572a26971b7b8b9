"""The command line for a person or a program: help, exit status, one sentence for a mistake."""

import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from safetensors.torch import load_file

from compvl.app import cli
from compvl.benchmarks.loading import expand
from compvl.evaluate.averages import averages

# A run of a few seconds.
FROM_RANDOM_WEIGHTS = ["--set", "pretrained=null", "--set", "precision=fp32"]


def compvl(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "compvl.app.cli", *map(str, args)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | env,
    )


@pytest.fixture
def inside(monkeypatch, capsys, tmp_path):
    """`compvl` without a process of its own, for the many cases: exit status, stdout, stderr."""
    monkeypatch.setenv("COMPVL_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("COMPVL_DEBUG", raising=False)

    def go(*args):
        monkeypatch.setattr(sys, "argv", ["compvl", *map(str, args)])
        capsys.readouterr()
        try:
            cli.main()
            status = 0
        except SystemExit as e:
            status = e.code or 0
        out = capsys.readouterr()
        return status, out.out, out.err

    return go


@pytest.mark.parametrize("command", ["reproduce", "evaluate", "models", "train", "bench"])
def test_help_has_an_example(command):
    done = compvl(command, "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout
    assert f"compvl {command}" in done.stdout
    assert "--json" in done.stdout


HELP_WITHOUT_HEAVY_IMPORTS = """
import sys
from compvl.app.cli import main
sys.argv = ['compvl', '--help']
try: main()
except SystemExit as e: assert not e.code
heavy = 'torch open_clip spacy pandas numpy matplotlib nbformat papermill'
print('loaded:', [m for m in heavy.split() if m in sys.modules])
"""


def test_help_needs_no_heavy_import():
    command = [sys.executable, "-c", HELP_WITHOUT_HEAVY_IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded: []" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "args, says",
    [
        (["reproduce", "--profile", "mirco"], ["mirco", "smoke", "micro-full", "paper"]),
        (["reproduce", "99_nothing", "--profile", "smoke"], ["99_nothing", "01_brittleness"]),
        (["reproduce", "--profile", "smoke", "--data-root", "no/such/folder"], ["no/such/folder"]),
        (["evaluate", "--benchmark", "no-such"], ["no-such", "swap"]),
        (["evaluate", "--benchmark", "swap", "--model", "no-such"], ["no-such"]),
        (["evaluate", "--benchmark", "swap", "--pretrained", "no-such"], ["no-such"]),
        (
            ["evaluate", "--benchmark", "swap", "--model", "ViT-B-32"],
            ["ViT-B-32", "--pretrained", "openai", "random"],
        ),
        (
            ["evaluate", "--benchmark", "swap", "--model", "negclip"],
            ["negclip", "checkpoints/negclip"],
        ),
        (
            ["evaluate", "--benchmark", "swap", "--model", "micro-clip", "--model", "micro-clip"],
            ["more than once"],
        ),
        (["evaluate", "--benchmark", "swap", "--models", "no-such.yaml"], ["no-such.yaml"]),
        (["evaluate", "--benchmark", "vtab-dtd"], ["vtab-dtd", "root"]),
        (["models", "no-such"], ["no-such", "negclip"]),
        (["evaluate", "--benchmark", "swap", "--fidelity", "no-such"], ["no-such", "corrected"]),
        (["evaluate", "--benchmark", "swap", "--root", "no/such/folder"], ["no/such/folder"]),
        (["train", "--method", "no-such"], ["no-such", "hp+hn"]),
        (["train", "--recipe", "no-such"], ["no-such", "negclip"]),
        (["train", "--recipe", "hp"], ["--train-captions"]),
        (["train", "--recipe", "svlc"], ["--shards"]),
        (["train", "--set", "learning_rate=1"], ["learning_rate", "batch_size"]),
        (["train", "--set", "stepss=1"], ["stepss", "did you mean steps"]),
        (["train", "--set", "kinds=foo"], ["foo", "replace"]),
        (["train", "--image-root", "x"], ["--image-root", "--data coco", "--data table"]),
        (["train", "--skip-damaged"], ["--skip-damaged", "--data coco", "--data webdataset"]),
        (["train", "--data", "webdataset", "--train-captions", "c.csv"], ["--train-captions"]),
        (["train", "--recipe", "dac"], ["bags of captions", "data_options.dense=text"]),
        (["train", "--recipe", "triplet-clip"], ["data_options.counterparts=true"]),
        (["train", "--set", "lr=fast"], ["lr='fast'", "wrong kind"]),
        (["train", "--set", "seed=x"], ["seed='x'", "whole number"]),
        (["train", "--epochs", "nan"], ["epochs=nan"]),
        (["train", "--config", "no-such.json"], ["no-such.json"]),
        (["train", "--data", "coco"], ["--train-captions"]),
        (["train", "--data", "table"], ["--train-captions"]),
        (["train", "--data", "table", "--train-captions", "c.json"], ["c.json", "data='coco'"]),
        (["train", "--train-captions", "no-such.tsv.gz"], ["no-such.tsv.gz does not exist"]),
        (["train", "--runs", "/dev/null/runs"], ["--runs", "cannot be written"]),
        (["bench", "no-such"], ["no-such", "evaluate-engine"]),
        (["bench", "--set", "n=32"], ["--set n", "no such option"]),
        (["evaluate", "--benchmark", "swap", "--csv", "."], ["--csv", "folder"]),
        (["evaluate", "--benchmark", "swap", "--cache", "/dev/null/c"], ["--cache", "written"]),
        (["evaluate", "--benchmark", "swap", "--report", __file__ + "/r.html"], ["--report"]),
        (["perturb", "--kind", "hp", "--rpm", "5", "a.jsonl", "b.jsonl"], ["--rpm", "rules"]),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, inside, args, says):
    """Status 2, nothing on stdout, a message that names the mistake and what is known."""
    if args[0] == "reproduce":
        args = [*args, "--out", tmp_path / "out"]
    status, out, err = inside(*args)
    assert status == 2, err
    assert not out, err
    message = err.strip().splitlines()[-1]
    assert message.startswith("compvl: "), err
    assert all(part in message for part in says), err
    assert not (tmp_path / "out").exists()


def test_traceback_only_for_debugging():
    mistake = ["train", "--config", "no-such.json"]
    plain = compvl(*mistake)
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    assert "no-such.json" in plain.stderr
    debug = compvl(*mistake, COMPVL_DEBUG="1")
    assert debug.returncode not in (0, 2)
    assert "Traceback" in debug.stderr


def test_unknown_option_is_refused(inside):
    status, _, _ = inside("evaluate", "--benchmrak", "swap")
    assert status == 2


def test_train_then_evaluate(tmp_path, inside):
    """A finished run is found again; evaluate takes its folder; outputs are JSON and CSV."""
    options = ["--method", "hp+hn", "--steps", "2", "--batch-size", "8", "--n-train", "32"]
    options += [*FROM_RANDOM_WEIGHTS, "--runs", tmp_path / "runs", "--json"]
    status, out, err = inside("train", *options)
    assert status == 0, err
    first = json.loads(out)
    status, out, err = inside("train", *options)
    assert status == 0, err
    assert json.loads(out) == first
    assert first["config"]["method"] == "hp+hn"
    assert first["last"]["step"] == 2

    options = ["--benchmark", "replace,swap", "--n", "20", "--device", "cpu", "--json"]
    csv = tmp_path / "t.csv"
    done = compvl("evaluate", "--pretrained", first["folder"], *options, "--csv", csv)
    assert done.returncode == 0, done.stderr
    figures = pd.DataFrame(json.loads(done.stdout)["figures"])
    assert set(figures.benchmark) >= {"replace-relations", "replace-attributes", "swap"}
    assert {"orig_acc", "aug_acc", "brittleness"} <= set(figures.metric)
    assert csv.read_text().startswith("benchmark,group,")


def test_a_recipe_fills_what_is_not_given(tmp_path, inside):
    """Options and a config file override it; steps take the place of its epochs."""
    config = tmp_path / "c.json"
    config.write_text(json.dumps(dict(weight_decay=0.3, batch_size=4)))
    options = ["--recipe", "svlc", "--config", config, "--model", "micro-clip"]
    options += ["--data", "microworld", "--n-train", "16", "--batch-size", "8", "--steps", "2"]
    status, out, err = inside("train", *options, *FROM_RANDOM_WEIGHTS, "--json")
    assert status == 0, err
    expected = dict(
        method="hn",
        lr=5e-6,
        lora_rank=4,
        model="micro-clip",
        batch_size=8,
        steps=2,
        epochs=None,
        weight_decay=0.3,
    )
    trained = json.loads(out)["config"]
    assert {name: trained[name] for name in expected} == expected


MODELS = ["--model", "micro-clip", "--model", "micro-clip:random"]
SMALL = ["--benchmark", "replace,stsb", "--n", "30", "--device", "cpu"]


def write_pairs(folder):
    """pairs.csv with eight captions of four small images, and a column `photo` for them."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(8):
        name = f"{i // 2}.png"
        Image.fromarray(rng.integers(0, 256, (48, 60, 3), dtype=np.uint8)).save(folder / name)
        rows.append(dict(photo=name, title=f"A dog beside {i} red cars and a cat."))
    pd.DataFrame(rows).to_csv(folder / "pairs.csv", index=False)


def test_a_table_is_perturbed_and_trained_on(tmp_path, inside, monkeypatch):
    """Hard negatives in a file beside the table and in the table itself; --data need not say it."""
    monkeypatch.setenv("COMPVL_CACHE", str(tmp_path / "cache"))
    write_pairs(tmp_path)
    pairs = tmp_path / "pairs.csv"
    for name in ("hn.jsonl", "pairs_hn.csv"):
        making = ["--kind", "hn", pairs, tmp_path / name, "--workers", "0", "--json"]
        status, out, err = inside("perturb", *making)
        assert status == 0, err
        assert json.loads(out)["n"] == 8

    options = ["--method", "hn", "--steps", "2", "--batch-size", "4", *FROM_RANDOM_WEIGHTS]
    options += ["--set", "data_options.image_column=photo", "--json"]
    runs = []
    for given in (
        ["--train-captions", pairs, "--hard-negatives", tmp_path / "hn.jsonl"],
        ["--train-captions", tmp_path / "pairs_hn.csv"],
        ["--data", "coco", "--train-captions", tmp_path / "pairs_hn.csv", "--image-root", tmp_path],
    ):
        status, out, err = inside("train", *given, *options)
        assert status == 0, err
        runs.append(json.loads(out))
        data = runs[-1]["config"]["train_data"]
        assert (data["data"], data["n"], data["with_hard_negative"]) == ("table", 8, 8)
        assert runs[-1]["last"]["with_hn"] == 4
    assert runs[0]["last"]["loss"] == runs[1]["last"]["loss"]
    assert runs[1] == runs[2], "the same run is found again"

    status, _, err = inside("train", "--train-captions", pairs, "--steps", "1")
    assert status == 2
    assert "only 'photo', 'title'" in err
    assert "--set data_options.image_column" in err


def test_captions_are_held_out(tmp_path, inside, monkeypatch):
    """Their losses are in validation.csv; the run has the name and the weights of one without."""
    monkeypatch.setenv("COMPVL_CACHE", str(tmp_path / "cache"))
    write_pairs(tmp_path)
    pairs = pd.read_csv(tmp_path / "pairs.csv")
    pairs[:4].to_csv(tmp_path / "training.csv", index=False)
    pairs[4:].to_csv(tmp_path / "held_out.csv", index=False)
    for name in ("training", "held_out"):
        files = [tmp_path / f"{name}.csv", tmp_path / f"{name}.jsonl"]
        status, _, err = inside("perturb", "--kind", "hn", *files, "--workers", "0")
        assert status == 0, err

    options = ["--method", "hn", "--steps", "3", "--batch-size", "4", *FROM_RANDOM_WEIGHTS]
    options += ["--set", "data_options.image_column=photo", "--train-captions"]
    options += [tmp_path / "training.csv", "--hard-negatives", tmp_path / "training.jsonl"]
    held_out = ["--validation-captions", tmp_path / "held_out.csv"]
    negatives = ["--validation-hard-negatives", tmp_path / "held_out.jsonl"]
    every = ["--set", "validate_every=2"]
    plain, looked = tmp_path / "plain", tmp_path / "looked"
    status, _, err = inside("train", *options, "--runs", plain)
    assert status == 0, err
    status, out, err = inside("train", *options, *held_out, *negatives, *every, "--runs", looked)
    assert status == 0, err
    (folder,) = looked.iterdir()
    losses = pd.read_csv(folder / "validation.csv").pivot(
        index="step", columns="metric", values="value"
    )
    assert list(losses.index) == [0, 2, 3]
    assert ((losses.itc + losses.hn) - losses.loss).abs().max() < 1e-4
    assert f"held-out loss {losses.loss[3]:.4f} (validation.csv)" in out
    assert [run.name for run in plain.iterdir()] == [folder.name]
    trained = load_file(folder / "weights.safetensors")
    for name, weight in load_file(plain / folder.name / "weights.safetensors").items():
        assert weight.equal(trained[name]), name

    for given, says in (
        (held_out, "validate_every=100"),
        ([*held_out, *every], "--validation-hard-negatives"),
        (["--validation-captions", tmp_path / "c.json", *every], "c.json is not a table"),
    ):
        status, _, err = inside("train", *options, *given, "--runs", tmp_path / "refused")
        assert status == 2, err
        assert says in err


def test_several_models_side_by_side(tmp_path, inside):
    """A table with paired differences, and every item in a file."""
    files = ["--items", tmp_path / "items", "--csv", tmp_path / "t.csv"]
    cache = ["--cache", tmp_path / "cache"]
    status, out, err = inside("evaluate", *MODELS, *SMALL, *files, *cache, "--json")
    assert status == 0, err
    found = {name: pd.DataFrame(rows) for name, rows in json.loads(out).items()}
    figures = found["figures"]
    differences = found["differences"]
    assert set(figures.model) == {"micro-clip", "micro-clip:random"}
    assert set(differences.model) == {"micro-clip:random"}
    assert {"replace", "replace-relations", "stsb"} <= set(differences.benchmark)

    which = "benchmark == 'replace' and metric == 'orig_acc'"
    difference = differences.query(which).iloc[0]
    value = figures.query(which).set_index("model").value
    assert difference["diff"] == pytest.approx(value["micro-clip:random"] - value["micro-clip"])
    assert difference.lo <= difference["diff"] <= difference.hi
    assert (tmp_path / "t.csv").exists()
    columns = "benchmark,group,metric,model,reference,a,b,diff"
    assert (tmp_path / "t_differences.csv").read_text().startswith(columns)

    of_random = sorted(path.name for path in (tmp_path / "items/micro-clip-random").iterdir())
    assert of_random == ["replace-attributes.csv", "replace-relations.csv", "stsb.csv"]
    table = (tmp_path / "items/micro-clip/replace-relations.csv").read_text().splitlines()
    assert len(table) == 31
    columns = {"caption", "hard_negative", "s_c", "orig_acc", "margin"}
    assert columns <= set(table[0].split(","))


def test_a_group_of_benchmarks_is_evaluated_whole(tmp_path, inside):
    """Every member has figures from the counterpart in the microworld."""
    options = ["--benchmark", "compositional", "--n", "6", "--cache", tmp_path / "cache", "--json"]
    status, out, err = inside("evaluate", "--model", "micro-clip", *options)
    assert status == 0, err
    found = pd.DataFrame(json.loads(out)["figures"])
    members = expand("compositional")
    assert len(members) > 70
    assert set(found.benchmark) == {*members, *averages(members)}
    assert found.value.notna().all()


def test_a_repeated_evaluation_uses_what_is_kept(tmp_path, inside):
    """Only scores that are missing are computed again."""
    options = [*MODELS, *SMALL, "--cache", tmp_path / "cache"]
    status, out, err = inside("evaluate", *options, "--json")
    assert status == 0, err
    kept = sorted((tmp_path / "cache/scores").glob("*.json"))
    assert len(kept) == 6
    written = {path: path.stat().st_mtime_ns for path in kept[1:]}
    kept[0].unlink()
    status, out, err = inside("evaluate", *options)
    assert status == 0, err
    assert "micro-clip:random" in out
    assert {path: path.stat().st_mtime_ns for path in kept[1:]} == written


LIST = """\
- name: micro-clip
  label: base
- name: micro-clip
  weights: no-such.pt
  label: lost
- {name: micro-clip, weights: random, label: blank}
"""


def test_a_list_of_models(tmp_path, inside, monkeypatch):
    """One that fails does not lose the others, and a second call encodes nothing."""
    path = tmp_path / "models.yaml"
    path.write_text(LIST)
    options = ["--models", path, *SMALL, "--cache", tmp_path / "cache", "--json"]
    status, out, err = inside("evaluate", *options)
    assert status == 1
    found = json.loads(out)
    assert list(dict.fromkeys(row["model"] for row in found["figures"])) == ["base", "blank"]
    assert {row["reference"] for row in found["differences"]} == {"base"}
    assert list(found["failures"]) == ["lost"]
    assert "no-such.pt" in found["failures"]["lost"]
    assert "compvl: lost failed" in err

    def encode(*_):
        raise AssertionError("encoded again")

    monkeypatch.setattr("compvl.models.clip.Model.encode_image", encode)
    monkeypatch.setattr("compvl.models.clip.Model.encode_text", encode)
    status, out, _ = inside("evaluate", *options)
    assert status == 1
    assert json.loads(out) == found
    status, out, _ = inside("evaluate", *options, "--no-cache")
    assert json.loads(out)["failures"]["base"] == "AssertionError: encoded again"


@pytest.mark.parametrize(
    "text, says",
    [
        ("- name: micro-clip\n  weigths: base\n", ["line 2, entry 1", "'weigths'", "weights"]),
        ("- name: micro-clip\n\n- label: x\n", ["line 3, entry 2", "no name"]),
        ("name: micro-clip\n", ["must be a list"]),
    ],
)
def test_mistakes_in_a_list_of_models(tmp_path, inside, text, says):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    status, out, err = inside("evaluate", "--benchmark", "swap", "--models", path)
    assert status == 2
    assert not out
    assert all(part in err for part in [str(path), *says]), err


def test_a_list_of_models_in_two_processes(tmp_path):
    """Figures and failures are those of one process, and are printed once."""
    path = tmp_path / "models.yaml"
    path.write_text(LIST.replace("random", "base"))
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "compvl"]
    found = []
    for number, program in enumerate((["-m", "compvl"], launch)):
        options = ["--models", path, "--benchmark", "swap,winoground", "--n", "30", "--json"]
        options += ["--device", "cpu", "--batch-size", "8", "--cache", tmp_path / str(number)]
        done = subprocess.run(
            [sys.executable, *program, "evaluate", *map(str, options)],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 1, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert {row["model"] for row in found[0]["figures"]} == {"base", "blank"}


def test_set_overrides_options_and_options_override_config(tmp_path, inside):
    config = tmp_path / "config.json"
    fields = dict(steps=1, batch_size=16, lr=0.5, n_train=32, pretrained=None, precision="fp32")
    config.write_text(json.dumps(fields))
    options = ["--config", config, "--batch-size", "8", "--lr", "0.25", "--set", "lr=1e-4"]
    status, out, err = inside("train", *options, "--json")
    assert status == 0, err
    trained = json.loads(out)["config"]
    assert (trained["steps"], trained["batch_size"], trained["lr"]) == (1, 8, 1e-4)


@pytest.mark.parametrize("required, exit_status", [(1.5, 0), (3, 1)])
def test_bench_writes_its_figures_and_keeps_to_its_mark(
    tmp_path, inside, monkeypatch, required, exit_status
):
    from compvl.app.speed import BENCHES

    def program(n=1):
        rows = [dict(way="plain", seconds=2.0 * n), dict(way="ours", seconds=1.0 * n)]
        what = "a stand-in"
        return dict(what=what, rows=rows, ratio=2.0, difference=0.0, required=required)

    monkeypatch.setitem(BENCHES, "stand-in", program)
    path = tmp_path / "b.json"
    status, out, err = inside("bench", "stand-in", "--set", "n=3", "--json", path)
    assert status == exit_status, err
    assert "times as fast" in out, err
    figures = json.loads(path.read_text())
    assert figures["rows"][0]["seconds"] == 6
    assert figures["options"] == {"n": 3}
    assert figures["environment"]["torch"]


def test_evaluate_reads_items_from_a_file(tmp_path, inside):
    images = tmp_path / "images"
    images.mkdir()
    for name, colour in (("1.png", "red"), ("2.png", "blue")):
        Image.new("RGB", (32, 32), colour).save(images / name)
    items = tmp_path / "items.csv"
    items.write_text("image,caption,foil,group\n1.png,red,blue,a\n2.png,blue,red,b\n")
    table = tmp_path / "figures.csv"
    card = tmp_path / "card.html"
    args = ["evaluate", "--benchmark", items, "--device", "cpu", "--no-cache"]
    status, _, err = inside(*args, "--root", images, "--csv", table, "--report", card)
    assert status == 0, err
    figures = pd.read_csv(table)
    accuracy = figures[figures.metric == "accuracy"].set_index("group")
    assert set(figures.benchmark) == {"items.csv"}
    assert accuracy.n["all"] == 2
    assert {"a", "b"} < set(accuracy.index)
    assert "items.csv" in card.read_text()

    items.write_text("image,caption,foil\n1.png,red,blue\n2.png,blue,\n")
    status, out, err = inside(*args, "--root", images)
    assert status == 2
    assert f"{items}:3, column foil, is empty" in err
    assert not out
