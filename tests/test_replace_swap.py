"""REPLACE and SWAP against the real public files: VL-CheckList and the released REPLACE benchmark.

They are looked for in $COMPVL_REAL, else in ../shared/real beside the checkout; without them
these tests are skipped.
"""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from released import REAL

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

COUNTS = {"relations": 16_868, "attributes": 10_575}
AUDIT = Path(__file__).resolve().parents[1] / "data/results/audit_replace.csv"
WRONG_ARTICLE = re.compile(
    r"\b(a (ivory|ebony|emerald|unclouded|upright|ingesting|aged)"
    r"|an (big|tiny|chestnut|crimson|sapphire|large))\b"
)


def real(*parts):
    """Return the path of real material; skip the test if it is absent."""
    path = REAL.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"real material not found: {path} (set COMPVL_REAL)")
    return path


def without_data_folder(items):
    """Return items whose image paths do not start with `data/`, as the builder writes them."""
    return [replace(item, image=item.image.removeprefix("data/")) for item in items]


def normalized(text):
    """Return a text in lower case with single spaces."""
    return " ".join(text.lower().split())


@pytest.fixture(scope="module", params=["relations", "attributes"])
def both(request):
    """(target, items built from VL-CheckList, items read from the released files)."""
    target = request.param
    built = build_replace(real("vl_checklist"), target)
    released_items = read_released_replace(real("hard_positives"), target)
    return target, built, released_items


def test_published_reproduces_the_release(both):
    """The built items are the released items, in the released order."""
    target, built, released_items = both
    assert len(released_items) == COUNTS[target]
    found = agreement(built, released_items)
    print(f"\n{target}: {found}")
    assert found["recovered"] >= 99.9
    assert found["extra"] <= 0.5
    assert found["identical"] == 100
    # Stronger than the tolerances: every string, group and id, in the released order.
    assert without_data_folder(released_items) == built


def test_agreement_sees_damage(both):
    """Missing, additional and changed items lower the agreement."""
    _, built, released_items = both
    assert agreement(built[:-500], released_items)["recovered"] < 99.9
    assert agreement(built + built[:500], released_items)["extra"] > 0.5
    changed = replace(built[0], hard_positive=built[0].hard_positive + " ")
    assert agreement([changed] + built[1:], released_items)["identical"] < 100


def test_released_strings_come_straight_from_the_files(both):
    """Independent of the builder and the reader: the raw JSON equals the items."""
    target, _, released_items = both
    for part, field in (("original", "caption"), ("hard_positive", "hard_positive")):
        raw = json.loads(real("hard_positives", part, f"vl_checklist_{target}.json").read_text())
        raw_strings = [
            (entry["image_path"], entry["true_caption"], entry["false_caption"]) for entry in raw
        ]
        item_strings = [
            (item.image, getattr(item, field), item.hard_negative) for item in released_items
        ]
        assert raw_strings == item_strings


def known_words(items, target):
    """Return the words of the captions, the words of the substitutions, and the articles."""
    words = {"a", "an"}
    for item in items:
        words.update(word.lower() for word in item.caption.split())
    for phrases in substitutions(target).values():
        for phrase in phrases.values():
            words.update(phrase.split())
    return words


def test_corrected(both):
    """Corrected items keep caption, image and group; their texts are intact and differ."""
    target, built, released_items = both
    corrected = correct_replace(built, target)
    built_by_id = {item.id: item for item in built}
    assert 0.9 * len(built) < len(corrected) < len(built)
    assert len({item.id for item in corrected}) == len(corrected)
    known = known_words(built, target)
    for item in corrected:
        before = built_by_id[item.id]
        assert item.caption == before.caption
        assert item.image == before.image
        assert item.group == before.group
        texts = (item.caption, item.hard_negative, item.hard_positive)
        assert len({normalized(text) for text in texts}) == 3, item
        # No word that the substitution tore.
        assert {word.lower() for word in item.hard_positive.split()} <= known, item
        assert drop_reason(*texts) is None
        assert not WRONG_ARTICLE.search(item.hard_positive), item
    # Both sources give the same items, and a second correction changes nothing.
    assert without_data_folder(correct_replace(released_items, target)) == corrected
    assert correct_replace(corrected, target) == corrected


def test_known_damage():
    """Known damage of the published texts is there, and the correction fixes or drops it."""
    relations = build_replace(real("vl_checklist"), "relations")
    attributes = build_replace(real("vl_checklist"), "attributes")
    positives = {item.hard_positive for item in attributes}
    assert "ivory ivoryboard" in positives
    assert "dampsuit ON smiling man" in positives
    assert "plant covecrimson in green leaf" in positives
    assert "wout ofdow out of room" in {item.hard_negative for item in relations}

    corrected = {}
    for item in correct_replace(relations, "relations"):
        corrected[item.id] = item
    for item in correct_replace(attributes, "attributes"):
        corrected[item.id] = item

    def corrected_where(field, text):
        """Return the corrected items (None: dropped) of all items that have this text."""
        items = [item for item in relations + attributes if getattr(item, field) == text]
        return [corrected.get(item.id) for item in items]

    now = corrected_where("hard_negative", "wout ofdow out of room")
    assert {item.hard_negative for item in now} == {"window out of room"}
    now = corrected_where("hard_positive", "ivory ivoryboard")
    assert {item.hard_positive for item in now} == {"ivory whiteboard"}
    now = corrected_where("hard_positive", "dampsuit ON smiling man")
    assert {item.hard_positive for item in now} == {"wetsuit ON happy man"}
    now = corrected_where("hard_positive", "tracks within front of train")
    assert now
    assert not any(now)
    torn = re.compile(r"out of\w|\w+out of")
    for item in corrected.values():
        assert not torn.search(item.hard_negative) or torn.search(item.caption), item


def test_audit_counts(capsys):
    """The audit counts every item, gives each drop a reason, and equals the committed table."""
    table = audit_replace(real("vl_checklist"))
    with capsys.disabled():
        print("\n" + table.drop(columns=["commit", "fidelities"]).to_string(index=False))
    assert table.groupby("target").n.sum().to_dict() == COUNTS
    totals = table.groupby("kind").n.sum()
    assert totals["foil: inside a word"] > 0
    assert totals["positive: inside a word"] > 0
    assert totals["dropped: part of a fixed phrase"] > 0
    # Every drop has a reason.
    assert "dropped: tested phrase has no substitution" not in totals
    assert AUDIT.exists(), (
        "data/results/audit_replace.csv is missing: save_audit(audit_replace(...)) writes it"
    )
    committed = pd.read_csv(AUDIT).drop(columns="commit")
    assert committed.equals(table.drop(columns="commit"))


@pytest.mark.parametrize("target", COUNTS)
def test_released_benchmark_has_the_published_items(target):
    """REPLACE from the released files has the published count; some images are missing."""
    benchmark = load_benchmark(f"replace-{target}", real("hard_positives").parent)
    assert len(benchmark) == COUNTS[target]
    assert benchmark.published_n == COUNTS[target]
    assert benchmark.source == "the released files"
    assert benchmark.coverage < 1
    assert benchmark.missing


def test_samples_of_the_corrected_benchmark():
    """A sample has the size requested, depends on the seed, and has no image here."""
    real("hard_positives")

    def sample(seed):
        return load_benchmark(
            "replace-attributes", REAL, "corrected", source="vl-checklist", n=50, seed=seed
        )

    third = sample(3)
    assert len(third) == 50
    assert third.items != sample(4).items
    assert len(third.covered()) == 0
    assert third.present == 0


def test_every_vl_checklist_file_reads():
    """Each of the seven VL-CheckList files on Visual Genome has over 900 entries."""
    files = sorted(real("vl_checklist").glob("*/vg/*.json"))
    assert len(files) == 7
    for file in files:
        assert len(read_vl_checklist(file)) > 900


def test_truncated_real_image(tmp_path):
    """A truncated image raises an error that names it; its key is not that of the whole image."""
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
    """A file that is not a JSON list raises an error that names the file."""
    file = tmp_path / "spatial.json"
    file.write_text(text)
    with pytest.raises(CompvlError, match="spatial.json"):
        read_vl_checklist(file)


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
    """A damaged entry raises an error that names the file and the entry and says what to do."""
    file = tmp_path / "spatial.json"
    write_json(file, [["a.jpg", {"POS": ["x"], "NEG": ["y"]}], item])
    with pytest.raises(CompvlError, match=r"spatial.json, item 1: .*[Dd]ownload"):
        read_vl_checklist(file)


def aro_entry(first="red", first_object="hat", second="wet", second_object="dog"):
    """Return an entry of ARO's attribution file: two attributes of two objects, exchanged."""
    return dict(
        image_path="1.jpg",
        true_caption=f"the {first} {first_object} and the {second} {second_object}",
        false_caption=f"the {second} {first_object} and the {first} {second_object}",
        bbox_x=0,
        bbox_y=0,
        bbox_w=5,
        bbox_h=5,
        attributes=[first, second],
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
    """A damaged entry raises an error that names the source and the entry."""
    with pytest.raises(CompvlError, match="aro.json, item 1"):
        build_swap([aro_entry(), aro_entry() | change], source="aro.json")


def meaning(caption):
    """Return the attribute-object pairs of a caption, such as {"red hat", "wet dog"}."""
    return frozenset(part.removeprefix("the ") for part in caption.split(" and "))


def test_swap_is_false_and_true_where_it_should_be():
    """`corrected` keeps just the pairings where exchanging the attributes changes the meaning."""
    attributes = ("red", "wet")
    objects = ("hat", "dog")
    pairings = itertools.product(attributes, attributes, objects, objects)
    entries = [
        aro_entry(first, first_object, second, second_object)
        for first, second, first_object, second_object in pairings
    ]
    published = build_swap(entries)
    corrected = build_swap(entries, "corrected")
    assert len(published) == 16
    for item in published:
        assert meaning(item.caption) == meaning(item.hard_positive)
    changed = [item for item in published if meaning(item.hard_negative) != meaning(item.caption)]
    assert {item.id for item in corrected} == {item.id for item in changed}
    assert len(corrected) == 4
    assert audit(published, corrected).n.sum() == 16


def test_items_are_values():
    """Equal items have equal hashes, and an item cannot be changed."""
    item = Triplet("1", "a.jpg", "c", "n", "p", "g")
    assert hash(item) == hash(replace(item))
    assert item != replace(item, hard_positive="q")
    with pytest.raises(AttributeError):
        item.caption = "x"


def write_released(folder, change=None):
    """Write a released REPLACE folder of two items; `change` edits those of the hard positives."""
    for part, text in (("original", "red hat"), ("hard_positive", "crimson hat")):
        items = [
            dict(
                image_id=str(i),
                true_caption=text,
                false_caption="tan hat",
                image_path=f"data/VG_100K/{i}.jpg",
            )
            for i in range(2)
        ]
        if change is not None and part == "hard_positive":
            change(items)
        write_json(folder / part / "vl_checklist_attributes.json", items)
    return folder


def test_released_hard_positives_are_read(tmp_path):
    """The hard positives are the captions of the second file."""
    items = read_released_replace(write_released(tmp_path), "attributes")
    assert [item.hard_positive for item in items] == ["crimson hat"] * 2


def other_false_caption(items):
    """Give the second item another false caption."""
    items[1]["false_caption"] = "pink hat"


def other_image(items):
    """Give the second item another image."""
    items[1]["image_path"] = "data/VG_100K/7.jpg"


def no_true_caption(items):
    """Remove the true caption of the second item."""
    del items[1]["true_caption"]


def no_substitution(items):
    """Make the hard positive of the first item equal to its caption."""
    items[0]["true_caption"] = "red hat"


def one_item_less(items):
    """Remove the last item."""
    items.pop()


@pytest.mark.parametrize(
    "change, message",
    [
        (other_false_caption, "item 1: false_caption.*do not align"),
        (other_image, "item 1: image_path.*do not align"),
        (no_true_caption, "item 1: no text under 'true_caption'.*hard positive"),
        (no_substitution, "item 0.*fixed substitutions"),
        (one_item_less, "must align"),
    ],
)
def test_released_files_that_do_not_align(tmp_path, change, message):
    """Two released files that do not belong together raise an error that says where."""
    folder = write_released(tmp_path, change)
    with pytest.raises(CompvlError, match=message):
        read_released_replace(folder, "attributes")


def test_damaged_released_file(tmp_path):
    """A released file that is not valid JSON raises an error with its path and line."""
    folder = write_released(tmp_path)
    (folder / "original/vl_checklist_attributes.json").write_text('[{"image_id": "1", ')
    message = "original/vl_checklist_attributes.json:1 is not valid JSON"
    with pytest.raises(CompvlError, match=message):
        read_released_replace(folder, "attributes")
