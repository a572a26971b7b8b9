"""Run nbs/index.ipynb's tables, and render it to README.md:  python scripts/readme.py

Cells that start with `#| echo: false` are run, so that tables always come from data/results: what they show is kept in the notebook, with their code folded, and stands in README.md without it. Other code cells appear with their committed
outputs; cells that start with `#| hide` are left out; links that the notebook writes relative to nbs/ (`../figures/x.png`, `paper/01_brittleness.ipynb`) become relative to the root.
"""

import ast
import os.path
import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from nbdev.clean import nbdev_clean

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "nbs/index.ipynb"
LINK = re.compile(r"""(\]\(|\b(?:src|href)=")(?![a-z]+:|[#/])([^)"\s]+)""")


def unechoed(cell) -> bool:
    """Whether README.md has what a cell shows, and not the cell."""
    return cell.cell_type == "code" and bool(re.match(r"#\|\s*echo: false\b", cell.source))


def run_cell(source: str, names: dict):
    """Execute a cell in `names`; the value of its last expression, None where it ends with none."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return last and eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def current(notebook: Path = INDEX) -> nbformat.NotebookNode:
    """`notebook` with what its cells show when they are run now."""
    nb = nbformat.read(notebook, as_version=4)
    for cell in filter(unechoed, nb.cells):
        cell.outputs = [
            nbformat.v4.new_output(
                "execute_result", {"text/markdown": run_cell(cell.source, {}).data}
            )
        ]
        cell.metadata["jupyter"] = {"source_hidden": True}
    return nb


def render(nb: nbformat.NotebookNode, below: str = "nbs") -> str:
    """The Markdown text of a notebook in the folder `below` as README.md at the root of the checkout."""
    nb.cells = [
        c for c in nb.cells if c.cell_type != "raw" and not re.match(r"#\|\s*hide\b", c.source)
    ]
    nb.cells = [
        nbformat.v4.new_markdown_cell(c.outputs[0].data["text/markdown"]) if unechoed(c) else c
        for c in nb.cells
    ]
    nb.metadata["language_info"] = {"name": "python"}
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
    text, resources = MarkdownExporter().from_notebook_node(nb)
    if resources.get("outputs"):
        raise SystemExit(
            "nbs/index.ipynb: an output holds an image; save it under figures/ and link it, so that README.md can show it."
        )
    text = LINK.sub(lambda m: m[1] + os.path.normpath(f"{below}/{m[2]}").replace(os.sep, "/"), text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.M)).strip() + "\n"


def write():
    """Bring nbs/index.ipynb and README.md up to date."""
    nb = current()
    nbformat.write(nb, INDEX)
    nbdev_clean(fname=str(INDEX))
    (ROOT / "README.md").write_text(render(nb), encoding="utf-8")


if __name__ == "__main__":
    write()
