"""Make the pieces of a profile with many seeds.

    python scripts/pieces.py [--profile micro-full] [--processes 2] [--minutes 120]
        [--rows vit-b-16 rn50] [--seeds 1 2] [--folder data/results/micro-full/pieces] [--cost]

A piece is a row of the papers' tables with one seed: trained, and scored on every benchmark that
the notebooks show it on. The folder holds whole pieces alone, so the command goes on where it was
stopped; what is unfinished waits in the folder of training runs ($COMPVL_RUNS).
Notebooks that run with COMPVL_PIECES=<folder> take the pieces in place of training. Seeds come
first: after the first round every row has one, after the second two. --cost makes nothing: it
prints how many of the runs are there, how long their training took, and what is left.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def shown():
    """(tables, names of benchmarks, split of the microworld) that the notebooks show."""
    from compvl.paper import table_rows as t
    from compvl.paper.loading import STANDARD, TRIPLET_BENCHMARKS
    from compvl.paper.longer import CONTRASTED
    from compvl.paper.rows import rows

    composition, _ = CONTRASTED["06_cae"]
    contrasted, _ = CONTRASTED["09_iterated_operators"]
    iterated = [*contrasted, "coco-retrieval"]
    unseen = rows(*t.UNSEEN)
    return [
        ((t.HP_TABLE1, t.HP_TABLE3), [*TRIPLET_BENCHMARKS, *STANDARD], None),
        ((t.HP_RATIOS, t.OTHER_TOWER), TRIPLET_BENCHMARKS, None),
        ((t.CAE_TABLE1, t.CAE_TABLE2, t.CAE_TABLE5), composition, None),
        ((t.CAE_TABLE3, t.HP_TABLE10), ["standard"], None),
        ((t.CAE_TABLE4,), ["sickr", "stsb"], None),
        ((t.TCL_TABLE2,), iterated, None),
        ((t.BEYOND,), [*TRIPLET_BENCHMARKS, STANDARD[0]], None),
        ((t.TOGETHER,), ["aro-relation", "aro-attribution"], None),
        ((t.SINCE_2024,), [*TRIPLET_BENCHMARKS, *STANDARD], None),
        ((unseen,), ["hard-positive-kinds", "combinations"], None),
        ((unseen,), ["combinations"], "heldout"),
    ]


def needed_benchmarks():
    """{row key: (row, {split: benchmarks})}; the first table that has a row says what it is."""
    from compvl.benchmarks.loading import expand
    from compvl.paper.loading import STANDARD, TRIPLET_BENCHMARKS
    from compvl.paper.table_rows import HP_TABLE8

    needed = {}
    for tables, names, split in shown():
        benchmarks = expand(names, True)
        for table in tables:
            for row in table:
                if row.source == "trained":
                    _, by_split = needed.setdefault(row.key, (row, {}))
                    by_split.setdefault(split, {}).update(dict.fromkeys(benchmarks))
    for row in HP_TABLE8:
        if row.is_shipped:
            standard = [] if row.scores_pairs else STANDARD
            needed[row.key] = (row, {None: dict.fromkeys([*TRIPLET_BENCHMARKS, *standard])})
    return needed


def plan(profile):
    """(row, seed, {split of the microworld: benchmarks}), in order; None is the default split."""
    from compvl.paper.runs import run_config, seeds_of
    from compvl.paper.table_rows import GENERATIVE

    pieces = []
    for row, by_split in needed_benchmarks().values():
        if row in GENERATIVE[1:]:  # a score of the captioner that the first row trains
            continue
        names = {split: list(benchmarks) for split, benchmarks in by_split.items()}
        for seed in seeds_of(row, profile):
            if run_config(row, profile, seed):
                pieces.append((row, seed, names))
    return sorted(pieces, key=lambda piece: piece[1])


def training_seconds(metrics, batch_size: int) -> float:
    """How long a run's steps took, by the rates that its metrics have.

    It is the median step that counts, so that a run that was stopped for a while took no longer."""
    return (batch_size / metrics.samples_per_s).median() * metrics.step.max()


def cost(folder: Path, todo, profile) -> str:
    """How many of the pieces' training runs are in the folder, what they took, and what is left."""
    from compvl.paper.pieces import Pieces
    from compvl.paper.runs import run_config

    pieces = Pieces(folder)
    n_there = 0
    precisions = Counter()
    hours = []  # of those that were not trained on a GPU
    for row, seed, _ in todo:
        config = run_config(row, profile, seed)
        metrics = pieces.metrics(config)
        if metrics is None:
            continue
        n_there += 1
        made_in = pieces.environment(config)
        precisions[made_in["precision"] if made_in else "a precision not recorded"] += 1
        if not (made_in and made_in["gpu"]):
            hours.append(training_seconds(metrics, config.batch_size) / 3600)
    lines = [f"{n_there} of {len(todo)} training runs are there"]
    computed_in = ", ".join(f"{n} in {precision}" for precision, n in precisions.most_common())
    lines += [f"{n_there - len(hours)} of them were trained on a GPU; {computed_in}"]
    if hours:
        left = sum(hours) / len(hours) * (len(todo) - n_there)
        lines.append(
            f"{len(hours)} took {sum(hours):.1f} hours of one core; the rest takes {left:.0f}"
        )
    return "\n".join(lines)


def rows_of(row):
    """The rows that are scored in the piece of a row: a captioner's scores are of one run."""
    from compvl.paper.table_rows import GENERATIVE

    return GENERATIVE if row in GENERATIVE else [row]


def is_whole(folder: Path, profile, rows, seed, by_split) -> bool:
    """Whether the rows' scores on all benchmarks are in the folder."""
    from compvl.paper.loading import load
    from compvl.paper.pieces import Pieces
    from compvl.paper.runs import run_config

    pieces = Pieces(folder)
    configs = [run_config(row, profile, seed) for row in rows]
    for split, names in by_split.items():
        items, _ = load(names, profile, split=split)
        if not all(pieces.has_scores(config, items) for config in configs):
            return False
    return True


def make_piece(name, row, seed, by_split):
    """Make one piece, in this process. Intervals are computed by the notebooks, and not here.

    It is made beside the runs, and comes into the folder of pieces as a whole."""
    from compvl.core import runs_dir
    from compvl.paper.evaluation import results
    from compvl.paper.profiles import get_profile

    one_seed = dict(seeds=(seed,), more_seeds={}, base_seeds=(seed,))
    profile = replace(get_profile(name), **one_seed, n_boot=2)
    rows = rows_of(row)
    folder = Path(os.environ["COMPVL_PIECES"])
    if is_whole(folder, profile, rows, seed, by_split):
        return
    unfinished = runs_dir() / "unfinished" / f"{name}-{row.key}-{seed}"
    os.environ["COMPVL_PIECES"] = str(unfinished)
    try:
        with tempfile.TemporaryDirectory() as out:
            for split, benchmarks in by_split.items():
                res = results(
                    rows, benchmarks, profile, out, f"piece-{split}", progress=False, split=split
                )
                res.check()
    finally:
        os.environ["COMPVL_PIECES"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(unfinished.iterdir()):
        shutil.move(file, folder / file.name)
    unfinished.rmdir()


def end_with(parent: int):
    """End this process when `parent` has ended: a stopped command leaves nothing running."""

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Workers:
    """Processes that go from piece to piece, each keeping the pictures that it has drawn.

    Where a process is killed, only its piece is lost.
    """

    def __init__(self, profile, todo, processes, minutes):
        self.profile = profile
        self.todo = iter(todo)
        self.deadline = time.perf_counter() + 60 * minutes
        self.pools = [self._start() for _ in range(processes)]
        self.running = {}  # future -> (number of the process, piece, start in seconds)
        self.made = 0
        self.failed = 0

    def _start(self):
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, context, end_with, (os.getpid(),))

    def _give_work(self, number):
        if time.perf_counter() >= self.deadline:
            return
        piece = next(self.todo, None)
        if piece:
            future = self.pools[number].submit(make_piece, self.profile, *piece)
            self.running[future] = (number, piece, time.perf_counter())

    def _finish(self, future):
        number, (row, seed, _), started = self.running.pop(future)
        error = future.exception()
        outcome = f"{type(error).__name__}: {error}" if error else "done"
        if error:
            self.failed += 1
        else:
            self.made += 1
        seconds = time.perf_counter() - started
        print(f"{row.key}, seed {seed}: {outcome} ({seconds:.0f} s)", flush=True)
        if isinstance(error, BrokenExecutor):
            self.pools[number] = self._start()
        self._give_work(number)

    def run(self):
        """Make the pieces, until all are there or the time is over; returns how many are left."""
        for number in range(len(self.pools)):
            self._give_work(number)
        while self.running:
            for future in wait(self.running, return_when=FIRST_COMPLETED).done:
                self._finish(future)
        for pool in self.pools:
            pool.shutdown()
        return len(list(self.todo))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="micro-full")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--rows", nargs="+", help="keys of rows: these alone")
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--cost", action="store_true", help="what was trained, and what is left")
    return parser, parser.parse_args()


def main():
    from compvl.core import cores
    from compvl.paper.profiles import get_profile

    parser, options = parse_arguments()
    folder = options.folder or ROOT / "data/results" / options.profile / "pieces"
    # the processes inherit the environment
    os.environ["COMPVL_PIECES"] = str(folder.absolute())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // options.processes)))

    profile = get_profile(options.profile)
    todo = plan(profile)
    known = dict.fromkeys(row.key for row, _, _ in todo)
    unknown = sorted(set(options.rows or ()) - set(known))
    if unknown:
        parser.error(f"no rows with pieces: {', '.join(unknown)}; known are {', '.join(known)}")
    if options.rows:
        todo = [piece for piece in todo if piece[0].key in options.rows]
    if options.seeds:
        todo = [piece for piece in todo if piece[1] in options.seeds]
    if options.cost:
        print(cost(folder, todo, profile))
        return

    workers = Workers(options.profile, todo, options.processes, options.minutes)
    left = workers.run()
    print(f"{workers.made} of {len(todo)} pieces are there, {workers.failed} failed")
    sys.exit(1 if workers.failed or left else 0)


if __name__ == "__main__":
    main()
