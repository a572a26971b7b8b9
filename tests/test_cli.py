"""The command line as a person or a program meets it: help, exit status, one sentence for a mistake."""
import json
import os
import subprocess
import sys
import time

import pytest


def compvl(*args, **env):
    return subprocess.run([sys.executable, "-m", "compvl.cli", *map(str, args)], capture_output=True, text=True,
                          env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | env)


@pytest.mark.parametrize("command", ["reproduce", "evaluate", "train", "bench"])
def test_help_has_an_example(command):
    done = compvl(command, "--help")
    assert done.returncode == 0 and "Example:" in done.stdout and f"compvl {command}" in done.stdout and "--json" in done.stdout


def test_help_is_quick():
    start = time.perf_counter()
    assert compvl("--help").returncode == 0
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize("args, says", [
    (["reproduce", "--profile", "mirco"], ["mirco", "smoke", "micro-full", "paper"]),
    (["reproduce", "99_nothing", "--profile", "smoke"], ["99_nothing", "01_brittleness"]),
    (["reproduce", "--profile", "smoke", "--data-root", "no/such/folder"], ["no/such/folder"]),
    (["evaluate", "--benchmark", "no-such"], ["no-such", "swap"]),
    (["evaluate", "--benchmark", "swap", "--model", "no-such"], ["no-such"]),
    (["evaluate", "--benchmark", "swap", "--pretrained", "no-such"], ["no-such"]),
    (["evaluate", "--benchmark", "swap", "--fidelity", "no-such"], ["no-such", "corrected"]),
    (["evaluate", "--benchmark", "swap", "--root", "no/such/folder"], ["no/such/folder"]),
    (["train", "--method", "no-such"], ["no-such", "hp+hn"]),
    (["train", "--set", "learning_rate=1"], ["learning_rate", "batch_size"]),
    (["train", "--set", "lr=fast"], ["wrong kind", "--set"]),
    (["train", "--config", "no-such.json"], ["no-such.json"]),
    (["train", "--data", "coco"], ["--train-captions"]),
    (["bench", "no-such"], ["no-such", "evaluate-engine"]),
])
def test_mistakes_get_one_sentence(tmp_path, args, says):
    """Status 2, no traceback, nothing on stdout, a message that names the mistake and what is known."""
    if args[0] == "reproduce":
        args = [*args, "--out", tmp_path / "out"]
    done = compvl(*args, COMPVL_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("compvl: ") and all(s in message for s in says), done.stderr
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback():
    done = compvl("evaluate", "--benchmark", "no-such", COMPVL_DEBUG="1")
    assert done.returncode not in (0, 2) and "Traceback" in done.stderr


def test_unknown_option_is_refused():
    assert compvl("evaluate", "--benchmrak", "swap").returncode == 2


def test_train_then_evaluate(tmp_path):
    """A few steps from random weights; the run is found again; its folder is what evaluate takes; outputs are JSON and CSV."""
    options = ["train", "--method", "hp+hn", "--steps", "2", "--batch-size", "8", "--n-train", "32", "--set", "pretrained=null",
               "--set", "precision=fp32", "--runs", tmp_path / "runs", "--json"]
    first, again = compvl(*options), compvl(*options)
    assert first.returncode == again.returncode == 0, first.stderr
    first, again = json.loads(first.stdout), json.loads(again.stdout)
    assert first == again and first["config"]["method"] == "hp+hn" and first["last"]["step"] == 2

    done = compvl("evaluate", "--pretrained", first["folder"], "--benchmark", "replace,swap", "--n", "20", "--device", "cpu",
                  "--csv", tmp_path / "t.csv", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {r["benchmark"] for r in rows} >= {"replace-relations", "replace-attributes", "swap"}
    assert {"orig_acc", "aug_acc", "brittleness"} <= {r["metric"] for r in rows}
    assert (tmp_path / "t.csv").read_text().startswith("benchmark,group,")


def test_set_overrides_options_and_options_override_config(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"steps": 1, "batch_size": 16, "lr": 0.5, "n_train": 32, "pretrained": null, "precision": "fp32"}')
    done = compvl("train", "--config", config, "--batch-size", "8", "--lr", "0.25", "--set", "lr=1e-4", "--runs", tmp_path / "runs", "--json")
    assert done.returncode == 0, done.stderr
    cfg = json.loads(done.stdout)["config"]
    assert (cfg["steps"], cfg["batch_size"], cfg["lr"]) == (1, 8, 1e-4)


def test_bench_writes_its_figures(tmp_path):
    done = compvl("bench", "step", "--set", "batch_size=8", "--set", "steps=1", "--json", tmp_path / "b.json")
    assert done.returncode in (0, 1) and "times as fast" in done.stdout, done.stderr
    figures = json.loads((tmp_path / "b.json").read_text())
    assert figures["ratio"] > 0 and figures["options"]["batch_size"] == 8 and figures["environment"]["torch"]
    assert done.returncode == (0 if figures.get("met", True) else 1)
