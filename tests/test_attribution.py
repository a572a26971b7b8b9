"""Attributions, second derivatives, and the model that is left as found.

They are compared with computations from the equations that share no code with the package."""

import itertools
import os
import random
import re
import subprocess
import sys

import open_clip
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from compvl.attribution.explain import Attribution, attribute
from compvl.attribution.image_map import image_attribution, image_map
from compvl.attribution.replacements import (
    Perturbation,
    caption_masks,
    perturbation_attribution,
    perturbed_tokens,
    replacements,
    tokenize_replacements,
)
from compvl.attribution.tokens import ATTRIBUTIONS, text_attribution
from compvl.core import CompvlError
from compvl.data.loading import load_train_data
from compvl.losses import attribution_excess, attribution_loss
from compvl.microworld.captions import caption
from compvl.microworld.scenes import scenes
from compvl.microworld.vocabulary import lexicon, microworld_words
from compvl.models.clip import create_model
from compvl.models.towers import eot_positions
from compvl.paper.kinds import kind_attributions
from compvl.train.batches import Collate
from compvl.train.config import TrainConfig
from compvl.train.step import Towers, backward_loss
from compvl.train.terms import COMPOSITION_TOKENS

BY_PASS = [method for method in ATTRIBUTIONS if method != "perturbation"]
SOT = 18
EOT = 19
L = 10

# ---- the text transformer from its weights, one caption at a time, on all positions


def layer(weights, k, x, heads, mask, activation):
    """Block `k` on x [n, W]; returns its output and its attention weights [H, n, n]."""

    def get(name):
        return weights[f"transformer.resblocks.{k}.{name}"]

    def norm(y, name):
        return F.layer_norm(y, y.shape[-1:], get(f"{name}.weight"), get(f"{name}.bias"))

    width = x.shape[1]
    d = width // heads

    def split(y):
        return torch.stack([y[:, h * d : (h + 1) * d] for h in range(heads)])

    projected = norm(x, "ln_1") @ get("attn.in_proj_weight").T + get("attn.in_proj_bias")
    query, key, value = map(split, projected.split(width, 1))
    attention = torch.softmax(query @ key.transpose(1, 2) / (width / heads) ** 0.5 + mask, -1)
    y = torch.cat(list(attention @ value), 1)
    x = x + y @ get("attn.out_proj.weight").T + get("attn.out_proj.bias")
    hidden = activation(norm(x, "ln_2") @ get("mlp.c_fc.weight").T + get("mlp.c_fc.bias"))
    return x + hidden @ get("mlp.c_proj.weight").T + get("mlp.c_proj.bias"), attention


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def activation_of(clip):
    """The activation function of a model's text tower."""
    name = type(clip.transformer.resblocks[0].mlp.gelu).__name__
    return quick_gelu if "Quick" in name else F.gelu


class Reference:
    """S, attention weights and what follows from them, for one image feature and one caption.

    S is the cosine, or with `score='logit'` the logit; of the layers, those from `start` on."""

    def __init__(self, clip, image, tokens, x=None, score="cosine", start=0):
        self.start = start
        weights = {name: value.detach() for name, value in clip.state_dict().items()}
        heads = clip.transformer.resblocks[0].attn.num_heads
        positions = weights["positional_embedding"]
        n = len(tokens)
        self.eot = int(tokens.argmax())
        self.A = []
        self.grads = {}
        mask = torch.full((n, n), float("-inf"), dtype=positions.dtype).triu(1)
        x = weights["token_embedding.weight"][tokens] if x is None else x
        self.x = x.clone().requires_grad_()
        y = self.x + positions[:n]
        for k in range(len(clip.transformer.resblocks)):
            y, a = layer(weights, k, y, heads, mask, activation_of(clip))
            self.A.append(a)
            a.register_hook(lambda grad, k=k: self.grads.update({k: grad}))
        y = F.layer_norm(y, y.shape[-1:], weights["ln_final.weight"], weights["ln_final.bias"])
        y = y[self.eot] @ weights["text_projection"]
        self.S = image @ y / (image.norm() * y.norm())
        if score == "logit":
            self.S = weights["logit_scale"].exp() * self.S

    def attention(self):
        return torch.stack([a.mean(0)[self.eot] for a in self.A[self.start :]]).mean(0)

    def gradient(self):
        (grad,) = torch.autograd.grad(self.S, self.x, retain_graph=True)
        grad = grad.abs().sum(1)[: self.eot + 1]
        return F.pad(grad.softmax(0), (0, len(self.x) - self.eot - 1))

    def gradcam(self):
        self.grads.clear()
        self.S.backward(retain_graph=True)
        R = torch.eye(len(self.x), dtype=self.x.dtype)
        for k, a in enumerate(self.A):
            if k < self.start:
                continue
            R = R + (self.grads[k] * a).clamp(min=0).mean(0) @ R
        return R[self.eot]


def reference(clip, images, tokens, method, score="logit", start=0):
    """The reference's attribution [B, L] of a batch, caption by caption."""
    found = []
    for image, row in zip(images, tokens, strict=True):
        of_caption = Reference(clip, image, row, score=score, start=start)
        found.append(getattr(of_caption, method)().detach())
    return torch.stack(found)


# ---- models and inputs


@pytest.fixture(scope="module")
def micro():
    return create_model("micro-clip", "base")


@pytest.fixture(scope="module", params=["micro-clip", "ViT-B-32"])
def model(request, micro):
    if request.param == "micro-clip":
        return micro
    torch.manual_seed(0)
    return create_model("ViT-B-32")


def small(kind=open_clip.CLIP, vision=None, **text):
    """A small model in double precision, whose scores depend on the tokens."""
    torch.manual_seed(3)
    vision = vision or dict(image_size=16, patch_size=8, width=16, layers=2, head_width=8)
    text = dict(context_length=L, vocab_size=EOT + 1, width=12, heads=2, layers=2) | text
    clip = kind(8, vision, text).double().eval()
    with torch.no_grad():  # as initialised, scores hardly depend on the tokens
        for name, parameter in clip.named_parameters():
            if parameter.ndim >= 2 and "visual" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    return clip


def rows(*inner):
    """Tokens [B, L] of captions with these tokens between start and end."""
    return torch.tensor([[SOT, *row, EOT] + [0] * (L - 2 - len(row)) for row in inner])


TOKENS = rows([1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12, 13, 14], [])


def feats(n=4):
    """Image features [n, 8], the same each time."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n, 8, dtype=torch.float64, generator=generator)


def some_captions(n):
    """Captions of n scenes."""
    found = []
    for i, scene in enumerate(scenes("test", n, seed=1)):
        found.append(caption(scene, random.Random(i)).text)
    return found


# ---- attribution of the tokens


@pytest.mark.parametrize("method", BY_PASS)
def test_equals_reference(model, method):
    torch.manual_seed(1)
    tokens = model.tokenizer(some_captions(3) + [""])
    images = torch.randn(4, model.clip.text_projection.shape[1])
    want = reference(model.clip, images, tokens, method)
    for graph in (False, True):
        got = text_attribution(model, images, tokens, method, create_graph=graph)
        assert got.shape == want.shape
        assert got.requires_grad == graph
        # float32, and a softmax of gradients in the hundreds
        assert (got - want).abs().max() < (1e-3 if method == "gradient" else 1e-5)
    if method == "gradcam":  # the part that the score decides, in proportion
        eot = eot_positions(model.clip, tokens)[:3]
        a = got.detach()[:3].scatter(1, eot[:, None], 0)
        b = want[:3].scatter(1, eot[:, None], 0)
        assert b.max() > 0
        assert (a - b).abs().max() < 1e-3 * b.max()


@pytest.mark.parametrize("method", BY_PASS)
def test_small_in_double(method):
    clip = small()
    got = text_attribution(clip, feats(), TOKENS, method)
    assert got.dtype == torch.float64
    assert (got - reference(clip, feats(), TOKENS, method)).abs().max() < 1e-12
    eot = TOKENS.argmax(1)
    assert (got[torch.arange(L) > eot[:, None]] == 0).all()
    if method == "gradcam":
        assert (got >= 0).all()
        assert (got.gather(1, eot[:, None]) >= 1).all()
        assert got[:3, :2].sum() > 1e-3
    else:
        assert torch.allclose(got.sum(1), torch.ones(4, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("score", ["logit", "cosine"])
@pytest.mark.parametrize("method", ["gradcam", "gradient"])
def test_the_score_is_the_logit_or_the_cosine(method, score):
    clip = small()
    got = text_attribution(clip, feats(), TOKENS, method, score=score)
    want = reference(clip, feats(), TOKENS, method, score)
    assert torch.allclose(got, want, atol=1e-12)
    other = "cosine" if score == "logit" else "logit"
    assert not torch.allclose(got, reference(clip, feats(), TOKENS, method, other), atol=1e-6)


def test_of_logits_the_gradient_leaves_one_token(micro):
    tokens = micro.tokenizer(some_captions(8))
    torch.manual_seed(0)
    images = torch.randn(8, micro.clip.text_projection.shape[1])
    by_cosine = text_attribution(micro, images, tokens, "gradient", score="cosine")
    by_logit = text_attribution(micro, images, tokens, "gradient")
    assert by_logit.amax(1).mean() > 0.9
    assert by_cosine.amax(1).mean() < 0.75


def chefer_notebook(clip, image, tokens, start_layer_text):
    """Relevance of the text as in Chefer et al.'s CLIP_explainability.ipynb, one caption."""
    of_caption = Reference(clip, image, tokens, score="logit")
    of_caption.S.backward()
    n = len(tokens)
    R = torch.eye(n, n, dtype=image.dtype)
    if start_layer_text == -1:
        start_layer_text = len(of_caption.A) - 1
    for i, attn_probs in enumerate(of_caption.A):
        if i < start_layer_text:
            continue
        cam = of_caption.grads[i] * attn_probs.detach()
        R = R + cam.clamp(min=0).mean(dim=0) @ R
    return R[tokens.argmax()]


@pytest.mark.parametrize("start", [0, 1, 2, -1])
def test_first_layer_as_in_chefers_notebook(start):
    clip = small(layers=3)
    got = text_attribution(clip, feats(), TOKENS, "gradcam", start_layer=start)
    pairs = zip(feats(), TOKENS, strict=True)
    want = torch.stack([chefer_notebook(clip, image, row, start) for image, row in pairs])
    assert torch.allclose(got, want, atol=1e-12)
    got = text_attribution(clip, feats(), TOKENS, "attention", start_layer=start)
    assert torch.allclose(got, reference(clip, feats(), TOKENS, "attention", start=start % 3))


def test_sum_over_heads_is_equation_7():
    """The sum over heads, which is no multiple of the average once there are two layers."""
    clip = small(layers=2)
    by_sum = text_attribution(clip, feats(), TOKENS, "gradcam", heads="sum")
    for image, tokens, got in zip(feats(), TOKENS, by_sum, strict=True):
        of_caption = Reference(clip, image, tokens, score="logit")
        of_caption.S.backward(retain_graph=True)
        R = torch.eye(L, dtype=torch.float64)
        for k, a in enumerate(of_caption.A):
            R = R + (of_caption.grads[k] * a).clamp(min=0).sum(0) @ R
        assert torch.allclose(got, R[of_caption.eot], atol=1e-12)
    by_mean = text_attribution(clip, feats(), TOKENS, "gradcam")
    heads = clip.transformer.resblocks[0].attn.num_heads
    before_eot = by_mean[0] > 0
    before_eot[int(TOKENS[0].argmax())] = False
    factor = by_sum[0][before_eot] / by_mean[0][before_eot]
    assert (factor > heads - 1e-9).all()
    assert factor.max() - factor.min() > 1e-6
    with pytest.raises(CompvlError, match="heads"):
        text_attribution(clip, feats(), TOKENS, "gradcam", heads="max")


@pytest.mark.parametrize("start", [3, -4])
def test_a_layer_that_is_not_there(start):
    clip = small(layers=3)
    with pytest.raises(CompvlError, match="there are 3 layers"):
        text_attribution(clip, feats(), TOKENS, "gradcam", start_layer=start)


def test_logits_need_a_logit_scale():
    clip = small()
    want = text_attribution(clip, feats(), TOKENS, score="cosine")
    del clip.logit_scale
    with pytest.raises(CompvlError, match="score='cosine'"):
        text_attribution(clip, feats(), TOKENS)
    assert torch.equal(text_attribution(clip, feats(), TOKENS, score="cosine"), want)


def test_gradient_by_finite_differences():
    clip = small()
    h = 1e-5
    for image, tokens in zip(feats()[:2], TOKENS[:2], strict=True):
        x = clip.token_embedding.weight[tokens].detach()
        eot = int(tokens.argmax())
        sums = torch.zeros(eot + 1, dtype=torch.float64)
        for k, j in itertools.product(range(eot + 1), range(x.shape[1])):
            step = torch.zeros_like(x)
            step[k, j] = h
            above = Reference(clip, image, tokens, x + step).S
            below = Reference(clip, image, tokens, x - step).S
            sums[k] += ((above - below) / (2 * h)).abs().detach()
        got = text_attribution(clip, image[None], tokens[None], "gradient", score="cosine")[0]
        assert torch.allclose(got[: eot + 1], sums.softmax(0), atol=1e-8)


@pytest.mark.parametrize("method", BY_PASS)
def test_only_eot_is_read_and_parts_agree(method):
    clip = small()
    generator = torch.Generator().manual_seed(0)
    inner = []
    for n in torch.randint(0, L - 1, (131,), generator=generator):
        inner.append(torch.randint(1, SOT, (int(n),), generator=generator).tolist())
    tokens = rows(*inner)
    images = feats(131)
    # Parts of the batch are quarters of the lengths.
    got, text = text_attribution(clip, images, tokens, method, features=True)
    assert torch.allclose(text, F.normalize(clip.encode_text(tokens), dim=-1).detach(), atol=1e-12)
    one_by_one = []
    for k in range(0, 131, 7):
        row = slice(k, k + 1)
        one_by_one.append(text_attribution(clip, images[row], tokens[row], method))
    assert torch.allclose(got[::7], torch.cat(one_by_one), atol=1e-12)
    behind = torch.arange(L) > tokens.argmax(1)[:, None]
    junk = torch.randint(1, SOT, tokens.shape, generator=generator)
    junk = torch.where(behind, junk, tokens)
    assert torch.allclose(text_attribution(clip, images, junk, method), got, atol=1e-12)


def test_custom_text_clip_is_the_same():
    clip = small()
    custom = small(open_clip.CustomTextCLIP)
    own = dict(clip.state_dict())
    state = {name: own[name.removeprefix("text.")] for name in custom.state_dict()}
    custom.load_state_dict(state, strict=True)
    for method in BY_PASS:
        got = text_attribution(custom, feats(), TOKENS, method)
        assert torch.allclose(got, text_attribution(clip, feats(), TOKENS, method), atol=1e-12)


# ---- perturbation

TEXTS = ["a red star", "the wet fish is on the big box", "a gizmo near a cat"]


@pytest.fixture(scope="module")
def perturbed(micro):
    """All replacements in TEXTS, their tensors, attributions, and a function for single scores."""
    views = scenes("test", 3, seed=2)
    pixels = torch.stack([micro.preprocess(scene.render(48)) for scene in views])
    images = micro.encode_image(pixels).detach()
    made = replacements(TEXTS, draws=None, words=microworld_words())
    tensors = tokenize_replacements(TEXTS, made, micro.tokenizer)
    got = perturbation_attribution(micro, images, micro.tokenizer(TEXTS), tensors)

    def score(k, text):
        tokens = micro.tokenizer([text])
        cosine = images[k] @ micro.encode_text(tokens, crop=False)[0]
        return float((micro.logit_scale * cosine).detach())

    return made, tensors, got, score


@pytest.mark.parametrize(
    ("old", "family", "form"), [("red", "color", "a {} star"), ("star", "object", "a red {}")]
)
def test_perturbation_is_exhaustive_replacement(perturbed, old, family, form):
    made, _, got, score = perturbed
    names = [value["words"] for value in lexicon().spec[family].values()]
    want = {form.format(max(words, key=words.get)) for words in names if old not in words}
    found = set()
    for new in made:
        if new.owner == 0 and TEXTS[0][new.start : new.end] == old:
            found.add(new.text)
    assert {re.sub(r"^an ", "a ", text) for text in found} == want
    drop = sum(score(0, TEXTS[0]) - score(0, text) for text in found) / len(want)
    assert abs(float(got[0, 1 + TEXTS[0].split().index(old)]) - drop) < 1e-5


def test_perturbation_touches_concepts_only(perturbed):
    _, tensors, got, _ = perturbed
    touched = perturbed_tokens(tensors, 3)
    assert touched[0].nonzero().flatten().tolist() == [2, 3]
    assert touched[1].sum() == 5
    assert (got[~touched] == 0).all()


@pytest.mark.parametrize("k", [1, 2])
def test_perturbation_of_all_concepts(perturbed, k):
    made, tensors, got, score = perturbed
    by_span = {}
    for row, new in enumerate(made):
        if new.owner == k:
            by_span.setdefault((new.start, new.end), []).append((row, new.text))
    assert by_span
    for found in by_span.values():
        drops = [score(k, TEXTS[k]) - score(k, text) for _, text in found]
        where = tensors.where[found[0][0]]
        assert torch.allclose(got[k][where], torch.tensor(sum(drops) / len(drops)), atol=1e-5)


# ---- L_attr

OBJECTS = torch.zeros(4, L, dtype=torch.bool)
OBJECTS[[0, 1, 2, 2], [2, 1, 3, 6]] = True
COMPOSITION = torch.zeros(4, L, dtype=torch.bool)  # the second caption has none
COMPOSITION[[0, 0, 2, 2], [1, 4, 1, 5]] = True  # and the last caption has neither

PERTURBED = rows(
    [1, 2, 3, 15], [1, 16, 3, 4], [7, 8, 9, 10, 11, 12, 2, 14], [7, 8, 9, 10, 1, 12, 13, 14]
)
OWNER = torch.tensor([0, 0, 2, 2])
WHERE = torch.zeros(4, L, dtype=torch.bool)
WHERE[[0, 1, 2, 3], [4, 2, 6, 5]] = True


def with_graph(clip, images, method):
    """Attributions of TOKENS that have a gradient."""
    if method != "perturbation":
        return text_attribution(clip, images, TOKENS, method, create_graph=True)
    made = (PERTURBED, OWNER, WHERE)
    return perturbation_attribution(clip, images, TOKENS, made, create_graph=True)


def loss_of(clip, images, method):
    """L_attr of TOKENS; its margin keeps the hinge open."""
    return attribution_loss(with_graph(clip, images, method), OBJECTS, COMPOSITION, 1.0)


def text_parameters(clip):
    """The parameters that L_attr may change."""
    found = []
    for name, parameter in clip.named_parameters():
        if "visual" not in name and "logit" not in name:
            found.append(parameter)
    return found


def test_loss_is_its_formula():
    a = torch.rand(4, L, dtype=torch.float64)
    hinges = []
    for i in (0, 2):
        difference = a[i][OBJECTS[i]].mean() - a[i][COMPOSITION[i]].mean()
        hinges.append(max(float(difference) + 0.2, 0))
    got = float(attribution_loss(a, OBJECTS, COMPOSITION, 0.2))
    assert abs(got - sum(hinges) / 2) < 1e-12


def test_balanced_means_are_their_formula():
    """Two relation tokens and four attribute tokens; then attributes alone, and relations alone."""
    a = torch.tensor([[0.9, 0.1, 0.2, 0.4, 0.4, 0.4, 0.8]] * 3, dtype=torch.float64)
    objects = torch.zeros(3, 7, dtype=torch.bool)
    objects[:, 0] = True
    relations = torch.zeros_like(objects)
    relations[:, 1:3] = True
    composition = ~objects
    composition[1, 1:3] = False
    composition[2, 3:] = False
    got = attribution_excess(a, objects, composition, relations)
    want = [0.9 - (0.15 + 0.5) / 2, 0.9 - 0.5, 0.9 - 0.15]
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64))
    over_tokens = attribution_excess(a, objects, composition)
    assert abs(float(over_tokens[0]) - (0.9 - 2.3 / 6)) < 1e-12
    assert torch.equal(over_tokens[1:], got[1:])
    loss = attribution_loss(a, objects, composition, -0.45, relations=relations)
    assert abs(float(loss) - (0.125 + 0.0 + 0.3) / 3) < 1e-12
    nothing = torch.zeros_like(objects)
    assert float(attribution_loss(a, objects, nothing, relations=relations)) == 0


@pytest.mark.parametrize("config", [{}, {"chunk_size": 3}])
@pytest.mark.parametrize("composition", COMPOSITION_TOKENS)
@pytest.mark.parametrize("method", ["attention", "perturbation"])
def test_active_hinges_are_counted(micro, method, composition, config):
    """What training logs is the hinge, counted by hand."""
    fields = dict(attribution=method, attr_composition=composition, precision="fp32")
    config = TrainConfig("cae", w_attr=1.0, **fields, **config).resolved()
    batch = Collate(micro, config)(load_train_data("microworld", n=64).batch(range(8)))
    images = micro.encode_image(micro.normalize(batch["images"]))
    tokens = batch["tokens"][:8]
    if method == "perturbation":
        made = Perturbation(batch["tokens"][8:], batch["owner"], batch["where"])
        a = perturbation_attribution(micro, images, tokens, made)
    else:
        a = text_attribution(micro, images, tokens, method)
    counted = 0
    for row in range(8):
        objects = a[row][batch["objects"][row]]
        composed = batch["composition"][row]
        if not len(objects) or not composed.any():
            continue
        kinds = [composed]
        if composition == "balanced":
            relation = batch["relations"][row]
            kinds = [composed & relation, composed & ~relation]
        means = [float(a[row][kind].mean()) for kind in kinds if kind.any()]
        counted += float(objects.mean()) > sum(means) / len(means)
    _, logged = backward_loss(Accelerator(), Towers(micro), micro, batch, config)
    assert int(logged["with_hinge"]) == counted
    micro.clip.zero_grad()


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_second_order_gradients(method):
    clip = small()
    images = feats().requires_grad_()
    parameters = text_parameters(clip)
    norms_and_biases = [p for p in parameters if p.numel() <= 36]
    others = [p for p in parameters if p.numel() > 36]

    def by_parameters(*_):
        return loss_of(clip, images, method)

    def by_images(images):
        return loss_of(clip, images, method)

    gradcheck = torch.autograd.gradcheck
    # Norms and biases by each number; embeddings and matrices along random directions.
    assert gradcheck(by_parameters, norms_and_biases, eps=1e-6, atol=1e-6)
    assert gradcheck(by_parameters, others, eps=1e-6, atol=1e-6, fast_mode=True)
    (grad,) = torch.autograd.grad(by_images(images), images, allow_unused=True)
    if method in ("gradcam", "gradient"):
        assert gradcheck(by_images, [images], eps=1e-6, atol=1e-6)
        assert grad.abs().sum() > 0
    else:  # sg(I), and attention of the text alone
        assert grad is None or (grad == 0).all()


@pytest.mark.parametrize("method", ATTRIBUTIONS)
@pytest.mark.parametrize("masked", ["all", "objects", "composition"])
def test_masked_batches_give_zero_with_zero_gradient(method, masked):
    clip = small()
    none = torch.zeros_like(OBJECTS)
    objects = OBJECTS if masked == "composition" else none
    composition = COMPOSITION if masked == "objects" else none
    loss = attribution_loss(with_graph(clip, feats(), method), objects, composition, 0.5)
    loss.backward()
    assert loss == 0
    grads = [p.grad for p in clip.parameters() if p.grad is not None]
    assert grads
    assert all((grad == 0).all() for grad in grads)


LONG = "a " * 80 + "red star on a box"


def test_captions_without_concepts_or_cut_off(micro):
    texts = ["a star and a box", "red and blue", "a red star", LONG, ""]
    objects, composition = caption_masks(texts, micro.tokenizer)
    assert objects.any(1).tolist() == [True, False, True, False, False]
    assert composition.any(1).tolist() == [False, True, True, False, False]
    images = torch.randn(5, 128)
    tokens = micro.tokenizer(texts)
    made = replacements(texts)
    assert {new.owner for new in made} == {0, 1, 2, 3}
    perturbed = tokenize_replacements(texts, made, micro.tokenizer)
    for method in ATTRIBUTIONS:
        if method == "perturbation":
            a = perturbation_attribution(micro, images, tokens, perturbed, True)
        else:
            a = text_attribution(micro, images, tokens, method, True)
        loss = attribution_loss(a, objects, composition, 5.0)
        assert torch.allclose(loss, 5 + a[2][objects[2]].mean() - a[2][composition[2]].mean())
        (grad,) = torch.autograd.grad(loss, micro.clip.token_embedding.weight)
        assert grad.isfinite().all()


def test_table_of_a_caption_that_is_cut_off(micro):
    found = attribute(micro, scenes("test", 1)[0], LONG)
    table = found.table("concept")
    assert list(table.token) == ["red", "star", "on", "box"]
    assert table.score.isna().all()
    assert len(found.tokens) == 75


# ---- the model is left as found


def state(clip):
    """Modes, attributes and hooks of the modules; flags of the parameters; weights."""
    modules = []
    for name, module in clip.named_modules():
        modules.append(
            (
                name,
                module.training,
                sorted(module.__dict__),
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                len(module._backward_hooks),
                getattr(module, "grad_checkpointing", None),
            )
        )
    parameters = [(name, p.requires_grad, p.grad is None) for name, p in clip.named_parameters()]
    return modules, parameters, {name: v.clone() for name, v in clip.state_dict().items()}


def same(a, b):
    """Whether two states are equal."""
    if a[:2] != b[:2] or a[2].keys() != b[2].keys():
        return False
    return all(torch.equal(value, b[2][name]) for name, value in a[2].items())


RESNET = dict(image_size=64, layers=[1, 1, 1, 1], width=8)


def all_calls(clip, pixels):
    """Functions without arguments, one for each attribution of text and image."""

    def by(method):
        return lambda: text_attribution(clip, pixels, TOKENS, method)

    def perturbation():
        return perturbation_attribution(clip, pixels, TOKENS, (PERTURBED, OWNER, WHERE))

    def of_the_image():
        return image_map(clip, pixels[:1], TOKENS[:1])

    return [*map(by, BY_PASS), perturbation, of_the_image]


@pytest.mark.parametrize("vision", [None, RESNET], ids=["vit", "resnet"])
def test_model_is_left_as_found(vision):
    clip = small(vision=vision)
    size = vision["image_size"] if vision else 16
    pixels = torch.randn(4, 3, size, size, dtype=torch.float64)
    for parameter in list(clip.parameters())[::3]:
        parameter.requires_grad_(False)
    clip.train()
    if vision is None:
        clip.visual.eval()
    else:
        clip.transformer.eval()
    clip.transformer.grad_checkpointing = True
    before = state(clip)
    mode = torch.is_grad_enabled()

    for call in all_calls(clip, pixels):
        call()
        assert same(before, state(clip))
        assert torch.is_grad_enabled() == mode

    def broken(*_):
        raise RuntimeError("broken")

    for module in (clip.ln_final, clip.visual):
        hook = module.register_forward_hook(broken)
        failing = state(clip)
        for call in all_calls(clip, pixels):
            with pytest.raises(RuntimeError, match="broken"):
                call()
            assert same(failing, state(clip))
            assert torch.is_grad_enabled() == mode
        hook.remove()

    # Gradient checkpointing is off only while the attention is watched.
    loss_of(clip, feats(), "gradcam").backward()
    assert [module[1:] for module in before[0]] == [module[1:] for module in state(clip)[0]]


@pytest.mark.parametrize("method", BY_PASS)
def test_frozen_model_and_no_grad(method):
    clip = small()
    want = text_attribution(clip, feats(), TOKENS, method)
    clip.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(text_attribution(clip, feats(), TOKENS, method), want)


# ---- image maps


@pytest.mark.parametrize("pool", ["tok", "avg"])
def test_vit_map_is_chefers(pool):
    vision = dict(image_size=24, patch_size=8, width=16, layers=2, head_width=8, pool_type=pool)
    clip = small(vision=vision)
    pixels = torch.randn(1, 3, 24, 24, dtype=torch.float64)
    text = clip.encode_text(TOKENS[:1]).detach()[0]
    weights = {name: value.detach() for name, value in clip.visual.state_dict().items()}
    patches = F.conv2d(pixels, weights["conv1.weight"], stride=8)[0].flatten(1).T
    x = torch.cat([weights["class_embedding"][None], patches]) + weights["positional_embedding"]
    y = F.layer_norm(x, (16,), weights["ln_pre.weight"], weights["ln_pre.bias"]).requires_grad_()
    attention = []
    no_mask = torch.zeros(10, 10, dtype=torch.float64)
    for k in range(2):
        y, a = layer(weights, k, y, 2, no_mask, F.gelu)
        attention.append(a)
    y = F.layer_norm(y, (16,), weights["ln_post.weight"], weights["ln_post.bias"])
    image = (y[0] if pool == "tok" else y[1:].mean(0)) @ weights["proj"]
    assert torch.allclose(image, clip.encode_image(pixels)[0])
    score = clip.logit_scale.exp() * F.cosine_similarity(image, text, 0)
    grads = torch.autograd.grad(score, attention)
    R = torch.eye(10, dtype=torch.float64)
    for a, grad in zip(attention, grads, strict=True):
        R = R + (grad * a).clamp(min=0).mean(0) @ R
    want = R[0, 1:] if pool == "tok" else (R[1:, 1:] - torch.eye(9)).mean(0)
    got = image_map(clip, pixels, TOKENS[:1])
    assert got.shape == (3, 3)
    assert torch.allclose(got.flatten(), want.detach(), atol=1e-12)
    assert got.max() > 0
    last = torch.eye(10, dtype=torch.float64)
    last = last + (grads[1] * attention[1]).clamp(min=0).mean(0)
    want = last[0, 1:] if pool == "tok" else (last[1:, 1:] - torch.eye(9)).mean(0)
    got = image_map(clip, pixels, TOKENS[:1], start_layer=-1)
    assert torch.allclose(got.flatten(), want.detach(), atol=1e-12)


def test_resnet_map_is_grad_cam():
    clip = small(vision=RESNET)
    pixels = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    text = clip.encode_text(TOKENS[:1]).detach()[0]
    visual = clip.visual
    maps = visual.layer3(visual.layer2(visual.layer1(visual.stem(pixels))))
    maps = visual.layer4(maps).detach().requires_grad_()
    score = clip.logit_scale.exp() * F.cosine_similarity(visual.attnpool(maps)[0], text, 0)
    (grad,) = torch.autograd.grad(score, maps)
    want = sum(grad[0, c].mean() * maps[0, c] for c in range(maps.shape[1])).clamp(min=0)
    got = image_map(clip, pixels, TOKENS[:1])
    assert got.shape == (2, 2)
    assert torch.allclose(got, want, atol=1e-12)


# ---- one caption and one image

CAFE = "A  RED snowboarder  near a café & a box"


@pytest.fixture
def scene_file(tmp_path):
    """A picture that is wider than what the model sees."""
    path = tmp_path / "scene.png"
    scenes("test", 1, seed=3)[0].render(96).resize((144, 96)).save(path)
    return path


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_attribute(micro, scene_file, method):
    before = state(micro.clip)
    found = attribute(micro, scene_file, CAFE, method)
    assert same(before, state(micro.clip))
    assert isinstance(found, Attribution)
    for (start, end), token in zip(found.spans, found.tokens, strict=True):
        assert CAFE[start:end] == token
    tokens = found.table("token")
    in_concepts = ["RED", "snow", "boarder", "near", "café", "box"]
    assert list(tokens[tokens.kind != ""].token) == in_concepts
    words = found.table("word").set_index("token")
    parts = tokens[tokens.token.isin(["snow", "boarder"])]
    assert abs(float(words.score["snowboarder"]) - parts.score.mean()) < 1e-9
    concepts = found.table("concept")
    assert list(zip(concepts.token, concepts.kind, strict=True)) == [
        ("RED", "attribute"),
        ("snowboarder", "object"),
        ("near", "relation"),
        ("café", "object"),
        ("box", "object"),
    ]


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_attribute_explains_what_the_tables_do(micro, scene_file, method):
    words = microworld_words()
    caption = "the red star is on the big box"
    found = attribute(micro, scene_file, caption, method, words=words, draws=1)
    table = kind_attributions(micro, [scene_file], [caption], method, draws=1, words=words)
    assert found.explained == "logit"
    tokens = found.table("token")
    mean_of = tokens.groupby("kind").score.mean()
    for kind in ("object", "relation", "attribute"):
        assert abs(float(table[kind][0]) - mean_of[kind]) < 1e-4 * max(1, abs(mean_of[kind]))


def test_attribute_explains_the_other_score_by_name(micro, scene_file):
    words = microworld_words()
    scores = {}
    for score in ("logit", "cosine"):
        options = dict(method="perturbation", words=words, score=score)
        scores[score] = torch.tensor(attribute(micro, scene_file, CAFE, **options).scores)
    scale = float(micro.logit_scale)
    assert torch.allclose(scores["logit"], scale * scores["cosine"], atol=1e-5)
    assert scores["logit"].abs().max() > 1e-3
    with pytest.raises(CompvlError, match="choose one of logit, cosine"):
        attribute(micro, scene_file, CAFE, score="probability")


def test_attribute_shows_the_picture(micro, scene_file, tmp_path):
    found = attribute(micro, scene_file, CAFE)
    assert found.picture.size == (96, 96)
    assert found.image_map.shape == (4, 4)
    heat = image_attribution(micro, scene_file, CAFE)
    assert (heat - torch.as_tensor(found.image_map)).abs().max() < 1e-6
    found.figure().savefig(tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
    with pytest.raises(CompvlError, match="missing"):
        attribute(micro, tmp_path / "none.png", CAFE)


@pytest.mark.parametrize(
    "text", [dict(no_causal_mask=True), dict(embed_cls=True), dict(block_type="custom")]
)
def test_other_towers_say_what_is_needed(text):
    clip = small(open_clip.CustomTextCLIP, **text)
    with pytest.raises(CompvlError, match="open_clip's text transformer"):
        text_attribution(clip, feats(), TOKENS)


# ---- several processes


class Step(nn.Module):
    """What a training step computes: attributions for L_attr, inside the forward that DDP wraps."""

    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def forward(self, images, tokens, method):
        return text_attribution(self.clip, images, tokens, method, create_graph=True)


def gradients(step, clip, part, method):
    """L_attr of a part of the batch, and its gradients."""
    clip.zero_grad()
    attribution = step(feats()[part], TOKENS[part], method)
    loss = attribution_loss(attribution, OBJECTS[part], COMPOSITION[part], 1.0)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in text_parameters(clip) if p.grad is not None]


PROCESSES = """
import sys

sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from test_attribution import Step, gradients, small

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
clip = small()
clip.visual.requires_grad_(False)
step = torch.nn.parallel.DistributedDataParallel(Step(clip), find_unused_parameters=True)
found = {}
for method in ("attention", "gradcam", "gradient"):
    part = slice(0, 1) if rank == 0 else slice(2, 3)
    loss, grads = gradients(step, clip, part, method)
    dist.all_reduce(loss)
    # The second process's caption has nothing to compare.
    part = slice(0, 1) if rank == 0 else slice(1, 2)
    uneven = gradients(step, clip, part, method)[1]
    found[method] = loss / 2, grads, uneven
if rank == 0:
    torch.save(found, sys.argv[2])
dist.destroy_process_group()
"""


def largest_difference(a, b):
    """Over two lists of tensors."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_two_processes_are_one(tmp_path):
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments = [script, os.path.dirname(__file__), tmp_path / "out.pt"]
    subprocess.run([*torchrun, "--nproc_per_node", "2", *arguments], check=True)
    clip = small()
    clip.visual.requires_grad_(False)
    for method, (loss, grads, uneven) in torch.load(tmp_path / "out.pt").items():
        want, by_one = gradients(Step(clip), clip, torch.tensor([0, 2]), method)
        assert torch.allclose(loss, want, atol=1e-12)
        assert max(float(grad.abs().max()) for grad in by_one) > 1e-12
        assert largest_difference(grads, by_one) < 1e-12
        _, by_one = gradients(Step(clip), clip, torch.tensor([0, 1]), method)
        assert largest_difference(uneven, by_one) < 1e-12
