"""The order perturbations and the parser with a trained English pipeline of spaCy.

    python scripts/taggers.py PIPELINE [CAPTIONS.tsv]

PIPELINE is the name or the folder of `en_core_web_sm`; NLTK has to be installed. Neither is needed
for anything else. ARO's perturbations, in a transcription of its code, are compared with compvl's
on 1,000 real captions: data/results/order_perturbations.csv. The shipped parser and the trained
pipeline are compared on the 100 captions annotated by hand: data/results/parser_pipelines.csv.

NLTK's `word_tokenize` splits sentences first, with data that pip does not install. Here both sides
take its words without that step.
"""

import csv
import random
import sys
from pathlib import Path

import nltk
import numpy as np
import pandas as pd
import spacy

from compvl.benchmarks.order import pre_caption, shuffle_captions
from compvl.core import data_dir, git_commit
from compvl.text.parser import pipeline as parsing_pipeline

ROOT = Path(__file__).resolve().parents[1]
CAPTIONS = ROOT.parent / "shared/real/aro/coco_val_neg_captions.tsv"
NOUNS = ["NN", "NNS", "NNP", "NNPS"]
ADJECTIVES = ["JJ", "JJR", "JJS"]
N_CAPTIONS = 1_000  # the first of the file
NAMES = ("nouns and adjectives", "all but these", "within trigrams", "trigrams")


def words(caption: str) -> list[str]:
    """NLTK's words of a caption, without splitting sentences."""
    return nltk.word_tokenize(caption, preserve_line=True)


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
        tokens = words(ex)
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
    ours = shuffle_captions(captions, tag, words, seed=1)
    rows = []
    for k, name in enumerate(NAMES):
        pairs = [(pre_caption(a[k]), pre_caption(b[k])) for a, b in zip(theirs, ours, strict=True)]
        same = sum(a == b for a, b in pairs)
        unmoved = sum(a == pre_caption(c) for (a, _), c in zip(pairs, captions, strict=True))
        rows.append((name, len(captions), same, unmoved))
    return pd.DataFrame(rows, columns=["perturbation", "captions", "same", "equal_to_caption"])


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


def main():
    """Compare, print and write both tables."""
    place = sys.argv[1]
    nlp = spacy.load(place)
    name = f"en_core_web_sm {nlp.meta['version']}"
    with open(sys.argv[2] if len(sys.argv) > 2 else CAPTIONS, newline="", encoding="utf-8") as file:
        captions = [row["title"] for row in csv.DictReader(file, delimiter="\t")][:N_CAPTIONS]
    about = dict(pipeline=name, nltk=nltk.__version__, spacy=spacy.__version__)
    orders = compare_orders(nlp, captions).assign(**about, commit=git_commit())
    parsers = compare_parsers(parsing_pipeline(place), name).assign(commit=git_commit())
    for table, file in ((orders, "order_perturbations"), (parsers, "parser_pipelines")):
        print(table.to_string(index=False))
        table.to_csv(data_dir() / f"results/{file}.csv", index=False)


if __name__ == "__main__":
    main()
