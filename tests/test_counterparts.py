"""compvl.benchmarks.synthetic across processes: the microworld's benchmarks must not depend on the order of sets."""

import os
import subprocess
import sys

CODE = """
import hashlib
import compvl.benchmarks.synthetic
from compvl.benchmarks.registry import REGISTRY, Request
for name, entry in REGISTRY.items():
    if entry.micro: print(name, hashlib.md5(repr(entry.micro(Request(name, None, n=24, seed=3, split='val'))).encode()).hexdigest())
"""


def test_every_process_makes_the_same_items():
    runs = [
        subprocess.run(
            [sys.executable, "-c", CODE],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and len(runs[0].splitlines()) == 51
