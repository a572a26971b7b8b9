"""The ledger of statements against the committed results and the notebooks that write them."""

import re

import pandas as pd
import pytest

from compvl.app.plan import select_notebooks
from compvl.core import CompvlError, data_dir, notebook_number
from compvl.paper.evidence import CLAIM_VERDICTS, Store
from compvl.paper.ledger import BY_CONSTRUCTION, STATEMENTS, make_ledger
from compvl.paper.published import published
from compvl.paper.statements import Findings

RESULTS = data_dir() / "results"
PROFILES = [
    profile
    for profile in ("micro", "micro-full")
    if (RESULTS / profile / "notebooks.json").exists()
]
TESTS = [test for statement in STATEMENTS.values() for test in statement.tests]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_entry_finds_what_it_asks_of_tables_that_are_there(profile):
    # raises for a finding or a row that a table lacks
    ledger, evidence = make_ledger(Store(None, profile))
    assert set(ledger.verdict) <= {*CLAIM_VERDICTS, BY_CONSTRUCTION}
    assert len(ledger) == len(STATEMENTS)
    assert (ledger.verdict == "no data").sum() == 0
    decided = ledger[ledger.tests > 0]
    assert decided[["difference", "lo", "hi"]].notna().all(axis=None)
    assert (ledger.sentence.str.len() > 10).all()
    known = evidence.dropna(subset=["lo"])
    assert (known.lo <= known.difference + 1e-9).all()
    assert (known.difference - 1e-9 <= known.hi).all()


@pytest.mark.parametrize("profile", PROFILES)
def test_the_ids_of_claims_are_unique_and_those_of_statements_exist(profile):
    for path in (RESULTS / profile).glob("*findings.csv"):
        table = pd.read_csv(path)
        assert table.columns[:2].tolist() == ["id", "claim"], path.name
        assert table.id.is_unique, path.name
    store = Store(None, profile)
    for test in TESTS:
        if isinstance(test, Findings):
            table = store.table(test.stem)
            assert table is not None, test.stem
            assert set(test.ids) <= set(table.id), test.stem


@pytest.mark.parametrize("profile", PROFILES)
def test_the_committed_ledger_is_the_one_that_statements_give(profile):
    ledger, _ = make_ledger(Store(None, profile))
    committed = pd.read_csv(RESULTS / profile / "11_claims_ledger.csv", keep_default_na=False)
    for column in ("id", "paper", "where", "claim", "rule", "tests", "unit", "verdict", "sentence"):
        assert committed[column].tolist() == ledger[column].tolist(), column


def is_committed(stem: str) -> bool:
    """Whether a table is committed, for any profile."""
    return any((RESULTS / profile / f"{stem}.csv").exists() for profile in PROFILES)


def test_every_table_is_one_that_a_notebook_writes():
    sources = {
        notebook_number(path.name): path.read_text(encoding="utf-8") for path in select_notebooks()
    }
    for stem in {test.stem for test in TESTS}:
        number = notebook_number(stem)
        last = stem.rsplit("_", 1)[1]
        if not number:
            assert (RESULTS / f"{stem}.csv").exists(), stem
        elif stem.endswith("_contrasts"):
            assert "nb.judge(" in sources[number]
        elif number in sources and not is_committed(stem):
            source = sources[number]
            name = stem.split("_", 1)[1]
            written = re.search(rf"keep\(\W*{last}\W|nb\.{last}\(|{name}", source)
            is_written = stem.removesuffix("_summary") in source or written
            assert is_written, f"no notebook {number} writes {stem}.csv"


def test_signs_agree_with_the_published_differences():
    """Where a published difference exists, reproduced means on its side of zero."""
    _, evidence = make_ledger(Store(None, PROFILES[0]))
    is_published = evidence.published.abs().gt(1e-9)
    known = evidence[is_published & (evidence.verdict == "reproduced")]
    assert len(known) > 10
    assert ((known.difference > 0) == (known.published > 0)).all()


def test_a_finding_that_is_gone_is_an_error(tmp_path):
    """A misspelt id, on either side, is not reported as missing data."""
    (tmp_path / "tables").mkdir()
    (test,) = STATEMENTS["HP20"].tests
    kept = pd.read_csv(RESULTS / "micro/01_brittleness_contrasts.csv")
    others = kept[kept.test != test.test]
    assert len(others) == len(kept) - 1
    others.to_csv(tmp_path / "tables/01_brittleness_contrasts.csv", index=False)
    with pytest.raises(CompvlError, match=re.escape(test.test)):
        make_ledger(Store(tmp_path, "micro"))


def test_the_table_of_items_names_every_statement_and_existing_notebooks():
    items = published("items").fillna("")
    assert (items[["paper", "item", "content", "notebook", "deviation"]] != "").all(axis=None)
    names = {path.stem for path in select_notebooks()}
    assert set(items.notebook) <= names
    named = [id for ids in items.statements for id in ids.split()]
    assert sorted(named) == sorted(STATEMENTS)
    for item in items.itertuples():
        assert all(id.startswith(item.paper) for id in item.statements.split())
