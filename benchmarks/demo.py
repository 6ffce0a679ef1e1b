"""The demo, run from the command line: seconds, and held-out accuracy before and after, for several seeds.

.venv/bin/python benchmarks/demo.py --out benchmarks/results/demo.json
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import measure_seeds


def run(seed: int) -> dict[str, Any]:
    """One `gruppo demo` in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gruppo", "demo", "--seed", str(seed), "--output-dir", folder]
        start = time.perf_counter()
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    last = output.strip().splitlines()[-1]
    found = re.fullmatch(r"held-out accuracy: (\S+) -> (\S+)", last)
    assert found, last
    return {
        "seed": seed,
        "before": float(found[1]),
        "after": float(found[2]),
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    measure_seeds(__doc__, run)
