"""Generative models as scorers: tiny ones in released formats, and the microworld's captioner."""

import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from PIL import Image

from compvl.app import cli
from compvl.benchmarks import load_benchmark
from compvl.core import CompvlError
from compvl.evaluate import evaluate
from compvl.models.captioner import load_captioner
from compvl.models.scorers import open_scorer
from compvl.models.vqa import GENERATIVE_SCORES, VQAScorer, load_generative, null_images
from compvl.paper.profiles import get_profile
from compvl.paper.runs import row_model
from compvl.paper.table_rows import GENERATIVE
from compvl.train.captioner import CaptionerConfig, train_captioner

transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

WORDS = (
    "Does this show ? Please answer yes or no . Yes USER : ASSISTANT a the red blue star fish box"
)
TEMPLATE = (
    "{% for turn in messages %}USER: {% for part in turn['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
SIZE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
IMAGES = [Image.new("RGB", (40, 30), "red"), Image.new("L", (30, 30), 200)] * 2
CAPTIONS = ["a red star", "a fish", "a blue box . a red star . the fish", "a red star"]


def word_tokenizer(**options):
    special = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
    vocabulary = {word: i for i, word in enumerate([*special, "\n", *WORDS.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        **options,
    )


def image_tokenizer(**others):
    """A tokenizer that knows its image token, and others, by name."""
    return word_tokenizer(extra_special_tokens={"image_token": "<image>"} | others)


def randomized(model):
    """The model with weights so large that scores differ, in eval mode."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def saved(model, processor, folder):
    """The folder, with the model's large random weights and its processor in it."""
    randomized(model).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """The folder of a tiny LLaVA, which has a chat template."""
    tokenizer = image_tokenizer()
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZE, image_size=32, patch_size=16),
        text_config=transformers.LlamaConfig(**SIZE, vocab_size=len(tokenizer), pad_token_id=3),
        image_token_index=tokenizer.image_token_id,
        vision_feature_layer=-1,
    )
    folder = tmp_path_factory.mktemp("llava")
    randomized(transformers.LlavaForConditionalGeneration(config)).save_pretrained(folder)
    images = transformers.CLIPImageProcessor(
        size=dict(shortest_edge=32), crop_size=dict(height=32, width=32)
    )
    transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory):
    """The folder of a tiny PaliGemma: no chat template, and a prompt that it reads both ways."""
    images = transformers.SiglipImageProcessor(size=dict(height=32, width=32))
    images.image_seq_length = 4
    processor = transformers.PaliGemmaProcessor(images, image_tokenizer())
    text = dict(SIZE, num_key_value_heads=1, head_dim=16, vocab_size=len(processor.tokenizer))
    config = transformers.PaliGemmaConfig(
        vision_config=dict(SIZE, model_type="siglip_vision_model", image_size=32, patch_size=16),
        text_config=dict(text, model_type="gemma"),
        image_token_index=processor.image_token_id,
        vocab_size=len(processor.tokenizer),
        projection_dim=32,
    )
    folder = tmp_path_factory.mktemp("paligemma")
    return saved(transformers.PaliGemmaForConditionalGeneration(config), processor, folder)


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory):
    """The folder of a tiny Qwen2-VL: the patches of all images of a batch are in one row."""
    names = dict(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    tokenizer = image_tokenizer(**names)
    token_ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()
    }
    patches = dict(patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
    rope = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 3, 3])
    text = dict(SIZE, num_key_value_heads=1, vocab_size=len(tokenizer), rope_parameters=rope)
    config = transformers.Qwen2VLConfig(
        vision_config=dict(patches, depth=2, embed_dim=32, hidden_size=32, num_heads=2),
        text_config=dict(text, bos_token_id=1, eos_token_id=2, pad_token_id=3),
        **token_ids,
    )
    folder = tmp_path_factory.mktemp("qwen2-vl")
    processor = transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(size=dict(shortest_edge=28**2, longest_edge=56**2)),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return saved(transformers.Qwen2VLForConditionalGeneration(config), processor, folder)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    """The folder of a tiny SmolVLM, a model of type Idefics3, which cuts an image into tiles."""
    tokenizer = image_tokenizer(
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    images = transformers.Idefics3ImageProcessor(
        size=dict(longest_edge=64), max_image_size=dict(longest_edge=32)
    )
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=1, chat_template=TEMPLATE
    )
    config = transformers.Idefics3Config(
        vision_config=dict(SIZE, image_size=32, patch_size=16),
        text_config=transformers.LlamaConfig(
            **SIZE, vocab_size=len(processor.tokenizer), pad_token_id=3
        ),
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    folder = tmp_path_factory.mktemp("smolvlm")
    return saved(transformers.Idefics3ForConditionalGeneration(config), processor, folder)


T5 = dict(model_type="t5", vocab_size=40, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
T5 |= dict(decoder_start_token_id=3, pad_token_id=3, eos_token_id=2)
OPT = dict(model_type="opt", vocab_size=40, hidden_size=32, ffn_dim=64, num_hidden_layers=2)
OPT |= dict(num_attention_heads=2, word_embed_proj_dim=32, pad_token_id=3)


def tiny_blip(kind, text, folder):
    """Save a tiny Blip2 or InstructBlip (`kind`) with this language model.

    Its processor puts the image's tokens before the prompt."""
    images = transformers.BlipImageProcessor(size=dict(height=32, width=32))
    tokenizers = [word_tokenizer()]
    if kind == "InstructBlip":  # a second one for the Q-Former, which adds its special tokens
        second = word_tokenizer()
        ends = [("<s>", 1), ("</s>", 2)]
        second.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=ends
        )
        tokenizers.append(second)
    made_by = getattr(transformers, f"{kind}Processor")
    processor = made_by(images, *tokenizers, num_query_tokens=4)
    config = getattr(transformers, f"{kind}Config")(
        vision_config=dict(SIZE, image_size=32, patch_size=16),
        qformer_config=dict(SIZE, vocab_size=len(processor.tokenizer)),
        text_config=text,
        num_query_tokens=4,
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return saved(model, processor, folder)


@pytest.fixture(scope="module")
def blip2_t5(tmp_path_factory):
    """The folder of a tiny BLIP-2 with an encoder-decoder."""
    return tiny_blip("Blip2", T5, tmp_path_factory.mktemp("blip2-t5"))


@pytest.fixture(scope="module")
def blip2_opt(tmp_path_factory):
    """The folder of a tiny BLIP-2 with a decoder alone."""
    return tiny_blip("Blip2", OPT, tmp_path_factory.mktemp("blip2-opt"))


@pytest.fixture(scope="module")
def instructblip(tmp_path_factory):
    """The folder of a tiny InstructBLIP, which says only of its language model what it is."""
    return tiny_blip("InstructBlip", T5, tmp_path_factory.mktemp("instructblip"))


CHAT = ["llava", "qwen2_vl", "smolvlm"]  # with a chat template
FAMILIES = [*CHAT, "paligemma", "blip2_t5", "blip2_opt", "instructblip"]


@pytest.mark.parametrize("kind", GENERATIVE_SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_as_one_pair_at_a_time(family, kind, request):
    folder = str(request.getfixturevalue(family))
    together = load_generative(folder, kind, "cpu", batch_size=4)
    single = load_generative(folder, kind, "cpu", batch_size=1)
    expected = single.score(IMAGES, CAPTIONS)
    assert len(set(expected.tolist())) == 4  # the first and last pair differ in their image
    for side in ("left", "right"):
        together.processor.tokenizer.padding_side = side
        assert torch.allclose(together.score(IMAGES, CAPTIONS), expected, atol=1e-5, rtol=0)


def test_likelihood_is_the_loss_of_paligemma(paligemma):
    """By the model's own mean loss on the answer, which it computes from its processor's labels.

    The default is the log-probability of the whole caption, the sum over its tokens."""
    scorer = load_generative(str(paligemma), "caption-per-token", "cpu")
    means = scorer.score(IMAGES, CAPTIONS)
    sums = load_generative(str(paligemma), "caption", "cpu").score(IMAGES, CAPTIONS)
    lengths = set()
    for image, caption, mean, whole in zip(IMAGES, CAPTIONS, means, sums, strict=True):
        inputs = scorer.processor(
            text="<image>", images=image.convert("RGB"), suffix=caption, return_tensors="pt"
        )
        with torch.no_grad():
            loss = scorer.model(**inputs).loss
        assert torch.isclose(mean, -loss, atol=1e-5)
        n_tokens = len(caption.split()) + 1  # with the end of the text
        assert int((inputs["labels"] != -100).sum()) == n_tokens
        assert torch.isclose(whole, -loss * n_tokens, atol=1e-4)
        lengths.add(n_tokens)
    assert lengths == {3, 4, 11}


def test_likelihood_is_the_loss_of_an_encoder_decoder(blip2_t5):
    """By the model's own mean loss on the caption, which its decoder reads behind its start."""
    scorer = load_generative(str(blip2_t5), "caption-per-token", "cpu")
    means = scorer.score(IMAGES, CAPTIONS)
    tokenizer = scorer.processor.tokenizer
    for image, caption, mean in zip(IMAGES, CAPTIONS, means, strict=True):
        inputs = scorer.processor(images=image.convert("RGB"), text="", return_tensors="pt")
        tokens = tokenizer(caption, add_special_tokens=False)["input_ids"]
        labels = torch.tensor([[*tokens, tokenizer.eos_token_id]])
        with torch.no_grad():
            loss = scorer.model(**inputs, labels=labels).loss
        assert -loss == pytest.approx(float(mean), abs=1e-5)


def likelihood_of_tokens(scorer, image, caption):
    """Log-probability of each token of a caption and of the end, by one forward pass."""
    processor = scorer.processor
    content = [{"role": "user", "content": [{"type": "image"}]}]
    prompt = processor.apply_chat_template(content, add_generation_prompt=True, tokenize=False)
    image = image.convert("RGB")
    before = processor(text=prompt, images=image, return_tensors="pt")["input_ids"].shape[1]
    inputs = processor(text=f"{prompt} {caption} </s>", images=image, return_tensors="pt")
    with torch.no_grad():
        logits = scorer.model(**inputs).logits[0].double()
    tokens = inputs["input_ids"][0, before:]
    return logits[before - 1 : -1].log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("family", CHAT)
def test_gain_is_of_whole_captions_and_by_name_of_tokens(family, request):
    """log p(caption | image) − log p(caption), the prior being the mean likelihood given noise."""
    folder = str(request.getfixturevalue(family))
    scorers = {kind: load_generative(folder, kind, "cpu") for kind in GENERATIVE_SCORES[1:]}
    scores = {kind: scorer.score(IMAGES, CAPTIONS) for kind, scorer in scorers.items()}
    scorer = scorers["gain"]
    for k, (image, caption) in enumerate(zip(IMAGES, CAPTIONS, strict=True)):
        given_image = likelihood_of_tokens(scorer, image, caption)
        assert len(given_image) == len(caption.split()) + 1
        given_noise = [likelihood_of_tokens(scorer, null, caption) for null in null_images(3)]
        priors = {
            "": torch.stack([by_token.sum() for by_token in given_noise]),
            "-per-token": torch.stack([by_token.mean() for by_token in given_noise]),
        }
        likelihoods = {"": given_image.sum(), "-per-token": given_image.mean()}
        for suffix, likelihood in likelihoods.items():
            gain = float(likelihood - priors[suffix].exp().mean().log())
            assert float(scores[f"caption{suffix}"][k]) == pytest.approx(
                float(likelihood), abs=1e-4
            )
            assert float(scores[f"gain{suffix}"][k]) == pytest.approx(gain, abs=1e-4)
    assert len({scorer.fingerprint() for scorer in scorers.values()}) == 4


def test_kinds_are_opened_by_name(llava):
    """As `--model gain-per-token:FOLDER` opens them."""
    for kind in GENERATIVE_SCORES:
        scorer = open_scorer(f"{kind}:{llava}", device="cpu")
        assert scorer.kind == kind
        assert scorer.is_per_token == (kind not in ("caption", "gain"))
    assert load_generative(str(llava), device="cpu").kind == "vqa"


@pytest.mark.parametrize("family", CHAT)
def test_vqa_is_the_first_generated_token(family, request):
    """The probability of Yes is that with which the model would begin its answer."""
    scorer = load_generative(str(request.getfixturevalue(family)), device="cpu")
    for image, caption, score in zip(IMAGES, CAPTIONS, scorer.score(IMAGES, CAPTIONS), strict=True):
        question = f'Does this figure show "{caption}"? Please answer yes or no.'
        content = [{"type": "image"}, {"type": "text", "text": question}]
        inputs = scorer.processor.apply_chat_template(
            [{"role": "user", "content": [*content]}], add_generation_prompt=True, tokenize=False
        )
        inputs = scorer.processor(text=inputs, images=image.convert("RGB"), return_tensors="pt")
        made = scorer.model.generate(
            **inputs,
            max_new_tokens=1,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        yes = scorer.processor.tokenizer.convert_tokens_to_ids("Yes")
        assert torch.isclose(score, made.scores[0][0].softmax(-1)[yes], atol=1e-6)


def test_an_answer_of_several_tokens_is_their_geometric_mean(llava):
    found = load_generative(str(llava), device="cpu")
    processor = found.processor
    scores = {}
    for answer in ("Yes", "Yes fish"):
        scorer = VQAScorer(found.model, processor, "tiny", answer=answer)
        assert scorer.match_threshold == 0.5  # of a probability
        scores[answer] = scorer.score(IMAGES[:1], CAPTIONS[:1])[0]
    content = [{"type": "image"}, {"type": "text", "text": found.question.format(CAPTIONS[0])}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=f"{prompt} Yes", images=IMAGES[0], return_tensors="pt")
    with torch.no_grad():
        after_yes = found.model(**inputs).logits[0, -1].softmax(-1)
    fish = after_yes[processor.tokenizer.convert_tokens_to_ids("fish")]
    assert torch.isclose(scores["Yes fish"], (scores["Yes"] * fish).sqrt(), atol=1e-6)


def test_scores_are_kept_and_resumed(llava, tmp_path, monkeypatch):
    swap = load_benchmark("swap", n=6)
    whole, scores = evaluate(
        open_scorer("vqa", llava, device="cpu"), [swap], progress=False, return_scores=True
    )

    interrupted = open_scorer(f"vqa:{llava}", device="cpu")
    score = interrupted.score
    calls = []

    def stop(images, captions):
        if calls:
            raise KeyboardInterrupt
        calls.append(len(captions))
        return score(images, captions)

    monkeypatch.setattr(interrupted, "score", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate(interrupted, [swap], cache=tmp_path, batch_size=4, progress=False)
    assert calls == [4]

    monkeypatch.setattr(
        interrupted, "score", lambda *pair: calls.append(len(pair[1])) or score(*pair)
    )
    again, resumed = evaluate(
        interrupted, [swap], cache=tmp_path, batch_size=4, progress=False, return_scores=True
    )
    pairs = 3 * len(swap)
    assert pairs - 4 <= sum(calls) <= pairs  # the first four were found
    for name in ("s_c", "s_n", "s_p"):
        expected = pytest.approx(scores["swap"][name].tolist(), abs=1e-5)
        assert resumed["swap"][name].tolist() == expected
    # figures may differ from those of `whole`: its batches are others, which can turn a near tie

    def refuse(images, captions):
        raise AssertionError("a pair was scored again")

    monkeypatch.setattr(interrupted, "score", refuse)
    kept = evaluate(interrupted, [swap], cache=tmp_path, batch_size=4, progress=False)
    assert kept.value.tolist() == again.value.tolist()
    assert kept.metric.tolist() == whole.metric.tolist()


def test_command(llava, tmp_path, monkeypatch, capsys):
    arguments = ["evaluate", "--benchmark", "swap", "--n", "4", "--csv", tmp_path / "t.csv"]
    models = ["--model", f"caption:{llava}", "--model", "micro-captioner"]
    monkeypatch.setattr(sys, "argv", ["compvl", *map(str, arguments), *models])
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code
    table = pd.read_csv(tmp_path / "t.csv")
    assert set(table.model) == {f"caption:{llava}", "micro-captioner"}
    assert "orig_acc" in set(table.metric)


def test_what_cannot_be_scored_is_named(llava, tmp_path, monkeypatch):
    scorer = load_generative(str(llava), device="cpu")
    processor = scorer.processor
    monkeypatch.setattr(scorer.model.config, "is_encoder_decoder", True)
    with pytest.raises(CompvlError, match="encoder-decoder"):
        VQAScorer(scorer.model, processor, "t5")
    monkeypatch.setattr(scorer.model.config, "is_encoder_decoder", False)
    monkeypatch.setattr(processor, "chat_template", None)
    monkeypatch.setattr(processor, "image_token", None)
    with pytest.raises(CompvlError, match="neither a chat template nor an image token"):
        VQAScorer(scorer.model, processor, "none")
    for name in ("vqa", "gain:"):
        with pytest.raises(CompvlError, match="name the model"):
            open_scorer(name)
    with pytest.raises(CompvlError, match="could not be opened"):
        open_scorer(f"vqa:{tmp_path}")
    old = SimpleNamespace(__version__="4.44.2")
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(CompvlError, match=r"update it to 4\.46"):
        load_generative(str(llava))


CONFIG = CaptionerConfig(
    n_train=24,  # three steps an epoch
    batch_size=8,
    steps=6,
    warmup=2,
    width=16,
    layers=1,
    validate_every=4,
    n_validation=8,
)


def metrics(run):
    """The log of a run without its speed."""
    return pd.read_csv(run / "metrics.csv").drop(columns="samples_per_s")


@pytest.mark.parametrize("step", [1, 3, 4])
def test_interrupted_training_is_uninterrupted(tmp_path, step):
    def stop(row):
        if row["step"] == step:
            raise KeyboardInterrupt

    whole = train_captioner(CONFIG, tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        train_captioner(CONFIG, tmp_path / "parts", progress=False, checkpoint_every=2, on_log=stop)
    parts = train_captioner(CONFIG, tmp_path / "parts", progress=False)
    assert parts.name == whole.name
    pd.testing.assert_frame_equal(metrics(parts), metrics(whole))
    assert metrics(whole).held_out.notna().tolist() == [False, False, False, True, False, True]
    trained = load_captioner(whole / "weights.safetensors").state_dict()
    resumed = load_captioner(parts / "weights.safetensors").state_dict()
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)


def test_rows_of_one_captioner(tmp_path):
    """A further seed trains one network for both rows; the shipped one has both scores."""
    smoke = get_profile("smoke")
    likelihood, gain = (row_model(row, smoke, 1, tmp_path) for row in GENERATIVE)
    assert len(list(tmp_path.glob("captioner-*"))) == 1
    assert (likelihood.prior, gain.prior) == (False, True)
    assert all(row.scores_pairs for row in GENERATIVE)

    likelihood, gain = (row_model(row, smoke) for row in GENERATIVE)
    picture = load_benchmark("swap", n=1).items[0].image.render(48)
    captions = ["a red ball", "a gourd left of a red ball"]
    left_out = likelihood.score([picture] * 2, captions) - gain.score([picture] * 2, captions)
    blank = likelihood.net.nothing(2)
    prior = likelihood.net.log_probabilities(blank, likelihood.tokenizer(captions)).sum(1)
    assert torch.allclose(left_out, prior, atol=1e-4)
