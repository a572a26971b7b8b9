"""The command line as a person or a program meets it: help, exit status, one sentence for a mistake."""

import json
import os
import subprocess
import sys

import pytest

from compvl.app import cli


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
    assert (
        done.returncode == 0
        and "Example:" in done.stdout
        and f"compvl {command}" in done.stdout
        and "--json" in done.stdout
    )


def test_help_needs_no_heavy_import():
    heavy = "torch open_clip spacy pandas numpy matplotlib nbformat papermill"
    code = f"import sys\nfrom compvl.app.cli import main\nsys.argv = ['compvl', '--help']\ntry: main()\nexcept SystemExit as e: assert not e.code\nprint('loaded:', [m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "loaded: []" in done.stdout, done.stdout + done.stderr


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
        (["evaluate", "--benchmark", "vtab-dtd"], ["vtab-dtd", "root"]),
        (["models", "no-such"], ["no-such", "negclip"]),
        (["evaluate", "--benchmark", "swap", "--fidelity", "no-such"], ["no-such", "corrected"]),
        (["evaluate", "--benchmark", "swap", "--root", "no/such/folder"], ["no/such/folder"]),
        (["train", "--method", "no-such"], ["no-such", "hp+hn"]),
        (["train", "--recipe", "no-such"], ["no-such", "negclip"]),
        (["train", "--recipe", "hp"], ["--train-captions"]),
        (["train", "--recipe", "svlc"], ["--shards"]),
        (["train", "--set", "learning_rate=1"], ["learning_rate", "batch_size"]),
        (["train", "--set", "lr=fast"], ["wrong kind", "--set"]),
        (["train", "--config", "no-such.json"], ["no-such.json"]),
        (["train", "--data", "coco"], ["--train-captions"]),
        (["bench", "no-such"], ["no-such", "evaluate-engine"]),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, inside, args, says):
    """Status 2, nothing on stdout, a message that names the mistake and what is known."""
    if args[0] == "reproduce":
        args = [*args, "--out", tmp_path / "out"]
    status, out, err = inside(*args)
    assert status == 2 and not out, err
    message = err.strip().splitlines()[-1]
    assert message.startswith("compvl: ") and all(s in message for s in says), err
    assert not (tmp_path / "out").exists()


def test_traceback_only_for_debugging():
    mistake = ["train", "--config", "no-such.json"]
    plain, debug = compvl(*mistake), compvl(*mistake, COMPVL_DEBUG="1")
    assert (
        plain.returncode == 2 and "Traceback" not in plain.stderr and "no-such.json" in plain.stderr
    )
    assert debug.returncode not in (0, 2) and "Traceback" in debug.stderr


def test_unknown_option_is_refused(inside):
    assert inside("evaluate", "--benchmrak", "swap")[0] == 2


def test_train_then_evaluate(tmp_path, inside):
    """A few steps from random weights; the run is found again; its folder is what evaluate takes; outputs are JSON and CSV."""
    options = [
        "train",
        "--method",
        "hp+hn",
        "--steps",
        "2",
        "--batch-size",
        "8",
        "--n-train",
        "32",
        "--set",
        "pretrained=null",
        "--set",
        "precision=fp32",
        "--runs",
        tmp_path / "runs",
        "--json",
    ]
    (status, out, err), again = inside(*options), inside(*options)
    assert status == again[0] == 0, err
    first, again = json.loads(out), json.loads(again[1])
    assert first == again and first["config"]["method"] == "hp+hn" and first["last"]["step"] == 2

    done = compvl(
        "evaluate",
        "--pretrained",
        first["folder"],
        "--benchmark",
        "replace,swap",
        "--n",
        "20",
        "--device",
        "cpu",
        "--csv",
        tmp_path / "t.csv",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["figures"]
    assert {r["benchmark"] for r in rows} >= {"replace-relations", "replace-attributes", "swap"}
    assert {"orig_acc", "aug_acc", "brittleness"} <= {r["metric"] for r in rows}
    assert (tmp_path / "t.csv").read_text().startswith("benchmark,group,")


def test_a_recipe_fills_what_is_not_given(tmp_path, inside):
    """Options and a config file win over it; steps take the place of its epochs."""
    (tmp_path / "c.json").write_text(json.dumps(dict(weight_decay=0.3, batch_size=4)))
    status, out, err = inside(
        "train",
        "--recipe",
        "svlc",
        "--config",
        tmp_path / "c.json",
        "--model",
        "micro-clip",
        "--set",
        "pretrained=null",
        "--set",
        "precision=fp32",
        "--data",
        "microworld",
        "--n-train",
        "16",
        "--batch-size",
        "8",
        "--steps",
        "2",
        "--json",
    )
    assert status == 0, err
    config = json.loads(out)["config"]
    assert {
        k: config[k]
        for k in (
            "method",
            "lr",
            "lora_rank",
            "model",
            "batch_size",
            "steps",
            "epochs",
            "weight_decay",
        )
    } == dict(
        method="hn",
        lr=5e-6,
        lora_rank=4,
        model="micro-clip",
        batch_size=8,
        steps=2,
        epochs=None,
        weight_decay=0.3,
    )


def test_several_models_side_by_side(tmp_path, inside):
    """A table with paired differences; every item in a file of its own; an interrupted or repeated evaluation goes on from what is kept."""
    args = [
        "evaluate",
        "--model",
        "micro-clip",
        "--model",
        "micro-clip:random",
        "--benchmark",
        "replace,stsb",
        "--n",
        "30",
        "--device",
        "cpu",
        "--items",
        tmp_path / "items",
        "--csv",
        tmp_path / "t.csv",
    ]
    status, out, err = inside(*args, "--cache", tmp_path / "cache", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert {r["model"] for r in found["figures"]} == {"micro-clip", "micro-clip:random"} and {
        r["model"] for r in found["differences"]
    } == {"micro-clip:random"}
    assert {"replace", "replace-relations", "stsb"} <= {
        r["benchmark"] for r in found["differences"]
    }
    d = next(
        r for r in found["differences"] if (r["benchmark"], r["metric"]) == ("replace", "orig_acc")
    )
    value = {
        r["model"]: r["value"]
        for r in found["figures"]
        if (r["benchmark"], r["metric"]) == ("replace", "orig_acc")
    }
    assert (
        d["diff"] == pytest.approx(value["micro-clip:random"] - value["micro-clip"])
        and d["lo"] <= d["diff"] <= d["hi"]
    )
    assert (tmp_path / "t.csv").exists() and (
        tmp_path / "t_differences.csv"
    ).read_text().startswith("benchmark,group,metric,model,reference,a,b,diff")
    kept = sorted((tmp_path / "cache/scores").glob("*.json"))
    assert len(kept) == 6 and sorted(
        p.name for p in (tmp_path / "items/micro-clip-random").iterdir()
    ) == ["replace-attributes.csv", "replace-relations.csv", "stsb.csv"]
    lines = (tmp_path / "items/micro-clip/replace-relations.csv").read_text().splitlines()
    assert len(lines) == 31 and {"caption", "hard_negative", "s_c", "orig_acc", "margin"} <= set(
        lines[0].split(",")
    )
    before = {p: p.stat().st_mtime_ns for p in kept}
    kept[0].unlink()
    status, out, err = inside(*args[:5], *args[5:], "--cache", tmp_path / "cache")
    assert (
        status == 0
        and "micro-clip:random" in out
        and all(p.stat().st_mtime_ns == t for p, t in before.items() if p != kept[0])
    )


def test_set_overrides_options_and_options_override_config(tmp_path, inside):
    config = tmp_path / "config.json"
    config.write_text(
        '{"steps": 1, "batch_size": 16, "lr": 0.5, "n_train": 32, "pretrained": null, "precision": "fp32"}'
    )
    status, out, err = inside(
        "train",
        "--config",
        config,
        "--batch-size",
        "8",
        "--lr",
        "0.25",
        "--set",
        "lr=1e-4",
        "--json",
    )
    assert status == 0, err
    cfg = json.loads(out)["config"]
    assert (cfg["steps"], cfg["batch_size"], cfg["lr"]) == (1, 8, 1e-4)


@pytest.mark.parametrize("required, exit_status", [(1.5, 0), (3, 1)])
def test_bench_writes_its_figures_and_keeps_to_its_mark(
    tmp_path, inside, monkeypatch, required, exit_status
):
    from compvl.app.speed import BENCHES

    def program(n=1):
        return dict(
            what="a stand-in",
            rows=[dict(way="plain", seconds=2.0 * n), dict(way="ours", seconds=1.0 * n)],
            ratio=2.0,
            difference=0.0,
            required=required,
        )

    monkeypatch.setitem(BENCHES, "stand-in", program)
    status, out, err = inside("bench", "stand-in", "--set", "n=3", "--json", tmp_path / "b.json")
    assert status == exit_status and "times as fast" in out, err
    figures = json.loads((tmp_path / "b.json").read_text())
    assert (
        figures["rows"][0]["seconds"] == 6
        and figures["options"] == {"n": 3}
        and figures["environment"]["torch"]
    )
