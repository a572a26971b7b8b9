"""What 10_beyond needs: its rows, their pieces, and combinations kept out of training."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pieces import make_piece, plan

from compvl.benchmarks.loading import load_benchmark
from compvl.benchmarks.synthetic.combinations import kept_out
from compvl.core import CompvlError
from compvl.evaluate.kept import Kept
from compvl.microworld.datasets import FinetuneSet, PretrainSet
from compvl.paper import pieces as pieces_of_runs
from compvl.paper.loading import STANDARD, TRIPLET_BENCHMARKS
from compvl.paper.profiles import PROFILES
from compvl.paper.rows import ROWS
from compvl.paper.runs import train_config
from compvl.paper.table_rows import (
    BEYOND,
    DOSE,
    GENERATIVE,
    HP_RATIOS,
    HP_TABLE8,
    OTHER_TOWER,
    TOGETHER,
    UNSEEN,
)
from compvl.train.loop import run_name

ROOT = Path(__file__).resolve().parents[1]


def smoke_run(row):
    """Name of the run of a row in the profile smoke."""
    return run_name(train_config(row, PROFILES["smoke"]))


def test_the_dial_makes_other_runs_and_leaves_the_papers_rows_alone():
    keys = [*DOSE["hn"].values(), *DOSE["hp+hn"].values()]
    names = {key: smoke_run(ROWS[key]) for key in keys}
    assert len(set(names.values())) == len(names) == 8
    explicit = ROWS["hn"].training(data_options=dict(rare_share=0.3))
    assert smoke_run(explicit) == names["hn"]  # 0.3 is what all other rows have


def test_rows_beside_the_published_ones_are_runs_of_their_own():
    keys = ["hn", "hp+hn", "swap-only", "replace-only", "hp+0.75hn", "clip-coco"]
    keys += ["hp+1.5hn", "hp+2hn", "hn+hp-replace", "hn+hp-swap"]
    keys += [row.key for row in OTHER_TOWER if row.source == "trained"]
    names = {key: smoke_run(ROWS[key]) for key in keys}
    assert len(set(names.values())) == len(keys) == 13
    assert smoke_run(ROWS["hp+hn"].training(w_hn=1.5)) == names["hp+1.5hn"]


def texts_of(row, n=1500):
    """Captions, hard negatives and hard positives that a row is trained on."""
    data = FinetuneSet(n, kinds=row.kinds, **row.data_options)
    return [data.texts(i) for i in range(n)]


def same_words(caption, positive):
    """Whether a hard positive has the words of its caption, in whatever order."""
    return sorted(re.findall(r"\w+", positive)) == sorted(re.findall(r"\w+", caption))


def test_rows_with_one_kind_of_hard_positives_have_the_hard_negatives_of_hn():
    of_hn = [texts[:2] for texts in texts_of(ROWS["hn"])]
    for key, is_swap in (("hn+hp-replace", False), ("hn+hp-swap", True)):
        texts = texts_of(ROWS[key])
        assert [one[:2] for one in texts] == of_hn
        pairs = [(caption, positive) for caption, _, positive in texts if positive]
        assert pairs
        assert all(same_words(*pair) == is_swap for pair in pairs)
    # this is what the paper's rows do not have
    for key in ("replace-only", "swap-only"):
        assert [texts[:2] for texts in texts_of(ROWS[key])] != of_hn


def test_rows_of_the_dial_need_the_microworld(tmp_path):
    with pytest.raises(CompvlError, match="microworld only.*rare words"):
        train_config(ROWS["hn-rare1"], replace(PROFILES["paper"], root=str(tmp_path)))


def trained_keys(table):
    """Keys of the rows that are trained."""
    return {row.key for row in table if row.source == "trained"}


def test_pieces_are_made_of_all_that_the_notebook_shows():
    planned_runs = plan(PROFILES["micro-full"])
    planned = {row.key: by_split for row, seed, by_split in planned_runs if seed == 0}

    assert trained_keys(BEYOND) <= set(planned)
    for key in trained_keys(BEYOND):
        assert {*TRIPLET_BENCHMARKS, STANDARD[0]} <= set(planned[key][None])
    for key in trained_keys(TOGETHER):
        assert {"aro-relation", "aro-attribution"} <= set(planned[key][None])

    for key in trained_keys(HP_RATIOS) | trained_keys(OTHER_TOWER):
        assert set(TRIPLET_BENCHMARKS) <= set(planned[key][None])
    assert {"hp+2hn", "roberta-hp+hn", "hn+hp-swap"} <= set(planned)

    # of the models that are compared with CLIP, seed 0 is shipped
    one_piece = {row.key for row in GENERATIVE[1:]}  # made with the first of these rows
    shipped = {row.key for row in HP_TABLE8 if row.is_shipped and row.has_counterpart}
    pretrained = shipped - one_piece
    for seed in range(1, 8):
        further = {row.key for row, at, _ in planned_runs if at == seed} - set(planned)
        assert further == (pretrained if seed in (1, 2) else set())
    for row, _, by_split in planned_runs:
        if row.is_shipped:
            standard = () if row.scores_pairs else STANDARD
            assert {*TRIPLET_BENCHMARKS, *standard} == set(by_split[None])

    for key in set(UNSEEN) - {"clip"}:
        assert {"hard-positive-kinds", "combinations"} <= set(planned[key][None])
        assert planned[key]["heldout"] == ["combinations"]


def test_training_says_no_kept_out_combination_but_falsely():
    true_texts = []
    negatives = []
    for dataset in (FinetuneSet(1500), PretrainSet(1500)):
        for caption, negative, positive in map(dataset.texts, range(1500)):
            true_texts += [text for text in (caption, positive) if text]
            negatives.append(negative)
    assert not any(map(kept_out, true_texts))
    assert any(kept_out(negative) for negative in negatives if negative)
    heldout = load_benchmark("combinations", n=60, split="heldout")
    assert all(kept_out(item.caption) for item in heldout.items)
    assert not any(kept_out(item.caption) for item in load_benchmark("combinations", n=60).items)


SCRIPT = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import pieces
def make_piece(profile, row, seed, by_split):
    key = row.key
    if key == "wrong": raise ValueError("no such row")
    if key == "killed": os._exit(9)
    Path(os.environ["COMPVL_PIECES"], f"{key}-{seed}").touch()
if __name__ == "__main__":
    pieces.make_piece = make_piece
    rows = [SimpleNamespace(key=k) for k in ("a", "wrong", "b", "killed", "c", "not asked for")]
    pieces.plan = lambda profile: [(r, s, {}) for s in (0, 1) for r in rows]
    pieces.main()
"""


def test_a_piece_that_fails_or_whose_process_is_killed_costs_only_itself(tmp_path):
    script = tmp_path / "some.py"
    script.write_text(SCRIPT)
    keys = ["a", "wrong", "b", "killed", "c"]
    options = ["--processes", "2", "--rows", *keys, "--folder", str(tmp_path)]
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(script), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path},
    )
    files = {file.name for file in tmp_path.iterdir()}
    pieces = {"a-0", "a-1", "b-0", "b-1", "c-0", "c-1"}
    assert files == {"some.py", *pieces}, done.stderr
    assert done.returncode == 1
    assert "6 of 10 pieces are there, 4 failed" in done.stdout
    assert "wrong, seed 0: ValueError: no such row" in done.stdout
    assert "killed, seed 1: BrokenProcessPool" in done.stdout


def test_a_piece_comes_into_the_folder_as_a_whole(tmp_path, monkeypatch):
    def save_one(self, key, table):
        if saved:
            raise OSError("disk full")
        saved.append(key)
        save(self, key, table)

    def refuse(*args, **options):
        raise AssertionError("the piece is there: nothing is trained")

    folder = tmp_path / "pieces"
    runs = tmp_path / "runs"
    monkeypatch.setenv("COMPVL_PIECES", str(folder))
    monkeypatch.setenv("COMPVL_RUNS", str(runs))
    make = partial(
        make_piece,
        "smoke",
        ROWS["clip-coco"],
        0,
        {None: ["swap", "replace-attributes"]},
    )
    save = Kept.save
    saved = []
    monkeypatch.setattr(Kept, "save", save_one)
    with pytest.raises(CompvlError, match="disk full"):
        make()
    assert not folder.exists()
    assert list((runs / "unfinished").rglob("*.json"))

    monkeypatch.setattr(Kept, "save", save)
    make()
    names = {file.name for file in folder.iterdir()}
    assert len(names) == 3 * 2  # the run and two benchmarks: each a table and a description
    assert not list((runs / "unfinished").iterdir())

    shutil.rmtree(runs)
    monkeypatch.setattr(pieces_of_runs, "finished_model", refuse)
    make()
    assert {file.name for file in folder.iterdir()} == names
