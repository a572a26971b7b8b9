"""Make the pieces of a profile with many seeds:  python scripts/pieces.py [--profile micro-full] [--processes 2] [--minutes 120] [--folder data/results/micro-full/pieces]

A piece is a row of the papers' tables with one seed: trained, and scored on every benchmark that the notebooks ask of it. What is there is not made again, so the command goes on where it was stopped;
the notebooks, run with COMPVL_PIECES=<folder>, take the pieces as they are. Seeds come first: after the first round every row has one, after the second two.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def plan(profile):
    """(row key, seed, {split of the microworld: benchmarks}), in order; None is the default split."""
    from compvl.benchmarks import expand
    from compvl.experiments import BEYOND, CAE_TABLE1, CAE_TABLE2, CAE_TABLE3, CAE_TABLE4, CAE_TABLE5, STANDARD, TABLE1, TABLE3, TABLE10, TCL_TABLE2, TOGETHER, TRIPLETS, UNSEEN, rows
    composition = ["aro-relation", "aro-attribution", "sugarcrepe", "vl-checklist-relation", "vl-checklist-attribute", "valse-relation", "svo-probes", "comvg", "winoground-compositional"]
    asked = {}
    for tables, names, split in [((TABLE1, TABLE3), [*TRIPLETS, *STANDARD], None), ((CAE_TABLE1, CAE_TABLE2, CAE_TABLE5), composition, None), ((CAE_TABLE3, TABLE10), ["standard"], None), ((CAE_TABLE4,), ["sickr", "stsb"], None),
                                 ((TCL_TABLE2,), [*TRIPLETS, *composition[:6], "coco-retrieval"], None),
                                 ((BEYOND,), [*TRIPLETS, STANDARD[0]], None), ((TOGETHER,), ["aro-relation", "aro-attribution"], None), ((rows(*UNSEEN),), ["hard-positive-kinds", "combinations"], None), ((rows(*UNSEEN),), ["combinations"], "heldout")]:
        for r in (r for t in tables for r in t if r.source == "trained"): asked.setdefault(r.key, {}).setdefault(split, {}).update(dict.fromkeys(expand(names, True)))
    return [(k, s, {split: list(names) for split, names in asked[k].items()}) for s in profile.seeds for k in asked]


def one(name, key, seed):
    """Make one piece, in this process."""
    from compvl.experiments import ROWS, get_profile, results
    p = get_profile(name)
    by_split = next(b for k, s, b in plan(p) if (k, s) == (key, seed))
    with tempfile.TemporaryDirectory() as out:
        for split, names in by_split.items(): results([ROWS[key]], names, replace(p, seeds=(seed,)), out, f"piece-{split}", progress=False, split=split).check()


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--profile", default="micro-full"); a.add_argument("--processes", type=int, default=2); a.add_argument("--minutes", type=float, default=1e9)
    a.add_argument("--folder", type=Path); a.add_argument("--one", nargs=2)
    o = a.parse_args()
    if o.one: return one(o.profile, o.one[0], int(o.one[1]))
    from compvl.experiments import get_profile
    folder, t0 = (o.folder or ROOT/"data/results"/o.profile/"pieces").absolute(), time.perf_counter()
    env = os.environ | dict(COMPVL_PIECES=str(folder), OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1)//o.processes)))
    def make(piece):
        key, seed, _ = piece
        if time.perf_counter() - t0 > 60*o.minutes: return None
        t = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, "--profile", o.profile, "--one", key, str(seed)], env=env, capture_output=True, text=True)
        last = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else "done"
        print(f"{key}, seed {seed}: {last} ({time.perf_counter() - t:.0f} s)", flush=True)
        return done.returncode == 0
    with ThreadPoolExecutor(o.processes) as pool: made = list(pool.map(make, plan(get_profile(o.profile))))
    print(f"{sum(m is True for m in made)} of {len(made)} pieces are there, {sum(m is False for m in made)} failed")
    sys.exit(0 if all(made) else 1)


if __name__ == "__main__":
    main()
