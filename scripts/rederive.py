"""Are the tables in the paper notebooks what the committed results say?  python scripts/rederive.py

The committed notebooks in nbs/paper contain their outputs. Their cells are executed again here. The
results of their profile are read from data/results/<profile>; nothing is trained or evaluated. What
the cells show (tables, findings, sentences) is compared with the committed output, cell by cell.

Cells that need a model, images or items cannot be executed, and neither can cells that depend on
these; the figures of such a cell are compared with the table that it wrote, where that is kept.
`not_executed.csv` lists those of them that show a table or a text, with what they need and what was
compared instead. It is written by hand: a cell that is not listed so is a problem, and so is a line
that is no longer true.
"""

import builtins
import contextlib
import io
import json
import re
import sys
import tempfile
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
from readme import ROOT, run_cell

from compvl.core import notebook_number, read_csv
from compvl.paper import notebook as paper_notebook
from compvl.paper.claims import FINDING_COLUMNS
from compvl.paper.evidence import Store
from compvl.paper.profiles import PROFILES

# What needs models, items or pictures
ITEMS = """row_models seed_models learning_curves examples turned turned_counts turned_triplets
    load load_benchmarks kind_attributions attribution_gap supervision captioned_scenes truth_rates
    operator_shares worst sheet scenes train train_towers identifiability dependent_identifiability
    trained_readers ship_base ship_matcher train_matcher ship_captioner train_captioner
    text_similarities case_study load_train_data search_weights parts_table""".split()

LIST = Path(__file__).with_name("not_executed.csv")


class NotExecuted(NamedTuple):
    """A cell with tables or texts that cannot be executed on kept results."""

    notebook: str  # such as 01_brittleness
    cell: str  # its id
    why: str
    compared_with: str  # 'kept tables' or 'nothing'


class NotStored(Exception):
    """Needs what is not kept; the message names it."""


class Disagrees(Exception):
    """Kept results that do not agree with each other."""


def refusing(name: str):
    """A function to stand in place of the one of this name, which needs what is not kept."""

    def refuse(*_, **__):
        raise NotStored(name)

    return refuse


class Numbers(HTMLParser):
    """The captions and rows of all tables of an HTML text, a list of texts each."""

    def __init__(self, text):
        super().__init__()
        self.rows = []
        self.open = False
        self.feed(re.sub(r"<style\b.*?</style>", "", text, flags=re.S))

    def handle_starttag(self, tag, attrs):
        if tag == "caption":
            self.rows.append([""])
            self.open = True
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag):
        if tag in ("caption", "td", "th"):
            self.open = False

    def handle_data(self, data):
        if self.open:
            self.rows[-1][-1] += " " + data.strip()


def table_rows(text: str) -> list[list[str]]:
    return [[" ".join(c.split()) for c in row] for row in Numbers(text).rows]


class NoScores(dict):
    """The rows that have scores, without these."""

    def get(self, key, default=None):
        raise NotStored("scores of items")

    __getitem__ = get


class Stored:
    """Results as `compvl.paper.evaluation.results` gives them: figures only, no scores of items."""

    def __init__(self, folder: Path, name: str, rows, profile):
        path = folder / f"{name}_summary.csv"
        if not path.exists():
            raise NotStored(path.name)
        self._summary = read_csv(path)
        told = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        self.profile = profile
        self.rows = list(rows)
        self.gaps = {**told.get("missing", {}), **told["problems"]}

    def summary(self):
        return self._summary

    @property
    def scores(self):
        return NoScores.fromkeys(self._summary.method)

    def check(self):
        pass

    def __getattr__(self, name):
        raise NotStored(f"{name} of the results")


class Kept:
    """The tables of a notebook that are kept, by name, and by the first cell of their rows."""

    def __init__(self, folder: Path, number: str):
        self.tables = {p.stem: read_csv(p) for p in sorted(folder.glob(f"{number}_*.csv"))}

    def _findings(self, claims) -> pd.DataFrame:
        """The kept rows of these claims, by their ids. Raises NotStored where there are none."""
        ids = [claim.id for claim in claims]
        texts = [claim.text for claim in claims]
        for table in self.tables.values():
            if "id" not in table or not set(ids) <= set(table.id):
                continue
            rows = table.set_index("id").loc[ids].reset_index()
            if rows.claim.tolist() == texts:
                return rows.reindex(columns=[*FINDING_COLUMNS, "against"])
        raise NotStored("kept findings")

    def evaluate_claims(self, res, claims, *_, **__) -> pd.DataFrame:
        """Kept findings. Raises Disagrees where their figures are not those of the summary."""
        claims = list(claims)
        found = self._findings(claims)
        index = ["method", "benchmark", "group", "metric"]
        figures = res.summary().set_index(index).value
        for claim, row in zip(claims, found.to_dict("records"), strict=True):
            for side in ("a", "b"):
                at = getattr(claim, side)
                if at not in figures.index:
                    continue
                if not np.isclose(figures[at], row[side], atol=1e-6, equal_nan=True):
                    raise Disagrees(
                        f"the finding {claim.text!r} has {side} = {row[side]:.4f}, and the summary "
                        f"{figures[at]:.4f} for {', '.join(at)}"
                    )
        return found

    def rarity_finding(self, parts, id, claim, *_) -> dict:
        """The kept finding of this id and claim. Raises NotStored where there is none."""
        for table in self.tables.values():
            if "id" not in table:
                continue
            row = table[(table.id == id) & (table.claim == claim)]
            if len(row):
                return row.iloc[0].to_dict()
        raise NotStored("kept findings")

    def comparisons(self, res, pairs, columns):
        label = {r.key: r.label for r in res.rows}
        wanted = [f"{label.get(b)} − {label.get(a)}" for a, b in pairs]
        at = {(c.benchmark, c.metric) for c in columns}
        for t in self.tables.values():
            if (
                {"pair", "benchmark", "metric"} <= set(t)
                and set(t.pair) <= set(wanted)
                and set(zip(t.benchmark, t.metric, strict=True)) <= at
            ):
                return t
        raise NotStored("kept comparisons")


def outputs(nb_cell) -> list[dict]:
    """The committed tables and texts of a cell."""
    return [
        o["data"]
        for o in nb_cell.get("outputs", [])
        if "data" in o
        and not {"image/png", "image/jpeg"} & set(o["data"])
        and {"text/html", "text/markdown"} & set(o["data"])
    ]


def shown(value) -> dict | None:
    """What a notebook would show of a value, where that is a table or a text."""
    for mime, method in (("text/markdown", "_repr_markdown_"), ("text/html", "_repr_html_")):
        if hasattr(value, method) and (text := getattr(value, method)()):
            return {mime: text}
    return None


def shown_by(source: str, space: dict) -> list[dict]:
    """Execute a cell as a notebook does; what it shows."""
    found = []

    def display(*values):
        found.extend(filter(None, map(shown, values)))

    space["display"] = display
    with (
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(paper_notebook, "display", display),
    ):
        value = shown(run_cell(re.sub(r"(?m)^[#%]\|?.*$", "", source), space))
    if value:
        found.append(value)
    return found


@contextlib.contextmanager
def patched_notebook(swaps: dict, folder: Path):
    """`compvl.paper.notebook` with the swaps that it uses, and committed tables as its store."""

    def committed(out=None, profile="micro", **_):
        return Store(None, profile, committed=folder.parent)

    stand_ins = dict(
        results=swaps["results"],
        evaluate_claims=swaps["evaluate_claims"],
        Store=committed,
        save_figure=lambda *_: None,  # figures are not compared
    )
    with (
        mock.patch.multiple(paper_notebook, **stand_ins),
        mock.patch.object(paper_notebook.Notebook, "_store_contrasts", lambda self: None),
    ):
        yield


def table_difference(ours: str, theirs: str) -> str:
    """'' where two HTML texts have the same tables, else where they differ."""
    made = table_rows(ours)
    committed = table_rows(theirs)
    if len(made) != len(committed):
        return f"a table of {len(committed)} rows, and the results give {len(made)}"
    title = next((cell for row in committed for cell in row if cell), "")
    for i, (row, wanted) in enumerate(zip(made, committed, strict=True), 1):
        for j, (cell, said) in enumerate(zip_longest(row, wanted, fillvalue="nothing"), 1):
            if cell != said:
                at = f"row {i} ({wanted[0] if wanted else ''}), cell {j}"
                return f"table {title!r}, {at}: {said!r}, and the results give {cell!r}"
    return ""


def text_difference(ours: str, theirs: str) -> str:
    """'' where two texts have the same lines, else the first that differs."""
    lines = zip_longest(ours.strip().splitlines(), theirs.strip().splitlines(), fillvalue="")
    for line, said in lines:
        if line != said:
            return f"{said!r}, and the results give {line!r}"
    return ""


def difference(ours: dict, theirs: dict) -> str:
    """'' where the outputs agree, else where they differ.

    `ours` was made again, `theirs` is committed.
    """
    if "text/html" in ours:
        return table_difference(ours["text/html"], theirs.get("text/html", ""))
    return text_difference(ours["text/markdown"], "".join(theirs.get("text/markdown", "")))


FIGURE = re.compile(r"[-−]?\d+(?:\.\d+)?(?:e[-+]\d+)?")
WITH_INTERVAL = re.compile(rf"({FIGURE.pattern}) \[({FIGURE.pattern}), ({FIGURE.pattern})\]")


def rounded(text: str, value: float) -> bool:
    """Whether a text is this value, rounded to as many decimals as the text has."""
    decimals = len(text.partition(".")[2])
    rounding = 0.5001 * 10**-decimals + 1e-9 * abs(value)
    return abs(float(text.replace("−", "-")) - value) <= rounding


def in_some_row(interval: tuple[str, str, str], table: pd.DataFrame) -> bool:
    """Whether a row of a kept table has a figure with these ends of its interval."""
    value, lo, hi = interval
    figures = table.select_dtypes("number")
    lows = [name for name in figures if name == "lo" or name.endswith("_lo")]
    for low in lows:
        high = low.removesuffix("lo") + "hi"
        others = figures.columns.difference([low, high])
        for row in figures.to_dict("records"):
            ends_agree = rounded(lo, row[low]) and rounded(hi, row[high])
            if ends_agree and any(rounded(value, row[name]) for name in others):
                return True
    return False


def interval_problem(intervals: list[tuple[str, str, str]], name: str, table) -> str:
    """'' where every figure with an interval is in some row of a kept table, else which is not."""
    for interval in intervals:
        if not in_some_row(interval, table):
            value, lo, hi = interval
            return f"table {name}: {value} [{lo}, {hi}] is in no row of {name}.csv"
    return ""


def row_problem(rows: list[list[str]], name: str, table) -> str:
    """'' where every figure is in its row of a kept table of as many rows, else which is not."""
    are_numbered = all(row[0] == str(i) for i, row in enumerate(rows))
    for i, row in enumerate(rows):
        values = [v for v in table.iloc[i] if isinstance(v, (int, float, np.number)) and v == v]
        for cell in row[1:] if are_numbered else row:
            if FIGURE.fullmatch(cell) and not any(rounded(cell, value) for value in values):
                label = ", ".join(text for text in row if not FIGURE.fullmatch(text))[:60]
                at = f"table {name}, row {i + 1} ({label})"
                return f"{at}: {cell!r} is not in that row of {name}.csv"
    return ""


def from_kept(data: dict, source: str, kept: Kept) -> str | None:
    """Compare a committed table, row by row, with the kept table that its cell wrote.

    '' where every figure is in that row (of a transposed table of figures with intervals: in some
    row), None where no table is kept.
    """
    said = re.findall(r"""["'/](\w+?)(?:\.csv)?["']""", source)
    names = [n for n in kept.tables if any(n == part or n.endswith(f"_{part}") for part in said)]
    rows = table_rows(data.get("text/html", ""))
    cells = [cell for row in rows for cell in row]
    intervals = [found.groups() for found in map(WITH_INTERVAL.fullmatch, cells) if found]
    with_figures = [row for row in rows if any(map(FIGURE.fullmatch, row))]
    problem = None
    for name in names:
        table = kept.tables[name]
        if intervals and any(column.endswith("lo") for column in table):
            problem = interval_problem(intervals, name, table)
            if not problem:
                return ""
        elif len(with_figures) == len(table):
            return row_problem(with_figures, name, table)
    return problem


def lacks_data(ours: dict, theirs: dict) -> bool:
    """Whether an output is empty, and the committed one is not: it needs what is not kept."""
    if "text/html" in ours:
        return not table_rows(ours["text/html"]) and bool(table_rows(theirs.get("text/html", "")))
    return not ours.get("text/markdown", "").strip()


def profile_shown(cells) -> str | None:
    """The profile that the committed outputs name."""
    for cell in cells:
        for data in outputs(cell):
            found = re.search(r"Profile `([\w-]+)`", data.get("text/markdown", ""))
            if found:
                return found[1]
    return None


class Again:
    """A paper notebook, executed again on kept results."""

    def __init__(self, path: Path, profile: str, folder: Path, out: str):
        self.name = path.stem
        self.profile = profile
        self.out = out
        self.kept = Kept(folder, notebook_number(path.stem))
        self.space = {"__name__": "__main__", "__builtins__": builtins}
        self.swaps = {name: refusing(name) for name in ITEMS} | dict(
            results=lambda rows, _, p, out, name, *a, **k: Stored(folder, name, rows, p),
            evaluate_claims=self.kept.evaluate_claims,
            comparisons=self.kept.comparisons,
            rarity_parts=lambda res: {},
            rarity_finding=self.kept.rarity_finding,
        )

    def execute(self, cell) -> list[str]:
        """What differs between a cell's outputs and the committed ones.

        Raises NotStored, or an error that follows from it, where the cell cannot be executed.
        """
        wanted = outputs(cell)
        try:
            found = shown_by(cell.source, self.space)
        finally:  # stand-ins in place of what the cell has imported
            self.space |= {name: new for name, new in self.swaps.items() if name in self.space}
        if "parameters" in cell.metadata.get("tags", []):
            self.space |= dict(profile=self.profile, out=self.out)
        if len(found) != len(wanted) or any(map(lacks_data, found, wanted)):
            raise NotStored("data of earlier cells")
        return [s for s in map(difference, found, wanted) if s]

    def compare(self, cell) -> tuple[list[str], NotExecuted | None]:
        """(what differs, the line of a cell that cannot be executed or None)."""
        try:
            return self.execute(cell), None
        except Disagrees as error:
            return [str(error)], None
        except NotStored as error:
            why = f"needs {error}"
        except Exception as error:  # follows from what earlier cells lack, if it is listed
            why = f"{type(error).__name__}: {error}"
        from_tables = [from_kept(data, cell.source, self.kept) for data in outputs(cell)]
        if not from_tables:  # a figure or a value: where it matters, later cells fail, too
            return [], None
        compared_with = "nothing" if None in from_tables else "kept tables"
        differ = [s for s in from_tables if s]
        return differ, NotExecuted(self.name, cell.id, why, compared_with)


def list_problems(notebook: str, found: list[NotExecuted]) -> list[str]:
    """Where not_executed.csv does not list exactly the cells that were found."""
    table = pd.read_csv(LIST, keep_default_na=False)
    lines = table[table.notebook == notebook].itertuples(index=False)
    listed = [NotExecuted(*line) for line in lines]
    problems = []
    for one in found:
        if one not in listed:
            problems.append(
                f"{notebook}, the cell with the id {one.cell} cannot be executed ({one.why}) and "
                f"is compared with {one.compared_with}: {LIST.name} does not say so"
            )
    for one in listed:
        if one not in found:
            problems.append(f"{LIST.name}, no longer true: {', '.join(one)}")
    return problems


def compare_all(path: Path, cells, profile: str, folder: Path):
    """(what differs by the number of the cell, cells that cannot be executed).

    `cells`: those with code, by number. `folder`: kept results of the profile.
    """
    if PROFILES[profile].data != "microworld":
        why = f"needs the data of the profile {profile}"
        shown = [cell for cell in cells.values() if outputs(cell)]
        return {}, [NotExecuted(path.stem, cell.id, why, "nothing") for cell in shown]
    differ = {}
    not_executed = []
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "tables").mkdir()
        again = Again(path, profile, folder, tmp)
        with patched_notebook(again.swaps, folder):
            for number, cell in cells.items():
                differ[number], failed = again.compare(cell)
                plt.close("all")  # figures are not compared
                if failed:
                    not_executed.append(failed)
    return differ, not_executed


def notebook(path: Path, root: Path = ROOT) -> tuple[list[str], int, int]:
    """(problems, cells whose tables and texts were compared, cells whose were not)."""
    nb = nbformat.read(path, as_version=4)
    cells = {i: cell for i, cell in enumerate(nb.cells, 1) if cell.cell_type == "code"}
    profile = profile_shown(cells.values())
    name = path.relative_to(root).as_posix()
    if profile is None:
        return [f"{name}: no output names the profile"], 0, 0
    differ, not_executed = compare_all(path, cells, profile, root / "data/results" / profile)
    problems = []
    for number, differences in differ.items():
        problems += [f"{name}, cell {number}: {difference}" for difference in differences]
    problems += list_problems(path.stem, not_executed)
    n_shown = sum(bool(outputs(cell)) for cell in cells.values())
    n_left = sum(one.compared_with == "nothing" for one in not_executed)
    return problems, n_shown - n_left, n_left


def rederive(root: Path = ROOT) -> tuple[list[str], int, int]:
    """Of all paper notebooks."""
    parts = [notebook(p, root) for p in sorted((root / "nbs/paper").glob("[0-9]*.ipynb"))]
    return (
        [x for p, _, _ in parts for x in p],
        sum(m for _, m, _ in parts),
        sum(n for _, _, n in parts),
    )


if __name__ == "__main__":
    problems, made, left = rederive()
    for p in problems:
        print(f"rederive: {p}", file=sys.stderr)
    print(
        f"rederive: {made} cells with tables or findings made again from data/results, "
        f"{left} that need models or items passed over"
    )
    sys.exit(bool(problems))
