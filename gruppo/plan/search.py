"""The largest settings that fit, each searched with the other settings unchanged."""

from collections.abc import Callable
from dataclasses import dataclass

from gruppo.plan.job import Adapter, Job
from gruppo.plan.memory import Memory
from gruppo.plan.presets import CLASSES, preset

_LONGEST = 1 << 20  # more tokens or completions than any run uses


@dataclass(frozen=True)
class Largest:
    """A setting, its largest value (None: not even the smallest fits), and what that value guarantees."""

    setting: str
    value: int | str | None
    means: str


def largest(fits: Callable[[int], bool], step: int = 1, most: int = _LONGEST) -> int | None:
    """The largest multiple of `step` up to `most` that fits; None if none fits. Assumes that all smaller ones fit too.

    Example:
        largest(lambda tokens: tokens * tokens <= 50) == 7
    """
    if not fits(step):
        return None
    low, high = 1, max(most // step, 1)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle - 1
    return low * step


def decoded_together(job: Job) -> bool:
    """Whether the job fits with all completions decoded at once."""
    memory = Memory(job)
    plan = memory.rollout_plan
    wanted = job.groups * max(job.prompt_tokens - 1, 0) + job.rows * job.completion_tokens
    return memory.fits and plan.rows >= job.rows and plan.kv_tokens >= wanted


def fits(job: Job) -> bool:
    return Memory(job).fits


def largest_settings(job: Job) -> list[Largest]:
    """The limits of what could be raised: number of completions, their length, and the size of the model."""
    size = job.generations
    together = largest(lambda rows: decoded_together(job.with_(rows=rows)), size)
    whole = largest(lambda tokens: _without_checkpointing(job.with_(completion_tokens=tokens)), 16)
    longest = largest(lambda tokens: fits(job.with_(completion_tokens=tokens)), 16)
    found = [
        Largest("max_completion_length", longest, "one row fits into an update, even if few are sampled at once"),
        Largest("max_completion_length", whole, "the same, without gradient checkpointing"),
    ]
    if job.sampler == "builtin":
        found.insert(0, Largest("generation batch", together, _means_together(job, together)))
    return [*found, _model_class(job, whole_weights=True), _model_class(job, whole_weights=False)]


def _means_together(job: Job, together: int | None) -> str:
    """Explains the limit: a run may have more completions than are decoded at once, some then wait for a slot."""
    means = f"all completions of a device, {job.generations} per prompt, are decoded at once"
    if together is None or together >= job.rows or not fits(job):
        return means
    return f"{means}; this run's {job.rows:,} fit too, but some of them wait for KV-cache slots"


def _without_checkpointing(job: Job) -> bool:
    """Whether the job fits with no gradient checkpointing, even if its config turns it on."""
    memory = Memory(job.with_(checkpointing=None) if job.checkpointing else job)
    return memory.fits and not memory.update_plan.checkpointing


def _model_class(job: Job, *, whole_weights: bool) -> Largest:
    """The largest preset that fits with the settings of the job."""
    targets = frozenset(preset(CLASSES[0]).projections)
    adapter = None if whole_weights else job.adapter or Adapter(16, targets)
    bits = None if whole_weights else job.bits
    names = [name for name in CLASSES if fits(job.with_(model=preset(name), adapter=adapter, bits=bits))]
    rank = "" if adapter is None else f", rank {adapter.rank}" + (f", {bits} bits" if bits else "")
    means = "all weights trained" if whole_weights else f"LoRA{rank}"
    return Largest("model", names[-1] if names else None, f"the largest Qwen2 shape, {means}")
