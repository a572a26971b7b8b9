"Figures against direct transcriptions of their definitions, and intervals against SciPy."

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
    "Scores on a grid, so that ties occur between every two of the three."
    return np.random.default_rng(seed).integers(0, levels, (3, n)) / levels


def test_triplet_metrics_are_the_papers_equations_on_a_million_triples():
    n = 1_000_000
    s_c, s_n, s_p = scores(n, 7, 0)
    orig = aug = brittle = ties = 0
    for c, neg, p in zip(
        s_c.tolist(), s_n.tolist(), s_p.tolist()
    ):  # Kamath et al., equations 1 and 2, one item at a time
        if c > neg:
            orig += 1
        if c > neg and p > neg:
            aug += 1
        if c > neg > p or p > neg > c:
            brittle += 1
        if c == neg or p == neg:
            ties += 1
    m = triplet_metrics(s_c, s_n, s_p)
    for key, count in dict(orig_acc=orig, aug_acc=aug, brittleness=brittle).items():
        assert m[key] == pytest.approx(100 * count / n, abs=1e-9)
    assert (m["ties"], m["n"]) == (ties, n) and ties > 100_000
    for key, s in dict(mean_c=s_c, mean_n=s_n, mean_p=s_p).items():
        assert m[key] == pytest.approx(s.mean())


def test_triplet_metrics_by_sorting_without_ties():
    "Ranks say the same: brittle when c_n is in the middle, augmented when it is last."
    s = np.random.default_rng(1).permutation(300_000).reshape(3, -1).astype(np.float32)
    place = np.argsort(np.argsort(s, axis=0), axis=0)[1]
    m = triplet_metrics(*s)
    assert (
        m["aug_acc"] == pytest.approx(100 * (place == 0).mean())
        and m["brittleness"] == pytest.approx(100 * (place == 1).mean())
        and m["ties"] == 0
    )
    assert all(abs(m[k] - CHANCE[k]) < 0.5 for k in ("orig_acc", "aug_acc", "brittleness"))


def test_triplet_metrics_take_lists_tensors_and_refuse_nonsense():
    lists = [[0.3, 0.2], [0.2, 0.3], [0.25, 0.1]]
    assert (
        triplet_metrics(*lists)
        == triplet_metrics(*map(np.array, lists))
        == triplet_metrics(*(torch.tensor(x, dtype=torch.float64) for x in lists))
    )
    with pytest.raises(
        CompvlError, match="s_n is not a number for 1 of 2 items, the first at position 1"
    ):
        triplet_metrics([0.1, 0.2], [0.1, np.nan], [0.1, 0.2])
    with pytest.raises(CompvlError, match="one length"):
        triplet_metrics([0.1, 0.2], [0.1], [0.1, 0.2])
    with pytest.raises(CompvlError, match="no scores"):
        triplet_metrics([], [], [])
    with pytest.raises(CompvlError):
        pair_outcomes([0.1], [np.nan])


def test_ties_are_failures_and_never_brittle():
    for s_c, s_n, s_p in ((0.3, 0.3, 0.3), (0.3, 0.3, 0.2), (0.3, 0.3, 0.4)):
        o = triplet_outcomes([s_c], [s_n], [s_p])
        assert (
            not o["orig_acc"][0]
            and not o["aug_acc"][0]
            and not o["brittleness"][0]
            and o["ties"][0]
        )
    o = triplet_outcomes([0.4], [0.3], [0.3])
    assert o["orig_acc"][0] and not o["aug_acc"][0] and not o["brittleness"][0] and o["ties"][0]


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
    ref = scipy.stats.bootstrap(
        (x,), np.mean, n_resamples=9999, method="percentile", random_state=0
    ).confidence_interval
    v = bootstrap(x, n_boot=9999)
    assert v.value == pytest.approx(np.mean(x)) and v.n == len(x)
    assert abs(v.lo - ref.low) < 0.04 * (ref.high - ref.low) and abs(v.hi - ref.high) < 0.04 * (
        ref.high - ref.low
    )
    assert resampled_means(x, 9999).std() == pytest.approx(np.std(x) / len(x) ** 0.5, rel=0.03)


def test_bootstrap_of_groups_resamples_each_by_itself():
    "REPLACE: relations and attributes count alike, and their errors add in quadrature."
    a, b = np.arange(1000) < 700, np.arange(250) < 100
    v = bootstrap([a, b], 20_000)
    se = 0.5 * (0.7 * 0.3 / 1000 + 0.4 * 0.6 / 250) ** 0.5
    assert v.value == pytest.approx(0.55) and v.n == 1250
    assert v.hi - v.lo == pytest.approx(2 * 1.96 * se, rel=0.03)


def test_paired_bootstrap_against_resampling_pairs():
    rng = np.random.default_rng(0)
    a = rng.random(400) < 0.5
    b = a ^ (rng.random(400) < 0.1)
    ref = scipy.stats.bootstrap(
        (a, b),
        lambda x, y, axis: y.mean(axis) - x.mean(axis),
        paired=True,
        n_resamples=9999,
        method="percentile",
        random_state=0,
    ).confidence_interval
    d = paired_bootstrap(a, b)
    assert d.value == pytest.approx(b.mean() - a.mean())
    assert abs(d.lo - ref.low) < 0.005 and abs(d.hi - ref.high) < 0.005 and 0 < d.p <= 1
    flipped = paired_bootstrap(b, a)
    assert flipped.value == -d.value and flipped.lo == pytest.approx(-d.hi, abs=0.005)
    with pytest.raises(CompvlError, match="same items"):
        paired_bootstrap(a, b[1:])


def test_paired_p_values_are_uniform_enough_under_no_difference():
    rng = np.random.default_rng(0)
    ps = [
        paired_bootstrap(rng.normal(size=200), rng.normal(size=200), n_boot=500, seed=s).p
        for s in range(300)
    ]
    assert 0.02 < np.mean(np.array(ps) < 0.05) < 0.09


def test_retrieval_at_scale_and_by_brute_force():
    g = torch.Generator().manual_seed(0)
    I = torch.nn.functional.normalize(torch.randn(300, 16, generator=g), dim=-1)
    owner = torch.arange(300).repeat_interleave(5)
    T = torch.nn.functional.normalize(I[owner] + 0.8 * torch.randn(1500, 16, generator=g), dim=-1)
    i2t, t2i = retrieval_ranks(I, T, owner, chunk=64)
    s = I.double() @ T.double().T
    for q in range(300):
        order = [int(owner[j]) for j in s[q].argsort(descending=True)]
        wrong_first = order.index(q)  # all texts before the first right one are wrong
        assert i2t[q] == wrong_first
    for q in range(0, 1500, 7):
        assert t2i[q] == [int(j) for j in s[:, q].argsort(descending=True)].index(int(owner[q]))
    with pytest.raises(CompvlError, match="image 299 has no text"):
        retrieval_ranks(I, T[:-5], owner[:-5])
    with pytest.raises(CompvlError, match="owners"):
        retrieval_ranks(I, T, owner[:-1])


def test_duplicate_images_count_against_the_model():
    I = torch.eye(4)[[0, 0, 1, 2]]
    assert [r.tolist() for r in retrieval_ranks(I, I, range(4))] == [[1, 1, 0, 0]] * 2
    assert classification_ranks(np.zeros((2, 10)), [0, 9]).tolist() == [9, 9]
