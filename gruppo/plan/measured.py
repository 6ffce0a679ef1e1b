"""Constants that were measured, not derived: written by benchmarks/plan_constants.py from committed results."""

import json
from pathlib import Path
from typing import Any

MEASURED: dict[str, Any] = json.loads((Path(__file__).parent / "measured.json").read_text(encoding="utf-8"))
