"""The examples are scripts, not a package: they import each other by their bare names, and so do these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
