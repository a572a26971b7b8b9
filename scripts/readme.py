"""Run nbs/index.ipynb's tables, and render it to README.md:  python scripts/readme.py

Cells that start with `#| echo: false` are run here, so that their tables always come from
data/results. The notebook keeps what they show, with their code folded; README.md has the tables
without the code. Other code cells appear with their committed outputs. Links that the notebook
writes relative to nbs/ (`../figures/x.png`) become relative to the root.
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


def shows_output_only(cell) -> bool:
    """Whether README.md has what a cell shows, and not the cell."""
    return cell.cell_type == "code" and bool(re.match(r"#\|\s*echo: false\b", cell.source))


def run_cell(source: str, names: dict):
    """Execute a cell in `names`. Returns the value of its last expression, or None."""
    tree = ast.parse(source)
    ends_with_value = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
    last = tree.body.pop() if ends_with_value else None
    exec(compile(tree, "<cell>", "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def current(notebook: Path = INDEX) -> nbformat.NotebookNode:
    """`notebook` with what its `echo: false` cells show when they are run now."""
    nb = nbformat.read(notebook, as_version=4)
    for cell in filter(shows_output_only, nb.cells):
        shown = {"text/markdown": run_cell(cell.source, {}).data}
        cell.outputs = [nbformat.v4.new_output("execute_result", shown)]
        cell.metadata["jupyter"] = {"source_hidden": True}
    return nb


def as_readme_cell(cell):
    """A cell as README.md shows it."""
    if shows_output_only(cell):
        return nbformat.v4.new_markdown_cell(cell.outputs[0].data["text/markdown"])
    if cell.cell_type == "code":
        cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
    return cell


def render(nb: nbformat.NotebookNode, below: str = "nbs") -> str:
    """The Markdown text of a notebook in the folder `below`, as README.md at the root."""

    def from_root(match) -> str:
        path = os.path.normpath(f"{below}/{match[2]}").replace(os.sep, "/")
        return match[1] + path

    nb.cells = [as_readme_cell(cell) for cell in nb.cells]
    nb.metadata["language_info"] = {"name": "python"}
    text, resources = MarkdownExporter().from_notebook_node(nb)
    if resources.get("outputs"):
        raise SystemExit(
            "nbs/index.ipynb: an output contains an image. Save it under figures/ and link it, so"
            " that README.md can show it."
        )
    text = LINK.sub(from_root, text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def write():
    """Bring nbs/index.ipynb and README.md up to date."""
    nb = current()
    nbformat.write(nb, INDEX)
    nbdev_clean(fname=str(INDEX))
    (ROOT / "README.md").write_text(render(nb), encoding="utf-8")


if __name__ == "__main__":
    write()
