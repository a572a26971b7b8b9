"""The causal model: other sizes, and pseudo-optimal encoders against their definition."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from compvl.core import CompvlError
from compvl.microworld.oracle import truth
from compvl.models.clip import create_model
from compvl.paper.blindness import equivalent_share, insensitivity
from compvl.paper.causal_model import CONFIGS, SCM, causal_config
from compvl.paper.causal_supports import SUPPORTS
from compvl.paper.causal_towers import CausalTowers, train_towers
from compvl.paper.dependent_latents import DependentSCM
from compvl.paper.drawn_supports import drawn_captions, drawn_scenes
from compvl.paper.estimates import Figure, figure, finding
from compvl.paper.identifiability import recovered
from compvl.paper.modality import modality_gap
from compvl.paper.pseudo_optimal import Pseudo, measure
from compvl.paper.trained_readers import ReaderConfig, patch_tokens, reader_config, train_reader

TINY = replace(CONFIGS["smoke"], n_values=7, steps=3, block_steps=3, n_test=128, batch=64)


def tuples(captions):
    """Captions [n, 5] as tuples."""
    return [tuple(v) for v in captions.tolist()]


@pytest.mark.parametrize("name", SUPPORTS)
def test_an_edit_is_not_in_the_support_and_has_one_origin(name):
    support = SUPPORTS[name](7)
    shown = set(tuples(support.captions))
    assert len(shown) == len(support.captions)
    origin = {}
    edits_of = support.edits(support.captions)
    for v, edits in zip(tuples(support.captions), edits_of, strict=True):
        for edit in tuples(edits):
            assert edit not in shown
            assert origin.setdefault(edit, v) == v
    edits = torch.tensor(list(origin))
    assert tuples(support.canon(edits)) == [origin[edit] for edit in tuples(edits)]


def slots_changed(name):
    """How many slots each edit of some captions changes, int64 [50, E]."""
    support = SUPPORTS[name](7)
    v = support.captions[:50]
    return (support.edits(v) != v[:, None]).sum(-1)


def test_edits_are_what_their_names_say():
    assert (slots_changed("REPLACE") == 1).all()
    assert (slots_changed("ADD") == 1).all()
    assert (slots_changed("SWAP") == 2).all()


def test_swap_keeps_the_words():
    support = SUPPORTS["SWAP"](7)
    v = support.captions[:50]
    words_of_edits, _ = support.edits(v).sort(-1)
    words, _ = v.sort(-1)
    assert (words_of_edits == words[:, None]).all()


def test_add_fills_the_empty_attribute():
    support = SUPPORTS["ADD"](7)
    v = support.captions[:50]
    assert ((v[:, [0, 3]] == 7).sum(1) == 1).all()
    assert (support.edits(v) < 7).all()


def test_words_of_the_code_differ_in_three_places():
    captions = SUPPORTS["REPLACE"](7).captions
    assert len(captions) == 7**3
    pairs = itertools.combinations(captions, 2)
    assert min(int((a != b).sum()) for a, b in pairs) == 3


@pytest.mark.parametrize("name", SUPPORTS)
@pytest.mark.parametrize("text", ["slots", "bag", "free"])
def test_pseudo_optimal_is_blind_whatever_the_tower(name, text):
    towers = train_towers(SCM("words", 3, TINY, SUPPORTS[name](7)), text)
    true = measure([towers])
    pseudo = measure([towers], 1)
    near = measure([towers], 1, 0.5)
    assert np.array_equal(true["loss"], pseudo["loss"])
    assert np.abs(true["loss"] - near["loss"]).max() < 1e-6
    assert (pseudo["ties"] == 100).all()
    assert (pseudo["accuracy"] == 0).all()
    assert (pseudo["accuracy_half"] == 50).all()
    assert (pseudo["moved"] == 0).all()
    if text != "bag":
        assert true["ties"].mean() < 50
    is_blind = bool((true["ties"] == 100).all())
    assert is_blind == (text == "bag" and name == "SWAP")


@pytest.fixture
def swap():
    """Towers on SWAP, and edits of captions of its support."""
    towers = train_towers(SCM("words", 0, TINY, SUPPORTS["SWAP"](7)))
    support = towers.scm.support
    edits = support.edit(support.captions[:400], torch.Generator().manual_seed(0))
    return towers, torch.cat([edits, torch.zeros(400, 1, dtype=torch.long)], 1)


def test_share(swap):
    towers, t = swap
    same = (towers.text_features(t) == Pseudo(towers, 0.3)(t)).all(1)
    assert torch.equal(same, towers.scm.support.position(t[:, :5]) >= 0.3)
    assert abs(float(same.float().mean()) - 0.7) < 0.1


def test_degree(swap):
    towers, t = swap
    own = towers.text_features(t)
    distances = []
    for degree in (0, 0.25, 0.5, 0.75, 1):
        distances.append(float((Pseudo(towers, 1, degree)(t) - own).norm(dim=1).mean()))
    assert distances[0] == 0
    assert distances == sorted(distances)
    assert torch.allclose(Pseudo(towers, 0.6, 0.4)(t).norm(dim=1), torch.ones(400), atol=1e-5)


def test_same_seed_same_towers():
    a = train_towers(SCM("tokens", 5, TINY))
    b = train_towers(SCM("tokens", 5, TINY))
    assert a.log == b.log
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)
    assert train_towers(SCM("tokens", 6, TINY)).log != a.log


def test_recovered_distinguishes_a_function_from_noise():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 2, generator=gen)
    assert recovered(x, torch.sin(2 * x[:, :1]) + x[:, 1:] ** 2, 500).mean() > 0.95
    assert abs(recovered(x, torch.randn(2000, 1, generator=gen), 500).mean()) < 0.06


def test_figures():
    x = np.random.default_rng(0).normal(3, 1, (2, 300))
    tenfold = 10 * figure(x)
    assert abs(tenfold.value - 10 * x.mean()) < 1e-6
    assert tenfold.lo < tenfold.value < tenfold.hi
    assert str(Figure(1.0, np.ones(5))) == "1.00 [1.00, 1.00]"
    assert finding("x", "x", tenfold, tenfold, within=1e-9)["verdict"] == "reproduced"
    assert finding("x", "x", tenfold, figure(x), -1)["verdict"] == "reproduced"


def test_equivalent_share_and_insensitivity():
    assert equivalent_share([100.0, 50.0, 50.0, 100.0]).value == 0.5
    assert equivalent_share([0.0]).value == 2
    blind = insensitivity(np.full((2, 9), 0.2), np.full((2, 9), 0.8))
    assert blind.value == pytest.approx(0.75)


@pytest.mark.parametrize("name", SUPPORTS)
def test_drawn_captions_are_true_and_their_edits_false(name):
    support = SUPPORTS[name](7)
    gen = torch.Generator().manual_seed(1)
    v = support.draw(60, gen)
    edits = drawn_captions(support.edit(v, gen))
    scenes = drawn_scenes(v, 1)
    for scene, caption, edit in zip(scenes, drawn_captions(v), edits, strict=True):
        assert truth(scene, caption) is True
        assert truth(scene, edit) is False


def test_a_penalty_on_reading_makes_a_text_tower_blind():
    support = SUPPORTS["SWAP"](7)
    gen = torch.Generator().manual_seed(0)
    v = support.draw(48, gen)
    edits = support.edit(v, gen)
    tokens = patch_tokens(create_model("micro-clip", "base", device="cpu"), drawn_scenes(v))
    cfg = ReaderConfig(steps=12, batch=16, hidden=8, blindness=100.0)
    moved = {}
    for blind in (False, True):
        reader = train_reader(tokens, v, support, cfg, blind)
        distances = reader.text_features(v) - reader.text_features(edits)
        moved[blind] = float(distances.norm(dim=1).mean())
        assert not any(weight.requires_grad for weight in reader.parameters())
    assert moved[True] < moved[False] / 2


def test_private_blocks_made_from_the_invariant_one():
    scm = DependentSCM("tokens", 0, TINY)
    drawn = scm.fresh(4000, torch.Generator().manual_seed(0))
    gen = torch.Generator().manual_seed(1)
    z = drawn.draw.z
    assert abs(recovered(z, drawn.own_x, 500).mean()) < 0.1
    assert recovered(z, drawn.draw.m_x, 500).mean() > 0.1
    finite = DependentSCM("tokens", 0, TINY, pairs=20)
    assert len(finite.draw(300, gen).z.unique(dim=0)) == 20
    assert train_towers(scm, width=4).image_features(drawn.draw.x).shape == (4000, 4)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: causal_config("tiny"), "smoke"),
        (lambda: reader_config("tiny"), "smoke"),
        (lambda: SUPPORTS["SWAP"](9), "prime"),
        (lambda: SCM("tokens", support=SUPPORTS["ADD"](7)), "support"),
        (lambda: CausalTowers(SCM("tokens"), "sums"), "slots"),
        (lambda: modality_gap(torch.ones(4, 2), torch.ones(4, 2)), "8 or more"),
        (lambda: finding("x", "x", figure(1.0), figure(2.0), 1, 0.1), "tolerance"),
    ],
)
def test_errors_say_what_to_do(call, said):
    with pytest.raises(CompvlError, match=said):
        call()
