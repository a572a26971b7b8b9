"""Keep a reproduction as the project's committed results.

    python scripts/keep.py [--times | --no-times] [reproduction]

It copies tidy results to data/results/<profile>/, figures to figures/ and outputs into nbs/paper/,
so that they can be read on the web. It runs the ledger of statements once more on the results that
were kept, and renders README.md, whose table comes from there. A reproduction of some notebooks
replaces the results of these and leaves those of the others.

It refuses results of a working tree with uncommitted changes: nobody could say which code made
them. If rows were trained beforehand, piece by piece ($COMPVL_PIECES is the folder of the pieces),
training.csv beside the results says what that took.

With --times it keeps only how long the notebooks took and what all of them cost together;
`compvl reproduce` estimates the time that is left from that. With --no-times it keeps all but that:
for a reproduction that found its training runs where an earlier one had left them ($COMPVL_RUNS).
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import nbformat
import pandas as pd
from nbdev.clean import nbdev_clean
from pieces import training_seconds
from readme import ROOT, write

from compvl.app.plan import reads_others
from compvl.app.reproduction import reproduce
from compvl.core import notebook_number, read_json
from compvl.paper.pieces import Pieces
from compvl.paper.profiles import get_profile
from compvl.paper.rows import ROWS
from compvl.paper.runs import config_name, run_config
from compvl.paper.table_rows import HP_TABLE8

NOTEBOOKS = ROOT / "nbs/paper"
TIME_FILES = ("notebooks.json", "cost.json")
TIMES = ("name", "status", "profile", "commit", "seconds", "jobs", "peak_mb")


def clean_output(output, out: Path):
    """An output without this machine's paths and without counters."""
    output = json.loads(json.dumps(output).replace(str(out.resolve()), "reproduction"))
    if "data" in output:
        output["metadata"] = {}
    if output["output_type"] == "execute_result":
        output["execution_count"] = None
    return nbformat.from_dict(output)


def set_profile(cell, executed):
    """Show the profile that the outputs below were made with in the cell of parameters."""
    injected = [c for c in executed.cells if "injected-parameters" in c.metadata.get("tags", [])]
    for line in (line for c in injected for line in c.source.split("\n")):
        if line.startswith("profile ="):
            lines = cell.source.split("\n")
            default = next(x for x in lines if x.startswith("profile ="))
            comment = default.partition("#")[2]
            lines[lines.index(default)] = f"{line}  #{comment}" if comment else line
            cell.source = "\n".join(lines)


def with_outputs(source: Path, executed: Path, out: Path):
    """Give the notebook `source` the outputs of its execution."""
    notebook = nbformat.read(source, as_version=4)
    ran = nbformat.read(executed, as_version=4)
    outputs = {cell["id"]: cell.get("outputs", []) for cell in ran.cells}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if "parameters" in cell.metadata.get("tags", []):
            set_profile(cell, ran)
        cell.outputs = [clean_output(output, out) for output in outputs.get(cell["id"], [])]
        cell.execution_count = None
    source.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")


def keep_times(out: Path, folder: Path | None = None):
    """Write the status and the time of each notebook to notebooks.json in `folder`.

    The default is the folder of the profile. Entries of other notebooks stay. What all notebooks
    cost together is kept if one call has run them all.
    """
    results = [read_json(path)["result"] for path in sorted((out / "notebooks").glob("*.json"))]
    profiles = {result["profile"] for result in results}
    if len(profiles) != 1:
        raise SystemExit(f"{out}: expected notebooks of one profile, found {sorted(profiles)}")
    folder = folder or ROOT / "data/results" / profiles.pop()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "notebooks.json"
    entries = {}
    for entry in read_json(path) if path.exists() else []:
        if (NOTEBOOKS / f"{entry['name']}.ipynb").exists():
            entries[entry["name"]] = entry
    for result in results:
        entries[result["name"]] = {key: result[key] for key in TIMES}
    ordered = [entries[name] for name in sorted(entries)]
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    cost = out / "cost.json"
    if cost.exists() and set(read_json(cost)["notebooks"]) == set(entries):
        shutil.copy(cost, folder)


def training_run(row, seed: int, profile, pieces: Pieces) -> dict | None:
    """The name, steps and seconds of a training run whose metrics are among the pieces."""
    config = run_config(row, profile, seed)
    metrics = None if config is None else pieces.metrics(config)
    if metrics is None:
        return None
    return dict(
        method=row.key,
        seed=seed,
        run=config_name(config),
        steps=metrics.step.max(),
        seconds=round(training_seconds(metrics, config.batch_size), 1),
    )


def keep_training(runs: list[dict], pieces: Path, folder: Path):
    """Write the training runs behind these results to training.csv in `folder`.

    Entries of other runs stay.
    """
    path = folder / "training.csv"
    entries = pd.read_csv(path).to_dict("records") if path.exists() else []
    profile = get_profile(runs[0]["profile"]["name"])
    pretrained = {row.key: row for row in HP_TABLE8}
    wanted = {(entry["method"], entry["seed"]) for run in runs for entry in run["rows"]}
    for key, seed in sorted(wanted):
        found = training_run(pretrained.get(key, ROWS[key]), seed, profile, Pieces(pieces))
        if found:
            entries.append(found)
    latest = {(entry["seed"], entry["method"]): entry for entry in entries}
    pd.DataFrame([latest[at] for at in sorted(latest)]).to_csv(path, index=False)


def keep_pictures(out: Path) -> set[str]:
    """Copy the figures of `out`. Returns their names."""
    found = sorted((out / "figures").glob("*.png"))
    for path in found:
        shutil.copy(path, ROOT / "figures")
    return {path.name for path in found}


def checked_runs(out: Path) -> list[dict]:
    """The records of all results of `out`, of one profile at one clean commit."""
    runs = [read_json(path) for path in sorted((out / "results").glob("*.json"))]
    profiles = sorted({run["profile"]["name"] for run in runs})
    commits = sorted({run["environment"]["commit"] for run in runs})
    unclear = [commit for commit in commits if "dirty" in commit or commit == "unknown"]
    if len(profiles) != 1 or len(commits) != 1 or unclear:
        raise SystemExit(
            f"{out}: expected results of one profile at one clean commit, found profiles {profiles}"
            f" at commits {commits}: commit, and reproduce with --force."
        )
    problems = {key: why for run in runs for key, why in run["problems"].items()}
    if problems:
        raise SystemExit(f"{out}: rows failed: {problems}")
    return runs


def checked_tables(out: Path) -> list[Path]:
    """The tables of `out` that are no views of its results (those come as .md and .html too)."""
    tables = [
        path
        for path in sorted((out / "tables").glob("*.csv"))
        if not path.with_suffix(".md").exists()
    ]
    both = {path.name for path in tables} & {path.name for path in (out / "results").iterdir()}
    if both:
        raise SystemExit(
            f"{out}: results and a table have the same name: {', '.join(sorted(both))}. One would"
            " replace the other: rename the table in its notebook."
        )
    return tables


def remove_old(folder: Path, made: set[str]):
    """Remove the results of the notebooks that were made; of all, if all were made.

    Times and cost stay.
    """
    numbers = {notebook_number(name) for name in made}
    every = made >= {path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb")}
    for path in folder.iterdir():
        if path.name in TIME_FILES:
            continue
        if path.is_file() and (every or notebook_number(path.stem) in numbers):
            path.unlink()


def read_again(folder: Path) -> set[str]:
    """Run the notebooks that read results on those that were just kept. Returns their figures."""
    sources = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
    names = [path.stem for path in sources if reads_others(nbformat.read(path, as_version=4))]
    if not names:
        return set()
    with tempfile.TemporaryDirectory() as tmp:
        if not reproduce(names, folder.name, out=tmp).ok:
            raise SystemExit(f"{', '.join(names)} fail on the results that were kept: see above")
        for path in sorted(Path(tmp, "tables").glob("*.csv")):
            shutil.copy(path, folder)
        for name in names:
            with_outputs(
                NOTEBOOKS / f"{name}.ipynb", Path(tmp) / f"notebooks/{name}.ipynb", Path(tmp)
            )
        return keep_pictures(Path(tmp))


def keep(out: Path, with_times: bool = True):
    """Copy what `out` contains."""
    runs = checked_runs(out)
    tables = checked_tables(out)
    made = {path.stem for path in (out / "notebooks").glob("*.ipynb")}
    folder = ROOT / "data/results" / runs[0]["profile"]["name"]
    folder.mkdir(parents=True, exist_ok=True)
    remove_old(folder, made)
    results = out / "results"
    for path in [*results.glob("*.json"), *results.glob("*.csv"), *tables]:
        shutil.copy(path, folder)
    if with_times:
        keep_times(out, folder)
    pieces = os.environ.get("COMPVL_PIECES")
    if pieces:
        keep_training(runs, Path(pieces), folder)
    figures = keep_pictures(out)
    for name in sorted(made):
        with_outputs(NOTEBOOKS / f"{name}.ipynb", out / f"notebooks/{name}.ipynb", out)
    figures |= read_again(folder)
    nbdev_clean(fname=str(NOTEBOOKS))
    write()
    count = len(list(folder.iterdir()))
    print(
        f"kept {count} files in {folder.relative_to(ROOT)} and {len(figures)} figures in figures/"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "reproduction")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--times", action="store_true", help="keep only times and cost")
    which.add_argument("--no-times", action="store_true", help="keep all but times and cost")
    arguments = parser.parse_args()
    if arguments.times:
        keep_times(arguments.out)
    else:
        keep(arguments.out, with_times=not arguments.no_times)
