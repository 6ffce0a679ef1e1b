"""A forecast as tables, as a few lines of text, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from gruppo.plan.job import Job
from gruppo.plan.memory import Memory
from gruppo.plan.search import Largest, largest_settings
from gruppo.plan.seconds import Seconds
from gruppo.plan.terms import GIB


@dataclass(frozen=True)
class Forecast:
    """A job with its predicted memory, time and largest settings.

    Example:
        forecast = Forecast(make_job(preset("qwen2-1.5b"), DEVICES["H200"], config))
        print("\\n".join(forecast.lines()))
    """

    job: Job
    assumed: tuple[str, ...] = ()  # assumptions about values that were not given

    @cached_property
    def memory(self) -> Memory:
        return Memory(self.job)

    @cached_property
    def seconds(self) -> Seconds:
        return Seconds(self.job, self.memory)

    @cached_property
    def largest(self) -> list[Largest]:
        return largest_settings(self.job)

    def lines(self) -> list[str]:
        """The plan in a few lines of text, as `gruppo check` prints it."""
        memory, job = self.memory, self.job
        peak = memory.peak
        most = max(peak.terms, key=lambda term: term.bytes)
        verdict = "fits" if memory.fits else "does not fit"
        said = [
            f"{job.model.name} ({_count(job.model.weights)} weights), {job.rows} completions per generation and "
            f"device, prompts of {job.prompt_tokens} and completions of up to {job.completion_tokens} tokens",
            f"peak memory {memory.device_bytes / GIB:.1f} GiB of {job.device.memory:.1f} ({job.device.name}): "
            f"{verdict}; largest phase: {peak.name}, most of it {most.name}, {most.bytes / GIB:.1f} GiB",
            f"sampling up to {memory.rollout_plan.rows} completions at once in {memory.rollout_plan.kv_tokens:,} "
            f"KV-cache slots; update in passes of {memory.pack_tokens:,} tokens"
            + (", with gradient checkpointing" if memory.update_plan.checkpointing else ""),
            f"{memory.between.bytes / GIB:.1f} GiB stay allocated between phases",
        ]
        if memory.fits:
            said.append(f"about {self.seconds.step:.1f} s for a generation and its updates, rewards not counted")
        return said + self.warnings()

    def warnings(self) -> list[str]:
        """Caveats about these numbers."""
        job, found = self.job, list(self.assumed)
        if not job.knows_optimizer:
            found.append(f"optim={job.optimizer!r} is unknown: two values per trained weight are assumed")
        if job.sampler == "transformers":
            found.append(
                "rollout_backend='transformers' grows its cache by copying: sampling may need twice the memory"
            )
        if job.shares > 1 and self.memory.shadow is not None and self.memory.whole_weights is None:
            found.append("the weights do not fit on one process, which sampling needs: use a vLLM server")
        return found

    def to_dict(self) -> dict[str, Any]:
        memory, seconds = self.memory, self.seconds
        return {
            "model": self.job.model.name,
            "weights": self.job.model.weights,
            "device": asdict(self.job.device),
            "fits": memory.fits,
            "peak_bytes": memory.peak.bytes,
            "device_bytes": memory.device_bytes,
            "limiting_phase": memory.peak.name,
            "resident_bytes": memory.between.bytes,
            "phases": {
                phase.name: {"bytes": phase.bytes, "terms": [asdict(term) for term in phase.terms]}
                for phase in memory.phases
            },
            "rollout_plan": memory.rollout_plan.to_dict(),
            "update_plan": memory.update_plan.to_dict(),
            "pass_tokens": memory.pack_tokens,
            "step_seconds": seconds.step,
            "parts": [asdict(part) for part in seconds.parts],
            "largest": [asdict(one) for one in self.largest],
            "warnings": self.warnings(),
        }


def print_forecast(forecast: Forecast) -> None:
    """Print the verdict, then the tables behind it: memory, seconds and the largest settings."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    job, verdict, *others = forecast.lines()
    for line in (verdict, job, *others):
        console.print(line, highlight=False)
    console.print()
    table = Table("memory", "GiB", "counted as", box=None)
    for name, size, formula, style in _memory_rows(forecast.memory):
        table.add_row(name, size, formula, style=style)
    console.print(table)
    console.print()
    table = Table("one generation and its updates", "seconds", "counted as", box=None)
    for part in forecast.seconds.parts:
        table.add_row(part.name, f"{part.seconds:.2f}", part.formula)
    console.print(table)
    console.print()
    table = Table("one setting changed, the others kept", "at most", "so that", box=None)
    for one in forecast.largest:
        value = "nothing fits" if one.value is None else f"{one.value:,}" if isinstance(one.value, int) else one.value
        table.add_row(one.setting, value, one.means)
    console.print(table)


def _memory_rows(memory: Memory) -> Iterator[tuple[str, str, str, str]]:
    """What stays allocated between phases, once; what each phase adds to it; and the peak as the device reports it.

    The last element of each row is its style.
    """
    for phase in (memory.between, *memory.phases):
        stays = () if phase is memory.between else memory.between.terms
        missing = [term.name for term in stays if term not in phase.terms]
        formula = f"what stays, except: {', '.join(missing)}" if missing else "what stays, plus" if stays else ""
        mark = " (the peak)" if phase is memory.peak else ""
        yield f"{phase.name}{mark}", f"{phase.bytes / GIB:.2f}", formula, "bold"
        for term in phase.terms:
            if term not in stays:
                yield f"  {term.name}", f"{term.bytes / GIB:.2f}", term.formula, ""
    gaps = memory.device_bytes - memory.peak.bytes
    told = f"the peak plus {memory.gap:.1%} of what is allocated in it: the allocator's gaps, measured"
    yield "peak on the device", f"{memory.device_bytes / GIB:.2f}", told, "bold"
    yield "  allocator gaps", f"{gaps / GIB:.2f}", "closed when memory is short, so `fits` leaves them out", ""


def _count(weights: int) -> str:
    """Example: _count(1_543_714_304) == "1.54B" and _count(600_000) == "0.6M"."""
    return f"{weights / 1e9:.2f}B" if weights >= 1e9 else f"{weights / 1e6:.1f}M"
