"""Run library notebooks and guides, and keep what their examples show.

    python scripts/outputs.py [nbs/lib/text/04_parser.ipynb …]

Without arguments, all of them. A notebook that fails keeps its old outputs; the exit status is 1.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbdev.clean import nbdev_clean
from readme import ROOT
from tqdm import tqdm


def execute(path: Path) -> str:
    """Run one notebook in a fresh kernel and write it with its outputs. Returns what went wrong."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(ROOT)}}
    try:
        NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    except CellExecutionError as error:
        return str(error)
    for cell in notebook.cells:
        if cell.cell_type == "code":  # progress bars and warnings of libraries are not kept
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    nbformat.write(notebook, path)
    nbdev_clean(fname=str(path))
    return ""


def main():
    """Run the notebooks named on the command line, or all of them."""
    os.environ["PYTHONPATH"] = str(ROOT)
    named = [Path(name).resolve() for name in sys.argv[1:]]
    folders = [ROOT / "nbs/lib", ROOT / "nbs/guide"]
    every = [path for folder in folders for path in sorted(folder.rglob("*.ipynb"))]
    failed = []
    for path in tqdm(named or every, unit="notebook"):
        problem = execute(path)
        if problem:
            failed.append(path)
            print(f"{path.relative_to(ROOT)} failed:\n{problem}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
