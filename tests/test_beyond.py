"""What the notebook 10_beyond asks of other modules: rows that leave those of the papers as they were, pieces of all that it shows, and combinations that no training text has."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from compvl.benchmarks.loading import load_benchmark
from compvl.core import CompvlError
from compvl.microworld.datasets import FinetuneSet, PretrainSet
from compvl.paper.loading import STANDARD, TRIPLET_BENCHMARKS
from compvl.paper.profiles import PROFILES
from compvl.paper.rows import ROWS
from compvl.paper.runs import train_config
from compvl.paper.table_rows import BEYOND, DOSE, HP_TABLE8, TOGETHER, UNSEEN
from compvl.train.loop import run_name

from compvl.benchmarks.synthetic import kept_out

ROOT = Path(__file__).resolve().parents[1]


def test_the_dial_makes_other_runs_and_leaves_the_papers_rows_alone():
    names = {
        k: run_name(train_config(ROWS[k], PROFILES["smoke"]))
        for by in DOSE.values()
        for k in by.values()
    }
    assert len(set(names.values())) == len(names) == 8
    said = replace(ROWS["hn"], data_options=dict(rare_share=0.3))
    assert (
        run_name(train_config(said, PROFILES["smoke"])) == names["hn"]
    )  # .3 is what all other rows have


def test_rows_of_the_dial_need_the_microworld(tmp_path):
    with pytest.raises(CompvlError, match="microworld only.*rare words"):
        train_config(ROWS["hn-rare1"], replace(PROFILES["paper"], root=str(tmp_path)))


def test_pieces_are_made_of_all_that_the_notebook_shows():
    spec = importlib.util.spec_from_file_location("pieces", ROOT / "scripts/pieces.py")
    pieces = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pieces)
    plan = pieces.plan(PROFILES["micro-full"])
    asked = {r.key: by for r, s, by in plan if s == 0}
    assert {r.key for r in BEYOND if r.source == "trained"} <= set(asked) and all(
        {*TRIPLET_BENCHMARKS, STANDARD[0]} <= set(asked[r.key][None])
        for r in BEYOND
        if r.source == "trained"
    )
    assert all(
        {"aro-relation", "aro-attribution"} <= set(asked[r.key][None])
        for r in TOGETHER
        if r.source == "trained"
    )
    assert [(s, {r.key for r, at, _ in plan if at == s} - set(asked)) for s in range(5)] == [
        (0, set()),
        *((s, {r.key for r in HP_TABLE8 if r.base}) for s in (1, 2)),
        (3, set()),
        (4, set()),
    ]  # of the models that are compared with CLIP, seed 0 is shipped
    assert all(
        {*TRIPLET_BENCHMARKS, *(STANDARD if r.key != "xvlm" else ())} == set(by[None])
        for r, _, by in plan
        if r.base
    )
    for k in set(UNSEEN) - {"clip"}:
        assert {"hard-positive-kinds", "combinations"} <= set(asked[k][None]) and asked[k][
            "heldout"
        ] == ["combinations"]


def test_training_says_no_kept_out_combination_but_falsely():
    told = [
        (c, p, n)
        for ds in (FinetuneSet(1500), PretrainSet(1500))
        for c, n, p in map(ds.texts, range(1500))
    ]
    assert not any(kept_out(t) for c, p, _ in told for t in (c, p) if t)
    assert any(kept_out(n) for _, _, n in told if n)
    assert all(
        kept_out(i.caption) for i in load_benchmark("combinations", n=60, split="heldout").items
    )
    assert not any(kept_out(i.caption) for i in load_benchmark("combinations", n=60).items)


def test_a_piece_that_fails_or_whose_process_is_killed_costs_only_itself(tmp_path):
    script = tmp_path / "some.py"
    script.write_text("""
import os, sys
from pathlib import Path
from types import SimpleNamespace
import pieces
def one(profile, row, seed, by_split):
    key = row.key
    if key == "wrong": raise ValueError("no such row")
    if key == "killed": os._exit(9)
    Path(os.environ["COMPVL_PIECES"], f"{key}-{seed}").touch()
if __name__ == "__main__":
    pieces.one = one
    rows = [SimpleNamespace(key=k) for k in ("a", "wrong", "b", "killed", "c", "not asked for")]
    pieces.plan = lambda profile: [(r, s, {}) for s in (0, 1) for r in rows]
    pieces.main()
""")
    said = subprocess.run(
        [
            sys.executable,
            str(script),
            "--processes",
            "2",
            "--rows",
            "a",
            "wrong",
            "b",
            "killed",
            "c",
            "--folder",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])},
    )
    assert {p.name for p in tmp_path.iterdir()} == {
        "some.py",
        *(f"{k}-{s}" for k in "abc" for s in (0, 1)),
    }, said.stderr
    assert said.returncode == 1 and "6 of 10 pieces are there, 4 failed" in said.stdout
    assert (
        "wrong, seed 0: ValueError: no such row" in said.stdout
        and "killed, seed 1: BrokenProcessPool" in said.stdout
    )
