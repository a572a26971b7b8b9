"""Figures against direct transcriptions of their definitions, and intervals against SciPy."""

import numpy as np
import pytest
import scipy.stats
import torch

from compvl.core import CompvlError
from compvl.metrics import (
    CHANCE,
    classification_ranks,
    pair_outcomes,
    retrieval_ranks,
    triplet_metrics,
    triplet_outcomes,
)
from compvl.stats import bootstrap, paired_bootstrap, resampled_means


def scores(n, levels, seed):
    """Scores on a grid, so that ties occur between every two of the three."""
    return np.random.default_rng(seed).integers(0, levels, (3, n)) / levels


PERCENTAGES = ("orig_acc", "aug_acc", "brittleness")


def counted(s_c, s_n, s_p):
    """Counts of Kamath et al., equations 1 and 2, one item at a time."""
    counts = dict(orig_acc=0, aug_acc=0, brittleness=0, ties=0)
    for c, n, p in zip(s_c.tolist(), s_n.tolist(), s_p.tolist(), strict=True):
        if c > n:
            counts["orig_acc"] += 1
        if c > n and p > n:
            counts["aug_acc"] += 1
        if c > n > p or p > n > c:
            counts["brittleness"] += 1
        if c == n or p == n:
            counts["ties"] += 1
    return counts


def test_triplet_metrics_are_the_papers_equations_on_a_million_triples():
    n = 1_000_000
    s_c, s_n, s_p = scores(n, 7, 0)
    counts = counted(s_c, s_n, s_p)
    metrics = triplet_metrics(s_c, s_n, s_p)
    for name in PERCENTAGES:
        assert metrics[name] == pytest.approx(100 * counts[name] / n, abs=1e-9)
    assert (metrics["ties"], metrics["n"]) == (counts["ties"], n)
    assert counts["ties"] > 100_000
    for name, values in dict(mean_c=s_c, mean_n=s_n, mean_p=s_p).items():
        assert metrics[name] == pytest.approx(values.mean())


def test_triplet_metrics_by_sorting_without_ties():
    """Ranks agree: brittle when c_n is in the middle, augmented when it is last."""
    s = np.random.default_rng(1).permutation(300_000).reshape(3, -1).astype(np.float32)
    place = np.argsort(np.argsort(s, axis=0), axis=0)[1]
    metrics = triplet_metrics(*s)
    assert metrics["aug_acc"] == pytest.approx(100 * (place == 0).mean())
    assert metrics["brittleness"] == pytest.approx(100 * (place == 1).mean())
    assert metrics["ties"] == 0
    assert all(abs(metrics[name] - CHANCE[name]) < 0.5 for name in PERCENTAGES)


def test_triplet_metrics_take_lists_tensors_and_refuse_nonsense():
    lists = [[0.3, 0.2], [0.2, 0.3], [0.25, 0.1]]
    arrays = [np.array(values) for values in lists]
    tensors = [torch.tensor(values, dtype=torch.float64) for values in lists]
    assert triplet_metrics(*lists) == triplet_metrics(*arrays) == triplet_metrics(*tensors)
    message = "s_n is not a number for 1 of 2 items, the first at position 1"
    with pytest.raises(CompvlError, match=message):
        triplet_metrics([0.1, 0.2], [0.1, np.nan], [0.1, 0.2])
    with pytest.raises(CompvlError, match="one length"):
        triplet_metrics([0.1, 0.2], [0.1], [0.1, 0.2])
    with pytest.raises(CompvlError, match="no scores"):
        triplet_metrics([], [], [])
    with pytest.raises(CompvlError):
        pair_outcomes([0.1], [np.nan])


@pytest.mark.parametrize("s_p", [0.2, 0.3, 0.4])
def test_a_caption_that_ties_is_a_failure_and_not_brittle(s_p):
    outcomes = triplet_outcomes([0.3], [0.3], [s_p])
    assert not outcomes["orig_acc"][0]
    assert not outcomes["aug_acc"][0]
    assert not outcomes["brittleness"][0]
    assert outcomes["ties"][0]


def test_a_hard_positive_that_ties_is_a_failure_and_not_brittle():
    outcomes = triplet_outcomes([0.4], [0.3], [0.3])
    assert outcomes["orig_acc"][0]
    assert not outcomes["aug_acc"][0]
    assert not outcomes["brittleness"][0]
    assert outcomes["ties"][0]


@pytest.mark.parametrize(
    "x",
    [
        np.arange(800) < 230,
        np.random.default_rng(0).integers(0, 5, 600),
        np.random.default_rng(0).normal(0.3, 0.1, 500),
    ],
    ids=["right or wrong", "few values", "scores"],
)
def test_bootstrap_agrees_with_scipy(x):
    options = dict(n_resamples=9999, method="percentile", random_state=0)
    expected = scipy.stats.bootstrap((x,), np.mean, **options).confidence_interval
    interval = bootstrap(x, n_boot=9999)
    assert interval.value == pytest.approx(np.mean(x))
    assert interval.n == len(x)
    tolerance = 0.04 * (expected.high - expected.low)
    assert abs(interval.lo - expected.low) < tolerance
    assert abs(interval.hi - expected.high) < tolerance
    assert resampled_means(x, 9999).std() == pytest.approx(np.std(x) / len(x) ** 0.5, rel=0.03)


def test_bootstrap_of_groups_resamples_each_by_itself():
    """REPLACE: relations and attributes have equal weight, and their variances add."""
    relations = np.arange(1000) < 700
    attributes = np.arange(250) < 100
    interval = bootstrap([relations, attributes], 20_000)
    standard_error = 0.5 * (0.7 * 0.3 / 1000 + 0.4 * 0.6 / 250) ** 0.5
    assert interval.value == pytest.approx(0.55)
    assert interval.n == 1250
    assert interval.hi - interval.lo == pytest.approx(2 * 1.96 * standard_error, rel=0.03)


def mean_difference(a, b, axis):
    """The difference of two means, for SciPy."""
    return b.mean(axis) - a.mean(axis)


def test_paired_bootstrap_against_resampling_pairs():
    rng = np.random.default_rng(0)
    a = rng.random(400) < 0.5
    b = a ^ (rng.random(400) < 0.1)
    options = dict(paired=True, n_resamples=9999, method="percentile", random_state=0)
    expected = scipy.stats.bootstrap((a, b), mean_difference, **options).confidence_interval
    difference = paired_bootstrap(a, b)
    assert difference.value == pytest.approx(b.mean() - a.mean())
    assert abs(difference.lo - expected.low) < 0.005
    assert abs(difference.hi - expected.high) < 0.005
    assert 0 < difference.p <= 1
    flipped = paired_bootstrap(b, a)
    assert flipped.value == -difference.value
    assert flipped.lo == pytest.approx(-difference.hi, abs=0.005)
    with pytest.raises(CompvlError, match="same items"):
        paired_bootstrap(a, b[1:])


def test_paired_p_values_are_uniform_enough_under_no_difference():
    rng = np.random.default_rng(0)
    p_values = []
    for seed in range(300):
        a = rng.normal(size=200)
        b = rng.normal(size=200)
        p_values.append(paired_bootstrap(a, b, n_boot=500, seed=seed).p)
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.09


def test_retrieval_at_scale_and_by_brute_force():
    generator = torch.Generator().manual_seed(0)
    normalize = torch.nn.functional.normalize
    images = normalize(torch.randn(300, 16, generator=generator), dim=-1)
    owner = torch.arange(300).repeat_interleave(5)
    noise = torch.randn(1500, 16, generator=generator)
    texts = normalize(images[owner] + 0.8 * noise, dim=-1)
    image_ranks, text_ranks = retrieval_ranks(images, texts, owner, chunk=64)
    s = images.double() @ texts.double().T
    for query in range(300):
        owners = owner[s[query].argsort(descending=True)].tolist()
        # all texts before the first right one are wrong
        assert image_ranks[query] == owners.index(query)
    for query in range(0, 1500, 7):
        order = s[:, query].argsort(descending=True).tolist()
        assert text_ranks[query] == order.index(int(owner[query]))
    with pytest.raises(CompvlError, match="image 299 has no text"):
        retrieval_ranks(images, texts[:-5], owner[:-5])
    with pytest.raises(CompvlError, match="owners"):
        retrieval_ranks(images, texts, owner[:-1])


def test_duplicate_images_count_against_the_model():
    images = torch.eye(4)[[0, 0, 1, 2]]
    for ranks in retrieval_ranks(images, images, range(4)):
        assert ranks.tolist() == [1, 1, 0, 0]
    assert classification_ranks(np.zeros((2, 10)), [0, 9]).tolist() == [9, 9]
