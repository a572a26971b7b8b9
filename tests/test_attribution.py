"""Attributions against computations from the equations that share no code with the package; second derivatives; the model left as found."""

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
from torch import nn

from compvl.attribution.explain import Attribution, attribute, image_attribution
from compvl.attribution.replacements import (
    caption_masks,
    perturbation_attribution,
    perturbation_scores,
    perturbed_tokens,
    replacements,
    tokenize_replacements,
)
from compvl.attribution.tokens import ATTRIBUTIONS, text_attribution
from compvl.core import CompvlError
from compvl.losses import attribution_loss
from compvl.microworld.captions import caption
from compvl.microworld.datasets import microworld_words
from compvl.microworld.scenes import scenes
from compvl.microworld.vocabulary import lexicon
from compvl.models.clip import create_model
from compvl.models.towers import eot_positions
from compvl.text.parser import parse_many

BY_PASS = [m for m in ATTRIBUTIONS if m != "perturbation"]
SOT, EOT, L = 18, 19, 10

# ---- the text transformer from its weights, one caption at a time, on all positions


def layer(w, k, x, heads, mask, act):
    "Block `k` on x [n, W]; returns its output and its attention weights [H, n, n]."

    def g(name):
        return w[f"transformer.resblocks.{k}.{name}"]

    def norm(y, name):
        return F.layer_norm(y, y.shape[-1:], g(f"{name}.weight"), g(f"{name}.bias"))

    n, W = x.shape
    q, key, v = (norm(x, "ln_1") @ g("attn.in_proj_weight").T + g("attn.in_proj_bias")).split(W, 1)

    def split(y):
        return torch.stack([y[:, h * (W // heads) : (h + 1) * (W // heads)] for h in range(heads)])

    a = torch.softmax(split(q) @ split(key).transpose(1, 2) / (W / heads) ** 0.5 + mask, -1)
    x = x + torch.cat(list(a @ split(v)), 1) @ g("attn.out_proj.weight").T + g("attn.out_proj.bias")
    h = act(norm(x, "ln_2") @ g("mlp.c_fc.weight").T + g("mlp.c_fc.bias"))
    return x + h @ g("mlp.c_proj.weight").T + g("mlp.c_proj.bias"), a


def act_of(clip):
    return (
        (lambda x: x * torch.sigmoid(1.702 * x))
        if "Quick" in type(clip.transformer.resblocks[0].mlp.gelu).__name__
        else F.gelu
    )


class Reference:
    "S, attention weights and what follows from them, for one image feature and one caption."

    def __init__(self, clip, image, tokens, x=None):
        w, heads = (
            {k: v.detach() for k, v in clip.state_dict().items()},
            clip.transformer.resblocks[0].attn.num_heads,
        )
        n, self.eot, self.A, self.dA = len(tokens), int(tokens.argmax()), [], []
        mask = torch.full((n, n), float("-inf"), dtype=w["positional_embedding"].dtype).triu(1)
        self.x = (w["token_embedding.weight"][tokens] if x is None else x).clone().requires_grad_()
        y = self.x + w["positional_embedding"][:n]
        for k in range(len(clip.transformer.resblocks)):
            y, a = layer(w, k, y, heads, mask, act_of(clip))
            self.A.append(a)
            a.register_hook(lambda g, k=k: self.dA.append((k, g)))
        y = (
            F.layer_norm(y, y.shape[-1:], w["ln_final.weight"], w["ln_final.bias"])[self.eot]
            @ w["text_projection"]
        )
        self.S = image @ y / (image.norm() * y.norm())

    def attention(self):
        return torch.stack([a.mean(0)[self.eot] for a in self.A]).mean(0)

    def gradient(self):
        g = torch.autograd.grad(self.S, self.x, retain_graph=True)[0].abs().sum(1)[: self.eot + 1]
        return F.pad(g.exp() / g.exp().sum(), (0, len(self.x) - self.eot - 1))

    def gradcam(self):
        self.dA.clear()
        self.S.backward(retain_graph=True)
        grads, R = dict(self.dA), torch.eye(len(self.x), dtype=self.x.dtype)
        for k, a in enumerate(self.A):
            R = R + (grads[k] * a).clamp(min=0).mean(0) @ R
        return R[self.eot]


def some_captions(n=4):
    return [caption(s, random.Random(i)).text for i, s in enumerate(scenes("test", n, seed=1))]


@pytest.fixture(scope="module")
def micro():
    return create_model("micro-clip", "base")


@pytest.fixture(scope="module", params=["micro-clip", "ViT-B-32"])
def model(request, micro):
    if request.param == "micro-clip":
        return micro
    torch.manual_seed(0)
    return create_model("ViT-B-32")


@pytest.mark.parametrize("method", BY_PASS)
def test_equals_reference(model, method):
    torch.manual_seed(1)
    texts = some_captions(3) + [""]
    tokens, I = model.tokenizer(texts), torch.randn(4, model.clip.text_projection.shape[1])
    want = torch.stack(
        [getattr(Reference(model.clip, i, t), method)().detach() for i, t in zip(I, tokens)]
    )
    for graph in (False, True):
        got = text_attribution(model, I, tokens, method, create_graph=graph)
        assert got.shape == want.shape and got.requires_grad == graph
        assert (got - want).abs().max() < 1e-5
    if method == "gradcam":  # the part that the score decides, in proportion
        eot = eot_positions(model.clip, tokens)[:3]
        a, b = (v.detach()[:3].scatter(1, eot[:, None], 0) for v in (got, want))
        assert b.max() > 0 and (a - b).abs().max() < 1e-3 * b.max()


def small(kind=open_clip.CLIP, vision=None, **text):
    torch.manual_seed(3)
    clip = (
        kind(
            8,
            vision or dict(image_size=16, patch_size=8, width=16, layers=2, head_width=8),
            dict(context_length=L, vocab_size=EOT + 1, width=12, heads=2, layers=2) | text,
        )
        .double()
        .eval()
    )
    with torch.no_grad():  # as initialised, scores hardly depend on the tokens
        for n, p in clip.named_parameters():
            if p.ndim >= 2 and "visual" not in n:
                p.copy_(torch.randn_like(p) * 0.5)
    return clip


def rows(*inner):
    return torch.tensor([[SOT, *r, EOT] + [0] * (L - 2 - len(r)) for r in inner])


TOKENS = rows([1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12, 13, 14], [])


def feats(n=4):
    return torch.randn(n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("method", BY_PASS)
def test_small_in_double(method):
    clip, I = small(), feats()
    want = torch.stack(
        [getattr(Reference(clip, i, t), method)().detach() for i, t in zip(I, TOKENS)]
    )
    got = text_attribution(clip, I, TOKENS, method)
    assert got.dtype == torch.float64 and (got - want).abs().max() < 1e-12
    eot = TOKENS.argmax(1)
    assert (got[torch.arange(L) > eot[:, None]] == 0).all()
    if method == "gradcam":
        assert (
            (got >= 0).all()
            and (got.gather(1, eot[:, None]) >= 1).all()
            and got[:3, :2].sum() > 1e-3
        )
    else:
        assert torch.allclose(got.sum(1), torch.ones(4, dtype=torch.float64), atol=1e-12)


def test_gradient_by_finite_differences():
    clip, I = small(), feats()
    for i, t in zip(I, TOKENS[:2]):
        x, eot, h = clip.token_embedding.weight[t].detach(), int(t.argmax()), 1e-5
        sums = torch.zeros(eot + 1, dtype=torch.float64)
        for k, j in itertools.product(range(eot + 1), range(x.shape[1])):
            d = torch.zeros_like(x)
            d[k, j] = h
            sums[k] += (
                ((Reference(clip, i, t, x + d).S - Reference(clip, i, t, x - d).S) / (2 * h))
                .abs()
                .detach()
            )
        got = text_attribution(clip, i[None], t[None], "gradient")[0]
        assert torch.allclose(got[: eot + 1], sums.softmax(0), atol=1e-8)


@pytest.mark.parametrize("method", BY_PASS)
def test_only_eot_is_read_and_parts_agree(method):
    clip, g = small(), torch.Generator().manual_seed(0)
    inner = [
        torch.randint(1, SOT, (int(n),), generator=g).tolist()
        for n in torch.randint(0, L - 1, (131,), generator=g)
    ]
    tokens, I = rows(*inner), feats(131)
    a, T = text_attribution(clip, I, tokens, method, features=True)  # by quarters of the lengths
    assert torch.allclose(T, F.normalize(clip.encode_text(tokens), dim=-1).detach(), atol=1e-12)
    one_by_one = torch.cat(
        [text_attribution(clip, I[k : k + 1], tokens[k : k + 1], method) for k in range(0, 131, 7)]
    )
    assert torch.allclose(a[::7], one_by_one, atol=1e-12)
    junk = torch.where(
        torch.arange(L) > tokens.argmax(1)[:, None],
        torch.randint(1, SOT, tokens.shape, generator=g),
        tokens,
    )
    assert torch.allclose(text_attribution(clip, I, junk, method), a, atol=1e-12)


def test_custom_text_clip_is_the_same():
    clip = small()
    custom = small(open_clip.CustomTextCLIP)
    own = {k: v for k, v in clip.state_dict().items()}
    custom.load_state_dict(
        {k: own[k.removeprefix("text.")] for k in custom.state_dict()}, strict=True
    )
    for m in BY_PASS:
        assert torch.allclose(
            text_attribution(custom, feats(), TOKENS, m),
            text_attribution(clip, feats(), TOKENS, m),
            atol=1e-12,
        )


def test_perturbation_is_exhaustive_replacement(micro):
    W, texts = (
        microworld_words(),
        ["a red star", "the wet fish is on the big box", "a gizmo near a cat"],
    )
    views = scenes("test", 3, seed=2)
    I = micro.encode_image(torch.stack([micro.preprocess(s.render(48)) for s in views])).detach()
    p = tokenize_replacements(
        texts, made := replacements(texts, draws=None, words=W), micro.tokenizer
    )
    got = perturbation_attribution(micro, I, micro.tokenizer(texts), p)

    def score(k, text):
        return (I[k] @ micro.encode_text(micro.tokenizer([text]), crop=False)[0]).item()

    def names(family):
        return [v["words"] for v in lexicon().spec[family].values()]

    for old, family, form in (("red", "color", "a {} star"), ("star", "object", "a red {}")):
        new = [max(w, key=w.get) for w in names(family) if old not in w]
        said = {r.text for r in made if r.owner == 0 and texts[0][r.start : r.end] == old}
        want = [form.format(w) for w in new]
        assert {re.sub(r"^an ", "a ", t) for t in said} == set(want)
        drop = sum(score(0, texts[0]) - score(0, t) for t in said) / len(want)
        assert abs(float(got[0, 1 + texts[0].split().index(old)]) - drop) < 1e-5
    touched = perturbed_tokens(p, 3)
    assert (
        touched[0].nonzero().flatten().tolist() == [2, 3]
        and touched[1].sum() == 5
        and (got[~touched] == 0).all()
    )
    for k in (1, 2):  # all concepts, from the rows as they were made
        for s, e in {(r.start, r.end) for r in made if r.owner == k}:
            drops = [
                score(k, texts[k]) - score(k, r.text)
                for r in made
                if r.owner == k and (r.start, r.end) == (s, e)
            ]
            at = next(r for r, q in enumerate(made) if q.owner == k and (q.start, q.end) == (s, e))
            assert torch.allclose(
                got[k][p.where[at]], torch.tensor(sum(drops) / len(drops)), atol=1e-5
            )


# ---- L_attr

OBJECTS = torch.zeros(4, L, dtype=torch.bool)
OBJECTS[0, 2] = OBJECTS[1, 1] = OBJECTS[2, 3] = OBJECTS[2, 6] = True
COMPOSITION = torch.zeros(4, L, dtype=torch.bool)
COMPOSITION[0, 1] = COMPOSITION[0, 4] = COMPOSITION[2, 1] = COMPOSITION[2, 5] = (
    True  # the second caption has none, the last nothing
)


def test_loss_is_its_formula():
    a = torch.rand(4, L, dtype=torch.float64)
    want = (
        sum(
            max(float(a[i][OBJECTS[i]].mean() - a[i][COMPOSITION[i]].mean()) + 0.2, 0)
            for i in (0, 2)
        )
        / 2
    )
    assert abs(float(attribution_loss(a, OBJECTS, COMPOSITION, 0.2)) - want) < 1e-12


def text_parameters(clip):
    return [p for n, p in clip.named_parameters() if "visual" not in n and "logit" not in n]


PERTURBED = rows(
    [1, 2, 3, 15], [1, 16, 3, 4], [7, 8, 9, 10, 11, 12, 2, 14], [7, 8, 9, 10, 1, 12, 13, 14]
)
OWNER, WHERE = torch.tensor([0, 0, 2, 2]), torch.zeros(4, L, dtype=torch.bool)
WHERE[0, 4] = WHERE[1, 2] = WHERE[2, 6] = WHERE[3, 5] = True


def L_attr(clip, I, method):
    if method != "perturbation":
        a = text_attribution(clip, I, TOKENS, method, create_graph=True)
    else:
        a = perturbation_attribution(clip, I, TOKENS, (PERTURBED, OWNER, WHERE), create_graph=True)
    return attribution_loss(a, OBJECTS, COMPOSITION, 1.0)  # the margin keeps the hinge open


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_second_order_gradients(method):
    clip, I = small(), feats().requires_grad_()
    p = text_parameters(clip)
    assert torch.autograd.gradcheck(
        lambda *_: L_attr(clip, I, method), [q for q in p if q.numel() <= 36], eps=1e-6, atol=1e-6
    )  # norms and biases, each number
    assert torch.autograd.gradcheck(
        lambda *_: L_attr(clip, I, method),
        [q for q in p if q.numel() > 36],
        eps=1e-6,
        atol=1e-6,
        fast_mode=True,
    )  # embeddings and matrices, along random directions
    by_image = torch.autograd.grad(L_attr(clip, I, method), I, allow_unused=True)[0]
    if method in ("gradcam", "gradient"):
        assert (
            torch.autograd.gradcheck(lambda I: L_attr(clip, I, method), [I], eps=1e-6, atol=1e-6)
            and by_image.abs().sum() > 0
        )
    else:
        assert by_image is None or (by_image == 0).all()  # sg(I), and attention of the text alone


@pytest.mark.parametrize("method", ATTRIBUTIONS)
@pytest.mark.parametrize("masked", ["all", "objects", "composition"])
def test_masked_batches_give_zero_with_zero_gradient(method, masked):
    clip, none = small(), torch.zeros_like(OBJECTS)
    if method == "perturbation":
        a = perturbation_attribution(
            clip, feats(), TOKENS, (PERTURBED, OWNER, WHERE), create_graph=True
        )
    else:
        a = text_attribution(clip, feats(), TOKENS, method, create_graph=True)
    loss = attribution_loss(
        a,
        OBJECTS if masked == "composition" else none,
        COMPOSITION if masked == "objects" else none,
        0.5,
    )
    loss.backward()
    assert (
        loss == 0
        and all(q.grad is None or (q.grad == 0).all() for q in clip.parameters())
        and any(q.grad is not None for q in clip.parameters())
    )


def test_captions_without_or_cut_off(micro):
    long = "a " * 80 + "red star on a box"
    texts = ["a star and a box", "red and blue", "a red star", long, ""]
    objects, composition = caption_masks(texts, micro.tokenizer)
    assert objects.any(1).tolist() == [True, False, True, False, False] and composition.any(
        1
    ).tolist() == [False, True, True, False, False]
    I, tokens = torch.randn(5, 128), micro.tokenizer(texts)
    made = replacements(texts)
    assert {r.owner for r in made} == {0, 1, 2, 3}
    for m in ATTRIBUTIONS:
        a = (
            perturbation_attribution(
                micro, I, tokens, tokenize_replacements(texts, made, micro.tokenizer), True
            )
            if m == "perturbation"
            else text_attribution(micro, I, tokens, m, True)
        )
        loss = attribution_loss(a, objects, composition, 5.0)
        want = 5 + a[2][objects[2]].mean() - a[2][composition[2]].mean()
        assert (
            torch.allclose(loss, want)
            and torch.autograd.grad(loss, micro.clip.token_embedding.weight)[0].isfinite().all()
        )
    x = attribute(micro, scenes("test", 1)[0], long)
    t = x.table("concept")
    assert (
        list(t.token) == ["red", "star", "on", "box"]
        and t.score.isna().all()
        and len(x.tokens) == 75
    )


# ---- the model is left as found


def state(clip):
    return (
        [
            (
                n,
                m.training,
                sorted(m.__dict__),
                len(m._forward_hooks),
                len(m._forward_pre_hooks),
                len(m._backward_hooks),
                getattr(m, "grad_checkpointing", None),
            )
            for n, m in clip.named_modules()
        ],
        [(n, p.requires_grad, p.grad is None) for n, p in clip.named_parameters()],
        {k: v.clone() for k, v in clip.state_dict().items()},
    )


def same(a, b):
    return (
        a[:2] == b[:2]
        and a[2].keys() == b[2].keys()
        and all(torch.equal(v, b[2][k]) for k, v in a[2].items())
    )


RESNET = dict(image_size=64, layers=[1, 1, 1, 1], width=8)


@pytest.mark.parametrize("vision", [None, RESNET], ids=["vit", "resnet"])
def test_model_is_left_as_found(vision):
    clip = small(vision=vision)
    pixels = torch.randn(4, 3, *[vision["image_size"] if vision else 16] * 2, dtype=torch.float64)
    for q in list(clip.parameters())[::3]:
        q.requires_grad_(False)
    clip.train()
    clip.visual.eval() if vision is None else clip.transformer.eval()
    clip.transformer.grad_checkpointing = True
    before, mode = state(clip), torch.is_grad_enabled()

    def calls():
        for m in BY_PASS:
            yield lambda: text_attribution(clip, pixels, TOKENS, m)
        yield lambda: perturbation_attribution(clip, pixels, TOKENS, (PERTURBED, OWNER, WHERE))
        yield lambda: image_map(clip, pixels[:1], TOKENS[:1])

    for call in calls():
        call()
        assert same(before, state(clip)) and torch.is_grad_enabled() == mode

    def broken(*_):
        raise RuntimeError("broken")

    for module in (clip.ln_final, clip.visual):
        hook = module.register_forward_hook(broken)
        failing = state(clip)
        for call in calls():
            with pytest.raises(RuntimeError, match="broken"):
                call()
            assert same(failing, state(clip)) and torch.is_grad_enabled() == mode
        hook.remove()
    L_attr(
        clip, feats(), "gradcam"
    ).backward()  # gradient checkpointing is off only while the attention is watched
    assert [x[1:] for x in before[0]] == [x[1:] for x in state(clip)[0]]


@pytest.mark.parametrize("method", BY_PASS)
def test_frozen_model_and_no_grad(method):
    clip, I = small(), feats()
    want = text_attribution(clip, I, TOKENS, method)
    for q in clip.parameters():
        q.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(text_attribution(clip, I, TOKENS, method), want)


# ---- image maps


def image_map(clip, pixels, tokens):
    from compvl.attribution.explain import _image_map

    return _image_map(clip, pixels, tokens)


@pytest.mark.parametrize("pool", ["tok", "avg"])
def test_vit_map_is_chefers(pool):
    clip = small(
        vision=dict(image_size=24, patch_size=8, width=16, layers=2, head_width=8, pool_type=pool)
    )
    pixels, T, v = (
        torch.randn(1, 3, 24, 24, dtype=torch.float64),
        clip.encode_text(TOKENS[:1]).detach()[0],
        clip.visual,
    )
    w, A = {k: x.detach() for k, x in v.state_dict().items()}, []
    x = (
        torch.cat(
            [
                w["class_embedding"][None],
                F.conv2d(pixels, w["conv1.weight"], stride=8)[0].flatten(1).T,
            ]
        )
        + w["positional_embedding"]
    )
    y = F.layer_norm(x, (16,), w["ln_pre.weight"], w["ln_pre.bias"]).requires_grad_()
    for k in range(2):
        y, a = layer(w, k, y, 2, torch.zeros(10, 10, dtype=torch.float64), F.gelu)
        A.append(a)
    y = F.layer_norm(y, (16,), w["ln_post.weight"], w["ln_post.bias"])
    I = (y[0] if pool == "tok" else y[1:].mean(0)) @ w["proj"]
    assert torch.allclose(I, clip.encode_image(pixels)[0])
    R = torch.eye(10, dtype=torch.float64)
    for a, g in zip(A, torch.autograd.grad(F.cosine_similarity(I, T, 0), A)):
        R = R + (g * a).clamp(min=0).mean(0) @ R
    want = R[0, 1:] if pool == "tok" else (R[1:, 1:] - torch.eye(9)).mean(0)
    got = image_map(clip, pixels, TOKENS[:1])
    assert (
        got.shape == (3, 3)
        and torch.allclose(got.flatten(), want.detach(), atol=1e-12)
        and got.max() > 0
    )


def test_resnet_map_is_grad_cam():
    clip = small(vision=RESNET)
    pixels, T, v = (
        torch.randn(1, 3, 64, 64, dtype=torch.float64),
        clip.encode_text(TOKENS[:1]).detach()[0],
        clip.visual,
    )
    f = v.layer3(v.layer2(v.layer1(v.stem(pixels))))
    f = v.layer4(f).detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cosine_similarity(v.attnpool(f)[0], T, 0), f)
    want = sum(g[0, c].mean() * f[0, c] for c in range(f.shape[1])).clamp(min=0)
    got = image_map(clip, pixels, TOKENS[:1])
    assert got.shape == (2, 2) and torch.allclose(got, want, atol=1e-12)


def test_attribute(micro, tmp_path):
    s = scenes("test", 1, seed=3)[0]
    path = tmp_path / "scene.png"
    s.render(96).resize((144, 96)).save(path)
    text = "A  RED snowboarder  near a café & a box"
    before = state(micro.clip)
    for m in ATTRIBUTIONS:
        x = attribute(micro, path, text, m)
        assert isinstance(x, Attribution) and all(
            text[a:b] == t for (a, b), t in zip(x.spans, x.tokens)
        )
        t, w, c = (x.table(k) for k in ("token", "word", "concept"))
        assert list(t[t.kind != ""].token) == ["RED", "snow", "boarder", "near", "café", "box"]
        assert (
            abs(
                float(w[w.token == "snowboarder"].score.iloc[0])
                - t[t.token.isin(["snow", "boarder"])].score.mean()
            )
            < 1e-9
        )
        assert list(zip(c.token, c.kind)) == [
            ("RED", "attribute"),
            ("snowboarder", "object"),
            ("near", "relation"),
            ("café", "object"),
            ("box", "object"),
        ]
    assert (
        x.picture.size == (96, 96)
        and x.image_map.shape == (4, 4)
        and same(before, state(micro.clip))
    )
    assert (image_attribution(micro, path, text) - torch.as_tensor(x.image_map)).abs().max() < 1e-6
    x.figure().savefig(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 1000
    with pytest.raises(CompvlError, match="missing"):
        attribute(micro, tmp_path / "none.png", text)


@pytest.mark.parametrize(
    "text", [dict(no_causal_mask=True), dict(embed_cls=True), dict(block_type="custom")]
)
def test_other_towers_say_what_is_needed(text):
    clip = small(open_clip.CustomTextCLIP, **text)
    with pytest.raises(CompvlError, match="open_clip's text transformer"):
        text_attribution(clip, feats(), TOKENS)


# ---- several processes


class Step(nn.Module):
    "What a training step asks of the model: L_attr's attributions, made inside the forward that DDP wraps."

    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def forward(self, I, tokens, method):
        return text_attribution(self.clip, I, tokens, method, create_graph=True)


def gradients(step, clip, half, method):
    clip.zero_grad()
    loss = attribution_loss(
        step(feats()[half], TOKENS[half], method), OBJECTS[half], COMPOSITION[half], 1.0
    )
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in text_parameters(clip) if p.grad is not None]


PROCESSES = """
import sys; sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from test_attribution import Step, gradients, small
torch.set_num_threads(1); dist.init_process_group('gloo'); rank = dist.get_rank()
clip = small(); clip.visual.requires_grad_(False)
step = torch.nn.parallel.DistributedDataParallel(Step(clip), find_unused_parameters=True)
out = {}
for m in ('attention', 'gradcam', 'gradient'):
    loss, grads = gradients(step, clip, slice(0, 1) if rank == 0 else slice(2, 3), m); dist.all_reduce(loss)
    uneven = gradients(step, clip, slice(0, 1) if rank == 0 else slice(1, 2), m)[1]       # the second process's caption has nothing to compare
    out[m] = loss / 2, grads, uneven
if rank == 0: torch.save(out, sys.argv[2])
dist.destroy_process_group()
"""


def test_two_processes_are_one(tmp_path):
    (tmp_path / "processes.py").write_text(PROCESSES)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            tmp_path / "processes.py",
            os.path.dirname(__file__),
            tmp_path / "out.pt",
        ],
        check=True,
    )
    clip = small()
    clip.visual.requires_grad_(False)
    for m, (loss, grads, uneven) in torch.load(tmp_path / "out.pt").items():
        want, by = gradients(Step(clip), clip, torch.tensor([0, 2]), m)
        assert torch.allclose(loss, want, atol=1e-12) and max(
            float((a - b).abs().max()) for a, b in zip(grads, by, strict=True)
        ) < 1e-12 < max(float(g.abs().max()) for g in by)
        assert (
            max(
                float((a - b).abs().max())
                for a, b in zip(
                    uneven, gradients(Step(clip), clip, torch.tensor([0, 1]), m)[1], strict=True
                )
            )
            < 1e-12
        )
