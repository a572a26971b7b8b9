"""What the notebook of the composition benchmarks cannot show.

Real released files and their published counts, other people's code as the reference, packed data
sets, and damaged files.
"""

import json
import os
import pickle
import random
import re
import sys
import types
import warnings
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from released import REAL

from compvl.benchmarks import order, retrieval
from compvl.benchmarks.items import Pair
from compvl.benchmarks.loading import REGISTRY, CountWarning, load_benchmark
from compvl.benchmarks.registry import Request, locate
from compvl.benchmarks.valse import read_valse
from compvl.benchmarks.vl_checklist import VL_CHECKLIST
from compvl.benchmarks.winoground import compositional_ids
from compvl.core import CompvlError, write_json
from compvl.downloads import DATASETS, status
from compvl.evaluate.engine import evaluate
from compvl.images import image_key, open_image
from compvl.models.clip import create_model

VALSE_COUNTS = {
    "existence": 505,
    "plurals": 851,
    "counting-hard": 868,
    "counting-small-quant": 900,
    "counting-adversarial": 691,
    "action-replacement": 648,
    "actant-swap": 949,
    "relations": 535,
    "coreference-standard": 708,
    "coreference-hard": 104,
    "foil-it": 943,
}


def real(folder):
    """Return a mark that skips a test where a folder of released files is absent."""
    return pytest.mark.skipif(
        not (REAL / folder).is_dir(),
        reason=f"{REAL / folder} (released files, not part of the project) is absent",
    )


def load(name, root=REAL, **kwargs):
    """Read the files of a benchmark."""
    return REGISTRY[name].files(Request(name, root, **kwargs))


# --- real files ---


@real("sugarcrepe")
def test_sugarcrepe_has_the_published_items():
    """SugarCrepe has seven subsets with the published counts; the first item is as released."""
    names = [
        name
        for name in REGISTRY
        if name.startswith("sugarcrepe-") and not name.startswith("sugarcrepe-pp-")
    ]
    counts = {name: len(load(name).items) for name in names}
    assert len(names) == 7
    assert sum(counts.values()) == 7_511
    for name, count in counts.items():
        assert REGISTRY[name].published_n == count
    swaps = {name: load(f"sugarcrepe-swap-{name}").items for name in ("obj", "att")}
    groups = {name: Counter(item.group for item in items) for name, items in swaps.items()}
    assert groups["obj"] == {"same words": 164, "other words": 81}
    assert groups["att"] == {"same words": 408, "other words": 258}
    first = swaps["att"][0]
    assert first.image == "000000565045.jpg"
    assert first.caption == "Blue bathroom with two white towels hanging by the shower."
    assert first.foil == "White bathroom with two blue towels hanging by the shower."


@real("valse")
@pytest.mark.parametrize("piece, n", VALSE_COUNTS.items())
def test_valse_has_the_published_valid_items(piece, n):
    """Each piece of VALSE has the published count of valid items; its file has more."""
    items = load(f"valse-{piece}").items
    assert len(items) == n
    assert REGISTRY[f"valse-{piece}"].published_n == n
    assert len({item.id for item in items}) == n
    assert len(read_valse(REAL / f"valse/{piece}.json", "x", valid_only=False)) > n


@real("comvg")
def test_comvg_has_the_published_items():
    """ComVG has the published count of each group, and the ids differ."""
    items = load("comvg").items
    assert len(items) == 5_400
    groups = Counter(item.group for item in items)
    assert groups == dict(object=2_584, subject=1_536, verb=1_280)
    assert len({item.id for item in items}) == 5_400


@real("vl_checklist")
def test_vl_checklist_visual_genome_part():
    """The Visual Genome part has the published counts, with captions equal to their foils."""
    relation = load("vl-checklist-relation", source="vg").items
    attribute = load("vl-checklist-attribute", source="vg").items
    relation_groups = Counter(item.group for item in relation)
    assert relation_groups == {"vg/spatial": 30_650, "vg/action": 12_733}
    assert Counter(item.group for item in attribute) == {
        "vg/color": 11_569,
        "vg/material": 2_470,
        "vg/size": 2_695,
        "vg/state": 941,
        "vg/action": 1_892,
    }
    assert len({item.id for item in relation}) == len(relation)
    assert any(item.caption == item.foil for item in relation + attribute)


@real("vl_checklist")
@pytest.mark.parametrize(
    "part, lost, whole",
    [
        (
            "relation",
            ["Relation/hake_action.json", "Relation/swig_action.json"],
            "source='vg' is complete",
        ),
        ("attribute", ["Attribute/vaw/color.json"], "source='vg' is complete"),
        (
            "object",
            [
                "Object/Location/swig_location/swig_agent/swig_agent_center.json",
                "Object/Size/vg_size/vg_subj_small.json",
            ],
            "data status",
        ),
    ],
)
def test_vl_checklist_names_what_is_missing(part, lost, whole):
    """The error names the missing files and what is complete, not the files that are there."""
    with pytest.raises(CompvlError) as error:
        load(f"vl-checklist-{part}")
    message = str(error.value)
    for expected in (*lost, whole):
        assert expected in message
    assert "vg/spatial" not in message


@real("winoground")
def test_winoground_ids_are_those_without_a_tag():
    """The compositional items of Winoground are the 172 items without a tag."""
    tags = json.loads((REAL / "winoground/new_tag_assignments.json").read_text())
    without_tag = {int(key) for key, value in tags.items() if not value}
    assert compositional_ids() == without_tag
    assert len(compositional_ids()) == 172


@real("valse")
def test_declared_sizes_and_checksums_are_those_of_the_released_files():
    """The released files pass verification; VL-CheckList is reported as incomplete."""
    names = ["sugarcrepe", "valse", "comvg", "hard-positives"]
    rows = status(REAL, names, verify=True).set_index("name")
    assert (rows.state == "present").all(), rows.problem.to_dict()
    vl_checklist = status(REAL, ["vl-checklist"], verify=True).iloc[0]
    assert vl_checklist.state == "incomplete"
    assert vl_checklist.found == 7
    assert vl_checklist.needed == 56


# --- ARO's reorderings, against its code ---


class TextShuffler:
    """The four functions of ARO's dataset_zoo/perturbations.py (MIT), with toy taggers."""

    def __init__(self, tag, words):
        self.tag = tag
        self.words = words

    def nouns_and_adj(self, ex):
        doc = self.tag(ex)
        text = np.array([t for t, _ in doc])
        noun_idx = [i for i, (_, t) in enumerate(doc) if t in ["NN", "NNS", "NNP", "NNPS"]]
        adjective_idx = [i for i, (_, t) in enumerate(doc) if t in ["JJ", "JJR", "JJS"]]
        text[noun_idx] = np.random.permutation(text[noun_idx])
        text[adjective_idx] = np.random.permutation(text[adjective_idx])
        return " ".join(text)

    def allbut_nouns_and_adj(self, ex):
        doc = self.tag(ex)
        text = np.array([t for t, _ in doc])
        else_idx = np.ones(text.shape[0])
        else_idx[
            [
                i
                for i, (_, t) in enumerate(doc)
                if t in ["NN", "NNS", "NNP", "NNPS", "JJ", "JJR", "JJS"]
            ]
        ] = 0
        else_idx = else_idx.astype(bool)
        text[else_idx] = np.random.permutation(text[else_idx])
        return " ".join(text)

    def trigrams(self, sentence):
        trigrams = []
        trigram = []
        for i in range(len(sentence)):
            trigram.append(sentence[i])
            if i % 3 == 2:
                trigrams.append(trigram[:])
                trigram = []
        return trigrams + [trigram] if trigram else trigrams

    def within_trigrams(self, ex):
        trigrams = self.trigrams(self.words(ex))
        for t in trigrams:
            random.shuffle(t)
        return " ".join(" ".join(t) for t in trigrams)

    def across_trigrams(self, ex):
        trigrams = self.trigrams(self.words(ex))
        random.shuffle(trigrams)
        return " ".join(" ".join(t) for t in trigrams)


WORDS = dict(
    dog="NN",
    dogs="NNS",
    Paris="NNP",
    mat="NN",
    boy="NN",
    red="JJ",
    wet="JJ",
    bigger="JJR",
    best="JJS",
)


def toy_words(text):
    """Split a text into words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", text)


def toy_tag(text):
    """Return (word, tag) of each word; a word that is not in `WORDS` is a preposition."""
    return [(word, WORDS.get(word, "IN")) for word in toy_words(text)]


def toy_tagger(texts):
    """Tag each text."""
    return map(toy_tag, texts)


@pytest.mark.parametrize("seed", [1, 7])
def test_reorderings_are_those_of_the_authors_code(seed):
    """From the same seed, the four reorderings are those of ARO's code."""
    rng = random.Random(0)
    vocabulary = [*WORDS, "a", "the", "on", "sits", "near", ","]
    captions = []
    for _ in range(200):
        words = rng.choices(vocabulary, k=rng.randrange(1, 14))
        captions.append(" ".join(words) + ".")
    random.seed(seed)
    np.random.seed(seed)
    theirs = TextShuffler(toy_tag, toy_words)
    expected = []
    for caption in captions:
        reordered = (
            theirs.nouns_and_adj(caption),
            theirs.allbut_nouns_and_adj(caption),
            theirs.within_trigrams(caption),
            theirs.across_trigrams(caption),
        )
        expected.append(reordered)
    assert order.shuffle_captions(captions, toy_tagger, toy_words, seed) == expected


def captions_of(n):
    """Return `n` captions of an image."""
    return [f"A red dog sits on a wet mat near boy {i}." for i in range(n)]


def write_coco_captions(root):
    """Write the captions of two images, as ARO and as Karpathy release them."""
    aro = [dict(image=f"val2014/{i}.jpg", caption=captions_of(5)) for i in range(2)]
    write_json(root / "aro/coco_karpathy_test.json", aro)
    images = []
    for i in range(2):
        sentences = [dict(raw=caption) for caption in captions_of(5)]
        image = dict(filepath="val2014", filename=f"{i}.jpg", split="test", sentences=sentences)
        images.append(image)
    write_json(root / "karpathy/dataset_coco.json", dict(images=images))


def test_coco_order_from_either_file(tmp_path, monkeypatch):
    """ARO's file and Karpathy's file give the same items, and the latter alone is enough."""
    monkeypatch.setattr(retrieval, "spacy_tagger", toy_tagger)
    monkeypatch.setattr(retrieval, "nltk_words", toy_words)
    write_coco_captions(tmp_path)
    aro = load("aro-coco-order", tmp_path).items
    karpathy = load("aro-coco-order", tmp_path, source="karpathy").items
    assert aro == karpathy
    assert karpathy == load("aro-coco-order", tmp_path).items
    assert len(aro) == 10
    for item in aro:
        assert len(item.foils) == 4
    assert aro[0].caption == "a red dog sits on a wet mat near boy 0"
    (tmp_path / "aro/coco_karpathy_test.json").unlink()
    assert load("aro-coco-order", tmp_path).items == karpathy
    assert len(load("coco-retrieval", tmp_path).items) == 2


def test_order_says_which_tool_is_missing(tmp_path, monkeypatch):
    """The error names the command that installs a missing tagger, tokenizer or package."""
    item = dict(image="flickr30k-images/1.jpg", caption=captions_of(5))
    write_json(tmp_path / "aro/flickr30k_test.json", [item])

    def load_model(*args, **kwargs):
        raise OSError("[E050] Can't find model 'en_core_web_sm'")

    def word_tokenize(text):
        raise LookupError("Resource punkt_tab not found.")

    monkeypatch.setitem(sys.modules, "spacy", types.SimpleNamespace(load=load_model))
    with pytest.raises(CompvlError, match="spacy download en_core_web_sm"):
        load("aro-flickr30k-order", tmp_path)
    monkeypatch.setattr(retrieval, "spacy_tagger", toy_tagger)
    monkeypatch.setitem(sys.modules, "nltk", types.SimpleNamespace(word_tokenize=word_tokenize))
    with pytest.raises(CompvlError, match="nltk.downloader punkt_tab"):
        load("aro-flickr30k-order", tmp_path)
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(CompvlError, match=r"compvl\[text\]"):
        load("aro-flickr30k-order", tmp_path)


# --- data sets packed into few files ---


def test_cifar_pictures_are_read_lazily_and_known_by_the_file(tmp_path, monkeypatch):
    """CIFAR-10 is verified, read image by image, and keyed by its file; damage is reported."""
    import torchvision.datasets as tv

    folder = tmp_path / "torchvision/cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = np.arange(3 * 3072, dtype=np.int64).reshape(3, 3072).astype(np.uint8)
    (folder / "test_batch").write_bytes(pickle.dumps(dict(data=pixels, labels=[3, 0, 9])))
    (folder / "batches.meta").write_bytes(
        pickle.dumps(
            dict(label_names="airplane automobile bird cat deer dog frog horse ship truck".split())
        )
    )
    with pytest.raises(CompvlError, match="CIFAR10.*incomplete or damaged"):
        load("cifar10", tmp_path)  # not the published MD5: never unpickled
    monkeypatch.setattr(tv.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a: True)
    loaded = load("cifar10", tmp_path)
    assert [item.label for item in loaded.items] == [3, 0, 9]
    assert loaded.classes[3] == "cat"
    assert len(loaded.templates) == 18
    assert len({image_key(item.image) for item in loaded.items}) == 3
    second = np.asarray(open_image(loaded.items[1].image))
    assert (second == pixels[1].reshape(3, 32, 32).transpose(1, 2, 0)).all()
    before = image_key(loaded.items[0].image)
    assert before == image_key(load("cifar10", tmp_path).items[0].image)
    os.utime(folder / "test_batch", ns=(1, 1))
    assert image_key(load("cifar10", tmp_path).items[0].image) != before
    # Worker processes receive the items pickled.
    restored = pickle.loads(pickle.dumps(loaded.items[1]))
    assert restored.image.read(1).size == (32, 32)
    (folder / "test_batch").write_bytes(pickle.dumps(dict(data=pixels, labels=[3, 0, 10])))
    with pytest.raises(CompvlError, match="label 10"):
        load("cifar10", tmp_path)
    (folder / "test_batch").write_bytes(b"cut")
    with pytest.raises(CompvlError, match="damaged"):
        load("cifar10", tmp_path)


def two_images():
    """Return a black and a grey image of 32 x 32 pixels: (height, width, channel, image)."""
    images = np.zeros((32, 32, 3, 2), np.uint8)
    images[..., 1] = 200
    return images


def test_svhn(tmp_path, monkeypatch):
    """SVHN's label 10 is the digit zero."""
    import torchvision.datasets as tv
    from scipy.io import savemat

    root = tmp_path / "torchvision"
    root.mkdir()
    monkeypatch.setattr(tv.SVHN, "_check_integrity", lambda self: True)
    savemat(root / "test_32x32.mat", dict(X=two_images(), y=np.array([[10], [4]])))
    loaded = load("vtab-svhn", tmp_path)
    assert [loaded.classes[item.label] for item in loaded.items] == ["zero", "four"]
    assert open_image(loaded.items[1].image).getpixel((0, 0)) == (200,) * 3


def test_flowers(tmp_path, monkeypatch):
    """The items of Flowers are the images of the test split, in order, with their classes."""
    import torchvision.datasets as tv
    from scipy.io import savemat

    folder = tmp_path / "torchvision/flowers-102"
    (folder / "jpg").mkdir(parents=True)
    monkeypatch.setattr(tv.Flowers102, "_check_integrity", lambda self: True)
    savemat(folder / "setid.mat", dict(tstid=[3, 2], trnid=[1, 1], valid=[1, 1]))
    savemat(folder / "imagelabels.mat", dict(labels=[1, 102, 5]))
    loaded = load("vtab-flowers", tmp_path)
    assert [(item.image, loaded.classes[item.label]) for item in loaded.items] == [
        ("torchvision/flowers-102/jpg/image_00002.jpg", "blackberry lily"),
        ("torchvision/flowers-102/jpg/image_00003.jpg", "english marigold"),
    ]


class NumpyFile(dict):
    """A stand-in for h5py.File that reads NumPy's format."""

    def __init__(self, path):
        with open(path, "rb") as file:
            super().__init__(dict(np.load(file)))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_pcam(tmp_path, monkeypatch):
    """PCam needs h5py, and reads its images and labels with it."""
    folder = tmp_path / "torchvision/pcam"
    folder.mkdir(parents=True)
    arrays = dict(x=two_images().transpose(3, 0, 1, 2), y=np.array([0, 1]).reshape(2, 1, 1, 1))
    for part, array in arrays.items():
        with open(folder / f"camelyonpatch_level_2_split_test_{part}.h5", "wb") as file:
            np.savez(file, **{part: array})
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(CompvlError, match="pip install h5py"):
        load("vtab-pcam", tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", types.SimpleNamespace(File=NumpyFile))
    loaded = load("vtab-pcam", tmp_path)
    assert [item.label for item in loaded.items] == [0, 1]
    assert "tumor" in loaded.classes[1]
    assert open_image(loaded.items[1].image).getpixel((0, 0)) == (200,) * 3


# --- damaged files ---

COMVG_HEADER = "id,sentence,neg_triplet,pos_image_id,neg_image_id,neg_value\n"


@pytest.mark.parametrize(
    "name, path, content, where",
    [
        (
            "sugarcrepe-add-obj",
            "sugarcrepe/add_obj.json",
            '{"0": {"filename": 3}}',
            "add_obj.json, item 0",
        ),
        ("sugarcrepe-add-obj", "sugarcrepe/add_obj.json", '{"0": ', "add_obj.json:1"),
        (
            "sugarcrepe-pp-swap-obj",
            "sugarcrepe_pp/swap_obj.json",
            '[{"filename": "a.jpg", "caption": "a", "negative_caption": "b"}]',
            "swap_obj.json, item 0: no text under 'caption2'",
        ),
        (
            "aro-relation",
            "aro/visual_genome_relation.json",
            "[1]",
            "visual_genome_relation.json, item 0",
        ),
        (
            "valse-relations",
            "valse/relations.json",
            '{"r": {"mturk": {"caption": "3"}}}',
            "relations.json, item r",
        ),
        ("valse-relations", "valse/relations.json", "[]", "relations.json holds a list"),
        (
            "svo-probes",
            "svo_probes/svo_probes.csv",
            "sentence\nA dog.",
            "svo_probes.csv:1 has no column pos_image_id",
        ),
        (
            "comvg",
            "comvg/ComVG.csv",
            COMVG_HEADER + "1,a,\"('x', 'y', 'z')\",1,2,colour",
            "ComVG.csv:2: neg_value",
        ),
        (
            "comvg",
            "comvg/ComVG.csv",
            COMVG_HEADER + "1,a,\"__import__('os')\",1,2,verb",
            "ComVG.csv:2: neg_triplet",
        ),
        ("winoground", "winoground/examples.jsonl", '{"id": 0}\n', "examples.jsonl, item 0"),
        ("winoground", "winoground/examples.jsonl", '{"id": \n', "examples.jsonl:1"),
        (
            "coco-retrieval",
            "karpathy/dataset_coco.json",
            '{"images": [{"split": "test", "filename": "a.jpg"}]}',
            "dataset_coco.json, item 0",
        ),
        (
            "coco-retrieval",
            "karpathy/dataset_coco.json",
            '{"images": []}',
            "dataset_coco.json has no image",
        ),
        (
            "aro-coco-order",
            "aro/coco_karpathy_test.json",
            '[{"image": "a.jpg"}]',
            "coco_karpathy_test.json, item 0",
        ),
        ("stsb", "stsb/sts-test.csv", "a\tb\tc\td\tx\tA\tB\n", "sts-test.csv:1: the score"),
        ("stsb", "stsb/sts-test.csv", "a\tb\tc\td\tnan\tA\tB\n", "sts-test.csv:1: the score"),
        ("sickr", "sickr/SICK.txt", "pair_ID\tsentence_A\n", "SICK.txt:1 has no column sentence_B"),
        ("sickr", "sickr/SICK.txt", "", "SICK.txt:1 has no column"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, path, content, where):
    """The error for a damaged file names the file and the place in it."""
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(content, encoding="utf-8")
    with pytest.raises(CompvlError) as e:
        load(name, tmp_path)
    assert where in str(e.value)


def test_a_damaged_vl_checklist_file_is_named(tmp_path):
    """The error names the damaged file among those of VL-CheckList."""
    for files in VL_CHECKLIST["attribute"]["vg"].values():
        write_json(tmp_path / "vl_checklist" / files[0], [])
    write_json(
        tmp_path / "vl_checklist/Attribute/vg/color.json", [["a.jpg", {"POS": [""], "NEG": ["b"]}]]
    )
    with pytest.raises(CompvlError, match="color.json, item 0"):
        load("vl-checklist-attribute", tmp_path, source="vg")


@pytest.mark.parametrize(
    "name, image, place",
    [
        ("sugarcrepe-swap-obj", "1.jpg", "coco/val2017/1.jpg"),
        ("sugarcrepe-pp-swap-obj", "1.jpg", "coco/val2017/1.jpg"),
        ("aro-relation", "7.jpg", "aro/images/7.jpg"),
        ("aro-attribution", "7.jpg", "visual_genome/VG_100K_2/7.jpg"),
        ("aro-coco-order", "val2014/a.jpg", "coco/val2014/a.jpg"),
        ("aro-flickr30k-order", "flickr30k-images/1.jpg", "flickr30k/flickr30k-images/1.jpg"),
        ("coco-retrieval", "val2014/a.jpg", "coco/val2014/a.jpg"),
        ("flickr30k-retrieval", "1.jpg", "flickr30k/flickr30k-images/1.jpg"),
        ("vl-checklist-relation", "VG_100K/1.jpg", "visual_genome/VG_100K/1.jpg"),
        ("vl-checklist-attribute", "VG_100K_2/1.jpg", "visual_genome/VG_100K_2/1.jpg"),
        ("vl-checklist-relation", "biking_1.jpg", "swig/images_512/biking_1.jpg"),
        ("vl-checklist-object", "hcvrd/1.jpg", "hake/hcvrd/1.jpg"),
        ("valse-existence", "v7w_1.jpg", "visual7w/images/v7w_1.jpg"),
        ("valse-plurals", "1.jpg", "coco/val2017/1.jpg"),
        ("valse-actant-swap", "biking_1.jpg", "swig/images_512/biking_1.jpg"),
        ("valse-coreference-standard", "COCO_val2014_1.jpg", "coco/val2014/COCO_val2014_1.jpg"),
        ("valse-coreference-hard", "V.jpg", "visdial/VisualDialog_val2018/V.jpg"),
        ("valse-foil-it", "COCO_val2014_1.jpg", "coco/val2014/COCO_val2014_1.jpg"),
        ("svo-probes", "1.jpg", "svo_probes/images/1.jpg"),
        ("comvg", "1.jpg", "visual_genome/VG_100K/1.jpg"),
        ("winoground", "ex_0_img_0.png", "winoground/images/ex_0_img_0.png"),
        ("imagenet", "imagenet/val/n0/a.JPEG", "imagenet/val/n0/a.JPEG"),
    ],
)
def test_photographs_are_found_where_their_data_sets_put_them(tmp_path, name, image, place):
    """The image of an item is found in the folder of its data set."""
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).touch()
    found = locate(tmp_path, [Pair("1", image, "a", "b")], REGISTRY[name].places)
    assert found[0].image == str(tmp_path / place)


@pytest.mark.parametrize("name", ["svo-probes", "stsb"])
def test_bytes_that_are_no_text(tmp_path, name):
    """A file that is not UTF-8 is reported."""
    path = {"svo-probes": "svo_probes/svo_probes.csv", "stsb": "stsb/sts-test.csv"}[name]
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_bytes(b"sentence,\xff\xfe\n")
    with pytest.raises(CompvlError, match="not UTF-8"):
        load(name, tmp_path)


@pytest.mark.parametrize("name", sorted(n for n, e in REGISTRY.items() if e.files))
def test_nothing_under_the_root(tmp_path, name):
    """Where no file is present, the error points to `compvl data status`; no file is made."""
    with pytest.raises(CompvlError, match="compvl data status"):
        load(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_benchmark_names_declared_data_sets():
    """Each benchmark with files names data sets, and each of them is declared."""
    for name, entry in REGISTRY.items():
        if entry.files:
            assert entry.datasets, name
            assert set(entry.datasets) <= set(DATASETS), name


# --- the number of items ---


def write_swaps(root, n):
    """SugarCrepe's exchanged objects, whose file ends after `n` items, with photographs."""
    (root / "coco/val2017").mkdir(parents=True)
    entries = {}
    for i in range(n):
        image = f"{i % 4:012d}.jpg"
        texts = dict(caption=f"a cat on dog {i}", negative_caption=f"a dog on cat {i}")
        entries[str(i)] = dict(filename=image, **texts)
        Image.new("RGB", (40, 30), (60 * (i % 4), 90, 120)).save(root / "coco/val2017" / image)
    write_json(root / "sugarcrepe/swap_obj.json", entries)


def load_quietly(name, root=None, **options):
    """A benchmark; a warning about the number of its items is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CountWarning)
        return load_benchmark(name, root, **options)


@pytest.mark.parametrize("n", [3, 246])
def test_another_number_of_items_than_published_is_warned_of(tmp_path, n):
    """The warning names benchmark, file, both numbers, and what to do; the benchmark has them."""
    write_swaps(tmp_path, n)
    with pytest.warns(CountWarning) as caught:
        benchmark = load_benchmark("sugarcrepe-swap-obj", tmp_path)
    (warning,) = caught
    message = str(warning.message)
    file = tmp_path / "sugarcrepe/swap_obj.json"
    for part in (f"sugarcrepe-swap-obj: {n} items were read from {file}, but 245 were", "status"):
        assert part in message
    assert warning.filename == __file__
    assert benchmark.read_n == len(benchmark) == n
    assert benchmark.source == f"SugarCrepe (sugarcrepe-swap-obj: {n} of published 245 items)"


def test_the_published_number_of_items_is_not_warned_of(tmp_path):
    write_swaps(tmp_path, 245)
    benchmark = load_quietly("sugarcrepe-swap-obj", tmp_path)
    assert benchmark.read_n is None
    assert benchmark.source == "SugarCrepe"


def test_a_part_that_was_asked_for_is_not_warned_of(tmp_path):
    """Neither items that were drawn, nor those that a correction leaves, nor the microworld."""
    write_swaps(tmp_path, 3)
    assert load_quietly("sugarcrepe-swap-obj", tmp_path, n=2).read_n is None
    entry = dict(
        image_path="2.jpg",
        true_caption="the red hat and the wet dog",
        false_caption="the wet hat and the red dog",
        attributes=["red", "wet"],
        **dict(bbox_x=1, bbox_y=2, bbox_w=30, bbox_h=20),
    )
    write_json(tmp_path / "aro/visual_genome_attribution.json", [entry])
    corrected = load_quietly("swap", tmp_path, fidelity="corrected")
    assert corrected.read_n is None
    assert corrected.fidelity == "corrected"
    assert load_quietly("sugarcrepe-swap-obj", n=2).read_n is None


def test_a_benchmark_without_a_corrected_form_is_read_as_published(tmp_path):
    """Its label says so, and a file that was cut off is warned of."""
    write_swaps(tmp_path, 3)
    with pytest.warns(CountWarning):
        benchmark = load_benchmark("sugarcrepe-swap-obj", tmp_path, fidelity="corrected")
    assert benchmark.fidelity == "published"
    assert benchmark.read_n == 3


def test_a_known_number_of_items_is_not_warned_of(tmp_path):
    """Winoground's compositional items are 172 in the released tags, 171 in papers."""
    (tmp_path / "winoground").mkdir()
    lines = []
    for number in sorted(compositional_ids()):
        texts = dict(caption_0="a cat", caption_1="a dog", collapsed_tag="Object")
        entry = dict(id=number, image_0=f"ex_{number}_0", image_1=f"ex_{number}_1", **texts)
        lines.append(json.dumps(entry))
    (tmp_path / "winoground/examples.jsonl").write_text("\n".join(lines))
    assert len(load_quietly("winoground-compositional", tmp_path)) == 172
    with pytest.warns(CountWarning, match="winoground: 172 items .* but 400 were published"):
        load_benchmark("winoground", tmp_path)


@real("sugarcrepe")
def test_released_files_are_not_warned_of():
    for name in ("sugarcrepe-add-att", "sugarcrepe-swap-obj"):
        assert len(load_quietly(name, REAL)) == REGISTRY[name].published_n


def test_figures_of_a_file_that_was_cut_off_say_so(tmp_path):
    """All images are there, but most items are not; a whole file has no such row."""
    model = create_model(device="cpu")
    shares = {}
    for n in (3, 245):
        write_swaps(tmp_path / str(n), n)
        benchmark = load_benchmark("sugarcrepe-swap-obj", tmp_path / str(n))
        table = evaluate(model, benchmark, n_boot=10, progress=False)
        rows = table[table.metric == "coverage"].set_index("group")
        shares[n] = rows.value.to_dict()
        assert set(rows.n) == {n}
    assert shares[3] == {"all": 100, "published": pytest.approx(100 * 3 / 245)}
    assert shares[245] == {"all": 100}
