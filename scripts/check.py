"""Checks on what is committed:  python scripts/check.py

1. compvl/ is what nbdev exports from nbs/ (compared on a copy: nothing in the checkout changes).
2. Notebooks are valid and clean; those in nbs/lib carry no outputs.
3. What nbs/index.ipynb shows is made from data/results, it links to every notebook, and README.md is its rendering.
4. Tables and findings in the committed outputs of nbs/paper are what the same cells give on data/results (see rederive.py).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

from readme import INDEX, ROOT, current, render
from rederive import rederive


def exported_and_clean() -> list[str]:
    """Problems found by exporting and cleaning a copy of the notebooks."""
    problems = []
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp)
        ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copy(ROOT / "settings.ini", copy)
        shutil.copytree(ROOT / "nbs", copy / "nbs", ignore=ignore)
        (copy / "compvl").mkdir()
        env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
        for command in ("nbdev_export", "nbdev_clean"):
            subprocess.run([Path(sys.executable).parent / command], cwd=copy, env=env, check=True)

        def sources(root):
            return {
                p.relative_to(root).as_posix(): p.read_text(encoding="utf-8")
                for p in (root / "compvl").rglob("*.py")
            }

        committed, exported = sources(ROOT), sources(copy)
        for name in sorted(committed.keys() | exported.keys()):
            if committed.get(name) != exported.get(name):
                problems.append(f"{name} is not what the notebooks export: run make export")
        for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
            name = path.relative_to(ROOT)
            if ".ipynb_checkpoints" in name.parts:
                continue
            if path.read_bytes() != (copy / name).read_bytes():
                problems.append(f"{name} is not clean: run make export")
    return problems


def valid_notebooks() -> list[str]:
    """Problems of the notebooks by themselves: their format, and outputs where none belong."""
    problems = []
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        name = path.relative_to(ROOT)
        try:
            nb = nbformat.read(path, as_version=4)
            nbformat.validate(nb)
        except Exception as e:
            problems.append(f"{name} is not a valid notebook: {str(e).splitlines()[0]}")
            continue
        for i, cell in enumerate(nb.cells):
            if name.parts[1] == "lib" and (cell.get("outputs") or cell.get("execution_count")):
                problems.append(f"{name} cell {i} carries outputs: run make export")
            if any(o.output_type == "error" for o in cell.get("outputs", [])):
                problems.append(f"{name} cell {i} carries an error")
    return problems


def readme() -> list[str]:
    """Problems of nbs/index.ipynb and of README.md, which is made from it."""
    path, nb, problems = ROOT / "README.md", current(), []
    if nb != nbformat.read(INDEX, as_version=4):
        problems.append("what nbs/index.ipynb shows is not made from data/results: run make readme")
    linked = "".join(c.source for c in nb.cells)
    problems += [
        f"nbs/index.ipynb does not lead to {p.name}"
        for p in sorted(INDEX.parent.glob("*/*.ipynb"))
        if f"]({p.relative_to(INDEX.parent).as_posix()})" not in linked
    ]
    if not path.exists() or path.read_text(encoding="utf-8") != render(nb):
        problems.append("README.md is not the rendering of nbs/index.ipynb: run make readme")
    return problems


if __name__ == "__main__":
    found = [p for check in (exported_and_clean, valid_notebooks, readme) for p in check()]
    differ, made, left = rederive()
    found += differ
    for problem in found:
        print(f"check: {problem}", file=sys.stderr)
    if found:
        sys.exit(1)
    print(
        f"check: compvl/ is exported, {len(list((ROOT / 'nbs').rglob('*.ipynb')))} notebooks are clean, README.md is current, "
        f"{made} cells of the paper notebooks agree with data/results ({left} need models or items)"
    )
