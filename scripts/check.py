"""Check what is committed:  python scripts/check.py

1. compvl/ is what nbdev exports from nbs/ (compared on a copy: nothing in the checkout changes).
2. Notebooks are valid and clean; their outputs contain no error and no path of a machine.
3. Examples of library notebooks and guides show their outputs; figure cells of paper notebooks
   show their figure.
4. nbs/index.ipynb shows what data/results contains and links to every paper notebook; README.md is
   its rendering and has at most 10 kB.
5. Tables and findings in the outputs of nbs/paper are what the same cells give on data/results
   (see rederive.py).
6. Numbers in the text of paper notebooks are those of data/results (see quotes.py).
7. All results of a profile were made at one commit.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from quotes import quote_problems
from readme import INDEX, ROOT, current, render
from rederive import rederive

NOTEBOOKS = [p for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if "checkpoints" not in str(p)]
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|home|root|work|Users)/\w+")
LARGEST_PICTURE = 150_000  # bytes
LARGEST_README = 10_000  # bytes


def short(path: Path) -> str:
    """A path as problems name it."""
    return path.relative_to(ROOT).as_posix()


def python_sources(root: Path) -> dict[str, str]:
    """The modules below `root`, by path."""
    files = sorted((root / "compvl").rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in files}


def export_copy(copy: Path):
    """Copy the notebooks to the folder `copy`, export and clean them there."""
    shutil.copy(ROOT / "settings.ini", copy)
    ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    shutil.copytree(ROOT / "nbs", copy / "nbs", ignore=ignore)
    (copy / "compvl").mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "IN_TEST"}
    for command in ("nbdev_export", "nbdev_clean"):
        program = Path(sys.executable).parent / command
        subprocess.run([program], cwd=copy, env=environment, check=True)


def exported_and_clean() -> list[str]:
    """Problems found by exporting and cleaning a copy of the notebooks."""
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        export_copy(copy)
        committed = python_sources(ROOT)
        exported = python_sources(copy)
        for name in sorted(committed.keys() | exported.keys()):
            if committed.get(name) != exported.get(name):
                problems.append(f"{name} is not what the notebooks export: run make export")
        for path in NOTEBOOKS:
            if path.read_bytes() != (copy / path.relative_to(ROOT)).read_bytes():
                problems.append(f"{short(path)} is not clean: run make export")
    return problems


def output_problems(output) -> list[str]:
    """Problems of one output of a cell."""
    problems = []
    if output.output_type == "error":
        problems.append("contains an error")
    data = output.get("data", {})
    picture = data.get("image/png", "")
    if len(base64.b64decode(picture)) > LARGEST_PICTURE:
        problems.append(f"shows a picture of more than {LARGEST_PICTURE // 1000} kB")
    texts = [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    found = MACHINE_PATH.search("\n".join(map(str, texts)))
    if found:
        problems.append(f"shows a path of the machine that ran it: {found[0]}")
    return problems


def draws_figure(cell) -> bool:
    """Whether a cell of a paper notebook makes a figure."""
    return bool(re.search(r"\b(?:save_figure|nb\.figure)\(", cell.source))


def shows_figure(cell) -> bool:
    """Whether a cell shows a picture, or links to one in figures/."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data or "figures/" in str(data.get("text/markdown", "")):
            return True
    return False


def notebook_problems(path: Path) -> list[str]:
    """Problems of one notebook: its format and its outputs."""
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        return [f"{short(path)} is not a valid notebook: {str(error).splitlines()[0]}"]
    problems = []
    room = path.relative_to(ROOT / "nbs").parts[0]
    for number, cell in enumerate(notebook.cells):
        found = [p for output in cell.get("outputs", []) for p in output_problems(output)]
        if room == "paper" and draws_figure(cell) and not shows_figure(cell):
            found.append("draws a figure and does not show it")
        problems += [f"{short(path)} cell {number} {problem}" for problem in found]
    examples = [c for c in notebook.cells if c.cell_type == "code" and "#| " not in c.source[:3]]
    if room in ("lib", "guide") and examples and not any(cell.outputs for cell in examples):
        problems.append(f"{short(path)} shows no output: run it with its outputs kept")
    return problems


def valid_notebooks() -> list[str]:
    """Problems of the notebooks by themselves."""
    return [problem for path in NOTEBOOKS for problem in notebook_problems(path)]


def readme() -> list[str]:
    """Problems of nbs/index.ipynb and of README.md, which is made from it."""
    path = ROOT / "README.md"
    notebook = current()
    problems = []
    if notebook != nbformat.read(INDEX, as_version=4):
        problems.append("nbs/index.ipynb does not show what data/results contains: run make readme")
    text = "".join(cell.source for cell in notebook.cells)
    for other in sorted((INDEX.parent / "paper").glob("[0-9]*.ipynb")):
        if f"](paper/{other.name})" not in text:
            problems.append(f"nbs/index.ipynb does not link to {other.name}")
    rendered = render(notebook)
    if not path.exists() or path.read_text(encoding="utf-8") != rendered:
        problems.append("README.md is not the rendering of nbs/index.ipynb: run make readme")
    if len(rendered.encode()) > LARGEST_README:
        problems.append(
            f"README.md has {len(rendered.encode()):,} bytes, {LARGEST_README:,} allowed"
        )
    return problems


def one_commit() -> list[str]:
    """Problems of the results' records: a profile with results of several commits."""
    problems = []
    for base in sorted((ROOT / "data/results").glob("*/00_base.json")):
        commits = {}
        for path in sorted(base.parent.glob("[0-9]*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            commits.setdefault(record["environment"]["commit"][:8], []).append(path.stem)
        if len(commits) > 1:
            made = "; ".join(f"{commit}: {', '.join(names)}" for commit, names in commits.items())
            problems.append(f"{short(base.parent)} has results of several commits: {made}")
    return problems


def main():
    """Run all checks. Problems go to stderr, and the exit status is 1 if there are any."""
    problems = [*exported_and_clean(), *valid_notebooks(), *readme(), *one_commit()]
    different, made, left = rederive()
    problems += [*different, *quote_problems()]
    for problem in problems:
        print(f"check: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    print(
        f"check: compvl/ is exported, {len(NOTEBOOKS)} notebooks are clean, README.md is current, "
        f"{made} cells of the paper notebooks agree with data/results ({left} need models or items)"
    )


if __name__ == "__main__":
    main()
