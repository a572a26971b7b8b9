"""Models that know nothing, put through the ledger: no statement is true of them by definition."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom

from compvl.evaluate.engine import COLUMNS
from compvl.evaluate.tasks import TASKS
from compvl.paper.columns import ABLATION_MEANS, COMPOSITION_MEANS, PAIRS, PAIRS_MEAN
from compvl.paper.evidence import Store
from compvl.paper.ledger import STATEMENTS, make_ledger
from compvl.paper.loading import CAE_BENCHMARKS, TRIPLET_BENCHMARKS, load
from compvl.paper.profiles import PROFILES
from compvl.paper.results import Results
from compvl.paper.rows import ROWS
from compvl.paper.statements import Contrast, contrasts_table
from compvl.stats import NO_EFFECT, REPRODUCED

N_DRAWS = 4
PROFILE = replace(PROFILES["smoke"], n_items=120, n_retrieval=60, n_classification=120, n_kind=30)
CAE = [*CAE_BENCHMARKS, "winoground-compositional"]
SHOWN = {  # results -> benchmarks, and the means over columns that they have
    "01_brittleness": (TRIPLET_BENCHMARKS, {}),
    "02_ratio_ablation": (TRIPLET_BENCHMARKS, {}),
    "03_standard_zeroshot": (("standard",), {}),
    "04_other_models": (TRIPLET_BENCHMARKS, {}),
    "06_cae": (CAE, COMPOSITION_MEANS | ABLATION_MEANS),
    "07_text_similarity": (("sickr", "stsb"), {}),
    "09_iterated_operators": (CAE_BENCHMARKS, {PAIRS_MEAN.benchmark: PAIRS}),
}
TESTED = [
    statement
    for statement in STATEMENTS.values()
    if statement.kind == "effect" and all(isinstance(test, Contrast) for test in statement.tests)
]


class RandomScorer:
    """Scores that depend on nothing."""

    compares_texts = False
    sees_images = True

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def pairs(self, images, *captions, desc=""):
        return [self.rng.random(len(images)) for _ in captions]

    def sentences(self, a, b, desc=""):
        return self.rng.random(len(a))

    def ranks(self, images, captions, owner, desc=""):
        n_images = len(images)
        to_text = self.rng.integers(0, len(captions), n_images)
        return to_text, self.rng.integers(0, n_images, len(captions))

    def class_scores(self, images, prompts, desc=""):
        return torch.from_numpy(self.rng.random((len(images), len(prompts))))


class ConstantScorer(RandomScorer):
    """The same score for everything."""

    def pairs(self, images, *captions, desc=""):
        return [np.ones(len(images)) for _ in captions]

    def sentences(self, a, b, desc=""):
        return np.ones(len(a))

    def ranks(self, images, captions, owner, desc=""):
        return np.full(len(images), len(captions)), np.full(len(captions), len(images))

    def class_scores(self, images, prompts, desc=""):
        return torch.ones(len(images), len(prompts))


def row_keys(name: str) -> list[str]:
    """The rows that the contrasts on some results need."""
    keys = {}
    for statement in TESTED:
        for test in statement.tests:
            if test.results == name:
                keys |= dict.fromkeys(key for _, (key, *_) in test.terms)
    for key in list(keys):
        keys |= dict.fromkeys(ROWS[key].of)
    return list(keys)


@pytest.fixture(scope="module")
def benchmarks():
    """{results: benchmarks}"""
    found = {}
    for name, (names, _) in SHOWN.items():
        found[name], missing = load(names, PROFILE)
        assert not missing
    return found


def write_contrasts(folder, benchmarks, scorer_of):
    """The contrasts of rows whose scores are those of `scorer_of(number of the row)`."""
    (folder / "tables").mkdir()
    number = 0
    for name, (_, joined) in SHOWN.items():
        scores = {}
        for key in row_keys(name):
            if ROWS[key].of:
                continue
            number += 1
            scorer = scorer_of(number)
            tables = {b.name: TASKS[b.task].score(b, scorer) for b in benchmarks[name]}
            scores[key] = {0: tables}
        rows = [ROWS[key] for key in row_keys(name)]
        table = pd.DataFrame(columns=COLUMNS)
        res = Results(PROFILE, rows, benchmarks[name], table, scores, joined=joined)
        tests = [t for statement in TESTED for t in statement.tests if t.results == name]
        contrasts = contrasts_table(tests, res)
        assert contrasts.difference.notna().all()
        contrasts.to_csv(folder / f"tables/{name}_contrasts.csv", index=False)
    return Store(folder, "smoke", fallback=False)


def test_every_effect_of_figures_is_tested_here():
    names = {test.results for statement in TESTED for test in statement.tests}
    assert names == set(SHOWN)
    assert len(TESTED) > 55


def test_random_scores_reproduce_no_more_than_their_level_allows(tmp_path, benchmarks):
    reproduced = Counter()
    for draw in range(N_DRAWS):
        folder = tmp_path / str(draw)
        folder.mkdir()
        store = write_contrasts(
            folder, benchmarks, lambda k, draw=draw: RandomScorer(1000 * draw + k)
        )
        ledger, _ = make_ledger(store, TESTED)
        reproduced.update(ledger.id[ledger.verdict == REPRODUCED])
    # by a test with a 95 % interval, one side: 2.5 %; by most of several, at most twice as often
    level = 0.05
    assert max(reproduced.values(), default=0) <= binom.ppf(1 - 1e-4, N_DRAWS, level)
    n_statements = N_DRAWS * len(TESTED)
    assert sum(reproduced.values()) <= binom.ppf(1 - 1e-4, n_statements, level)


def test_constant_scores_reproduce_nothing(tmp_path, benchmarks):
    store = write_contrasts(tmp_path, benchmarks, ConstantScorer)
    ledger, evidence = make_ledger(store, TESTED)
    assert not (ledger.verdict == REPRODUCED).any()
    assert np.allclose(evidence.difference, 0)
    with_size = evidence[evidence.published.notna()]
    assert set(with_size.verdict) == {NO_EFFECT}
