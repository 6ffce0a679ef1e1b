"""Cost of a replay and its deviation from the run: for the demo's first updates, and for short runs of many recipes.

    python benchmarks/replay.py                   (CPU only)

For each run: the largest difference between the logged values and those recomputed from its record. For the demo (16
prompts × 8 completions of up to 32 tokens) also the seconds that a replay takes, and the bytes that updates add to the
record.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import provenance
from benchmarks.recording import demo
from gruppo.demo.task import exact_match, load_task
from gruppo.replay import replay
from gruppo.runs import Run
from tests.replay.worlds import RUNS, trained

RESULTS = Path(__file__).parent / "results"


def difference(folder: Path) -> dict[str, float]:
    """The largest differences between logged losses and advantages and those of a replay with the same settings."""
    found = replay(folder)
    logged = {line["update"]: line["loss"] for line in Run(folder).metrics("train")}
    return {
        "updates": len(found.updates),
        "loss": max(abs(update["loss"] - logged[update["update"]]) for update in found.updates),
        "advantage": max(update["advantage_difference"] for update in found.updates),
    }


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.parquet"))


def seconds(folder: Path, **options: Any) -> float:
    """Seconds per update, including the time to read it."""
    start = time.perf_counter()
    updates = len(replay(folder, **options).updates)
    return round((time.perf_counter() - start) / updates, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "replay.json")
    parser.add_argument("--steps", type=int, default=20, help="of the demo (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "demo"
        demo(folder, options.steps).train()
        torch.set_num_threads(1)
        rows = len(Run(folder).update_logps(["row"]))
        of_demo = {
            **difference(folder),
            "rows": rows,
            "seconds_per_update": {
                "as recorded": seconds(folder),
                "two recipes": seconds(folder, changes={"recipe": "dr_grpo"}, against={"recipe": "gspo"}),
                "another reward": seconds(folder, rewards=exact_match, dataset=load_task()[0]),
            },
            "bytes": {"rollouts": size(folder / "rollouts"), "updates": size(folder / "updates")},
        }
        differences = {}
        for i, (name, settings) in enumerate(RUNS.items()):
            trained(Path(place) / str(i), **settings)
            differences[name] = difference(Path(place) / str(i))
    result = {**provenance("gruppo", "pyarrow"), "demo": of_demo, "runs": differences}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
