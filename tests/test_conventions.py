"""Published figures beside ours, against transcriptions of the released code.

The transcriptions follow om-ai-lab/VL-CheckList (`vl_checklist/data_loader.py`, `evaluate.py`,
`radar.py`, `corpus.json`) and Heidelberg-NLP/VALSE (`lxmert_valse_eval.py`), on made-up scores. The
figures of HP's `run_eval.py`, SugarCrepe++ and BiVLC are counted by hand.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from released import REAL

from compvl.app import cli
from compvl.benchmarks.bivlc import BIVLC_METRICS
from compvl.benchmarks.items import Benchmark, Pair, Triplet
from compvl.benchmarks.loading import load_benchmark
from compvl.benchmarks.vl_checklist import VL_CHECKLIST
from compvl.core import CompvlError, write_json
from compvl.evaluate.conventions import (
    CONVENTIONS,
    convention_of,
    convention_table,
    published_figures,
)
from compvl.evaluate.engine import evaluate
from compvl.evaluate.tasks import TASKS


def made_up(image, text):
    """A score in 0..1 that depends on the picture's name and the text."""
    digest = hashlib.sha256(f"{Path(str(image)).name}|{text}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


class MadeUp:
    """A scorer of made-up scores, which needs no pictures."""

    def __init__(self, threshold=None):
        self.match_threshold = threshold

    def pairs(self, images, *captions, desc=""):
        """Scores of images with each list of captions."""
        scores = []
        for texts in captions:
            pairs = zip(images, texts, strict=True)
            scores.append(np.array([made_up(image, text) for image, text in pairs]))
        return scores


def published(benchmark, scorer):
    """{(group, metric): (value in percent, n)} of a benchmark's convention."""
    table = TASKS["pair"].score(benchmark, scorer)
    rows = published_figures(benchmark.convention, table, n_boot=50)
    assert (rows.lo <= rows.value + 1e-9).all() and (rows.value <= rows.hi + 1e-9).all()
    keys = zip(rows.group, rows.metric, strict=True)
    return dict(zip(keys, zip(rows.value, rows.n, strict=True), strict=True))


# ---- VL-CheckList


def load_itc_samples(path, exists):
    """`DataLoader.load_itc_samples` of one file."""
    corpus = []
    for x in json.loads(path.read_text()):
        image, texts_dict = x
        if exists(image):
            corpus.append((image, texts_dict["POS"], texts_dict["NEG"]))
    return corpus


def total_acc(data, max_number=2000):
    """The accuracy of one file that `Evaluate.eval` writes for the task `itc`."""
    num_t, num_f = 0, 0
    data = data[: int(max_number / 2)]
    for image, texts_pos, texts_neg in data:
        if made_up(image, texts_pos[0]) > made_up(image, texts_neg[0]):
            num_t += 1
        else:
            num_f += 1
    return float(num_t) / (num_t + num_f), num_t + num_f


def radar_scores(root, corpora, exists=lambda image: True):
    """{kind: (value, entries)} of a part, as `generate_chart` averages."""
    m = {}
    for corpus, groups in corpora.items():
        for kind, files in groups.items():
            m.setdefault(kind, {})[corpus] = files
    found = {}
    for item in m:
        data_score = []
        n = 0
        for data in m[item]:
            score = 0
            for file in m[item][data]:
                acc, count = total_acc(load_itc_samples(root / file, exists))
                score += acc
                n += count
            data_score.append(score / len(m[item][data]))
        found[item] = (sum(data_score) / len(data_score), n)
    return found


def check_checklist(benchmark, want):
    """Compare the figures of a benchmark with those of the transcription."""
    got = published(benchmark, MadeUp())
    assert set(got) == {("published", "accuracy")} | {
        (f"published/{kind}", "accuracy") for kind in want
    }
    for kind, (value, n) in want.items():
        assert got[f"published/{kind}", "accuracy"] == (pytest.approx(100 * value), n)
    mean = np.mean([value for value, _ in want.values()])
    assert got["published", "accuracy"][0] == pytest.approx(100 * mean)


def write_part(root, part):
    """Small files of all corpora of a part; one has more than 1,000 entries, SWiG's three pairs."""
    sizes = iter(range(2, 100))
    for corpus, groups in VL_CHECKLIST[part].items():
        for files in groups.values():
            for file in files:
                n = 1_010 if file.endswith("vg_obj_large.json") else next(sizes)
                pairs = 3 if corpus == "swig" else 1
                entries = []
                for i in range(n):
                    pos = [f"{file} {i} caption {k}" for k in range(pairs)]
                    neg = [f"{file} {i} foil {k}" for k in range(pairs)]
                    entries.append([f"{Path(file).stem}_{i}.jpg", {"POS": pos, "NEG": neg}])
                write_json(root / "vl_checklist" / file, entries)


@pytest.mark.parametrize("part", ["object", "relation", "attribute"])
def test_vl_checklist_as_its_code(tmp_path, part):
    write_part(tmp_path, part)
    benchmark = load_benchmark(f"vl-checklist-{part}", tmp_path)
    want = radar_scores(tmp_path / "vl_checklist", VL_CHECKLIST[part])
    check_checklist(benchmark, want)
    if part == "object":  # entries after the 1,000th, and pairs after the first, are ours alone
        assert sum(n for _, n in want.values()) < len(benchmark) / 1.5
        ours = TASKS["pair"].score(benchmark, MadeUp())
        accuracy = 100 * (ours.s_c > ours.s_f).mean()
        assert abs(published(benchmark, MadeUp())["published", "accuracy"][0] - accuracy) > 0.1


def test_vl_checklist_counts_the_first_entries_that_have_an_image(tmp_path):
    write_part(tmp_path, "object")
    benchmark = load_benchmark("vl-checklist-object", tmp_path)
    there = {item.image for item in benchmark.items if made_up(item.image, "there") > 0.1}
    kept = [item for item in benchmark.items if item.image in there]
    part = Benchmark("x", "pair", kept, "test", convention=benchmark.convention)
    names = {Path(image).name for image in there}
    want = radar_scores(
        tmp_path / "vl_checklist", VL_CHECKLIST["object"], lambda image: image in names
    )
    check_checklist(part, want)


@pytest.mark.skipif(
    not (REAL / "vl_checklist").is_dir(),
    reason=f"{REAL / 'vl_checklist'} (released files, not part of the project) is absent",
)
@pytest.mark.parametrize("part", ["relation", "attribute"])
def test_vl_checklist_on_released_files(part):
    benchmark = load_benchmark(f"vl-checklist-{part}", REAL, source="vg")
    want = radar_scores(REAL / "vl_checklist", {"vg": VL_CHECKLIST[part]["vg"]})
    check_checklist(benchmark, want)
    assert {n for _, n in want.values()} <= {1_000, 941}


# ---- VALSE


def released_valse(scores):
    """The counts of `lxmert_valse_eval.py` on (probability of the caption, of the foil).

    MIT License, Copyright (c) 2022 Letitia Parcalabescu, Michele Cafagna, Lilitta Muradjan, Anette
    Frank, Iacer Calixto, Albert Gatt."""
    count, foil_accuracy, capt_fits, foil_detected, pairwise_acc = 0, 0, 0, 0, 0
    for of_caption, of_foil in scores:
        logits = [np.log(p / (1 - p)) / 2 for p in (of_caption, of_foil)]
        cross_score = [(-logit, logit) for logit in logits]  # no match, match
        if cross_score[1][0] == cross_score[1][1]:
            continue
        if cross_score[0][0] < cross_score[0][1]:
            foil_accuracy += 1
            capt_fits += 1
        if cross_score[1][0] >= cross_score[1][1]:
            foil_detected += 1
            foil_accuracy += 1
        if cross_score[0][1] > cross_score[1][1]:
            pairwise_acc += 1
        count += 1
    return dict(
        acc=foil_accuracy / count * 50,
        p_c=capt_fits / count * 100,
        p_f=foil_detected / count * 100,
        acc_r=pairwise_acc / count * 100,
    ), count


def valse_table(scores, threshold=0.5):
    """A table of scores by item."""
    table = pd.DataFrame(scores, columns=["s_c", "s_f"]).assign(group="")
    return table if threshold is None else table.assign(threshold=threshold)


def test_valse_by_hand():
    scores = [(0.9, 0.1), (0.9, 0.8), (0.2, 0.1), (0.3, 0.4), (0.9, 0.5), (0.5, 0.2)]
    rows = published_figures("valse", valse_table(scores), n_boot=50).set_index("metric")
    # the fifth item is left out; a caption that is exactly undecided does not fit
    assert rows.value.to_dict() == dict(
        acc_r=pytest.approx(80), acc=pytest.approx(60), p_c=40, p_f=80, min_p=40
    )
    assert (rows.n == 5).all()
    assert (rows.group == "published").all()


def test_valse_as_its_script():
    rng = np.random.default_rng(0)
    scores = np.round(rng.uniform(0.05, 0.95, (2_000, 2)), 2)  # so that some are 0.5, and some tie
    assert (scores[:, 1] == 0.5).any() and (scores[:, 0] == scores[:, 1]).any()
    want, count = released_valse(scores.tolist())
    rows = published_figures("valse", valse_table(scores), n_boot=50).set_index("metric")
    for metric, value in want.items():
        assert rows.value[metric] == pytest.approx(value)
        assert rows.n[metric] == count < 2_000
    assert rows.value["min_p"] == pytest.approx(min(want["p_c"], want["p_f"]))


def test_valse_of_two_towers_has_the_pairwise_accuracy_alone():
    scores = [(0.3, 0.1), (0.2, 0.25), (0.1, 0.1)]
    rows = published_figures("valse", valse_table(scores, None), n_boot=50)
    assert list(rows.metric) == ["acc_r"]
    assert rows.value[0] == pytest.approx(100 / 3)


class Head:
    """A `PairScorer` of made-up probabilities."""

    name = "head"
    device = torch.device("cpu")
    image_size = 8
    match_threshold = 0.5

    def fingerprint(self):
        """A fixed identity."""
        return "head"

    def truncated(self, captions):
        """No caption is cut."""
        return [False] * len(captions)

    def score(self, images, captions):
        """A number for each caption."""
        return torch.tensor([made_up("", caption) for caption in captions])


@pytest.mark.parametrize("convention", ["", "valse"])
def test_published_figures_stand_beside_ours(convention):
    picture = Image.new("RGB", (8, 8))
    items = [Pair(f"{i}", StillImage(picture), f"caption {i}", f"foil {i}") for i in range(40)]
    benchmark = Benchmark("valse-test", "pair", items, "test", convention=convention)
    rows = evaluate(Head(), [benchmark], n_boot=50, progress=False)
    beside = rows[rows.group == "published"]
    ours = rows[(rows.group == "all") & (rows.metric == "accuracy")].value.item()
    if not convention:
        assert beside.empty
        return
    assert list(beside.metric) == ["acc_r", "acc", "p_c", "p_f", "min_p"]
    assert beside.set_index("metric").value["acc_r"] == pytest.approx(ours)


class StillImage:
    """A picture that opens as itself."""

    def __init__(self, picture):
        self.picture = picture

    def render(self, size=None):
        """The picture."""
        return self.picture


# ---- HP's run_eval.py, SugarCrepe++ and BiVLC


ORDERS = [" > ".join(order) for order in itertools.permutations("cnp")]


def triplets_in_order(order, n):
    """n triplets whose scores fall in an order such as `c > p > n`."""
    scores = dict(zip(order.split(" > "), (0.9, 0.5, 0.1), strict=True))
    return [(scores["c"], scores["n"], scores["p"])] * n


def triplet_table(scores):
    """A table of scores by item."""
    return pd.DataFrame(scores, columns=["s_c", "s_n", "s_p"]).assign(group="")


def test_each_order_of_a_triplet_has_its_own_figure():
    """One to six triplets in the six orders: a figure cannot stand in another's place."""
    counts = {order: k + 1 for k, order in enumerate(ORDERS)}
    scores = [(0.5, 0.5, 0.1), (0.9, 0.1, 0.1), (0.3, 0.3, 0.3)]  # the hard negative ties
    for order, n in counts.items():
        scores += triplets_in_order(order, n)
    table = triplet_table(scores)
    rows = published_figures("hp-run-eval", table, n_boot=50).set_index("metric")
    assert len(table) == 24
    for order, n in counts.items():
        assert rows.value[order] == pytest.approx(100 * n / 24), order
        assert rows.lo[order] <= rows.value[order] <= rows.hi[order]
    assert rows.value["tied"] == pytest.approx(100 * 3 / 24)
    assert rows.value["gap_cp"] == pytest.approx((table.s_c - table.s_p).abs().mean())
    assert set(rows.index) == {*ORDERS, "tied", "gap_cp"}
    assert (rows.n == 24).all()
    assert (rows.group == "published").all()


def printed_by_run_eval(scores):
    """The five numbers that HP's script prints, one item at a time; of ties in c and p as well."""
    printed = dict(below=0, c_down=0, p_down=0, above=0, tied=0)
    for c, n, p in scores:
        printed["below"] += n < p and n < c  # the hard negative is below both
        printed["c_down"] += c > n and n > p
        printed["p_down"] += p > n and n > c
        printed["above"] += n > p and n > c
        printed["tied"] += n in (c, p)
    return printed


def test_orders_add_up_to_what_run_eval_prints():
    scores = np.random.default_rng(0).integers(0, 5, (3_000, 3)) / 4  # all kinds of ties
    rows = published_figures("hp-run-eval", triplet_table(scores), n_boot=50)
    percent = rows.set_index("metric").value
    parts = dict(
        below=("c > p > n", "p > c > n"),
        c_down=("c > n > p",),
        p_down=("p > n > c",),
        above=("n > c > p", "n > p > c"),
        tied=("tied",),
    )
    printed = printed_by_run_eval(scores.tolist())
    for name, orders in parts.items():
        assert printed[name] > 100
        assert percent[list(orders)].sum() == pytest.approx(100 * printed[name] / 3_000), name
    assert percent[[*ORDERS, "tied"]].sum() == pytest.approx(100)


def test_sugarcrepe_pp_by_hand():
    table = triplet_table([(3, 1, 2), (3, 2, 1), (1, 2, 3), (1, 3, 2), (2, 2, 3)])
    names = ["image_to_text", "image_p1_neg", "image_p2_neg"]
    rows = published_figures("sugarcrepe-pp", table, n_boot=50).set_index("metric")
    assert rows.value.to_dict() == dict(zip(names, (20, 40, 60), strict=True))
    texts = pd.DataFrame(dict(t_cp=[3, 2, 3, 1], t_cn=[2, 3, 1, 1], t_pn=[1, 1, 4, 0]))
    rows = published_figures("sugarcrepe-pp", texts, n_boot=50).set_index("metric")
    assert rows.value.to_dict() == dict(text_only=25)


def test_a_text_encoder_alone_has_no_orders():
    texts = pd.DataFrame(dict(t_cp=[3.0], t_cn=[2.0], t_pn=[1.0]))
    assert published_figures("hp-run-eval", texts).empty
    assert published_figures("bivlc", texts).empty


def test_bivlc_has_its_names_and_types_of_foil():
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(90, 4)))
    table.columns = ["s_00", "s_01", "s_10", "s_11"]
    table["group"] = ["replace", "swap", "add"] * 30
    ours = TASKS["square"].outcomes(table)
    rows = published_figures("bivlc", table, n_boot=50).set_index(["group", "metric"])
    assert len(rows) == 4 * 7
    for name, metric in BIVLC_METRICS.items():
        assert rows.value["published", name] == pytest.approx(100 * ours[metric].mean())
        of_swap = ours[metric][table.group == "swap"]
        assert rows.value["published/swap", name] == pytest.approx(100 * of_swap.mean())
        assert rows.n["published/swap", name] == 30
    assert len(set(rows.value["published"])) == 7  # none stands in another's place


def write_replace(root, n):
    """n items of REPLACE in the released form, with pictures of noise."""
    rng = np.random.default_rng(0)
    (root / "VG_100K").mkdir(parents=True)
    originals = []
    positives = []
    for k in range(n):
        pixels = rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"VG_100K/{k}.png")
        item = dict(image_id=str(k), image_path=f"data/VG_100K/{k}.png")
        item["false_caption"] = f"red star {k} far from blue box"
        originals.append(item | dict(true_caption=f"red star {k} near blue box"))
        positives.append(item | dict(true_caption=f"red star {k} next to blue box"))
    for part, items in (("original", originals), ("hard_positive", positives)):
        path = root / "hard_positives" / part / "vl_checklist_relations.json"
        path.parent.mkdir(parents=True)
        write_json(path, items)


def test_orders_are_in_what_the_command_writes(tmp_path, monkeypatch, capsys):
    """In the CSV, in the JSON and in the report, as counted from the scores of the items."""
    write_replace(tmp_path / "root", 30)
    command = ["compvl", "evaluate", "--model", "micro-clip", "--benchmark", "replace-relations"]
    command += ["--root", tmp_path / "root", "--no-cache", "--device", "cpu", "--json"]
    command += ["--csv", tmp_path / "t.csv", "--items", tmp_path, "--report", tmp_path / "r.html"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code
    items = pd.read_csv(tmp_path / "micro-clip/replace-relations.csv")
    scores = items[["s_c", "s_n", "s_p"]].rename(columns=lambda name: name[-1])
    orders = scores.apply(lambda row: " > ".join(row.sort_values(ascending=False).index), axis=1)
    assert orders.nunique() > 1
    table = pd.read_csv(tmp_path / "t.csv")
    found = table[table.group == "published"].set_index("metric").value
    records = json.loads(capsys.readouterr().out)["figures"]
    in_json = {row["metric"]: row["value"] for row in records if row["group"] == "published"}
    page = (tmp_path / "r.html").read_text()
    for order in ORDERS:
        assert found[order] == pytest.approx(100 * (orders == order).mean())
        shown = f"published: {order}".replace(">", "&gt;")
        assert f"{shown}</th><td>{found[order]:.1f} <small>" in page
    gap = (items.s_c - items.s_p).abs().mean()
    assert found["gap_cp"] == pytest.approx(gap, abs=1e-6)
    assert f"published: mean |s(c) − s(c_p)|</th><td>{found['gap_cp']:.4f} <small>" in page
    assert in_json == pytest.approx(found.to_dict())


# ---- by name


def test_a_convention_is_of_released_files_alone():
    for name in ("replace-relations", "swap", "sugarcrepe-pp-swap-obj", "bivlc"):
        in_micro = load_benchmark(name, n=4)
        assert convention_of(in_micro) == ""
        rows = evaluate(Head(), in_micro, n_boot=10, progress=False)
        assert not rows.group.str.startswith("published").any()
    items = [Triplet("0", "0.jpg", "a", "b", "c")]
    released = Benchmark("swap", "triplet", items, "VG", published_n=28_748)
    assert convention_of(released) == "hp-run-eval"
    assert convention_of(Benchmark("swap", "triplet", items, "mine")) == ""
    assert convention_of(Benchmark("bivlc", "square", [], "BiVLC", published_n=1)) == "bivlc"
    assert convention_of(Benchmark("valse-x", "pair", [], "V", convention="valse")) == "valse"
    assert convention_of(Benchmark("mine", "triplet", items, "mine")) == ""


def test_every_convention_is_registered_by_a_benchmark_and_known():
    table = convention_table()
    assert set(table.ours) == {convention.ours for convention in CONVENTIONS.values()}
    assert {"vl-checklist-object", "valse-actant-swap"} <= set(table.benchmark)
    with pytest.raises(CompvlError, match="Unknown convention 'valze'"):
        published_figures("valze", valse_table([(1, 0)]))


def test_the_microworld_has_our_figures_alone():
    assert load_benchmark("vl-checklist-relation", n=2).convention == ""
