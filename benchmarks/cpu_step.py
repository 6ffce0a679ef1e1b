"""Seconds per optimizer step of the demo's configuration: gruppo and TRL 1.16, side by side in one run.

    make bench-peers
    .venv-peers/bin/python benchmarks/cpu_step.py --out benchmarks/results/cpu_step.json

Both train the demo's model on the demo's task with the demo's settings on the CPU. Rounds alternate between the two,
so that a busy machine slows both; the ratio is that of the medians over all steps but each round's first.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import provenance
from gruppo.demo import model_path
from gruppo.demo.run import settings
from gruppo.demo.task import exact_match, load_task


def step_seconds(library: Any, steps: int, seed: int) -> list[float]:
    """The `step_time` of every step but the first of a short run."""
    train, _ = load_task()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = library.GRPOTrainer(
            model=str(model_path()),
            reward_funcs=exact_match,
            args=library.GRPOConfig(**settings(Path(folder), steps, seed)),
            train_dataset=train,
        )
        trainer.train()
    return [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)

    import trl

    import gruppo

    seconds: dict[str, list[float]] = {"trl": [], "gruppo": []}
    for seed in range(options.rounds):
        for name, library in (("trl", trl), ("gruppo", gruppo)):
            seconds[name] += step_seconds(library, options.steps, seed)
            print(f"{name:7s} round {seed}: {statistics.median(seconds[name]):.3f} s a step so far", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["trl"] / medians["gruppo"]
    print(f"gruppo {medians['gruppo']:.3f} s, TRL {medians['trl']:.3f} s: {ratio:.2f} times faster")
    if options.out:
        result = {**provenance("trl", "gruppo"), "median_seconds": medians, "ratio": ratio, "seconds": seconds}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
