"""Compares the predictions of `gruppo plan` with the measurements of committed results.

    python benchmarks/plan_compare.py            (prints them and fills the tables of docs/plan.md)

Every result of a whole run, an update or a rollout that records its memory use is compared; none is left out. The
constants that predictions need come from some of the same files (benchmarks/plan_constants.py), so seconds on the H200
are partly a fit. Memory is pure arithmetic except for the program itself and the allocator's gaps.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from gruppo.plan import DEVICES, Device
from gruppo.plan.job import Adapter, Job, Model
from gruppo.plan.measured import MEASURED
from gruppo.plan.memory import Memory
from gruppo.plan.reading import read_model
from gruppo.plan.seconds import Seconds
from gruppo.plan.terms import GIB

RESULTS = Path(__file__).parent / "results"
SMOLLM2 = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, tie_word_embeddings=True,
)  # fmt: skip
WIDTHS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Comparison:
    """A measured value and its prediction."""

    source: str  # file, and case in it
    what: str  # "GiB …" or "seconds …"
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@cache
def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def model_of(shape: dict[str, Any] | None) -> Model:
    """The model with these fields of Qwen2Config; without a shape SmolLM2, a Llama whose projections have no bias."""
    from transformers import LlamaConfig, Qwen2Config

    return read_model(LlamaConfig(**SMOLLM2) if shape is None else Qwen2Config(**shape))


def device_of(result: dict[str, Any], memory_gib: float | None = None) -> Device:
    name = result["device"].removeprefix("NVIDIA ")
    if memory_gib is None:
        return DEVICES[name]
    # The limit applies to torch's allocations; the memory of the program itself comes on top.
    return replace(DEVICES[name], memory=memory_gib + MEASURED["cuda"]["program_bytes"] / GIB)


# ---- whole steps on the H200


STEPS = ("step_qwen2-1.5b", "step_qwen2-1.5b-lean", "step_long-prompt", "step_smollm2", "recording_qwen2-1.5b")


@cache
def step_job(name: str) -> Job:
    """The job of a result of benchmarks/step.py."""
    result = load(f"{name}.json")
    record = result["engines"]["gruppo"]
    rounds = record["rounds"]
    rows = result["prompts"] * result["completions"]
    logged = [one["logged"] for one in rounds]
    prompt = result["prompt_tokens"] or round(record["plans"]["rollout"]["plan"]["prefill_tokens"] / result["prompts"])
    return Job(
        model_of(result["shape"]),
        device_of(result, result["memory_gib"]),
        rows=rows,
        generations=result["completions"],
        prompt_tokens=prompt,
        completion_tokens=result["new_tokens"],
        mean_completion_tokens=round(sum(one["completions/mean_length"] for one in logged) / len(logged)),
        unmoved=sum(one["frac_reward_zero_std"] for one in logged) / len(logged),
        weight_bytes=WIDTHS[result["weights"]],
        micro_batch_rows=result["rows"],
    )


def step_memory() -> Iterator[Comparison]:
    for name in STEPS:
        record, memory = load(f"{name}.json")["engines"]["gruppo"], Memory(step_job(name))
        phases = {phase.name: phase.bytes - memory.program.bytes for phase in memory.phases}
        parts = record["peak_allocated_gib_by_part"]
        yield Comparison(name, "GiB allocated in the update", parts["update"], phases["update"] / GIB)
        # `collect` covers the parity check, and sampling without the KV cache, which torch's statistics leave out.
        collect = max(phases["parity check"], phases["sampling"] - memory.pool.bytes)
        yield Comparison(name, "GiB allocated between updates", parts["collect"], collect / GIB)
        yield Comparison(name, "GiB of the device", record["peak_device_gib"], memory.device_bytes / GIB)


# ---- updates and rollouts alone


def update_memory() -> Iterator[Comparison]:
    """Updates of benchmarks/update.py: weights, gradients and passes, without an optimizer."""
    name = "update_qwen2-1.5b"
    result = load(f"{name}.json")
    budget = result["max_tokens_per_micro_batch"]
    base = Job(
        model_of({key: value for key, value in result["shape"].items() if key != "max_position_embeddings"}),
        device_of(result),
        rows=result["prompts"] * result["completions"],
        generations=result["completions"],
        prompt_tokens=result["prompt_tokens"],
        completion_tokens=result["new_tokens"],
        weight_bytes=2,
        optimizer="sgd",
        tokens=budget,
        checkpointing=False,
    )
    changes: dict[str, dict[str, Any]] = {
        "everything": {},
        "fused_layers=False": {"fused": False},
        "fused_head=False": {},  # the prediction does not distinguish it
        "prompts not shared": {"generations": 1},
        "garbage collection": {},
        "max_tokens_per_micro_batch=4400": {"tokens": 4400},
        "max_tokens_per_micro_batch=2300": {"tokens": 2300},
        "gradient_checkpointing=True": {"checkpointing": True},
        "packed_update=False, 8 rows at a time": {"packed": False},
        "packed_update=False, checkpointing": {"packed": False, "checkpointing": True},
    }
    for case, change in changes.items():
        memory = Memory(base.with_(**change))
        update = next(phase for phase in memory.phases if phase.name == "update").bytes - memory.program.bytes
        yield Comparison(f"{name}: {case}", "GiB allocated", result["cases"][case]["peak_gib"], update / GIB)


ROLLOUTS = ("rollout_qwen2-1.5b", "rollout_qwen2-1.5b-fp32", "rollout_qwen2-7b", "rollout_smollm2")


@cache
def rollout_job(name: str) -> Job:
    """The job of a result of benchmarks/rollout.py, which has no optimizer."""
    result = load(f"{name}.json")
    counters = result["engines"]["builtin"]["first_call"]["counters"]
    rows = result["prompts"] * result["completions"]
    tokens = result["engines"]["builtin"]["first_call"]["tokens"]
    return Job(
        model_of(result["shape"]),
        device_of(result),
        rows=rows,
        generations=result["completions"],
        prompt_tokens=result["prompt_tokens"] or round(counters["prefill_tokens"] / result["prompts"]) + 1,
        completion_tokens=result["new_tokens"],
        mean_completion_tokens=round(tokens / rows),
        weight_bytes=WIDTHS[result["weights"]],
        autocast=result["autocast"] is not None,
        optimizer="sgd",
    )


def rollout_memory() -> Iterator[Comparison]:
    for name in ROLLOUTS:
        record, memory = load(f"{name}.json")["engines"]["builtin"], Memory(rollout_job(name))
        sampling = next(phase for phase in memory.phases if phase.name == "sampling")
        own = sampling.bytes - memory.program.bytes
        yield Comparison(name, "GiB allocated", record["peak_memory_gib"], own / GIB)


# ---- runs of benchmarks/plan_cpu.py and plan_gpu.py


def case_job(case: dict[str, Any], device: Device, **known: Any) -> Job:
    """The job of a case of benchmarks/plan_runs.py."""
    model, fields = model_of(case["shape"]), case["fields"]
    targets = frozenset(model.projections)
    adapter = None if case["lora"] is None else Adapter(case["lora"]["r"], targets)
    return Job(
        model,
        device,
        rows=case["prompts"] * case["completions"],
        generations=case["completions"],
        prompt_tokens=case["prompt_tokens"],
        completion_tokens=case["new_tokens"],
        weight_bytes=WIDTHS[case["weights"]],
        autocast=fields.get("bf16", device.kind != "cpu"),
        adapter=adapter,
        reference=fields.get("beta", 0) > 0,
        checkpointing=fields.get("gradient_checkpointing"),
        optimizer=fields.get("optim", "adamw_torch_fused"),
        parity=fields.get("parity_check", "first") != "off",
        packed=fields.get("packed_update", True),
        fused=fields.get("fused_layers", True),
        micro_batch_rows=case["prompts"] * case["completions"],
        **known,
    )


def cpu_device(memory_gib: float = 16) -> Device:
    """One thread of a CPU with `memory_gib` of memory."""
    speed = MEASURED["cpu"]["tflops_per_thread"]
    return Device("CPU", speed, speed, MEASURED["cpu"]["bandwidth"], memory_gib, kind="cpu")


def cpu_memory(name: str = "plan_cpu") -> Iterator[Comparison]:
    result = load(f"{name}.json")
    for case, run in result["runs"].items():
        memory = Memory(case_job(run["case"], cpu_device()))
        measured = max(run["peak_bytes"].values())
        yield Comparison(f"{name}: {case}", "GiB of the process", measured / GIB, memory.device_bytes / GIB)


def gpu_memory(name: str = "plan_gpu") -> Iterator[Comparison]:
    """The largest phase of each run, and every phase that took more than a quarter of its memory."""
    result = load(f"{name}.json")
    for case, run in result["runs"].items():
        if "failed" in run:
            continue
        memory = Memory(case_job(run["case"], device_of(result)))
        phases = {phase.name: phase.bytes - memory.program.bytes for phase in memory.phases}
        phases["parity"] = phases.pop("parity check", 0)
        phases["update"] = max(phases["update"], phases.pop("optimizer step"))
        largest = max(run["peak_bytes"].values())
        yield Comparison(f"{name}: {case}", "GiB allocated", largest / GIB, max(phases.values()) / GIB)
        for phase in ("sampling", "parity", "update"):
            measured = run["peak_bytes"].get(phase, 0)
            if phases[phase] and measured > largest / 4:
                yield Comparison(f"{name}: {case}", f"GiB in {phase}", measured / GIB, phases[phase] / GIB)


# ---- seconds


def step_seconds() -> Iterator[Comparison]:
    """Steps and their parts; the time of rewards is not predicted and therefore not counted."""
    for name in STEPS:
        median = load(f"{name}.json")["engines"]["gruppo"]["median"]
        job = step_job(name)
        seconds = Seconds(job, Memory(job))
        sampling = sum(part.seconds for part in seconds.sampling)
        update = next(part for part in seconds.parts if part.name == "update").seconds
        yield Comparison(name, "seconds of a step", median["step"] - median["rewards"], seconds.step)
        yield Comparison(name, "seconds of sampling", median["generation"], sampling)
        yield Comparison(name, "seconds of the update", median["update"], update)


def rollout_seconds() -> Iterator[Comparison]:
    for name in ROLLOUTS:
        job = rollout_job(name)
        predicted = sum(part.seconds for part in Seconds(job, Memory(job)).sampling)
        measured = load(f"{name}.json")["engines"]["builtin"]["median_seconds"]
        yield Comparison(name, "seconds of a rollout", measured, predicted)


def cpu_seconds(name: str = "plan_cpu") -> Iterator[Comparison]:
    """Processor seconds of the last update of each run, on one thread."""
    for case, run in load(f"{name}.json")["runs"].items():
        job = case_job(run["case"], cpu_device())
        predicted = Seconds(job, Memory(job)).step
        yield Comparison(f"{name}: {case}", "processor seconds of a step", run["steps"][-1]["step"], predicted)


def comparisons() -> Iterator[Comparison]:
    yield from step_memory()
    yield from update_memory()
    yield from rollout_memory()
    yield from cpu_memory()
    if (RESULTS / "plan_gpu.json").exists():
        yield from gpu_memory()
    yield from step_seconds()
    yield from rollout_seconds()
    yield from cpu_seconds()


# ---- the page


def example_table() -> str:
    """The worked example: the memory of a step's update, term by term, and the measurement."""
    name = "step_qwen2-1.5b"
    memory, record = Memory(step_job(name)), load(f"{name}.json")["engines"]["gruppo"]
    (update,) = [phase for phase in memory.phases if phase.name == "update"]
    rows = [f"| {term.name} | {term.formula} | {term.bytes / GIB:.2f} |" for term in update.terms]
    allocated = (update.bytes - memory.program.bytes) / GIB
    return "\n".join(
        [
            "| | counted as | GiB |",
            "|---|---|---|",
            *rows,
            f"| together | | {update.bytes / GIB:.2f} |",
            "",
            f"Without the program {allocated:.2f} GiB; measured were {record['peak_allocated_gib']:.2f}. On the "
            f"device, with gaps, {memory.device_bytes / GIB:.2f} GiB; measured were {record['peak_device_gib']:.2f}.",
        ]
    )


def table(found: Iterable[Comparison]) -> str:
    rows = [
        f"| {one.source} | {one.what} | {one.measured:.2f} | {one.predicted:.2f} | {one.error:+.0%} |" for one in found
    ]
    return "\n".join(["| result | what | measured | predicted | error |", "|---|---|---|---|---|", *rows])


def fill_page(page: str) -> str:
    """docs/plan.md with the tables of the committed results."""
    found = list(comparisons())
    parts = {
        "example": example_table(),
        "memory": table(one for one in found if "GiB" in one.what),
        "seconds": table(one for one in found if "seconds" in one.what),
    }
    for name, text in parts.items():
        first, last = f"<!-- {name}: benchmarks/plan_compare.py -->", f"<!-- end of {name} -->"
        start, end = page.index(first) + len(first), page.index(last)
        page = f"{page[:start]}\n{text}\n{page[end:]}"
    return page


def main() -> None:
    for one in comparisons():
        print(f"{one.source:58} {one.what:36} {one.measured:9.3f} {one.predicted:9.3f} {one.error:+7.1%}")
    path = RESULTS.parent.parent / "docs" / "plan.md"
    path.write_text(fill_page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
