"""The registry of claims against the committed results and against the notebooks that write them."""

import re

import pandas as pd
import pytest
from compvl.app.plan import select_notebooks
from compvl.core import data_dir, notebook_number
from compvl.paper.evidence import VERDICTS, Store
from compvl.paper.ledger import make_ledger
from compvl.paper.statements import CLAIMS

PROFILES = [
    p for p in ("micro", "micro-full") if (data_dir() / "results" / p / "notebooks.json").exists()
]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_entry_finds_what_it_asks_of_tables_that_are_there(profile):
    ledger, evidence = make_ledger(
        Store(None, profile)
    )  # raises for a finding or a row that a table lacks
    assert set(ledger.verdict) <= set(VERDICTS) and len(ledger) == len(CLAIMS)
    assert (ledger.verdict != "no data").sum() >= 25
    decided = ledger[ledger.verdict.isin(VERDICTS[:2])]
    assert (
        decided[["difference", "lo", "hi"]].notna().all(axis=None)
        and (ledger.sentence.str.len() > 10).all()
    )
    assert (
        evidence.dropna(subset=["lo"]).eval("lo <= difference + 1e-9 and difference - 1e-9 <= hi")
    ).all()


def test_every_table_is_one_that_a_notebook_writes():
    sources = {notebook_number(p.name): p.read_text(encoding="utf-8") for p in select_notebooks()}
    for stem in {t.stem for e in CLAIMS for t in e.tests}:
        number, last = notebook_number(stem), stem.rsplit("_", 1)[1]
        if not number:
            assert (data_dir() / f"results/{stem}.csv").exists(), stem
        elif number in sources and not any(
            (data_dir() / "results" / p / f"{stem}.csv").exists() for p in PROFILES
        ):
            text = sources[number]
            assert stem.removesuffix("_summary") in text or re.search(
                rf"keep\(\W*{last}\W|{stem.split('_', 1)[1]}", text
            ), f"no notebook {number} writes {stem}.csv"


def test_signs_agree_with_the_published_differences():
    """Where a published difference exists, reproduced means on its side of zero."""
    _, evidence = make_ledger(Store(None, PROFILES[0]))
    known = evidence[evidence.published.abs().gt(1e-9) & (evidence.verdict == "reproduced")]
    assert len(known) > 20 and ((known.difference > 0) == (known.published > 0)).all()


def test_a_finding_that_is_gone_is_an_error(tmp_path):
    """A typo, on either side, cannot pass for missing data."""
    from compvl.core import CompvlError

    (tmp_path / "tables").mkdir()
    kept = pd.read_csv(data_dir() / "results/micro/01_brittleness_findings.csv")
    kept[~kept.claim.str.startswith("Hard negatives alone, brittleness on REPLACE")].to_csv(
        tmp_path / "tables/01_brittleness_findings.csv", index=False
    )
    with pytest.raises(CompvlError, match="Hard negatives alone, brittleness on REPLACE"):
        make_ledger(Store(tmp_path, "micro"))
