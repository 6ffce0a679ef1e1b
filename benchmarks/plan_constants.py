"""Computes the constants of `gruppo plan` that are measured, not derived, from committed results.

    python benchmarks/plan_constants.py            (writes gruppo/plan/measured.json)

The shares of a device's peak rates that decoding and updates reach are fitted to a few results on one H200: a grid
search for the constants that minimise the largest relative error, which is printed. On a CPU only one thread was
measured.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.plan_compare import GIB, ROLLOUTS, STEPS, case_job, cpu_device, load, rollout_job, step_job
from gruppo.plan.memory import Memory
from gruppo.plan.seconds import Seconds

OUT = Path(__file__).parent.parent / "gruppo" / "plan" / "measured.json"
START = {
    "bandwidth_reached": 0.8,
    "decode_reached": 0.7,
    "seconds_per_logit": 1e-11,
    "seconds_per_decoded_layer": 5e-5,
    "update_reached": 0.47,
    "host_seconds_per_layer": 4.3e-3,
    "host_seconds_per_completion": 4e-4,
}


def worst(pairs: Iterable[tuple[float, float]]) -> float:
    """The largest relative error of (predicted, measured) pairs."""
    return max(abs(predicted / measured - 1) for predicted, measured in pairs)


def fit(start: dict[str, float], grid: dict[str, list[float]], error: Callable[[dict[str, float]], float]) -> float:
    """Set the constants to the best point of the grid, in place, and return the error there."""
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    best = min(points, key=lambda point: error(start | point))
    start |= best
    return error(start)


# ---- one H200


def memory_of_cuda() -> dict[str, float]:
    """Memory of a process outside of torch, and torch's reserved memory in excess of its allocated memory."""
    records = [load(f"{name}.json")["engines"]["gruppo"] for name in STEPS]
    beside = statistics.mean(record["peak_device_gib"] - record["peak_reserved_gib"] for record in records)
    gaps = statistics.mean(record["peak_reserved_gib"] / record["peak_allocated_gib"] - 1 for record in records)
    return {"program_bytes": round(beside * GIB), "gap": round(gaps, 3)}


def decode_pairs(constants: dict[str, float]) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of decoding, in rollouts and in steps."""
    pairs = []
    for name in ROLLOUTS:
        rounds = load(f"{name}.json")["engines"]["builtin"]["rounds"]
        measured = statistics.median(one["counters"]["decode_seconds"] for one in rounds)
        pairs.append((_seconds(rollout_job(name), constants).sampling[1].seconds, measured))
    for name in STEPS[:4]:
        rounds = load(f"{name}.json")["engines"]["gruppo"]["rounds"]
        measured = statistics.median(one["generation: decode"] for one in rounds)
        pairs.append((_seconds(step_job(name), constants).sampling[1].seconds, measured))
    return pairs


_JOBS: dict[Any, Memory] = {}


def _seconds(job: Any, constants: dict[str, float]) -> Seconds:
    memory = _JOBS.setdefault(repr(job), Memory(job))
    return Seconds(job, memory, {"cuda": constants, "cpu": constants})


def fit_decoding(constants: dict[str, float]) -> float:
    grid = {
        "decode_reached": [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8],
        "bandwidth_reached": [0.6, 0.7, 0.8, 0.9],
        "seconds_per_logit": [0.6e-11, 0.8e-11, 1.0e-11, 1.2e-11, 1.4e-11, 1.6e-11],
        "seconds_per_decoded_layer": [3e-5, 3.5e-5, 4e-5, 4.5e-5, 5e-5, 5.5e-5, 6e-5],
    }
    return fit(constants, grid, lambda point: worst(decode_pairs(point)))


def update_constants() -> dict[str, float]:
    """The share of the peak that large passes reach, and the host's seconds per layer, which bound small passes."""
    result = load("update_qwen2-1.5b.json")
    cases, flops = result["cases"], result["limit"]["flops"]
    job = step_job("step_qwen2-1.5b")
    reached = flops / cases["everything"]["seconds"] / job.device.peak(2)
    groups, layers = result["prompts"], job.model.shape.layers
    small = [cases[f"max_tokens_per_micro_batch={tokens}"] for tokens in (4400, 2300)]
    per_layer = [case["seconds"] / (groups * cuts * layers) for case, cuts in zip(small, (2, 4), strict=True)]
    return {"update_reached": round(reached, 3), "host_seconds_per_layer": round(statistics.mean(per_layer), 5)}


def seconds_per_completion() -> float:
    """Seconds per completion outside of sampling, rewards and passes: rows, texts, records, audits and metrics."""
    found = []
    for name in STEPS[:4]:
        record = load(f"{name}.json")["engines"]["gruppo"]["median"]
        found.append((record["collect"] - record["generation"] - record["rewards"]) / step_job(name).rows)
    # The difference between an update within a step and the same passes alone.
    step, alone = load("step_qwen2-1.5b.json"), load("update_qwen2-1.5b.json")["cases"]["everything"]["seconds"]
    rest = (step["engines"]["gruppo"]["median"]["update"] - alone) / step_job("step_qwen2-1.5b").rows
    return round(statistics.mean(found) + rest, 6)


# ---- a CPU


def cpu_constants() -> dict[str, float]:
    """The constants of one thread: memory before the first weight is loaded, allocator overhead, and speed.

    The peak of a thread is set to 0.1 TFLOP/s; the shares of it that decoding and updates reach are fitted.
    """
    runs = load("plan_cpu.json")["runs"]
    constants = START | {"tflops_per_thread": 0.1, "bandwidth": 0.02, "bandwidth_reached": 1.0, "seconds_per_logit": 0}
    constants |= {"host_seconds_per_completion": 1e-3, "gap": 0.0}
    constants["program_bytes"] = runs["tiny"]["peak_bytes"]["loading"]
    memories = {name: Memory(case_job(run["case"], cpu_device())) for name, run in runs.items()}
    gaps = []
    for name, run in runs.items():
        own = memories[name].peak.bytes - memories[name].program.bytes
        measured = max(run["peak_bytes"].values()) - constants["program_bytes"]
        if own > 0.1 * constants["program_bytes"]:  # a tiny model's own memory is too small to compare
            gaps.append(measured / own - 1)
    constants["gap"] = round(statistics.mean(gaps), 3)

    def error(point: dict[str, float]) -> float:
        pairs = []
        for name, run in runs.items():
            seconds = Seconds(memories[name].job, memories[name], {"cpu": point})
            pairs.append((seconds.step, run["steps"][-1]["step"]))
        return worst(pairs)

    grid = {
        "decode_reached": [0.1, 0.15, 0.2, 0.25, 0.3, 0.4],
        "update_reached": [0.3, 0.4, 0.5, 0.6, 0.7, 0.8],
        "seconds_per_decoded_layer": [0.5e-3, 1e-3, 1.5e-3, 2e-3, 3e-3],
        "host_seconds_per_layer": [0.01, 0.02, 0.04],
        "host_seconds_per_completion": [1e-3, 2e-3, 3e-3],
    }
    print(f"a CPU: largest error of seconds {fit(constants, grid, error):.1%}")
    return constants


def main() -> None:
    cuda = START | memory_of_cuda() | update_constants()
    cuda["host_seconds_per_completion"] = seconds_per_completion()
    print(f"decoding: largest error {fit_decoding(cuda):.1%}")
    for predicted, measured in decode_pairs(cuda):
        print(f"   {predicted:8.3f} s, measured {measured:8.3f} s")
    found = {"cuda": cuda, "cpu": cpu_constants()}
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
