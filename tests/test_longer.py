"""The table of longer training is what the pieces of micro-full say."""

import pandas as pd
import pytest

from compvl.core import data_dir, read_csv
from compvl.paper import pieces
from compvl.paper.evaluation import results
from compvl.paper.profiles import get_profile
from compvl.paper.rows import rows
from compvl.paper.weight_search import search_weights

FOLDER = data_dir() / "results/micro-full"
WHERE = ["method", "benchmark", "group", "metric"]


def take_pieces(folder, monkeypatch):
    """Let results be of the pieces in a folder alone."""

    def refuse(*args, **options):
        raise AssertionError("the scores of a piece are missing: it would be trained")

    monkeypatch.setenv("COMPVL_PIECES", str(folder))
    monkeypatch.setattr(pieces, "finished_model", refuse)


def test_figures_follow_from_the_kept_scores(monkeypatch, tmp_path):
    take_pieces(FOLDER / "pieces", monkeypatch)
    profile = get_profile("micro-full")
    names = ["replace-attributes"]
    table = read_csv(FOLDER / "longer.csv")
    there = table.groupby("method").seeds.max()
    trained = [row.key for row in rows(*there.index) if row.source == "trained"]
    seeds = {key: range(int(there[key])) for key in trained}
    found = results(rows(*seeds), names, profile, tmp_path, "again", progress=False, seeds=seeds)
    found.check()
    committed = table.set_index(WHERE)
    again = found.summary().set_index(WHERE)
    shared = committed.index.intersection(again.index)
    assert len(shared) >= 3 * len(trained)
    for place in shared:
        for column in ("value", "lo", "hi", "seeds"):
            assert again.loc[place, column] == pytest.approx(committed.loc[place, column])


def test_differences_between_rows_of_table_1_are_known_to_a_point():
    pairs = read_csv(FOLDER / "longer_pairs.csv")
    half_widths = (pairs.hi - pairs.lo) / 2
    assert len(pairs) == 30
    assert half_widths.max() <= 1.0


def test_the_choice_of_weights_follows_from_the_kept_scores(monkeypatch, tmp_path):
    folder = data_dir() / "results/lambda"
    take_pieces(folder / "pieces", monkeypatch)
    committed = read_csv(folder / "micro-full_choice.csv", keep_default_na=False)
    weights = committed.groupby("attribution", sort=False)["λ"].apply(list).to_dict()
    again = search_weights(
        weights,
        get_profile("micro-full"),
        tmp_path,
        "again",
        weights=weights,
        seeds=(0,),
        by_rules=True,
        progress=False,
    )
    pd.testing.assert_frame_equal(again.round(4), committed, check_dtype=False, atol=1e-3)
