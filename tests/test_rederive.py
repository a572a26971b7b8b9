"""scripts/rederive.py finds a figure that the committed results do not give."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from quotes import QUOTES, quote_problem, quote_problems
from rederive import LIST, from_kept, notebook, outputs, table_rows

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "07_text_similarity"


@pytest.fixture
def copy(tmp_path):
    """A checkout with one paper notebook and the results that it came from."""
    (tmp_path / "nbs/paper").mkdir(parents=True)
    path = shutil.copy(ROOT / f"nbs/paper/{NOTEBOOK}.ipynb", tmp_path / "nbs/paper")
    for folder in (ROOT / "data/results").glob("micro*"):
        (tmp_path / "data/results" / folder.name).mkdir(parents=True)
        for p in folder.glob("07_*"):
            shutil.copy(p, tmp_path / "data/results" / folder.name)
    return Path(path), tmp_path


def test_agreement(copy):
    problems, made, _ = notebook(*copy)
    assert problems == [] and made >= 3


def test_another_figure_in_the_results(copy):
    path, root = copy
    for p in (root / "data/results").glob("*/07_text_similarity_summary.csv"):
        lines = p.read_text().splitlines()
        i = next(i for i, line in enumerate(lines) if ",clip,spearman," in line)
        value = lines[i].split(",")[4]
        p.write_text("\n".join(lines).replace(value, str(float(value) + 1)) + "\n")
    problems, _, _ = notebook(path, root)
    assert any(
        "CAE Table 4" in p and "(CLIP)" in p and p.startswith(f"nbs/paper/{NOTEBOOK}.ipynb, cell ")
        for p in problems
    )


def test_another_figure_in_the_notebook(copy):
    path, root = copy
    nb = json.loads(path.read_text())
    said = next(
        o["data"]
        for c in nb["cells"]
        for o in c.get("outputs", [])
        if "**opposite**" in "".join(o.get("data", {}).get("text/markdown", ""))
    )
    said["text/markdown"] = "".join(said["text/markdown"]).replace("**opposite**", "**reproduced**")
    path.write_text(json.dumps(nb))
    problems, _, _ = notebook(path, root)
    assert any("opposite" in p for p in problems)


def test_a_cell_that_newly_fails_is_reported(copy):
    path, root = copy
    nb = nbformat.read(path, as_version=4)
    cell = next(cell for cell in nb.cells if cell.cell_type == "code" and outputs(cell))
    cell.source = f"1 / 0\n{cell.source}"
    nbformat.write(nb, path)
    problems, _, _ = notebook(path, root)
    assert any(cell.id in problem and "ZeroDivisionError" in problem for problem in problems)


def test_a_cell_that_is_listed_and_no_longer_fails_is_reported(copy):
    path, root = copy
    listed = pd.read_csv(LIST).set_index("notebook").cell[[NOTEBOOK]].iloc[0]
    nb = nbformat.read(path, as_version=4)
    nb.cells = [cell for cell in nb.cells if cell.id != listed]
    nbformat.write(nb, path)
    problems, _, _ = notebook(path, root)
    assert any("no longer true" in problem and listed in problem for problem in problems)


def test_rows_of_a_table():
    cells = "<th>a</th><td>1.0<br><span>[0.5, 1.5]</span></td>"
    html = f"<style>td{{}}</style><table><tr>{cells}</tr></table>"
    assert table_rows(html) == [["a", "1.0 [0.5, 1.5]"]]


@pytest.mark.parametrize(
    "cell, said",
    [("1.2 [0.9, 1.4]", ""), ("1.2 [0.9, 1.5]", "1.2 [0.9, 1.5] is in no row of 08_ends.csv")],
)
def test_a_turned_table(cell, said):
    kept = SimpleNamespace(
        tables={
            "08_ends": pd.DataFrame(
                [("SWAP", 3.0, 2.0, 4.0), ("ADD", 1.234, 0.91, 1.449)],
                columns=["operator", "value", "lo", "hi"],
            )
        }
    )
    head = "<tr><th></th><th>SWAP</th><th>ADD</th></tr>"
    body = f"<tr><th>loss</th><td>3.0 [2.0, 4.0]</td><td>{cell}</td></tr>"
    html = f"<table>{head}{body}</table>"
    told = from_kept({"text/html": html}, 'cells(keep("ends", table))', kept)
    assert told == "" if not said else said in told


@pytest.mark.parametrize(
    "written, expected",
    [
        ("{{{number}}}", ""),
        ("{{9{number}}}", "is not in the notebook"),
        ("{number}", "exactly one number"),
    ],
)
def test_a_quote_is_the_value_of_its_table(written, expected):
    quotes = pd.read_csv(QUOTES, keep_default_na=False)
    known = next(quotes[quotes.notebook == "01_brittleness"].itertuples())
    before, number, after = re.split(r"[{}]", known.quote)
    quote = before + written.format(number=number) + after
    problem = quote_problem(known._replace(quote=quote))
    assert expected in problem
    assert bool(problem) == bool(expected)


def test_a_number_that_is_no_longer_the_value_is_found(monkeypatch):
    quotes = pd.read_csv(QUOTES, keep_default_na=False)
    known = next(quotes[quotes.notebook == "01_brittleness"].itertuples())
    monkeypatch.setattr("quotes.value_of", lambda quote: 99.0)
    assert "is 99.0" in quote_problem(known)


def test_a_number_from_nowhere_is_found(monkeypatch):
    monkeypatch.setattr("quotes.discussed", lambda notebook: ["It gains 7.5 points, [95 %]."])
    problems = quote_problems()
    assert any("discusses 7.5" in problem for problem in problems)
    assert not any("discusses 95" in problem for problem in problems)
