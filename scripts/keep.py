"""Keep a reproduction as the project's committed results:  python scripts/keep.py [--times] [reproduction]

Copies its tidy results to data/results/<profile>/, its figures to figures/ and its small outputs into nbs/paper/, so that they can be
read on the web; runs what reads results (the ledger of claims) once more on those that were kept; renders README.md, whose tables come from there. Of a reproduction of some notebooks, the results of these are replaced, and those of the
others stay. Refuses results of a working tree with uncommitted changes: nobody could say which code made them.
Where training was done before, piece by piece (COMPVL_PIECES is its folder), training.csv beside the results says what it took.
With --times, keeps only how long the notebooks of its profile took, from which `compvl reproduce` tells how much time is left.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import pandas as pd
from nbdev.clean import nbdev_clean

from compvl.core import notebook_number
from compvl.paper.pieces import Pieces
from compvl.paper.profiles import get_profile
from compvl.paper.rows import ROWS
from compvl.paper.table_rows import HP_TABLE8
from compvl.paper.runs import run_config
from compvl.app.reproduction import reads_others, reproduce
from readme import ROOT, write

LARGEST = 200_000  # bytes of an output that is kept in a notebook; larger figures are in figures/


def with_outputs(source: Path, executed: Path, out: Path):
    """Give the notebook `source` the small outputs of its execution, without this machine's paths."""
    nb, ran = (nbformat.read(p, as_version=4) for p in (source, executed))
    outputs = {c["id"]: c.get("outputs", []) for c in ran.cells}
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        kept = [
            json.loads(json.dumps(o).replace(str(out.resolve()), "reproduction"))
            for o in outputs.get(cell["id"], [])
            if len(json.dumps(o)) <= LARGEST
        ]
        cell.outputs = [
            nbformat.from_dict(
                o
                | {"metadata": {}}
                | ({"execution_count": None} if o["output_type"] == "execute_result" else {})
            )
            if "data" in o
            else nbformat.from_dict(o)
            for o in kept
        ]
        cell.execution_count = None
    source.write_text(nbformat.writes(nb, indent=1) + "\n", encoding="utf-8")


def times(out: Path, folder: Path | None = None):
    """Write what became of each notebook, and in what time, to notebooks.json in `folder` (default: that of the profile); what is there of others stays."""
    record = [
        {k: r[k] for k in ("name", "status", "profile", "commit", "seconds", "peak_mb")}
        for r in (
            json.loads(p.read_text(encoding="utf-8"))["result"]
            for p in sorted((out / "notebooks").glob("*.json"))
        )
    ]
    if len({r["profile"] for r in record}) != 1:
        raise SystemExit(
            f"{out}: expected notebooks of one profile, found {sorted({r['profile'] for r in record})}"
        )
    folder = folder or ROOT / "data/results" / record[0]["profile"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "notebooks.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = {r["name"]: r for r in [*before, *record]}
    path.write_text(
        json.dumps([found[k] for k in sorted(found)], indent=1) + "\n", encoding="utf-8"
    )


def training(runs: list[dict], pieces: Path, folder: Path):
    """Write the training runs behind the rows of these results, with their seconds, to training.csv in `folder`: those whose metrics are among the pieces; what is there of others stays."""
    path = folder / "training.csv"
    before = pd.read_csv(path).to_dict("records") if path.exists() else []
    profile, found, models = get_profile(runs[0]["profile"]["name"]), [], {r.key: r for r in HP_TABLE8}
    for key, seed in sorted(
        {(r["method"], r["seed"]) for told in runs for r in told["rows"]}, key=lambda r: r[::-1]
    ):
        if config := run_config(models.get(key, ROWS[key]), profile, seed):
            metrics = Pieces(pieces).file(config)
            if metrics.exists():
                speed = pd.read_csv(metrics).samples_per_s
                found.append(
                    dict(
                        method=key,
                        seed=seed,
                        run=metrics.name.removesuffix(".csv.gz"),
                        steps=len(speed),
                        seconds=round((config.batch_size / speed).sum(), 1),
                    )
                )
    of = {(r["method"], r["seed"]): r for r in [*before, *found]}
    pd.DataFrame([of[k] for k in sorted(of, key=lambda k: k[::-1])]).to_csv(path, index=False)


def pictures(out: Path) -> set[str]:
    """Copy the figures of `out`; their names."""
    found = [p for p in (out / "figures").glob("*") if p.suffix in (".png", ".svg")]
    for path in found:
        shutil.copy(path, ROOT / "figures")
    return {p.name for p in found}


def keep(out: Path):
    """Copy what `out` holds, after checking that all of it was made at one commit, by one profile."""
    kept = sorted((out / "results").glob("*.json"))
    runs = [json.loads(p.read_text(encoding="utf-8")) for p in kept]
    profiles = {r["profile"]["name"] for r in runs}
    commits = {r["environment"]["commit"] for r in runs}
    if (
        len(profiles) != 1
        or len(commits) != 1
        or any("dirty" in c or c == "unknown" for c in commits)
    ):
        raise SystemExit(
            f"{out}: expected results of one profile at one clean commit, found profiles {sorted(profiles)} at commits {sorted(commits)}: commit, and reproduce with --force."
        )
    if problems := {k: v for r in runs for k, v in r["problems"].items()}:
        raise SystemExit(f"{out}: rows failed: {problems}")
    tables = [
        p for p in sorted((out / "tables").glob("*.csv")) if not p.with_suffix(".md").exists()
    ]  # those with .md and .html are views of the results
    if both := {p.name for p in tables} & {p.name for p in (out / "results").iterdir()}:
        raise SystemExit(
            f"{out}: results and a table of the same name: {', '.join(sorted(both))}. One would replace the other: rename the table in its notebook."
        )
    folder = ROOT / "data/results" / profiles.pop()
    folder.mkdir(parents=True, exist_ok=True)
    ours = ROOT / "nbs/paper"
    made = {p.stem for p in (out / "notebooks").glob("*.ipynb")}
    every = made >= {p.stem for p in ours.glob("[0-9]*.ipynb")}
    for old in folder.iterdir():
        if old.is_file() and (
            every or notebook_number(old.stem) in set(map(notebook_number, made))
        ):  # pieces of runs, in a folder of their own, stay
            old.unlink()
    for path in [*kept, *sorted((out / "results").glob("*.csv")), *tables]:
        shutil.copy(path, folder)
    times(out, folder)
    if pieces := os.environ.get("COMPVL_PIECES"):
        training(runs, Path(pieces), folder)
    figures = pictures(out)
    for name in sorted(made):
        with_outputs(ours / f"{name}.ipynb", out / f"notebooks/{name}.ipynb", out)
    reading = [
        p.stem
        for p in sorted(ours.glob("[0-9]*.ipynb"))
        if reads_others(nbformat.read(p, as_version=4))
    ]
    if reading:  # they say which results they read: now those that were just kept
        with tempfile.TemporaryDirectory() as tmp:
            if not reproduce(reading, folder.name, out=tmp).ok:
                raise SystemExit(
                    f"{', '.join(reading)} fail on the results that were kept: see above"
                )
            for path in sorted(Path(tmp, "tables").glob("*.csv")):
                shutil.copy(path, folder)
            figures |= pictures(Path(tmp))
            for name in reading:
                with_outputs(
                    ours / f"{name}.ipynb", Path(tmp) / f"notebooks/{name}.ipynb", Path(tmp)
                )
    nbdev_clean(fname=str(ours))
    write()
    print(
        f"kept {len(list(folder.iterdir()))} files in {folder.relative_to(ROOT)} and {len(figures)} figures in figures/"
    )


if __name__ == "__main__":
    (times if "--times" in sys.argv else keep)(
        Path(next((a for a in sys.argv[1:] if a != "--times"), ROOT / "reproduction"))
    )
