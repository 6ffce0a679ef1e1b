"""Runs in separate processes, which may be killed at any moment, and their outcomes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.processes import context, exits_of
from tests.resume import evidence
from tests.resume.moments import Stop

MOST_SECONDS = 120
SAVED_AND_LEFT = 75  # the exit code of a run that was asked to stop: it saved a checkpoint and exited


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code of each process (negative: the signal that killed it), and its results."""

    folder: Path
    exits: tuple[int, ...]
    log: str
    reached: Mapping[int, Mapping[str, list[int]]] = field(default_factory=dict)  # by process; only if it finished
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, jobs: Sequence["Job"], exits: tuple[int, ...]) -> "Outcome":
        """The outcome of processes that have exited."""
        folder = Path(jobs[0].folder) / "run"
        log = "\n".join(job.log.read_text(errors="replace") for job in jobs if job.log.exists())
        if any(exits):
            return cls(folder, exits, log)
        reports = [json.loads(job.report.read_text()) for job in jobs]
        return cls(
            folder,
            exits,
            log,
            reached={rank: report["reached"] for rank, report in enumerate(reports)},
            evidence={
                **{f"process {rank}": report["evidence"] for rank, report in enumerate(reports)},
                **evidence.of_folder(folder),
            },
        )

    @property
    def finished(self) -> bool:
        return not any(self.exits)

    def checked(self) -> "Outcome":
        """Assert that the run finished, and return the outcome."""
        assert self.finished, f"exit codes {self.exits}\n{self.log[-6000:]}"
        return self


def run(case: str, folder: Path, **orders: Any) -> Outcome:
    """Train the configuration `case` in folder/run, or resume the run there; `orders` are fields of `Job`."""
    from tests.resume.cases import CASES

    if CASES[case].processes > 1 and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 cannot resume on several CPU processes")
    folder.mkdir(parents=True, exist_ok=True)
    count = CASES[case].processes
    jobs = [Job(case, str(folder), rank, count, **orders) for rank in range(count)]
    for path in (*(job.report for job in jobs), jobs[0].meeting):
        path.unlink(missing_ok=True)
    return Outcome.of(jobs, _together(jobs))


def has_checkpoint(folder: Path) -> bool:
    return any((folder / "run").glob("checkpoint-*"))


def killed_and_resumed(case: str, folder: Path, stop: Stop) -> Outcome:
    """A run that is killed and then resumed until it finishes."""
    killed = run(case, folder, stop=stop)
    assert killed.exits[stop.rank] == -stop.signal, f"{stop}: exit codes {killed.exits}\n{killed.log[-6000:]}"
    return run(case, folder, resume=True).checked()


def assert_same(straight: Outcome, resumed: Outcome) -> None:
    """Assert that two runs are equal byte for byte."""
    found = evidence.differences(straight.evidence, resumed.evidence)
    assert not found, "\n".join(["not the same:", *found[:20]])


# ---- processes


@dataclass(frozen=True)
class Job:
    """The instructions for a process."""

    case: str
    folder: str  # the run is in folder/run
    rank: int = 0
    world: int = 1
    stop: Stop | None = None
    resume: bool = False
    checkpoint: Path | None = None  # the checkpoint to resume from; None: the trainer finds it
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that differ from those of the case
    tricks: tuple[str, ...] = ()  # functions of tests.resume.tricks, called with the trainer before it trains

    @property
    def log(self) -> Path:
        return Path(self.folder) / f"process{self.rank}.log"

    @property
    def meeting(self) -> Path:
        """The rendezvous file of the processes of a run."""
        return Path(self.folder) / "meeting"

    @property
    def report(self) -> Path:
        return Path(self.folder) / f"process{self.rank}.json"


def start(job: Job) -> Any:
    """Start a process that runs the job."""
    from tests.resume.process import work

    process = context().Process(target=work, args=(job,))
    process.start()
    return process


def _together(jobs: list[Job]) -> tuple[int, ...]:
    """Run all processes; if one of them fails, the others are killed, as a launcher does.

    A process that exits with SAVED_AND_LEFT has agreed on it with the others, which get time to exit as well.
    """
    logs = [job.log for job in jobs]
    return exits_of([start(job) for job in jobs], logs, MOST_SECONDS, fine=(0, SAVED_AND_LEFT))
