"""Where tests find real benchmark files and photographs."""

import os
from pathlib import Path

REAL = Path(os.environ.get("COMPVL_REAL") or Path(__file__).resolve().parents[2] / "shared/real")
