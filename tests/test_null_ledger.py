"""Models that know nothing, put through the ledger: no statement is true of them by definition."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binom

from compvl import stats
from compvl.attribution.tokens import ATTRIBUTIONS
from compvl.benchmarks.loading import load_benchmark, load_benchmarks
from compvl.core import CompvlError
from compvl.evaluate.embed import Embedder
from compvl.evaluate.engine import COLUMNS
from compvl.evaluate.tasks import TASKS
from compvl.models.clip import create_model
from compvl.paper import trained_readers
from compvl.paper.attribution_gaps import gaps
from compvl.paper.blindness import probe
from compvl.paper.blindness_findings import near_blind_findings
from compvl.paper.causal_model import CONFIGS, SCM
from compvl.paper.causal_supports import SUPPORTS
from compvl.paper.causal_towers import CausalTowers, train_towers
from compvl.paper.dependent_latents import DependentSCM
from compvl.paper.estimates import figure
from compvl.paper.evidence import Store
from compvl.paper.identifiability import (
    BLOCKS,
    hard_identification_findings,
    identification_findings,
    recovered,
)
from compvl.paper.iterated import harden, harder_findings, next_application, operate
from compvl.paper.ledger import STATEMENTS, evaluate_statement, make_ledger
from compvl.paper.loading import load
from compvl.paper.longer import CONTRASTED, contrasted_rows, contrasts_of
from compvl.paper.profiles import PROFILES
from compvl.paper.pseudo_optimal import measure
from compvl.paper.ratios import ratio_effect
from compvl.paper.results import Results
from compvl.paper.returns import BY_APPLICATIONS, RETURNS_ON, diminishing
from compvl.paper.rows import ROWS
from compvl.paper.similarities import caption_phrases, phrase_changes, phrase_similarities
from compvl.paper.statements import Contrast, contrasts_table
from compvl.paper.trained_readers import measure_reader, reader_findings
from compvl.stats import NO_EFFECT, OPPOSITE, REPRODUCED
from compvl.text.parser import parse_many
from compvl.text.tokens import token_masks

N_DRAWS = 40
N_SCORE_DRAWS = 30  # of all scores, which take more than a second each
N_SEED_DRAWS = 6  # of the scores of three training seeds
N_BOOT = 500
PROFILE = replace(PROFILES["smoke"], n_items=120, n_retrieval=60, n_classification=120, n_kind=30)
EFFECTS = [statement for statement in STATEMENTS.values() if statement.kind == "effect"]

# Which effects are fed with which null. An effect whose tests are all contrasts of figures is fed
# with random and constant scores; every other one is listed here, or excepted with the reason.
CONTRASTS = [
    statement
    for statement in EFFECTS
    if all(isinstance(test, Contrast) for test in statement.tests)
]
FED = {
    "scores": ("TCL13",),
    "scores of repeated edits": ("TCL11",),
    "attributions": ("CAE1", "CAE2", "CAE3", "CAE5", "CAE44"),
    "similarities of phrases": ("CAE6", "CAE7", "CAE32", "CAE37"),
    "causal features": ("TCL1", "TCL2", "TCL18", "TCL19"),
    "readers": ("TCL15", "TCL16", "TCL17"),
    "features of edits": ("TCL9",),
}
EXCEPTED = {
    "TCL10": "It counts operators in the released files of benchmarks. No model takes part in it.",
}


def test_every_effect_is_fed_with_a_null():
    listed = [statement.id for statement in CONTRASTS]
    listed += chain(*FED.values())
    listed += EXCEPTED
    assert sorted(listed) == sorted(statement.id for statement in EFFECTS)
    assert {test.results for statement in CONTRASTS for test in statement.tests} == set(CONTRASTED)


def statements(null: str) -> list:
    """The statements that are fed with a null."""
    return [STATEMENTS[id] for id in FED[null]]


def store_of(folder, tables: dict[str, pd.DataFrame]) -> Store:
    """Tables as a reproduction in a new folder stores them."""
    (folder / "tables").mkdir(parents=True)
    for stem, table in tables.items():
        table.to_csv(folder / f"tables/{stem}.csv", index=False)
    return Store(folder, "smoke", fallback=False)


def judged(folder, tables: dict[str, pd.DataFrame], judged_statements) -> dict:
    """{id: evaluation} of statements on tables, which are written to a new folder."""
    store = store_of(folder, tables)
    found = {}
    for statement in judged_statements:
        found[statement.id] = evaluate_statement(statement, store)
        assert not found[statement.id].missing
        assert not (found[statement.id].evidence.verdict == "no data").any()
    return found


def evidence_of(found: dict) -> pd.DataFrame:
    """The tests of all evaluated statements."""
    return pd.concat([one.evidence for one in found.values()], ignore_index=True)


def verdicts_of(found: dict) -> set[str]:
    """The verdicts of evaluated statements."""
    return {one.verdict for one in found.values()}


def level(statement, n_tests: int) -> float:
    """How often a statement may be reproduced by chance.

    One test with a 95 % interval: 2.5 %, on the side of the paper. All of several: at most that.
    m of n: at most n / m times as often, however they depend on each other (Markov)."""
    needed = n_tests
    if statement.rule == "most":
        needed = n_tests // 2 + 1
    return 0.025 * n_tests / needed


class Count:
    """How often each statement is reproduced, draw by draw."""

    def __init__(self):
        self.reproduced = Counter()
        self.tests = {}
        self.draws = 0

    def add(self, found: dict):
        """One more draw, as of `judged`."""
        self.draws += 1
        for id, one in found.items():
            self.reproduced[id] += one.verdict == REPRODUCED
            self.tests[id] = len(one.evidence)

    def check(self):
        """No statement is reproduced more often than its level allows, nor are all together."""
        expected = 0.0
        too_often = []
        for id, n_tests in self.tests.items():
            one = level(STATEMENTS[id], n_tests)
            expected += one
            allowed = binom.ppf(1 - 1e-4, self.draws, one)
            if self.reproduced[id] > allowed:
                found = f"{id}: {self.reproduced[id]} of {self.draws} draws"
                too_often.append(f"{found}, and {allowed:.0f} are allowed at {100 * one:.1f} %")
        assert not too_often, "\n".join(too_often)
        n = self.draws * len(self.tests)
        allowed = binom.ppf(1 - 1e-4, n, expected / len(self.tests))
        assert self.reproduced.total() <= allowed


# Scores ---------------------------------------------------------------------------------------


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


class TiltedScorer(RandomScorer):
    """Scores of a training seed that favours captions over other texts, or the other way round."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.tilt = self.rng.normal(0, 0.05)

    def pairs(self, images, *captions, desc=""):
        first, *others = super().pairs(images, *captions, desc=desc)
        return [first + self.tilt, *others]


def row_keys(name: str) -> list[str]:
    """The rows that the statements on some results need."""
    keys = dict.fromkeys(row.key for row in contrasted_rows(contrasts_of(name)))
    if name == "09_iterated_operators":
        keys |= dict.fromkeys(BY_APPLICATIONS)
    return list(keys)


@pytest.fixture(scope="module")
def benchmarks():
    """{results: benchmarks}"""
    found = {}
    for name, (names, _) in CONTRASTED.items():
        found[name], missing = load(names, PROFILE)
        assert not missing
    return found


@pytest.fixture
def kept(monkeypatch):
    """Resamples, which are the same in every draw, are computed once."""
    resamples = lru_cache(maxsize=None)(stats._draws.__wrapped__)
    monkeypatch.setattr(stats, "_draws", resamples)


@dataclass
class KeptResults(Results):
    """Results that keep the parts of a figure, which several statements use."""

    kept: dict = field(default_factory=dict)

    def weighted(self, *at):
        if at not in self.kept:
            self.kept[at] = super().weighted(*at)
        return self.kept[at]


def scored_rows(benchmarks, scorer_of) -> dict[str, dict[str, pd.DataFrame]]:
    """{row: {benchmark: scores}}, those of `scorer_of(number of the row)`."""
    found = {}
    for name in CONTRASTED:
        for key in row_keys(name):
            if ROWS[key].of:
                continue
            if key not in found:
                found[key] = (scorer_of(len(found)), {})
            scorer, tables = found[key]
            for benchmark in benchmarks[name]:
                if benchmark.name not in tables:
                    tables[benchmark.name] = TASKS[benchmark.task].score(benchmark, scorer)
    return {key: tables for key, (_, tables) in found.items()}


def scored_tables(benchmarks, *scorers_of) -> dict[str, pd.DataFrame]:
    """Tables of contrasts and of returns, from the `scored_rows` of each training seed."""
    scored = [scored_rows(benchmarks, scorer_of) for scorer_of in scorers_of]
    tables = {}
    for name, (_, joined) in CONTRASTED.items():
        rows = [ROWS[key] for key in row_keys(name)]
        scores = {}
        for row in rows:
            if not row.of:
                scores[row.key] = {seed: of_rows[row.key] for seed, of_rows in enumerate(scored)}
        table = pd.DataFrame(columns=COLUMNS)
        res = KeptResults(PROFILE, rows, benchmarks[name], table, scores, joined=joined)
        tables[f"{name}_contrasts"] = contrasts_table(contrasts_of(name), res)
        assert tables[f"{name}_contrasts"].difference.notna().all()
        if name == "09_iterated_operators":
            tables[f"{name}_returns"] = diminishing(res, BY_APPLICATIONS, RETURNS_ON)
    return tables


def test_random_scores(tmp_path, benchmarks, kept):
    count = Count()
    for draw in range(N_SCORE_DRAWS):
        tables = scored_tables(benchmarks, lambda k, draw=draw: RandomScorer(1000 * draw + k))
        found = judged(tmp_path / str(draw), tables, [*CONTRASTS, *statements("scores")])
        count.add(found)
    assert len(count.tests) > 75
    assert count.tests["TCL13"] == 6
    count.check()


def test_random_scores_of_several_seeds(tmp_path, benchmarks, kept):
    """Three training seeds that differ from each other; no row differs from another."""
    count = Count()
    for draw in range(N_SEED_DRAWS):
        scorers_of = []
        for seed in range(3):
            first = 10_000 * draw + 1000 * seed
            scorers_of.append(lambda k, first=first: TiltedScorer(first + k))
        tables = scored_tables(benchmarks, *scorers_of)
        found = judged(tmp_path / str(draw), tables, [*CONTRASTS, *statements("scores")])
        count.add(found)
    count.check()


def test_constant_scores(tmp_path, benchmarks, kept):
    tables = scored_tables(benchmarks, ConstantScorer)
    store = store_of(tmp_path / "0", tables)
    ledger, evidence = make_ledger(store, [*CONTRASTS, *statements("scores")])
    assert not ledger.no_data.any()
    assert not (ledger.verdict == REPRODUCED).any()
    assert np.allclose(evidence.difference, 0)
    with_size = evidence[evidence.published.notna()]
    assert set(with_size.verdict) == {NO_EFFECT}


# Features of texts and images -------------------------------------------------------------------


class RandomFeatures(Embedder):
    """Unit features that depend on nothing; equal texts have equal ones, and equal images."""

    def __init__(self, seed: int, width: int = 64):
        self.generator = torch.Generator().manual_seed(seed)
        self.width = width
        self.known = {}
        self.logit_scale = torch.tensor(1 / 0.07)

    def drawn(self, n: int):
        """Features of n new texts or images."""
        return F.normalize(torch.randn(n, self.width, generator=self.generator), dim=1)

    def texts(self, captions, desc=""):
        new = [caption for caption in dict.fromkeys(captions) if caption not in self.known]
        self.known |= zip(new, self.drawn(len(new)), strict=True)
        return torch.stack([self.known[caption] for caption in captions])

    def images(self, images, desc=""):
        return self.texts(images)


class ConstantFeatures(RandomFeatures):
    """The same features for everything."""

    def drawn(self, n: int):
        return F.normalize(torch.ones(n, self.width), dim=1)


@pytest.fixture(scope="module")
def operated():
    """Captions with their scenes, and negatives of one and two applications of operators."""
    items = [
        (item.image, item.captions[0]) for item in load_benchmark("coco-retrieval", n=60).items
    ]
    return items, operate(items, times=2)


def hardness_tables(operated, model) -> dict[str, pd.DataFrame]:
    """The findings of 09_iterated_operators on the hardness of negatives."""
    steps = next_application(harden(model, *operated), N_BOOT)
    return {"09_iterated_operators_findings": harder_findings(steps)}


def test_random_features_of_repeated_edits(tmp_path, operated):
    count = Count()
    for draw in range(N_DRAWS):
        tables = hardness_tables(operated, RandomFeatures(draw))
        found = judged(tmp_path / str(draw), tables, statements("scores of repeated edits"))
        count.add(found)
    assert count.tests["TCL11"] >= 3  # few captions allow two exchanges
    count.check()


def test_constant_features_of_repeated_edits(tmp_path, operated):
    tables = hardness_tables(operated, ConstantFeatures(0))
    found = judged(tmp_path / "0", tables, statements("scores of repeated edits"))
    assert REPRODUCED not in verdicts_of(found)
    assert (evidence_of(found).difference == 0).all()


@pytest.fixture(scope="module")
def phrases():
    """The phrases of captions, by benchmark."""
    found = {}
    for name in ("aro-relation", "aro-attribution"):
        items = load_benchmark(name, n=60).items
        found[name] = caption_phrases([item.caption for item in items])
    return found


def phrase_tables(phrases, model_of) -> dict[str, pd.DataFrame]:
    """The table of 06_cae on phrases, of text encoders `model_of(number)`."""
    labels = [
        "CLIP",
        "CLIP-FT",
        *(ROWS[f"cae-{attribution}"].label for attribution in ATTRIBUTIONS),
    ]
    models = {label: model_of(number) for number, label in enumerate(labels)}
    changed = []
    for name, of_captions in phrases.items():
        near = {}
        for label, model in models.items():
            near[label] = phrase_similarities(model, of_captions)
        for than in ("CLIP", "CLIP-FT"):
            changed.append(phrase_changes(near, than, N_BOOT).assign(benchmark=name))
    return {"06_cae_phrases": pd.concat(changed)}


def test_random_similarities_of_phrases(tmp_path, phrases):
    count = Count()
    for draw in range(N_DRAWS):
        tables = phrase_tables(phrases, lambda k, draw=draw: RandomFeatures(10 * draw + k))
        found = judged(tmp_path / str(draw), tables, statements("similarities of phrases"))
        count.add(found)
    count.check()


def test_constant_similarities_of_phrases(tmp_path, phrases):
    tables = phrase_tables(phrases, ConstantFeatures)
    found = judged(tmp_path / "0", tables, statements("similarities of phrases"))
    assert REPRODUCED not in verdicts_of(found)
    assert np.allclose(evidence_of(found).difference, 0)


# Attribution --------------------------------------------------------------------------------------


def concept_masks(name: str) -> dict[str, np.ndarray]:
    """Kind of concept -> which tokens of a benchmark's captions are of it, bool [N, L].

    As in `compvl.paper.kinds`, a token of an object is of no other kind."""
    captions = []
    for item in load_benchmark(name, n=100).items:
        captions.append(item.caption if hasattr(item, "caption") else item.captions[0])
    tokenizer = create_model("micro-clip", device="cpu").tokenizer
    parsed = list(parse_many(captions))
    masks = {}
    for kind in ("object", "relation", "attribute"):
        spans = [one.spans(kind) for one in parsed]
        masks[kind] = token_masks(captions, spans, tokenizer).numpy()
    for kind in ("relation", "attribute"):
        masks[kind] &= ~masks["object"]
    return masks


@pytest.fixture(scope="module")
def masks():
    """`concept_masks` of the benchmarks that 05_attribution uses for its statements."""
    return {name: concept_masks(name) for name in ("coco-retrieval", "aro-relation")}


def attributions(masks: dict[str, np.ndarray], of_tokens_by) -> pd.DataFrame:
    """A table as of `kind_attributions`, where `of_tokens_by(method, shape)` gives the tokens'."""
    tables = []
    shape = masks["object"].shape
    for method in ATTRIBUTIONS:
        of_tokens = of_tokens_by(method, shape)
        columns = dict(item=np.arange(len(of_tokens)), method=method)
        for kind, mask in masks.items():
            n_tokens = np.where(mask.any(1), mask.sum(1), np.nan)
            columns[kind] = (of_tokens * mask).sum(1) / n_tokens
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def attribution_tables(masks, of_tokens_by, rng) -> dict[str, pd.DataFrame]:
    """The tables of 05_attribution: gaps between kinds, and correlations of ratio and accuracy."""
    of_captions = {}
    for label in ("CLIP", ROWS["hn"].label):
        of_captions[label] = attributions(masks["coco-retrieval"], of_tokens_by)
    table = gaps(of_captions, N_BOOT)
    of_pairs = attributions(masks["aro-relation"], of_tokens_by)
    is_right = rng.random(len(masks["aro-relation"]["object"])) < 0.5
    effects = []
    for method in ATTRIBUTIONS:
        of_method = of_pairs[of_pairs.method == method]
        effect = ratio_effect([of_method], [is_right], of="relation", n_boot=N_BOOT)
        effects.append(("aro-relation", "CLIP", method, *effect[:4]))
    columns = ["benchmark", "model", "attribution", "correlation", "lo", "hi", "n"]
    return {
        "05_attribution_gap": table,
        "05_attribution_effects": pd.DataFrame(effects, columns=columns),
    }


def test_random_attributions(tmp_path, masks):
    count = Count()
    for draw in range(N_DRAWS):
        rng = np.random.default_rng(draw)

        def of_tokens_by(method, shape, rng=rng):
            # perturbation may be negative
            drawn_by = rng.standard_normal if method == "perturbation" else rng.standard_exponential
            return drawn_by(shape)

        tables = attribution_tables(masks, of_tokens_by, rng)
        found = judged(tmp_path / str(draw), tables, statements("attributions"))
        count.add(found)
    count.check()


def test_equal_attributions(tmp_path, masks):
    rng = np.random.default_rng(0)
    tables = attribution_tables(masks, lambda method, shape: np.ones(shape), rng)
    found = judged(tmp_path / "0", tables, statements("attributions"))
    assert REPRODUCED not in verdicts_of(found)
    assert np.allclose(evidence_of(found).difference, 0)


# Features of the causal model ---------------------------------------------------------------------


CAUSAL = replace(CONFIGS["smoke"], n_fit=80, n_test=120)
WIDTHS = (6, 12)  # numbers in a feature, of TCL18 and TCL19


def causal_r2(features_of, seed: int, cfg) -> tuple[dict, dict]:
    """R² as of `identifiability` and of `dependent_identifiability`, with their keys.

    `features_of(scm, tower, seen, width)` gives features of images or texts, `seen`."""
    found = {}
    hard = {}
    n = cfg.n_fit + cfg.n_test
    generator = torch.Generator().manual_seed(seed)
    for generation in ("sentence", "tokens"):
        scm = SCM(generation, seed, cfg)
        sample = scm.draw(n, generator)
        for tower, seen in dict(image=sample.x, text=sample.t).items():
            features = features_of(scm, tower, seen, 6)
            for name, attribute in BLOCKS.items():
                r2 = recovered(features, getattr(sample, attribute), cfg.n_fit)
                found[generation, tower, name] = figure(r2[None], N_BOOT)
    for pairs in ("new", "1000"):
        scm = DependentSCM("tokens", seed, cfg)
        drawn = scm.fresh(n, generator)
        of_image = (drawn.draw.x, drawn.own_x)
        of_text = (drawn.draw.t, drawn.own_t)
        for tower, (seen, own) in dict(image=of_image, text=of_text).items():
            for width in WIDTHS:
                features = features_of(scm, tower, seen, width)
                invariant = recovered(features, drawn.draw.z, cfg.n_fit)
                private = recovered(features, own, cfg.n_fit)
                hard[pairs, width, tower, "invariant"] = figure(invariant[None], N_BOOT)
                hard[pairs, width, tower, "private, own part"] = figure(private[None], N_BOOT)
    return found, hard


def causal_tables(features_of, seed: int, cfg=CAUSAL) -> dict[str, pd.DataFrame]:
    """The findings of 08_nonidentifiability on Theorem 5."""
    found, hard = causal_r2(features_of, seed, cfg)
    return {
        "08_nonidentifiability_findings": pd.DataFrame(identification_findings(found)),
        "08_nonidentifiability_hard_findings": pd.DataFrame(hard_identification_findings(hard)),
    }


def untrained(scm, tower, seen, width):
    """Features of towers with random weights."""
    with torch.no_grad():
        towers = CausalTowers(scm, width=width)
        return towers.image_features(seen) if tower == "image" else towers.text_features(seen)


@pytest.mark.parametrize(("null", "n_draws"), [("random", N_DRAWS), ("untrained", 10)])
def test_features_of_the_causal_model(tmp_path, null, n_draws):
    count = Count()
    for draw in range(n_draws):
        torch.manual_seed(draw)
        generator = torch.Generator().manual_seed(draw)

        def at_random(scm, tower, seen, width, generator=generator):
            return F.normalize(torch.randn(len(seen), width, generator=generator), dim=1)

        features_of = at_random if null == "random" else untrained
        tables = causal_tables(features_of, draw)
        found = judged(tmp_path / str(draw), tables, statements("causal features"))
        count.add(found)
    assert count.tests == dict(TCL1=4, TCL2=4, TCL18=8, TCL19=8)
    count.check()


def test_features_of_nothing_and_of_everything(tmp_path):
    """Constant features exclude private blocks, and whole images and texts contain the invariant
    one; neither identifies it."""
    features = dict(
        nothing=lambda scm, tower, seen, width: torch.ones(len(seen), width),
        everything=lambda scm, tower, seen, width: seen,
    )
    larger = replace(CAUSAL, n_fit=200, n_test=400)
    for name, features_of in features.items():
        tables = causal_tables(features_of, 0, larger)
        found = judged(tmp_path / name, tables, statements("causal features"))
        assert REPRODUCED not in verdicts_of(found), name
        failed = "contain" if name == "nothing" else "exclude"
        evidence = evidence_of(found)
        assert set(evidence.verdict[evidence.test.str.contains(failed)]) == {OPPOSITE}, name


# Trained readers ----------------------------------------------------------------------------------


class UntrainedReader:
    """Unit features that depend on nothing, of a reader; the same for all where `constant`."""

    model = SimpleNamespace(logit_scale=torch.tensor(1.0))  # so that the loss is that of chance

    def __init__(self, generator: torch.Generator, constant: bool):
        self.generator = generator
        self.constant = constant

    def image_features(self, tokens):
        drawn = torch.randn(len(tokens), 64, generator=self.generator)
        return F.normalize(torch.ones_like(drawn) if self.constant else drawn, dim=1)

    text_features = image_features


def reader_tables(seed: int, constant: bool = False) -> dict[str, pd.DataFrame]:
    """The findings of 08_nonidentifiability on readers that know nothing."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.zeros(512, 1)
    readers = {}
    free = {}
    for operator in SUPPORTS:
        for name in ("plain", "blind", "free"):
            reader = UntrainedReader(generator, constant)
            measured = measure_reader(reader, items, items, items, 64)
            measured = {metric: x[None] for metric, x in measured.items()}  # one seed
            if name == "free":
                free[operator] = measured["accuracy_half"]
            else:
                readers[operator, name] = measured
    losses, accuracies = reader_findings(readers, free, 64, N_BOOT)
    return {
        "08_nonidentifiability_readers_loss_findings": losses,
        "08_nonidentifiability_readers_findings": accuracies,
    }


@pytest.fixture
def any_blindness(monkeypatch):
    """Towers that did not become blind are judged as well: untrained ones are not blind."""
    monkeypatch.setattr(trained_readers, "BLIND", -np.inf)


def test_untrained_readers(tmp_path, any_blindness):
    count = Count()
    for draw in range(N_DRAWS):
        found = judged(tmp_path / str(draw), reader_tables(draw), statements("readers"))
        count.add(found)
        evidence = evidence_of(found)
        of_loss = evidence[evidence.test.str.contains("held-out loss")]
        assert set(of_loss.verdict) == {REPRODUCED}  # the loss is the same, for want of learning
    assert count.tests == dict(TCL15=6, TCL16=3, TCL17=6)
    count.check()


def test_constant_readers(tmp_path):
    tables = reader_tables(0, constant=True)
    found = judged(tmp_path / "0", tables, statements("readers"))
    assert REPRODUCED not in verdicts_of(found)


# Blindness ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def edited_pairs():
    """The pairs of captions and edits that 08_nonidentifiability probes CLIP on, by operator."""
    found = {}
    for benchmark in load_benchmarks(["sugarcrepe"], n=60):
        operator = benchmark.name.split("-")[1].upper()
        found.setdefault(operator, []).append(benchmark)
    assert found.keys() == SUPPORTS.keys()
    return found


@pytest.fixture(scope="module")
def true_optimal():
    """Distances of captions and edits in the true-optimal encoders of 08_nonidentifiability."""
    found = {}
    for operator, support in SUPPORTS.items():
        found[operator] = measure([train_towers(SCM("words", 0, CONFIGS["smoke"], support()))])
    return found


def blindness_tables(edited_pairs, true_optimal, model) -> dict[str, pd.DataFrame]:
    """The findings of 08_nonidentifiability on how near CLIP is to the blind encoders."""
    findings = []
    for operator, pairs in edited_pairs.items():
        probes = pd.concat([probe(model, benchmark) for benchmark in pairs])
        clip = {}
        for column in ("accuracy_half", "moved", "apart"):
            clip[column] = probes[column].to_numpy()[None]
        findings += near_blind_findings(operator, clip, true_optimal[operator], N_BOOT)
    return {"08_nonidentifiability_findings": pd.DataFrame(findings)}


def test_random_features_are_at_chance_and_not_insensitive(tmp_path, edited_pairs, true_optimal):
    """Chance is an equivalent share of 100 % by definition; insensitivity is what can fail."""
    count = Count()
    for draw in range(N_DRAWS):
        tables = blindness_tables(edited_pairs, true_optimal, RandomFeatures(draw))
        found = judged(tmp_path / str(draw), tables, statements("features of edits"))
        count.add(found)
        evidence = evidence_of(found)
        is_share = evidence.test.str.contains("equivalent share")
        assert set(evidence.verdict[is_share]) == {REPRODUCED}
        assert set(evidence.verdict[~is_share]) == {OPPOSITE}
    assert count.tests["TCL9"] == 6
    count.check()


def test_constant_features_have_no_insensitivity(edited_pairs, true_optimal):
    with pytest.raises(CompvlError, match="have the same text features"):
        blindness_tables(edited_pairs, true_optimal, ConstantFeatures(0))


def test_untrained_towers_are_not_near_the_blind_encoders(tmp_path, edited_pairs, true_optimal):
    """Towers with random weights are at chance, and their text features move little where words
    change places; but not where words are others, or more."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = Embedder(create_model("micro-clip", device="cpu"), progress=False)
        tables = blindness_tables(edited_pairs, true_optimal, model)
        found = judged(tmp_path / str(seed), tables, statements("features of edits"))
        assert REPRODUCED not in verdicts_of(found)
