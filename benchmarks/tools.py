"""The examples with a tool and with an environment, run from the command line: scores before and after, seconds.

.venv/bin/python benchmarks/tools.py --out benchmarks/results/tools.json
"""

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import measure_seeds

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = ("calculator", "guessing_game")


def run(example: str, seed: int) -> dict[str, Any]:
    """One run in a separate process."""
    command = [sys.executable, str(FOLDER / f"{example}.py"), "--seed", str(seed)]
    # Waiting threads sleep instead of spinning, as in the demo, so that other work on the machine disturbs less.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return {
        "example": example,
        "seed": seed,
        "before": scores(output, "before"),
        "after": scores(output, "after"),
        "seconds": round(time.perf_counter() - start, 1),
    }


def scores(output: str, when: str) -> dict[str, float]:
    """The measurements of a line such as "before: accuracy 0.031, call_rate 0.086"."""
    (line,) = re.findall(rf"^{when}: (.*)$", output, re.MULTILINE)
    return {name: float(value) for name, value in (entry.split() for entry in line.split(", "))}


if __name__ == "__main__":
    measure_seeds(__doc__, *(partial(run, example) for example in EXAMPLES))
