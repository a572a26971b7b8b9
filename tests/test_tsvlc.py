"""The HP+HN step of compvl and of TSVLC's own code, and TSVLC's rules for hard negatives, where
`COMPVL_TSVLC` names a checkout of it."""

import os
from functools import partial

import pytest
import torch

from compvl.app.speed.text import perturbing, tsvlc_negatives
from compvl.app.speed.training import (
    CompvlSteps,
    TsvlcSteps,
    coco_batches,
    gradient_difference,
    gradients_of,
    random_start,
)

CHECKOUT = os.environ.get("COMPVL_TSVLC")
pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="no checkout of SivanDoveh/TSVLC (COMPVL_TSVLC names its folder)"
)


@pytest.mark.parametrize("w_hn", [1.0, 0.25])
def test_gradients_are_those_of_tsvlc(w_hn):
    model, config = random_start("hp+hn", "micro-clip", "cpu", 0, batch_size=8, w_hn=w_hn)
    (batch,) = coco_batches(1, 8, model.image_size)
    theirs, _ = gradients_of(partial(TsvlcSteps, checkout=CHECKOUT), model, config, batch)
    ours, _ = gradients_of(CompvlSteps, model, config, batch)
    assert max(float(gradient.abs().max()) for gradient in theirs.values()) > 1e-4
    assert gradient_difference(theirs, ours) < 1e-5
    assert torch.isfinite(torch.stack([g.abs().max() for g in ours.values()])).all()


def test_its_rules_are_one_more_way():
    create = tsvlc_negatives(CHECKOUT)
    tries = [create("a red ball on a table") for _ in range(40)]
    made = [texts[0] for texts in tries if texts]  # the kind that it draws may have no word here
    assert made and "a red ball on a table" not in made
    assert create("zzz") == []
    rows = perturbing(n=20, workers=0, tsvlc=CHECKOUT)["rows"]
    assert rows[-1]["way"] == "TSVLC's rules, a call a caption" and len(rows) == 6
