"""compvl.benchmarks.replace_swap against the real public files: VL-CheckList and the released REPLACE benchmark.

They are looked for in $COMPVL_REAL, else in ../shared/real beside the checkout; without them these tests are skipped."""

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from compvl.benchmarks.files import read_vl_checklist
from compvl.benchmarks.items import Triplet
from compvl.benchmarks.loading import load_benchmark
from compvl.benchmarks.replace import build_replace, read_released_replace
from compvl.benchmarks.replace_audit import agreement, audit, audit_replace
from compvl.benchmarks.replace_corrected import correct_replace, drop_reason
from compvl.benchmarks.replace_rules import substitutions
from compvl.benchmarks.swap import build_swap
from compvl.core import CompvlError, write_json
from compvl.images import image_key, open_image

REAL = Path(os.environ.get("COMPVL_REAL") or Path(__file__).resolve().parents[2] / "shared/real")
COUNTS = {"relations": 16_868, "attributes": 10_575}


def real(*parts):
    path = REAL.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"real material not found: {path} (set COMPVL_REAL)")
    return path


@pytest.fixture(scope="module", params=["relations", "attributes"])
def both(request):
    "(target, built from VL-CheckList, read from the released files)"
    target = request.param
    return (
        target,
        build_replace(real("vl_checklist"), target),
        read_released_replace(real("hard_positives"), target),
    )


def test_published_reproduces_the_release(both):
    target, built, released = both
    assert len(released) == COUNTS[target]
    found = agreement(built, released)
    print(f"\n{target}: {found}")
    assert found["recovered"] >= 99.9 and found["extra"] <= 0.5 and found["identical"] == 100
    # stronger than the tolerances: every string, group and id, in the released order
    assert [replace(t, image=t.image.removeprefix("data/")) for t in released] == built


def test_agreement_sees_damage(both):
    target, built, released = both
    assert agreement(built[:-500], released)["recovered"] < 99.9
    assert agreement(built + built[:500], released)["extra"] > 0.5
    assert (
        agreement(
            [replace(built[0], hard_positive=built[0].hard_positive + " ")] + built[1:], released
        )["identical"]
        < 100
    )


def test_released_strings_come_straight_from_the_files(both):
    "Independent of the builder and the reader: the raw JSON against the items."
    import json

    target, built, released = both
    for part, field in (("original", "caption"), ("hard_positive", "hard_positive")):
        raw = json.loads(real("hard_positives", part, f"vl_checklist_{target}.json").read_text())
        assert [(r["image_path"], r["true_caption"], r["false_caption"]) for r in raw] == [
            (t.image, getattr(t, field), t.hard_negative) for t in released
        ]


def test_corrected(both):
    target, built, released = both
    fixed = correct_replace(built, target)
    was = {t.id: t for t in built}
    assert 0.9 * len(built) < len(fixed) < len(built) and len({t.id for t in fixed}) == len(fixed)
    words = Counter(w.lower() for t in built for w in t.caption.split())
    known = (
        set(words)
        | {w for s in substitutions(target).values() for p in s.values() for w in p.split()}
        | {"a", "an"}
    )
    for t in fixed:
        assert (
            t.caption == was[t.id].caption
            and t.image == was[t.id].image
            and t.group == was[t.id].group
        )
        assert (
            len(
                {" ".join(x.lower().split()) for x in (t.caption, t.hard_negative, t.hard_positive)}
            )
            == 3
        ), t
        assert {w.lower() for w in t.hard_positive.split()} <= known, (
            t
        )  # no word that the substitution tore
        assert drop_reason(t.caption, t.hard_negative, t.hard_positive) is None
        assert not re.search(
            r"\b(a (ivory|ebony|emerald|unclouded|upright|ingesting|aged)|an (big|tiny|chestnut|crimson|sapphire|large))\b",
            t.hard_positive,
        ), t
    # both sources give the same, and correcting twice changes nothing
    assert [
        replace(t, image=t.image.removeprefix("data/")) for t in correct_replace(released, target)
    ] == fixed
    assert correct_replace(fixed, target) == fixed


def test_known_damage():
    relations, attributes = (build_replace(real("vl_checklist"), t) for t in COUNTS)
    texts = {t.hard_positive for t in attributes}
    assert {
        "ivory ivoryboard",
        "dampsuit ON smiling man",
        "plant covecrimson in green leaf",
    } <= texts
    assert "wout ofdow out of room" in {t.hard_negative for t in relations}
    fixed = {
        t.id: t
        for t in correct_replace(relations, "relations") + correct_replace(attributes, "attributes")
    }

    def now(**texts):
        return [
            fixed.get(t.id)
            for t in relations + attributes
            if all(getattr(t, k) == v for k, v in texts.items())
        ]

    assert {t.hard_negative for t in now(hard_negative="wout ofdow out of room")} == {
        "window out of room"
    }
    assert {t.hard_positive for t in now(hard_positive="ivory ivoryboard")} == {"ivory whiteboard"}
    assert {t.hard_positive for t in now(hard_positive="dampsuit ON smiling man")} == {
        "wetsuit ON happy man"
    }
    assert now(hard_positive="tracks within front of train") and not any(
        now(hard_positive="tracks within front of train")
    )
    torn = re.compile(r"out of\w|\w+out of")
    assert not [
        t for t in fixed.values() if torn.search(t.hard_negative) and not torn.search(t.caption)
    ]


def test_audit_counts(capsys):
    table = audit_replace(real("vl_checklist"))
    with capsys.disabled():
        print("\n" + table.drop(columns=["commit", "fidelities"]).to_string(index=False))
    assert table.groupby("target").n.sum().to_dict() == COUNTS
    totals = table.groupby("kind").n.sum()
    assert (
        totals["foil: inside a word"] > 0
        and totals["positive: inside a word"] > 0
        and totals["dropped: part of a fixed phrase"] > 0
    )
    assert "dropped: tested phrase has no substitution" not in totals  # every drop has a reason
    committed = Path(__file__).resolve().parents[1] / "data/results/audit_replace.csv"
    import pandas as pd

    assert committed.exists(), (
        "data/results/audit_replace.csv is missing: save_audit(audit_replace(...)) writes it"
    )
    assert pd.read_csv(committed).drop(columns="commit").equals(table.drop(columns="commit"))


def test_load_benchmark_real():
    for target, n in COUNTS.items():
        b = load_benchmark(f"replace-{target}", real("hard_positives").parent)
        assert (
            len(b) == b.published_n == n
            and b.source == "the released files"
            and b.coverage < 1
            and b.missing
        )

    def part(seed):
        return load_benchmark(
            "replace-attributes", REAL, "corrected", source="vl-checklist", n=50, seed=seed
        )

    assert len(part(3)) == 50 and part(3).items != part(4).items
    assert len(part(3).covered()) == part(3).present == 0


def test_every_vl_checklist_file_reads():
    files = sorted(real("vl_checklist").glob("*/vg/*.json"))
    assert len(files) == 7 and all(len(read_vl_checklist(f)) > 900 for f in files)


def test_truncated_real_image(tmp_path):
    photo = sorted(real("coco128").glob("*.jpg"))[0]
    assert open_image(photo).mode == "RGB"
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(photo.read_bytes()[:3000])
    with pytest.raises(CompvlError, match="cut.jpg.*truncated"):
        open_image(cut)
    assert image_key(cut) != image_key(photo)


# Faults and behaviour that need no real material


@pytest.mark.parametrize("text", ['[["a.jpg", {"POS": ["x"]', "", "nonsense", "{}", "null"])
def test_malformed_vl_checklist(tmp_path, text):
    f = tmp_path / "spatial.json"
    f.write_text(text)
    with pytest.raises(CompvlError, match="spatial.json"):
        read_vl_checklist(f)


@pytest.mark.parametrize(
    "item",
    [
        None,
        3,
        [],
        ["a.jpg"],
        ["a.jpg", {"POS": ["x"]}],
        ["a.jpg", {"POS": ["x"], "NEG": []}],
        ["a.jpg", {"POS": ["x"], "NEG": [None]}],
        ["a.jpg", {"POS": [" "], "NEG": ["y"]}],
        [5, {"POS": ["x"], "NEG": ["y"]}],
        ["a.jpg", ["x", "y"]],
    ],
)
def test_damaged_vl_checklist_item(tmp_path, item):
    f = tmp_path / "spatial.json"
    write_json(f, [["a.jpg", {"POS": ["x"], "NEG": ["y"]}], item])
    with pytest.raises(CompvlError, match=r"spatial.json, item 1: .*[Dd]ownload"):
        read_vl_checklist(f)


def aro(a1="red", o1="hat", a2="wet", o2="dog", **change):
    return (
        dict(
            image_path="1.jpg",
            true_caption=f"the {a1} {o1} and the {a2} {o2}",
            false_caption=f"the {a2} {o1} and the {a1} {o2}",
            bbox_x=0,
            bbox_y=0,
            bbox_w=5,
            bbox_h=5,
            attributes=[a1, a2],
        )
        | change
    )


@pytest.mark.parametrize(
    "change",
    [
        dict(true_caption=None),
        dict(true_caption="a hat"),
        dict(false_caption=3),
        dict(bbox_h="5"),
        dict(image_path=None),
    ],
)
def test_damaged_swap_entry(change):
    with pytest.raises(CompvlError, match="aro.json, item 1"):
        build_swap([aro(), aro(**change)], source="aro.json")


def test_swap_is_false_and_true_where_it_should_be():
    "Of all pairings of two attributes and two objects, corrected keeps just those where exchanging the attributes changes the meaning."
    entries = [
        aro(a1, o1, a2, o2)
        for a1 in ("red", "wet")
        for a2 in ("red", "wet")
        for o1 in ("hat", "dog")
        for o2 in ("hat", "dog")
    ]
    meaning = lambda t: frozenset(c.removeprefix("the ") for c in t.split(" and "))
    published, corrected = build_swap(entries), build_swap(entries, "corrected")
    assert len(published) == 16 and all(
        meaning(t.caption) == meaning(t.hard_positive) for t in published
    )
    assert {t.id for t in corrected} == {
        t.id for t in published if meaning(t.hard_negative) != meaning(t.caption)
    } and len(corrected) == 4
    assert audit(published, corrected).n.sum() == 16


def test_items_are_values():
    t = Triplet("1", "a.jpg", "c", "n", "p", "g")
    assert hash(t) == hash(replace(t)) and t != replace(t, hard_positive="q")
    with pytest.raises(AttributeError):
        t.caption = "x"


def released(folder, *changes):
    "A released REPLACE folder of two items, each file changed by a function."
    for part, text, change in zip(
        ("original", "hard_positive"), ("red hat", "crimson hat"), changes
    ):
        items = [
            dict(
                image_id=str(i),
                true_caption=text,
                false_caption="tan hat",
                image_path=f"data/VG_100K/{i}.jpg",
            )
            for i in range(2)
        ]
        change(items)
        write_json(folder / part / "vl_checklist_attributes.json", items)
    return folder


def test_released_alignment(tmp_path):
    same = lambda items: None
    assert [
        t.hard_positive for t in read_released_replace(released(tmp_path, same, same), "attributes")
    ] == ["crimson hat"] * 2
    cases = [
        (lambda x: x[1].update(false_caption="pink hat"), "item 1: false_caption.*do not align"),
        (
            lambda x: x[1].update(image_path="data/VG_100K/7.jpg"),
            "item 1: image_path.*do not align",
        ),
        (lambda x: x[1].pop("true_caption"), "item 1: no text under 'true_caption'.*hard positive"),
        (lambda x: x[0].update(true_caption="red hat"), "item 0.*fixed substitutions"),
        (lambda x: x.pop(), "must align"),
    ]
    for change, message in cases:
        with pytest.raises(CompvlError, match=message):
            read_released_replace(released(tmp_path, same, change), "attributes")
    (tmp_path / "original/vl_checklist_attributes.json").write_text('[{"image_id": "1", ')
    with pytest.raises(
        CompvlError, match="original/vl_checklist_attributes.json:1 is not valid JSON"
    ):
        read_released_replace(tmp_path, "attributes")
