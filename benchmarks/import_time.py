"""Seconds that `import gruppo` and `gruppo --help` take.

    python benchmarks/import_time.py --out benchmarks/results/import_time.json       (CPU only)

Each run is a new process, with the files in the disk cache. Reported are the fastest run, because other work on the
machine can only add time, and the median; the start-up time of Python itself is measured for comparison.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import provenance

RUNS = 20
COMMANDS = {
    "python": ["-c", "pass"],
    "import gruppo": ["-c", "import gruppo"],
    "gruppo --help": ["-m", "gruppo", "--help"],
}


def seconds(arguments: list[str]) -> list[float]:
    found = []
    for _ in range(RUNS + 1):  # the first run only fills the disk cache
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        found.append(time.perf_counter() - start)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = {name: seconds(words) for name, words in COMMANDS.items()}
    fastest = {name: round(min(times), 4) for name, times in measured.items()}
    medians = {name: round(statistics.median(times), 4) for name, times in measured.items()}
    result = {**provenance("gruppo"), "runs": RUNS, "fastest_seconds": fastest, "median_seconds": medians}
    print(json.dumps(fastest, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
