"""What `compvl.text.classify` makes of CREPE's hard negatives, and the committed table of it."""

import pandas as pd
import pytest
from crepe_kinds import crepe_table, negatives
from pandas.testing import assert_frame_equal
from released import REAL

from compvl.core import data_dir
from compvl.text import EDIT_KINDS, classify

FILES = REAL / "crepe/prod_hard_negatives"
OPERATORS = {"atom": "replace", "swap": "swap", "negate": "negate"}
CHECKED = {
    "atom": [4],
    "swap": [4, 5, 6, 7],
    "negate": [4],
}  # numbers of atoms; the rest takes long


@pytest.fixture(scope="module")
def committed():
    """The committed table."""
    return pd.read_csv(data_dir() / "results/classify_crepe.csv").drop(columns="commit")


@pytest.mark.skipif(
    not FILES.is_dir(), reason=f"{FILES} (CREPE's files, not part of the project) is absent"
)
@pytest.mark.parametrize("kind", CHECKED)
def test_the_committed_table_is_that_of_the_files(committed, kind):
    found = crepe_table(REAL, [kind], CHECKED[kind])
    kept = committed[(committed.kind == kind) & committed.complexity.isin(CHECKED[kind])]
    assert_frame_equal(found, kept.reset_index(drop=True))


def test_classify_agrees_with_the_three_kinds(committed):
    assert set(committed.kind) == set(OPERATORS)
    assert (committed[[*EDIT_KINDS]].sum(axis=1) == committed.n).all()
    counts = committed.groupby("kind").sum(numeric_only=True)
    for kind in ("atom", "negate"):
        assert counts[OPERATORS[kind]][kind] / counts.n[kind] >= 0.95
    # a swap has no word but the caption's own; what else the files call one is a replacement
    swaps = committed[committed.kind == "swap"].groupby("words").sum(numeric_only=True)
    assert swaps.n["own"] > 20_000
    assert swaps.swap["own"] / swaps.n["own"] >= 0.95


@pytest.mark.parametrize(
    ("caption", "negative"),
    [
        ("a mug on a shelf near a lamp", "A mug on something near a lamp. There is no shelf."),
        (
            "two goats in a field with a barn",
            "Two goats in something with a barn. There are no fields.",
        ),
        ("a kite above a lake", "A kite above something. There is no lake."),
        (
            "a spoon in a bowl. the bowl is red.",
            "A spoon in a bowl. The bowl is red. There is no spoon.",
        ),
        ("a monkey holding a banana", "There is no monkey holding a banana"),
        ("a tram that stops by a tower", "a tram that stops not by a tower"),
    ],
)
def test_a_denial_in_crepes_manner_is_a_negation(caption, negative):
    assert classify(caption, negative).main == "negate"


@pytest.mark.parametrize(
    ("caption", "negative", "operator"),
    [
        ("there is no mug. a red shelf", "there is no mug. a blue shelf", "replace"),
        ("there is no mug on a shelf by a lamp", "there is no mug on a lamp by a shelf", "swap"),
        ("a mug on a shelf", "a mug on something", "replace"),
        ("a mug on a shelf", "There is a mug on a table", "replace"),
    ],
)
def test_a_denial_that_both_have_or_none_has_is_no_negation(caption, negative, operator):
    assert classify(caption, negative).main == operator


def test_negatives_written_as_a_set_are_read(tmp_path):
    folder = tmp_path / "crepe/prod_hard_negatives/negate"
    folder.mkdir(parents=True)
    rows = [
        "['a dog not on a bed', 'a dog on a bed. There is no dog.']",
        "{'no dog', 'a dog on no bed'}",
    ]
    table = pd.DataFrame(dict(caption=["a dog on a bed", "a dog on a bed"], hard_negs=rows))
    table.to_csv(folder / "prod_vg_hard_negs_negate_complexity_4.csv", index=False)
    pairs = list(negatives(tmp_path, "negate", 4))
    assert len(pairs) == 4
    assert {negative for _, negative in pairs[2:]} == {"no dog", "a dog on no bed"}
