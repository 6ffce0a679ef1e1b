"""A forecast as tables, as a few lines, and as numbers."""

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
    """A job with all that is predicted of it.

    Example:
        forecast = Forecast(make_job(preset("qwen2-1.5b"), DEVICES["H200"], config))
        print("\\n".join(forecast.lines()))
    """

    job: Job
    assumed: tuple[str, ...] = ()  # what nobody has said

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
        """The plan in a few lines of text, for a check of a recipe."""
        memory, job = self.memory, self.job
        peak = memory.peak
        most = max(peak.terms, key=lambda term: term.bytes)
        verdict = "fits" if memory.fits else "does not fit"
        said = [
            f"{job.model.name} ({job.model.weights / 1e9:.2f}B weights), {job.rows} completions a generation and "
            f"device, prompts of {job.prompt_tokens} and completions of up to {job.completion_tokens} tokens",
            f"peak memory {memory.device_bytes / GIB:.1f} GiB of {job.device.memory:.1f} ({job.device.name}): "
            f"{verdict}; largest phase: {peak.name}, most of it {most.name}, {most.bytes / GIB:.1f} GiB",
            f"sampling {memory.rollout_plan.rows} completions at once with {memory.rollout_plan.kv_tokens:,} places "
            f"for keys and values; update in passes of {memory.pack_tokens:,} tokens"
            + (", with gradient checkpointing" if memory.update_plan.checkpointing else ""),
            f"between phases {memory.between.bytes / GIB:.1f} GiB stay",
        ]
        if memory.fits:
            said.append(f"about {self.seconds.step:.1f} s for a generation and its updates, rewards not counted")
        return said + self.warnings()

    def warnings(self) -> list[str]:
        """What a reader should know of these numbers."""
        job, found = self.job, list(self.assumed)
        if not job.knows_optimizer:
            found.append(f"optim={job.optimizer!r} is not known here: two values per trained weight are assumed")
        if job.sampler == "transformers":
            found.append("rollout_backend='transformers' grows its cache by copying: sampling may take twice as much")
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
    """Tables of memory, of seconds and of the largest settings, and what follows from them."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    first, *others = forecast.lines()
    console.print(first, highlight=False)
    memory = forecast.memory
    for phase in memory.phases:
        mark = " (the peak)" if phase is memory.peak else ""
        table = Table("", "GiB", "counted as", title=f"{phase.name}{mark}", title_justify="left", box=None)
        for term in phase.terms:
            table.add_row(term.name, f"{term.bytes / GIB:.2f}", term.formula)
        table.add_row("together", f"{phase.bytes / GIB:.2f}", "", style="bold")
        console.print(table)
    table = Table("", "seconds", "counted as", title="one generation and its updates", title_justify="left", box=None)
    for part in forecast.seconds.parts:
        table.add_row(part.name, f"{part.seconds:.2f}", part.formula)
    console.print(table)
    table = Table(
        "", "at most", "", title="one setting larger, the others as they are", title_justify="left", box=None
    )
    for one in forecast.largest:
        value = "nothing fits" if one.value is None else f"{one.value:,}" if isinstance(one.value, int) else one.value
        table.add_row(one.setting, value, one.means)
    console.print(table)
    for line in others:
        console.print(line, highlight=False)
