"""Does `classify` find the kinds of CREPE's hard negatives?

    python scripts/crepe_kinds.py FOLDER

FOLDER contains crepe/prod_hard_negatives/{atom,swap,negate}/*.csv, the productivity files of CREPE
(Ma et al., CVPR 2023; `compvl data status crepe-productivity-atom` says where they come from). The
script writes data/results/classify_crepe.csv: for each kind and number of atoms, and by whether the
negative has only words of its caption (`own`) or also others (`other`), how often the main operator
of `compvl.text.classify` is each of EDIT_KINDS.

The negatives of the kind swap are of both sorts. Where the caption has nothing to exchange, an atom
of the picture that the caption does not name stands in the place of one that it names.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from compvl.core import data_dir, git_commit
from compvl.text import EDIT_KINDS, classify

KINDS = ("atom", "swap", "negate")
COMPLEXITIES = range(4, 13)  # numbers of atoms in a caption


def negatives(folder: Path, kind: str, complexity: int) -> Iterator[tuple[str, str]]:
    """(caption, hard negative) of a file. Some of its rows list the negatives as a set."""
    name = f"prod_vg_hard_negs_{kind}_complexity_{complexity}.csv"
    table = pd.read_csv(folder / "crepe/prod_hard_negatives" / kind / name)
    for caption, texts in zip(table.caption, table.hard_negs, strict=True):
        for text in ast.literal_eval(texts):
            yield caption, text


def words(text: str) -> set[str]:
    """The different words of a text; case and punctuation are ignored."""
    return set(re.findall(r"[a-z0-9']+", text.lower()))


def counts(pairs: Iterable[tuple[str, str]]) -> list[dict]:
    """How often each operator is the main one, by whose words the negative has."""
    found = {}
    for caption, negative in pairs:
        whose = "own" if words(negative) <= words(caption) else "other"
        found.setdefault(whose, Counter())[classify(caption, negative).main] += 1
    rows = []
    for whose, of_kind in sorted(found.items()):
        operators = {kind: of_kind[kind] for kind in EDIT_KINDS}
        rows.append(dict(words=whose, n=of_kind.total()) | operators)
    return rows


def crepe_table(
    folder: Path, kinds: Iterable[str] = KINDS, complexities: Iterable[int] = COMPLEXITIES
) -> pd.DataFrame:
    """Rows of `counts`, by kind and complexity."""
    rows = []
    for kind in kinds:
        for complexity in complexities:
            about = dict(kind=kind, complexity=complexity)
            rows += [about | row for row in counts(negatives(folder, kind, complexity))]
    return pd.DataFrame(rows)


def main(folder: Path):
    """Write the table."""
    path = data_dir() / "results/classify_crepe.csv"
    crepe_table(folder).assign(commit=git_commit()).to_csv(path, index=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
