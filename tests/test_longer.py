"""The table of longer training is what the pieces of micro-full say."""

import pytest

from compvl.core import data_dir, read_csv
from compvl.paper import pieces
from compvl.paper.evaluation import results
from compvl.paper.profiles import get_profile
from compvl.paper.rows import rows

FOLDER = data_dir() / "results/micro-full"
WHERE = ["method", "benchmark", "group", "metric"]


def test_figures_follow_from_the_kept_scores(monkeypatch, tmp_path):
    def refuse(*args, **options):
        raise AssertionError("the scores of a piece are missing: it would be trained")

    monkeypatch.setenv("COMPVL_PIECES", str(FOLDER / "pieces"))
    monkeypatch.setattr(pieces, "finished_model", refuse)
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
