"""Are the tables in the paper notebooks what the committed results say?  python scripts/rederive.py

The committed notebooks in nbs/paper contain their outputs. Their cells are executed again here. The
results of their profile are read from data/results/<profile>; nothing is trained or evaluated. What
the cells show (tables, findings, sentences) is compared with the committed output, cell by cell.
Cells that need a model, images or items are skipped, and so are cells that depend on these; the
figures of such a cell are compared with the table that it wrote, where that is kept. The number of
other cells is reported.
"""

import builtins
import contextlib
import io
import json
import re
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
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
    load load_benchmarks
    load_benchmark
    kind_attributions attribution_gap supervision captioned_scenes truth_rates operator_shares worst
    sheet scenes train train_towers identifiability dependent_identifiability
    trained_readers ship_base ship_matcher train_matcher
    ship_captioner train_captioner save_figure
    text_similarities case_study load_train_data search_weights parts_table""".split()


class NotStored(Exception):
    """Needs what is not kept."""


class Disagrees(Exception):
    """Kept results that do not agree with each other."""


def refuse(*_, **__):
    raise NotStored


class Numbers(HTMLParser):
    """The captions and rows of all tables of an HTML text, a list of texts each."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open = [], False
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


class Stored:
    """Results as `compvl.paper.evaluation.results` gives them: figures only, no scores of items."""

    def __init__(self, folder: Path, name: str, rows, profile):
        path = folder / f"{name}_summary.csv"
        if not path.exists():
            raise NotStored
        self._summary = read_csv(path)
        told = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        self.profile, self.rows, self.gaps = (
            profile,
            list(rows),
            {**told.get("missing", {}), **told["problems"]},
        )

    def summary(self):
        return self._summary

    @property
    def scores(self):
        """The rows that have scores, without these."""
        return dict.fromkeys(self._summary.method)

    def check(self):
        pass

    def __getattr__(self, name):
        raise NotStored


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
        raise NotStored

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
        raise NotStored

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
        raise NotStored


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

    def committed(out, profile, **_):
        return Store(None, profile, committed=folder.parent)

    with contextlib.ExitStack() as stack:
        for name in ("results", "evaluate_claims", "save_figure"):
            stack.enter_context(mock.patch.object(paper_notebook, name, swaps[name]))
        stack.enter_context(mock.patch.object(paper_notebook, "Store", committed))
        yield


def same(ours: dict, theirs: dict) -> str:
    """'' where the outputs agree, else where they differ.

    `ours` was made again, `theirs` is committed.
    """
    if "text/html" in ours:
        a, b = table_rows(ours["text/html"]), table_rows(theirs.get("text/html", ""))
        if len(a) != len(b):
            return f"a table of {len(b)} rows, and the results give {len(a)}"
        title = next((c for r in b for c in r if c), "")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            for j in range(max(len(x), len(y))):
                p, q = (r[j] if j < len(r) else "nothing" for r in (x, y))
                if p != q:
                    row = f"row {i + 1} ({y[0] if y else ''}), cell {j + 1}"
                    return f"table {title!r}, {row}: {q!r}, and the results give {p!r}"
        return ""
    p, q = (
        ours["text/markdown"].strip().splitlines(),
        "".join(theirs.get("text/markdown", "")).strip().splitlines(),
    )
    return next(
        (
            f"{y!r}, and the results give {x!r}"
            for x, y in zip(p + [""] * len(q), q + [""] * len(p), strict=True)
            if x != y
        ),
        "",
    )


def in_some_row(interval: tuple[str, str, str], table: pd.DataFrame, rounded) -> bool:
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


def from_kept(data: dict, source: str, kept: Kept) -> str | None:
    """Compare a committed table, row by row, with the kept table that its cell wrote.

    '' where every figure is in that row (of a transposed table of figures with intervals: in some
    row), None where no table is kept.
    """
    names = [
        n
        for n in kept.tables
        for said in re.findall(r"""["'/](\w+?)(?:\.csv)?["']""", source)
        if n == said or n.endswith(f"_{said}")
    ]
    if not names or "text/html" not in data:
        return None
    number = re.compile(r"[-−]?\d+(?:\.\d+)?(?:e[-+]\d+)?")

    def rounded(text, value):
        return abs(float(text.replace("−", "-")) - value) <= 0.5001 * 10 ** -len(
            text.partition(".")[2]
        ) + 1e-9 * abs(value)

    rows = table_rows(data["text/html"])
    spread = [
        m.groups()
        for r in rows
        for c in r
        if (m := re.fullmatch(rf"({number.pattern}) \[({number.pattern}), ({number.pattern})\]", c))
    ]
    body = [r for r in rows if any(number.fullmatch(c) for c in r)]
    missing = ""
    for n in dict.fromkeys(names):
        t = kept.tables[n]
        if spread and any(name.endswith("lo") for name in t):
            gone = [m for m in spread if not in_some_row(m, t, rounded)]
            if not gone:
                return ""
            value, lo, hi = gone[0]
            missing = f"table {n}: {value} [{lo}, {hi}] is in no row of {n}.csv"
            continue
        index = all(r[0] == str(i) for i, r in enumerate(body))
        if len(body) != len(t):
            continue
        for i, row in enumerate(body):
            values = [v for v in t.iloc[i] if isinstance(v, (int, float, np.number)) and v == v]
            for c in row[1:] if index else row:
                if number.fullmatch(c) and not any(rounded(c, v) for v in values):
                    label = ", ".join(x for x in row if not number.fullmatch(x))[:60]
                    return f"table {n}, row {i + 1} ({label}): {c!r} is not in that row of {n}.csv"
        return ""
    return missing or None


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
        self.profile = profile
        self.out = out
        self.kept = Kept(folder, notebook_number(path.stem))
        self.space = {"__name__": "__main__", "__builtins__": builtins}
        self.swaps = dict.fromkeys(ITEMS, refuse) | dict(
            results=lambda rows, _, p, out, name, *a, **k: Stored(folder, name, rows, p),
            evaluate_claims=self.kept.evaluate_claims,
            comparisons=self.kept.comparisons,
            rarity_parts=lambda res: {},
            rarity_finding=self.kept.rarity_finding,
        )

    def swap(self):
        """Put the stand-ins in place of what the cells imported."""
        self.space |= {name: new for name, new in self.swaps.items() if name in self.space}

    def execute(self, cell) -> list[str]:
        """What differs between a cell's outputs and the committed ones.

        Raises NotStored, or an error that follows from it, where the cell cannot be executed.
        """
        wanted = outputs(cell)
        found = shown_by(cell.source, self.space)
        if "parameters" in cell.metadata.get("tags", []):
            self.space |= dict(profile=self.profile, out=self.out)
        self.swap()
        texts = [data for data in found if not (data.get("text/html") or "").startswith("<img")]
        if len(texts) != len(wanted) or any(map(lacks_data, texts, wanted)):
            raise NotStored
        return [s for s in map(same, texts, wanted) if s]

    def compare(self, cell) -> tuple[list[str], bool, bool]:
        """(what differs, whether the cell was compared, whether it was left out)."""
        wanted = outputs(cell)
        try:
            return self.execute(cell), bool(wanted), False
        except Disagrees as error:
            return [str(error)], True, False
        except FOLLOWS:
            self.swap()
        from_tables = [from_kept(data, cell.source, self.kept) for data in wanted]
        differ = [s for s in from_tables if s]
        return differ, bool(wanted) and None not in from_tables, None in from_tables


# NotStored, and what follows from it in later cells
FOLLOWS = (NotStored, NameError, AttributeError, LookupError, TypeError, ValueError)


def notebook(path: Path, root: Path = ROOT) -> tuple[list[str], int, int]:
    """(problems, cells that were executed again, cells with tables or texts that could not be)."""
    nb = nbformat.read(path, as_version=4)
    cells = [cell for cell in nb.cells if cell.cell_type == "code"]
    profile = profile_shown(cells)
    if profile is None:
        return [], 0, 0
    if PROFILES[profile].root or PROFILES[profile].data != "microworld":
        return [], 0, sum(bool(outputs(cell)) for cell in cells)
    folder = root / "data/results" / profile
    problems = []
    made = left = 0
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "tables").mkdir()
        again = Again(path, profile, folder, tmp)
        with patched_notebook(again.swaps, folder):
            for cell in cells:
                differ, compared, left_out = again.compare(cell)
                plt.close("all")  # figures are not compared
                made += compared
                left += left_out
                name = f"{path.relative_to(root).as_posix()}, cell {nb.cells.index(cell) + 1}"
                problems += [f"{name}: {difference}" for difference in differ]
    return problems, made, left


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
