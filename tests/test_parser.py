"""The parser where a notebook cannot show it: a trained pipeline, processes, real captions."""

import csv
import json

import pytest
import spacy
from released import REAL
from spacy.language import Language
from spacy.tokens import Doc

from compvl.core import CompvlError
from compvl.text.parser import parse, parse_many, pipeline

BABY = "A man holding a baby taking a picture"
DOGS = "Dogs that are wet sleep on snow-covered ground in the park"
TAGS = {
    BABY: (
        "DT NN VBG DT NN VBG DT NN",
        (1, 1, 1, 4, 2, 1, 7, 5),
        "det ROOT acl det dobj acl det dobj",
    ),
    DOGS: (
        "NNS WDT VBP JJ VBP IN NN HYPH VBN NN IN DT NN",
        (4, 2, 0, 2, 4, 4, 8, 8, 9, 5, 4, 12, 10),
        "nsubj nsubj relcl acomp ROOT prep npadvmod punct amod pobj prep det pobj",
    ),
}


@Language.component("tags_by_hand")
def tags_by_hand(doc):
    """Tags, heads and dependencies of the two captions, written by hand."""
    tags, heads, deps = TAGS[doc.text]
    return Doc(
        doc.vocab,
        words=[token.text for token in doc],
        spaces=[bool(token.whitespace_) for token in doc],
        tags=tags.split(),
        heads=heads,
        deps=deps.split(),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pipeline from a folder, as `spacy.load` takes it, whose tags were written by hand."""
    nlp = spacy.blank("en")
    nlp.add_pipe("tags_by_hand")
    folder = tmp_path_factory.mktemp("pipeline")
    nlp.to_disk(folder)
    return pipeline(str(folder))


def triples(parsed):
    """(subject, relation, object) of every relation."""
    objects = parsed.objects
    return [(objects[r.subject].text, r.text, objects[r.object].text) for r in parsed.relations]


def attributes(parsed):
    """(attribute, object) of every attribute."""
    return [(a.text, parsed.objects[a.object].text) for a in parsed.attributes]


def assert_spans_are_texts(parsed):
    """Every span has the text that it names."""
    for span in [*parsed.objects, *parsed.attributes, *parsed.relations, *parsed.tokens]:
        assert parsed.text[span.start : span.end] == span.text


def test_dependencies_decide_what_refers_to_what(trained):
    """Nearness gives the picture to the baby and the park to the ground, dependencies do not."""
    baby = parse(BABY, trained)
    assert triples(baby) == [("man", "holding", "baby"), ("man", "taking", "picture")]
    assert triples(parse(BABY))[1] == ("baby", "taking", "picture")
    dogs = parse(DOGS, trained)
    assert triples(dogs) == [("Dogs", "sleep on", "ground"), ("Dogs", "in", "park")]
    assert attributes(dogs) == [("wet", "Dogs"), ("snow-covered", "ground")]
    tokens = [(token.text, token.pos) for token in dogs.tokens]
    assert tokens[6:8] == [("snow-covered", "ADJ"), ("ground", "NOUN")]
    assert_spans_are_texts(dogs)


def test_component_and_function_agree(trained):
    """The spaCy component gives what `parse` gives, alone and in batches."""
    alone = [parse(caption, trained) for caption in (BABY, DOGS)]
    assert [trained(caption)._.compvl for caption in (BABY, DOGS)] == alone
    assert list(parse_many([BABY, DOGS] * 3, trained, batch_size=2)) == alone * 3


def test_shipped_component_survives_bytes():
    """A parsed document can be written to bytes and read again."""
    nlp = pipeline()
    doc = nlp("a red  cube on the ball")
    again = Doc(nlp.vocab).from_bytes(doc.to_bytes())
    assert again._.compvl == doc._.compvl
    assert doc._.compvl == parse(doc.text)


def test_missing_pipeline_says_how_to_install():
    """The message has the command to install it."""
    with pytest.raises(CompvlError, match="python -m spacy download en_core_web_sm_not_there"):
        pipeline("en_core_web_sm_not_there")


def test_processes_keep_the_order():
    """Two processes give the parses in the order of the captions."""
    captions = [f"{n} dogs and a cat on bed {n}" for n in range(60)]
    parses = list(parse_many(iter(captions), batch_size=7, n_process=2))
    assert parses == [parse(caption) for caption in captions]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "!!!",
        "...a dog",
        "A",
        "and",
        "of of of",
        "the the",
        "red",
        "🐶 dog 🐱",
        "a\tdog\non  a\u00a0bed",
        "it's a dog's life",
        "x" * 500,
        "running",
        "who that which",
        "to to to",
        "A DOG AND A CAT",
        "1 2 3",
        "dog-cat-",
        "don't",
        "the men's",
        "’s",
        "and, and, or a,",
        "on on a dog on",
    ],
)
def test_any_text_is_read(text):
    """No text is an error, spans are texts, and indices are those of objects."""
    parsed = parse(text)
    assert_spans_are_texts(parsed)
    known = {None, *range(len(parsed.objects))}
    for relation in parsed.relations:
        assert relation.subject in known
        assert relation.object in known
    assert all(attribute.object in known for attribute in parsed.attributes)
    parsed.graph()


def test_casing_spacing_and_punctuation_change_nothing():
    """Words and graph are those of the plain caption."""
    plain = parse("two brown dogs are sleeping next to a small child holding a bowl of soup")
    for other in (
        "TWO BROWN DOGS ARE SLEEPING NEXT TO A SMALL CHILD HOLDING A BOWL OF SOUP",
        "Two  brown dogs are sleeping next  to a small child holding a bowl of soup.",
        " two brown dogs are sleeping next to a small child holding a bowl of soup !",
    ):
        parsed = parse(other)
        for kind in ("object", "attribute", "relation"):
            words = [" ".join(word.lower().split()) for word in parsed.words(kind)]
            assert words == plain.words(kind)
        assert parsed.graph() == plain.graph()


@pytest.fixture(scope="module")
def real_captions():
    """The distinct captions of ARO's COCO file and of SugarCrepe."""
    tsv = REAL / "aro/coco_val_neg_captions.tsv"
    if not tsv.exists():
        pytest.skip(f"{tsv} is not there: set COMPVL_REAL to the folder of real material")
    with open(tsv, newline="", encoding="utf-8") as file:
        found = [row["title"] for row in csv.DictReader(file, delimiter="\t")]
    for split in sorted((REAL / "sugarcrepe").glob("*.json")):
        found += [item["caption"] for item in json.loads(split.read_text("utf-8")).values()]
    return list(dict.fromkeys(found))


def test_real_captions_are_read(real_captions):
    """At least 98 % with an object, 90 % with a relation or an attribute; spans are texts.

    How fast this is: `compvl bench perturb`.
    """
    parses = list(parse_many(real_captions))
    with_object = sum(bool(parsed.objects) for parsed in parses)
    with_more = sum(bool(parsed.relations or parsed.attributes) for parsed in parses)
    assert with_object >= 0.98 * len(parses)
    assert with_more >= 0.9 * len(parses)
    for parsed in parses:
        assert_spans_are_texts(parsed)
