"""Seconds per optimizer step of the demo's configuration: gruppo and TRL 1.16, side by side in one run.

    make bench-peers
    .venv-peers/bin/python benchmarks/cpu_step.py --out benchmarks/results/cpu_step.json

Both run the demo's training (model, task, settings, all steps) on the CPU, in turns, so that a busy machine slows
both. Ratios are of medians over steps, once of wall seconds and once of processor seconds, which other work on the
machine hardly affects.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import TrainerCallback

from benchmarks.common import provenance
from gruppo.demo import model_path
from gruppo.demo.run import settings
from gruppo.demo.task import exact_match, load_task


class Clock(TrainerCallback):
    """Wall and processor seconds at the end of every step."""

    def __init__(self) -> None:
        self.ticks: list[tuple[float, float]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ticks.append((time.perf_counter(), time.process_time()))

    def steps(self) -> list[tuple[float, float]]:
        """(wall, processor) seconds of every step but the first."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self.ticks)]


def measure(library: Any, steps: int, seed: int) -> list[tuple[float, float]]:
    """Run the demo and return the (wall, processor) seconds of its steps."""
    train, _ = load_task()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        library.GRPOTrainer(
            model=str(model_path()),
            reward_funcs=exact_match,
            args=library.GRPOConfig(**settings(Path(folder), steps, seed)),
            train_dataset=train,
            callbacks=[clock],
        ).train()
    return clock.steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)

    import trl

    import gruppo

    measured: dict[str, list[tuple[float, float]]] = {"trl": [], "gruppo": []}
    for seed in range(options.rounds):
        for name, library in (("trl", trl), ("gruppo", gruppo)):
            measured[name] += measure(library, options.steps, seed)
    result: dict[str, Any] = provenance("trl", "gruppo")
    for i, kind in enumerate(("wall", "processor")):
        medians = {name: statistics.median(step[i] for step in steps) for name, steps in measured.items()}
        ratio = medians["trl"] / medians["gruppo"]
        print(f"{kind} seconds a step: gruppo {medians['gruppo']:.3f}, TRL {medians['trl']:.3f}; ratio {ratio:.2f}")
        result[f"{kind}_seconds"] = {name: round(value, 4) for name, value in medians.items()}
        result[f"{kind}_ratio"] = round(ratio, 3)
    if options.out:
        options.out.write_text(json.dumps({**result, "steps": len(measured["gruppo"])}, indent=1) + "\n")


if __name__ == "__main__":
    main()
