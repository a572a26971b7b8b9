"""The ledger of statements against the committed results and the notebooks that write them."""

import ast
import html
import re

import nbformat
import pandas as pd
import pytest
from nbconvert.filters import markdown2html

from compvl.app.plan import select_notebooks
from compvl.core import CompvlError, data_dir, notebook_number
from compvl.paper.evidence import CLAIM_VERDICTS, Store
from compvl.paper.html_tables import html_table
from compvl.paper.ledger import BY_CONSTRUCTION, STATEMENTS, make_ledger
from compvl.paper.ledger_views import (
    JUDGED,
    by_paper,
    heading_anchor,
    ledger_table,
    shown_items,
    statement_ids,
    statement_notebooks,
)
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


NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in select_notebooks()}
ITEMS = published("items")
ROWS = [pytest.param(item, id=f"{item.paper} {item.item}") for item in ITEMS.itertuples()]


def headings(name: str) -> list[str]:
    """The headings of a notebook, without their marks."""
    found = []
    for cell in NOTEBOOKS[name].cells:
        if cell.cell_type == "markdown":
            found += re.findall(r"^#+ (.+)$", cell.source, flags=re.MULTILINE)
    return found


def judged_ids(name: str) -> list[str]:
    """The ids of the statements that a notebook evaluates: the arguments of its `nb.judge`."""
    found = []
    for cell in NOTEBOOKS[name].cells:
        if cell.cell_type != "code" or "nb.judge(" not in cell.source:
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "nb.judge":
                arguments = ast.Expression(ast.Tuple(node.args, ast.Load()))
                code = compile(ast.fix_missing_locations(arguments), name, "eval")
                found += eval(code)
    return found


def test_the_table_of_items_names_every_statement_and_existing_notebooks():
    columns = ["paper", "item", "content", "notebook", "heading", "statements", "deviation"]
    assert list(ITEMS) == columns
    assert ITEMS.notna().all(axis=None)
    assert ITEMS.apply(lambda column: column.str.strip() != "").all(axis=None)
    assert not ITEMS.duplicated(["paper", "item"]).any()
    assert set(ITEMS.notebook) <= set(NOTEBOOKS)
    named = [id for cell in ITEMS.statements for id in statement_ids(cell)]
    assert sorted(set(named)) == sorted(STATEMENTS)


@pytest.mark.parametrize("item", ROWS)
def test_an_item_has_statements_or_says_why_not(item):
    ids = statement_ids(item.statements)
    if not ids:
        assert re.fullmatch(r"none: \S.{5,}", item.statements)
    assert len(set(ids)) == len(ids)
    assert all(id.startswith(item.paper) for id in ids)


@pytest.mark.parametrize("item", ROWS)
def test_an_item_names_a_heading_of_its_notebook(item):
    assert headings(item.notebook).count(item.heading) == 1


@pytest.mark.parametrize("item", ROWS)
def test_statements_are_evaluated_in_the_notebook_of_their_item(item):
    assert set(statement_ids(item.statements)) <= set(judged_ids(item.notebook))


@pytest.mark.parametrize("table", ["Table", "Figure"])
@pytest.mark.parametrize(
    "paper, last", [("HP", dict(Table=10, Figure=4)), ("CAE", dict(Table=5, Figure=6))]
)
def test_every_table_and_figure_has_a_row(paper, last, table):
    of_paper = ITEMS[ITEMS.paper == paper].item
    numbers = of_paper.str.extract(rf"^{table} (\d+)")[0].dropna().astype(int)
    assert set(numbers) == set(range(1, last[table] + 1))


def test_links_are_links_and_lead_to_headings():
    """Written as markup, with the fragments that nbconvert gives to headings."""
    markup = html_table(shown_items(ITEMS), "Items")
    assert "&lt;" not in markup
    links = re.findall(r'<a href="([^"]+)">([^<]+)</a>: ', markup)
    assert len(links) == len(ITEMS)
    for (address, text), item in zip(links, ITEMS.itertuples(), strict=True):
        assert text == item.notebook
        file, anchor = html.unescape(address).split("#")
        assert file == f"{item.notebook}.ipynb"
        assert f'id="{anchor}"' in markdown2html(f"## {item.heading}")


def test_the_ledger_links_each_statement_to_where_it_is_evaluated(tmp_path):
    names = statement_notebooks()
    ledger, _ = make_ledger(Store(tmp_path, "smoke", fallback=False))
    assert set(ledger.id) == set(STATEMENTS)
    markup = ledger_table(ledger).as_raw_html()
    for row in ledger.itertuples():
        name = names[row.id]
        assert row.notebook in ("", notebook_number(name)), row.id
        assert headings(name).count(JUDGED) == 1
    for name in set(names.values()):
        count = list(names.values()).count(name)
        assert markup.count(f'<a href="{name}.ipynb#{heading_anchor(JUDGED)}">') == count


def test_statements_that_are_not_tested_have_a_reason():
    untested = published("untested")
    assert list(untested) == ["paper", "where", "statement", "reason"]
    assert untested.notna().all(axis=None)
    assert set(untested.paper) == set(ITEMS.paper)
    assert not untested.duplicated(["paper", "statement"]).any()
    assert (untested[["statement", "reason"]].map(len) > 10).all(axis=None)
    texts = " ".join(untested.reason)
    assert set(re.findall(r"\b(?:HP|CAE|TCL)\d+", texts)) <= set(STATEMENTS)
    assert set(re.findall(r"\b\d\d_[a-z]\w+", texts)) <= set(NOTEBOOKS)
    markup = html_table(by_paper(untested, "where"))
    assert markup.count('class="group"') == 3
