"""Make the pieces of a profile with many seeds:  python scripts/pieces.py [--profile micro-full] [--processes 2] [--minutes 120] [--rows vit-b-16 rn50] [--folder data/results/micro-full/pieces]

A piece is a row of the papers' tables with one seed: trained, and scored on every benchmark that the notebooks ask of it. What is there is not made again, so the command goes on where it was stopped;
the notebooks, run with COMPVL_PIECES=<folder>, take the pieces as they are. Seeds come first: after the first round every row has one, after the second two.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def plan(profile):
    """(row, seed, {split of the microworld: benchmarks}), in order; None is the default split."""
    from compvl.benchmarks.loading import expand
    from compvl.paper.loading import CAE_BENCHMARKS, STANDARD, TRIPLET_BENCHMARKS
    from compvl.paper.table_rows import BEYOND, CAE_TABLE1, CAE_TABLE2, CAE_TABLE3, CAE_TABLE4, CAE_TABLE5, HP_TABLE1, HP_TABLE10, HP_TABLE3, HP_TABLE8, TCL_TABLE2, TOGETHER, UNSEEN
    from compvl.paper.rows import rows
    from compvl.paper.runs import run_config, seeds_of

    asked = {}
    for tables, names, split in [
        ((HP_TABLE1, HP_TABLE3), [*TRIPLET_BENCHMARKS, *STANDARD], None),
        ((CAE_TABLE1, CAE_TABLE2, CAE_TABLE5), [*CAE_BENCHMARKS, "winoground-compositional"], None),
        ((CAE_TABLE3, HP_TABLE10), ["standard"], None),
        ((CAE_TABLE4,), ["sickr", "stsb"], None),
        ((TCL_TABLE2,), [*TRIPLET_BENCHMARKS, *CAE_BENCHMARKS[:6], "coco-retrieval"], None),
        ((BEYOND,), [*TRIPLET_BENCHMARKS, STANDARD[0]], None),
        ((TOGETHER,), ["aro-relation", "aro-attribution"], None),
        ((rows(*UNSEEN),), ["hard-positive-kinds", "combinations"], None),
        ((rows(*UNSEEN),), ["combinations"], "heldout"),
    ]:
        for r in (r for t in tables for r in t if r.source == "trained"):
            asked.setdefault(r.key, (r, {}))[1].setdefault(split, {}).update(
                dict.fromkeys(expand(names, True))
            )
    asked |= {
        r.key: (
            r,
            {
                None: dict.fromkeys(
                    TRIPLET_BENCHMARKS if r.key == "xvlm" else [*TRIPLET_BENCHMARKS, *STANDARD]
                )
            },
        )
        for r in HP_TABLE8
        if r.base
    }
    return sorted(
        (
            (r, s, {split: list(names) for split, names in by.items()})
            for r, by in asked.values()
            for s in seeds_of(r, profile)
            if run_config(r, profile, s)
        ),
        key=lambda piece: piece[1],
    )


def one(name, row, seed, by_split):
    """Make one piece, in this process."""
    from compvl.paper.evaluation import results
    from compvl.paper.profiles import get_profile

    with tempfile.TemporaryDirectory() as out:
        for split, names in by_split.items():
            results(
                [row],
                names,
                replace(get_profile(name), seeds=(seed,), base_seeds=(seed,)),
                out,
                f"piece-{split}",
                progress=False,
                split=split,
            ).check()


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--profile", default="micro-full")
    a.add_argument("--processes", type=int, default=2)
    a.add_argument("--minutes", type=float, default=1e9)
    a.add_argument("--rows", nargs="+", help="keys of rows: these alone")
    a.add_argument("--folder", type=Path)
    o = a.parse_args()
    from compvl.core import cores
    from compvl.paper.profiles import get_profile

    folder, t0, failed, made = (
        (o.folder or ROOT / "data/results" / o.profile / "pieces").absolute(),
        time.perf_counter(),
        0,
        0,
    )
    os.environ |= dict(
        COMPVL_PIECES=str(folder), OMP_NUM_THREADS=str(max(1, cores() // o.processes))
    )  # the processes inherit it
    todo = plan(get_profile(o.profile))
    if unknown := set(o.rows or ()) - {row.key for row, _, _ in todo}:
        a.error(
            f"no rows with pieces: {', '.join(sorted(unknown))}; known are {', '.join(dict.fromkeys(row.key for row, _, _ in todo))}"
        )
    todo = iter([piece for piece in todo if not o.rows or piece[0].key in o.rows])
    start = lambda: ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    pools, running = (
        [start() for _ in range(o.processes)],
        {},
    )  # a process goes from piece to piece, and draws a picture once; where one is killed, only its piece is lost

    def fill(i):
        if time.perf_counter() - t0 < 60 * o.minutes and (piece := next(todo, None)):
            running[pools[i].submit(one, o.profile, *piece)] = i, piece, time.perf_counter()

    for i in range(o.processes):
        fill(i)
    while running:
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            i, (row, seed, _), t = running.pop(done)
            error = done.exception()
            failed, made = failed + bool(error), made + (not error)
            print(
                f"{row.key}, seed {seed}: {f'{type(error).__name__}: {error}' if error else 'done'} ({time.perf_counter() - t:.0f} s)",
                flush=True,
            )
            if isinstance(error, BrokenExecutor):
                pools[i] = start()
            fill(i)
    for pool in pools:
        pool.shutdown()
    left = len([*todo])
    print(f"{made} of {made + failed + left} pieces are there, {failed} failed")
    sys.exit(0 if not failed + left else 1)


if __name__ == "__main__":
    main()
