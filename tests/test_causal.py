"""The causal model: supports and operators of other sizes, pseudo-optimal encoders against a plain statement of what they are."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from compvl.core import CompvlError
from compvl.paper.causal import (
    CONFIGS,
    SCM,
    SUPPORTS,
    CausalTowers,
    Figure,
    Pseudo,
    causal_config,
    equivalent_share,
    figure,
    finding,
    insensitivity,
    measure,
    modality_gap,
    recovered,
    train_towers,
)

TINY = replace(CONFIGS["smoke"], n_values=7, steps=3, block_steps=3, n_test=128, batch=64)


@pytest.mark.parametrize("name", SUPPORTS)
def test_no_edit_of_a_caption_is_one_training_shows_and_none_is_an_edit_of_two(name):
    s = SUPPORTS[name](7)
    shown = set(map(tuple, s.captions.tolist()))
    assert len(shown) == len(s.captions)
    of = {}
    for v, edits in zip(s.captions.tolist(), s.edits(s.captions).tolist()):
        for e in map(tuple, edits):
            assert e not in shown and of.setdefault(e, tuple(v)) == tuple(v)
    some = torch.tensor(list(of))
    assert s.canon(some).tolist() == [list(of[tuple(e)]) for e in some.tolist()]


def test_edits_are_what_their_names_say():
    changed = {
        name: (lambda s: s.edits(s.captions[:50]) != s.captions[:50, None])(make(7))
        for name, make in SUPPORTS.items()
    }
    assert (
        (changed["REPLACE"].sum(-1) == 1).all()
        and (changed["ADD"].sum(-1) == 1).all()
        and (changed["SWAP"].sum(-1) == 2).all()
    )
    s = SUPPORTS["SWAP"](7)
    v = s.captions[:50]
    assert (s.edits(v).sort(-1)[0] == v.sort(-1)[0][:, None]).all()  # the same words
    s = SUPPORTS["ADD"](7)
    v = s.captions[:50]
    assert ((v[:, [0, 3]] == 7).sum(1) == 1).all() and (s.edits(v) < 7).all()


def test_words_of_the_code_differ_in_three_places():
    v = SUPPORTS["REPLACE"](7).captions
    assert len(v) == 7**3 and min(int((a != b).sum()) for a, b in itertools.combinations(v, 2)) == 3


@pytest.mark.parametrize("name", SUPPORTS)
@pytest.mark.parametrize("text", ["slots", "bag", "free"])
def test_pseudo_optimal_is_blind_whatever_the_tower(name, text):
    towers = train_towers(SCM("words", 3, TINY, SUPPORTS[name](7)), text)
    true, pseudo, near = measure([towers]), measure([towers], 1), measure([towers], 1, 0.5)
    assert (
        np.array_equal(true["loss"], pseudo["loss"])
        and np.abs(true["loss"] - near["loss"]).max() < 1e-6
    )
    assert (
        (pseudo["ties"] == 100).all()
        and (pseudo["accuracy"] == 0).all()
        and (pseudo["accuracy_half"] == 50).all()
        and (pseudo["moved"] == 0).all()
    )
    if text != "bag":
        assert true["ties"].mean() < 50
    assert ((true["ties"] == 100).all()) == (text == "bag" and name == "SWAP")


def test_share_and_degree():
    towers = train_towers(SCM("words", 0, TINY, SUPPORTS["SWAP"](7)))
    s, gen = towers.scm.support, torch.Generator().manual_seed(0)
    t = torch.cat([s.edit(s.captions[:400], gen), torch.zeros(400, 1, dtype=torch.long)], 1)
    own, third = towers.text_features(t), Pseudo(towers, 0.3)(t)
    same = (own == third).all(1)
    assert torch.equal(same, s.lot(t[:, :5]) >= 0.3) and abs(float(same.float().mean()) - 0.7) < 0.1
    far = [
        float((Pseudo(towers, 1, d)(t) - own).norm(dim=1).mean()) for d in (0, 0.25, 0.5, 0.75, 1)
    ]
    assert (
        far[0] == 0
        and far == sorted(far)
        and torch.allclose(Pseudo(towers, 0.6, 0.4)(t).norm(dim=1), torch.ones(400), atol=1e-5)
    )


def test_same_seed_same_towers():
    a, b = (train_towers(SCM("tokens", 5, TINY)) for _ in range(2))
    assert a.log == b.log and all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert train_towers(SCM("tokens", 6, TINY)).log != a.log


def test_recovered_knows_a_function_from_noise():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 2, generator=gen)
    assert recovered(x, torch.sin(2 * x[:, :1]) + x[:, 1:] ** 2, 500).mean() > 0.95
    assert abs(recovered(x, torch.randn(2000, 1, generator=gen), 500).mean()) < 0.06


def test_figures():
    x = np.random.default_rng(0).normal(3, 1, (2, 300))
    f = 10 * figure(x)
    assert (
        abs(f.value - 10 * x.mean()) < 1e-6
        and f.lo < f.value < f.hi
        and str(Figure(1.0, np.ones(5))) == "1.00 [1.00, 1.00]"
    )
    assert (
        equivalent_share([100.0, 50.0, 50.0, 100.0]).value == 0.5
        and equivalent_share([0.0]).value == 2
    )
    assert insensitivity(np.full((2, 9), 0.2), np.full((2, 9), 0.8)).value == pytest.approx(0.75)
    assert (
        finding("x", f, f, within=1e-9)["verdict"] == "reproduced"
        and finding("x", f, figure(x), -1)["verdict"] == "reproduced"
    )


def test_errors_say_what_to_do():
    for bad, said in [
        (lambda: causal_config("tiny"), "smoke"),
        (lambda: SUPPORTS["SWAP"](9), "prime"),
        (lambda: SCM("tokens", support=SUPPORTS["ADD"](7)), "support"),
        (lambda: CausalTowers(SCM("tokens"), "sums"), "slots"),
        (lambda: modality_gap(torch.ones(4, 2), torch.ones(4, 2)), "8 or more"),
        (lambda: finding("x", figure(1.0), figure(2.0), 1, 0.1), "tolerance"),
    ]:
        with pytest.raises(CompvlError, match=said):
            bad()
