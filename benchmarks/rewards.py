"""Milliseconds that a reward worker adds to a cheap reward on one batch.

    python benchmarks/rewards.py                 (CPU only)

A reward that reads one character of each of 512 completions of about 500 characters, with their token ids and two
columns of the dataset, is computed in process and in a worker. The worker adds the time to send and read a batch.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import provenance
from gruppo.rewards.runner import RewardInputs, RewardRunner, RewardSettings

SAMPLES, CHARACTERS, CALLS = 512, 500, 20


def ends_well(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(completion.endswith("e")) for completion in completions]


def batch() -> RewardInputs:
    """A batch whose texts and ids are all different, so that nothing is sent just once for several rows."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    completions = ["".join(draw.choices(letters, k=CHARACTERS)) for _ in range(SAMPLES)]
    rows = [{"answer": str(i), "solution": f"The answer is {i}."} for i in range(SAMPLES)]
    ids = [[draw.randrange(150_000) for _ in range(CHARACTERS // 4)] for _ in range(SAMPLES)]
    return RewardInputs(rows, [f"Question {i}: what is {i} + 0?" for i in range(SAMPLES)], completions, ids)


def milliseconds(settings: RewardSettings) -> dict[str, float]:
    """The first call, which waits for a worker to be ready, and the median and maximum of the later calls."""
    runner = RewardRunner([ends_well], ["ends_well"], [None], device=torch.device("cpu"), settings=settings)
    inputs, times = batch(), []
    for _ in range(1 + CALLS):
        start = time.perf_counter()
        runner.score(inputs)
        times.append(1000 * (time.perf_counter() - start))
    runner.close()
    first, *others = times
    return {"first": round(first, 2), "median": round(statistics.median(others), 2), "worst": round(max(others), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rewards.json")
    args = parser.parse_args()
    in_process, worker = milliseconds(RewardSettings()), milliseconds(RewardSettings(timeout=60.0))
    result = {
        **provenance("cloudpickle"),
        "samples": SAMPLES,
        "characters": CHARACTERS,
        "calls": CALLS,
        "milliseconds": {"in_process": in_process, "worker": worker},
        "added_by_worker": round(worker["median"] - in_process["median"], 2),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
