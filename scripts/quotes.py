"""Numbers in the text of paper notebooks, beside the committed results that they come from.

`check.py` compares them. `quotes.csv` lists them, one a row:

- `notebook`: such as 01_brittleness, or index;
- `quote`: words of a markdown cell with the number in braces, such as "HN gains {5.2} points";
- `table`: a file below data/results, without .csv;
- `where`: the row of the table, as `column=value` separated by semicolons;
- `column`: the column of the value;
- `scale`: a factor, such as 100 for shares.

A number is right if it is the value without its sign, rounded to as many decimals as it has. The
sections that discuss results may contain no number with a decimal point that is not listed, and no
percentage but 95 %.
"""

import re
from functools import cache
from pathlib import Path

import nbformat
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
QUOTES = Path(__file__).with_name("quotes.csv")
DISCUSSIONS = ("## Discussion", "## What it means", "## Conclusion")
NUMBER = re.compile(r"\{([\d,.]+)\}")
RESULT = re.compile(r"\d+\.\d+|(?!95\b)\b\d+(?= %)")


def flat(text: str) -> str:
    """A text with every run of white space as one space."""
    return " ".join(text.split())


def words(quote: str) -> str:
    """A quote without its braces, as `flat`."""
    return flat(quote.replace("{", "").replace("}", ""))


@cache
def markdown(notebook: str) -> list[str]:
    """The texts of the markdown cells of a notebook."""
    folder = ROOT / "nbs" if notebook == "index" else ROOT / "nbs/paper"
    cells = nbformat.read(folder / f"{notebook}.ipynb", as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def discussed(notebook: str) -> list[str]:
    """The text of the sections that discuss results, from their heading to the next one."""
    sections = []
    inside = False
    for source in markdown(notebook):
        for paragraph in source.split("\n\n"):
            if paragraph.startswith("## "):
                inside = paragraph.startswith(DISCUSSIONS)
            elif inside:
                sections.append(flat(paragraph))
    return sections


def value_of(quote) -> float:
    """The value that a quote is about. Raises ValueError where its row is not one row."""
    table = pd.read_csv(ROOT / f"data/results/{quote.table}.csv", keep_default_na=False)
    for condition in quote.where.split(";"):
        column, wanted = (part.strip() for part in condition.split("=", 1))
        table = table[table[column].astype(str) == wanted]
    if len(table) != 1:
        raise ValueError(f"{quote.table}.csv has {len(table)} rows with {quote.where}")
    return float(table[quote.column].iloc[0]) * quote.scale


def quote_problem(quote) -> str:
    """What is wrong with a quote; '' if nothing is."""
    numbers = NUMBER.findall(quote.quote)
    if len(numbers) != 1:
        return "needs exactly one number in braces"
    if words(quote.quote) not in flat(" ".join(markdown(quote.notebook))):
        return "is not in the notebook"
    number = numbers[0].replace(",", "")
    try:
        value = abs(value_of(quote))
    except ValueError as error:
        return str(error)
    decimals = len(number.partition(".")[2])
    if f"{value:.{decimals}f}" != number:
        return f"is {value:.{decimals + 1}f} in {quote.table}.csv"
    return ""


def quote_problems() -> list[str]:
    """Numbers in the text that are not those of committed results, or come from nowhere."""
    quotes = pd.read_csv(QUOTES, keep_default_na=False)
    problems = []
    for quote in quotes.itertuples():
        problem = quote_problem(quote)
        if problem:
            problems.append(f"{quote.notebook}: “{quote.quote}” {problem} (scripts/quotes.csv)")
    for path in sorted((ROOT / "nbs/paper").glob("[0-9]*.ipynb")):
        known = quotes[quotes.notebook == path.stem].quote.map(words)
        for paragraph in discussed(path.stem):
            for quote in known:
                paragraph = paragraph.replace(quote, "")
            for number in RESULT.findall(paragraph):
                problems.append(
                    f"{path.stem} discusses {number}, and scripts/quotes.csv does not say where it "
                    "comes from"
                )
    return problems
