"""Where tests find real benchmark files and photographs, and small files with a wrong column."""

import json
import os
import shutil
from pathlib import Path

REAL = Path(os.environ.get("COMPVL_REAL") or Path(__file__).resolve().parents[2] / "shared/real")


def with_other_column(root: Path, file: str, column: str, to: Path) -> Path:
    """A copy of a data root, in `to`, in which a file has another name for one column.

    In a CSV file the header has it, in a JSON list the last entry. Returns the copied file."""
    shutil.copytree(root, to)
    path = to / file
    text = path.read_text()
    if path.suffix == ".csv":
        header, rest = text.split("\n", 1)
        names = [f"other_{name}" if name == column else name for name in header.strip().split(",")]
        assert ",".join(names) != header.strip()
        path.write_text(",".join(names) + "\n" + rest)
        return path
    entries = json.loads(text)
    entries[-1][f"other_{column}"] = entries[-1].pop(column)
    path.write_text(json.dumps(entries))
    return path
