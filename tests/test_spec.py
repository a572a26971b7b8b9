"""SPEC: small files in the released format, and values beside those of the released code."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from released import with_other_column

from compvl.benchmarks.loading import GROUPS, load_benchmark, load_benchmarks
from compvl.benchmarks.registry import REGISTRY
from compvl.core import CompvlError
from compvl.evaluate.drawing import draw_failures
from compvl.evaluate.engine import evaluate, item_scores
from compvl.evaluate.failures import item_table, worst
from compvl.evaluate.kept import identity
from compvl.evaluate.tasks import TASKS, task_of
from compvl.models.clip import create_model

COUNTS = dict(
    absolute_size=1_500,
    relative_size=1_500,
    absolute_spatial=4_500,
    relative_spatial=2_000,
    existence=1_000,
    count=4_500,
)
KEYS = dict(
    absolute_size=3, relative_size=3, absolute_spatial=9, relative_spatial=4, existence=2, count=9
)
# accuracies in percent, and batches of 64, that notebooks/evaluate_example_local.ipynb prints
PRINTED = dict(
    existence=(16, 57.00, 52.00, 55.50, 50.10, 57.90, 51.80),
    relative_spatial=(32, 27.10, 26.75, 30.65, 29.60, 25.80, 25.85),
    absolute_size=(24, 44.27, 36.27, 43.20, 43.07, 37.07, 36.67),
    relative_size=(24, 34.07, 32.47, 34.33, 33.27, 33.53, 33.07),
    count=(71, 25.27, 23.62, 36.87, 37.40, 14.00),
    absolute_spatial=(71, 12.64, 12.20, 12.07, 11.58),
)


def entries(subset, n=2):
    """Both lists of a subset: n sets, in each of which every member asks once."""
    captions, images = [], []
    for k in range(n):
        texts = [f"a photo of thing {k} in state {j}" for j in range(KEYS[subset])]
        files = [f"images/{k}_{j}.png" for j in range(KEYS[subset])]
        for j in range(KEYS[subset]):
            captions.append(dict(query=files[j], keys=texts, label=j))
            images.append(dict(query=texts[j], keys=files, label=j))
    return captions, images


def write(root, subset, n=2, folder="spec", pictures=True):
    """A small subset under a data root."""
    place = root / folder / subset
    (place / "images").mkdir(parents=True, exist_ok=True)
    captions, images = entries(subset, n)
    (place / "image2text.json").write_text(json.dumps(captions))
    (place / "text2image.json").write_text(json.dumps(images))
    generator = np.random.default_rng(len(subset))
    for entry in captions if pictures else ():
        pixels = generator.integers(0, 255, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / entry["query"])
    return captions, images


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return create_model("micro-clip", device="cpu")


def accuracy_of(scores, labels):
    """Percent right, as `CLIPWrapper` of wjpoom/SPEC counts it."""
    pred_labels = torch.stack(scores).argmax(dim=-1)
    return 100 * (torch.tensor(labels) == pred_labels).sum().item() / len(labels)


@torch.no_grad()
def published(model, place, entries, images_are_keys):
    """The accuracy of one list, from embeddings computed one by one."""

    def image(name):
        return model.encode_image(model.preprocess(Image.open(place / name).convert("RGB"))[None])

    def text(words):
        return model.encode_text(model.tokenizer([words]), crop=False)

    key, query = (image, text) if images_are_keys else (text, image)
    scores = []
    for entry in entries:
        keys = torch.cat([key(one) for one in entry["keys"]])
        scores.append((query(entry["query"]) @ keys.T)[0])
    return accuracy_of(scores, [entry["label"] for entry in entries])


@pytest.mark.parametrize("subset", COUNTS)
def test_as_the_released_code(tmp_path, model, subset):
    captions, images = write(tmp_path, subset, n=4)
    name = f"spec-{subset.replace('_', '-')}"
    benchmarks = [load_benchmark(name, tmp_path), load_benchmark(f"{name}-images", tmp_path)]
    figures = evaluate(model, benchmarks, n_boot=20, progress=False)
    place = tmp_path / "spec" / subset
    for benchmark, entries, by_images in zip(benchmarks, (captions, images), (0, 1), strict=True):
        assert len(benchmark) == len(entries) and benchmark.coverage == 1
        rows = figures[(figures.benchmark == benchmark.name) & (figures.group == "all")]
        values = rows.set_index("metric").value
        want = published(model, place, entries, by_images)
        assert values["accuracy"] == pytest.approx(want)
        assert values["coverage"] == 100


def test_published_counts_and_names():
    assert GROUPS["spec"] == tuple(f"spec-{subset.replace('_', '-')}" for subset in COUNTS)
    assert GROUPS["spec-images"] == tuple(f"{name}-images" for name in GROUPS["spec"])
    for subset, n in COUNTS.items():
        name = f"spec-{subset.replace('_', '-')}"
        assert REGISTRY[name].published_n == REGISTRY[f"{name}-images"].published_n == n
    assert load_benchmarks("spec", n=1)[0].task == "caption-choice"


@pytest.mark.parametrize("subset", PRINTED)
def test_the_counts_fit_what_the_authors_print(subset):
    """Of the numbers that fit the batches and the accuracies, ours is the only multiple of 500."""
    batches, *accuracies = PRINTED[subset]
    fitting = []
    for n in range(64 * (batches - 1) + 1, 64 * batches + 1):
        possible = {f"{100 * right / n:.2f}" for right in range(n + 1)}
        if all(f"{accuracy:.2f}" in possible for accuracy in accuracies):
            fitting.append(n)
    assert [n for n in fitting if n % 500 == 0] == [COUNTS[subset]]


def test_the_average_of_the_subsets(tmp_path, model):
    for subset in COUNTS:
        write(tmp_path, subset, folder="spec/data")
    benchmarks = load_benchmarks(["spec", "spec-images"], tmp_path)
    figures = evaluate(model, benchmarks, n_boot=20, progress=False)
    accuracy = figures[figures.metric == "accuracy"]
    for group in ("spec", "spec-images"):
        parts = accuracy[accuracy.benchmark.isin(GROUPS[group]) & (accuracy.group == "all")]
        average = accuracy[(accuracy.benchmark == group) & (accuracy.group == "macro")]
        assert len(parts) == 6
        assert average.value.item() == pytest.approx(parts.value.mean())


def test_missing_images_lower_the_coverage(tmp_path):
    write(tmp_path, "count")
    (tmp_path / "spec/count/images/0_3.png").unlink()
    choice = load_benchmark("spec-count", tmp_path)
    selection = load_benchmark("spec-count-images", tmp_path)
    assert choice.present == len(choice) - 1
    assert selection.present == len(selection) - 9  # every caption of the set needs all its images
    assert "images of 9 of 18" in repr(selection)
    assert len(selection.covered()) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(query=None), "no text under 'query'"),
        (dict(keys="a"), "no list of two texts or more under 'keys'"),
        (dict(keys=["a"]), "no list of two texts or more under 'keys'"),
        (dict(keys=["a", ""]), "no list of two texts or more under 'keys'"),
        (dict(label=None), "no number under 'label'"),
        (dict(label=9), "'label' is 9"),
        (dict(label=0.5), "'label' is 0.5"),
        (dict(keys=["a", "a"], label=0), "also among the others"),
    ],
)
@pytest.mark.parametrize("name", ["spec-count", "spec-count-images"])
def test_damaged_entries_are_named(tmp_path, name, change, message):
    lists = write(tmp_path, "count", pictures=False)
    for file, of_file in zip(("image2text.json", "text2image.json"), lists, strict=True):
        of_file[5] |= change
        (tmp_path / "spec/count" / file).write_text(json.dumps(of_file))
    with pytest.raises(CompvlError, match="item 5") as raised:
        load_benchmark(name, tmp_path)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["spec-count", "spec-count-images"])
@pytest.mark.parametrize("column", ["query", "keys", "label"])
def test_every_wrong_column_is_refused_by_name(tmp_path, name, column):
    write(tmp_path / "root", "count", pictures=False)
    file = "text2image.json" if name.endswith("images") else "image2text.json"
    path = with_other_column(tmp_path / "root", f"spec/count/{file}", column, tmp_path / "other")
    with pytest.raises(CompvlError, match=f"{path.name}, item 17: .*'{column}'"):
        load_benchmark(name, tmp_path / "other")


# ---- the task


class Scores:
    """A scorer of given scores, by image."""

    def __init__(self, scores):
        self.scores = scores

    def pairs(self, images, *captions, desc=""):
        """The score of each image."""
        return [np.array([self.scores[image] for image in images])]


def test_image_selection_by_hand():
    benchmark = load_benchmark("spec-count-images", n=3)
    scores = {}
    for item, (own, others) in zip(
        benchmark.items, [(0.5, (0.4,)), (0.5, (0.6,)), (0.5, (0.5,))], strict=True
    ):
        scores[item.image] = own
        scores |= dict(zip(item.other_images, others, strict=True))
    table = TASKS["image-selection"].score(benchmark, Scores(scores))
    assert type(task_of(table)) is type(TASKS["image-selection"])
    assert list(table["rank"]) == [0, 1, 1]
    outcomes = TASKS["image-selection"].outcomes(table)
    assert list(outcomes["accuracy"]) == [True, False, False]
    assert outcomes["ties"].sum() == 1


def test_items_are_kept_and_drawn(tmp_path, model):
    write(tmp_path, "count")
    benchmark = load_benchmark("spec-count-images", tmp_path)
    before = identity(benchmark)
    Image.new("RGB", (8, 8)).save(tmp_path / "spec/count/images/1_8.png")
    assert identity(load_benchmark("spec-count-images", tmp_path)) != before
    first = evaluate(model, [benchmark], n_boot=20, keep=tmp_path / "kept", progress=False)
    again = evaluate(model, [benchmark], n_boot=20, keep=tmp_path / "kept", progress=False)
    pd.testing.assert_frame_equal(first, again)
    scores = item_scores(model, benchmark, progress=False)
    assert len(item_table(benchmark, scores)) == len(benchmark)
    draw_failures(worst(benchmark, scores, 2), 24).savefig(tmp_path / "worst.png")
