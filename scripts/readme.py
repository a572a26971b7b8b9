"""Render nbs/index.ipynb to README.md:  python scripts/readme.py

Code cells appear with their committed outputs; cells that start with `#| hide` are left out; of cells that start
with `#| echo: false`, what they print when they are run now stands there as Markdown, so that tables always come
from data/results; links that the notebook writes relative to nbs/ (`../figures/x.png`, `paper/01_brittleness.ipynb`) become relative to the root.
"""
import contextlib
import io
import os.path
import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"""(\]\(|\b(?:src|href)=")(?![a-z]+:|[#/])([^)"\s]+)""")


def printed(source: str) -> str:
    """What a cell prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        exec(compile(source, "nbs/index.ipynb", "exec"), {})
    return text.getvalue()


def render(notebook: Path = ROOT / "nbs/index.ipynb") -> str:
    """The Markdown text of `notebook` as README.md at the root of the checkout."""
    nb = nbformat.read(notebook, as_version=4)
    nb.cells = [c for c in nb.cells if c.cell_type != "raw" and not re.match(r"#\|\s*hide\b", c.source)]
    nb.cells = [nbformat.v4.new_markdown_cell(printed(c.source)) if re.match(r"#\|\s*echo: false\b", c.source) else c for c in nb.cells]
    nb.metadata["language_info"] = {"name": "python"}
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
    text, resources = MarkdownExporter().from_notebook_node(nb)
    if resources.get("outputs"):
        raise SystemExit(f"{notebook.name}: an output holds an image; save it under figures/ and link it, so that README.md can show it.")
    below = notebook.parent.relative_to(ROOT)
    text = LINK.sub(lambda m: m[1] + os.path.normpath(below / m[2]).replace(os.sep, "/"), text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.M)).strip() + "\n"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(render(), encoding="utf-8")
