"""Worker processes for comparisons that may take long: symbolic algebra on arbitrary model output.

    with Graders() as graders:
        graders.run([Call(compare, (gold, answer, ladder), seconds=10.0), …])      [Outcome(value=…), …], in order

A comparison has its own time limit, but that cannot interrupt a single long call into C. Here the limit is enforced
from outside: a worker that overruns is killed, its current call is lost, and the other workers continue.

Workers are plain subprocesses instead of `multiprocessing` processes, which either fork a process that may hold a GPU
or run the user's script again.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from gruppo.errors import ConfigError
from gruppo.sandbox.variables import environment

__all__ = ["Call", "Graders", "Lost", "Outcome", "cores", "run_calls"]

MODULE = "gruppo.evaluation.worker"
MOST = 16  # processes by default; each takes about 100 MB
START_SECONDS = 120.0  # to import SymPy, on a busy machine


class Lost(StrEnum):
    """Why a call has no result."""

    TIMEOUT = "timeout"  # it took too long, and its process was killed
    DIED = "died"  # its process ended: out of memory, or a crash


@dataclass(frozen=True)
class Call:
    """A function of an importable module, its arguments, and its time limit in seconds.

    Example:
        Call(grade, (completion, "18", LADDERS["math"]), seconds=10.0)
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or why it returned nothing."""

    value: Any = None
    lost: Lost | None = None


def run_calls(calls: Sequence[Call], workers: "Graders | None") -> list[Outcome]:
    """The outcomes of calls, in order: computed by the workers, or in this process if there are none.

    Example:
        run_calls([Call(max, (3, 5), seconds=1.0)], None) == [Outcome(value=5)]
    """
    if workers is not None:
        return workers.run(calls)
    return [Outcome(call.function(*call.arguments)) for call in calls]


class _Worker:
    """One worker process and its current task."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                # -P: do not add the working folder to the module search path; PYTHONPATH below copies this process's.
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C goes to the parent process only, which ends this one itself
                env={**environment(), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )
        self.ready = False
        self.task: int | None = None
        self.deadline = time.monotonic() + START_SECONDS
        weakref.finalize(self, _dispose, self.process, self.pipe, os.getpid())

    def give(self, task: int, call: Call) -> bool:
        """Send it a call; False if the process is already gone, which is not the call's fault."""
        try:
            self.pipe.send((call.function, call.arguments, call.seconds))
        except OSError:
            return False
        self.task, self.deadline = task, time.monotonic() + call.seconds
        return True

    def kill(self) -> None:
        _dispose(self.process, self.pipe, os.getpid())


def _dispose(process: "subprocess.Popen[bytes]", pipe: "Connection[Any, Any]", owner: int) -> None:
    if os.getpid() != owner:  # a forked child that exits must not kill its parent's workers
        return
    pipe.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


class Graders:
    """A pool of worker processes, started when there is work.

    `processes`: how many; None means one for each core that this process may use, at most 16.

    Example:
        with Graders() as graders:
            grade_attempts(problems, attempts, LADDERS["math"], workers=graders)
    """

    def __init__(self, processes: int | None = None):
        if processes is not None and processes < 1:
            raise ConfigError(f"Graders(processes={processes}): must be at least 1; None starts one per core.")
        self.processes = processes if processes is not None else min(cores(), MOST)
        self._workers: list[_Worker] = []
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> "Graders":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        self._closed = True
        self._end_all()

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run the calls and return their outcomes, in order. An exception in a worker is raised here."""
        if self._closed:
            raise RuntimeError("These graders are closed; create new ones.")
        with self._lock:
            try:
                return self._run(calls)
            except BaseException:  # also Ctrl-C: a late reply would be mistaken for the reply to the next call
                self._end_all()
                raise

    def _run(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(calls)
        waiting = deque(range(len(calls)))
        while waiting or any(worker.task is not None for worker in self._workers):
            self._start(len(waiting))
            self._hand_out(calls, waiting)
            for worker in self._those_with_news():
                self._take_from(worker, outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    def _start(self, waiting: int) -> None:
        idle = sum(worker.task is None for worker in self._workers)
        for _ in range(min(waiting - idle, self.processes - len(self._workers))):
            self._workers.append(_Worker())

    def _hand_out(self, calls: Sequence[Call], waiting: deque[int]) -> None:
        for worker in list(self._workers):
            if waiting and worker.ready and worker.task is None:
                if worker.give(waiting[0], calls[waiting[0]]):
                    waiting.popleft()
                else:
                    self._remove(worker)

    def _those_with_news(self) -> list[_Worker]:
        """Wait until at least one worker has replied, exited or overrun its deadline; return all such workers."""
        at_work = [worker for worker in self._workers if worker.task is not None or not worker.ready]
        if not at_work:
            return []
        left = min(worker.deadline for worker in at_work) - time.monotonic()
        said = wait([worker.pipe for worker in at_work], timeout=max(left, 0.0))
        now = time.monotonic()
        return [worker for worker in at_work if worker.pipe in said or worker.deadline <= now]

    def _take_from(self, worker: _Worker, outcomes: list[Outcome | None]) -> None:
        kind: str
        value: Any
        try:
            kind, value = worker.pipe.recv() if worker.pipe.poll() else ("lost", Lost.TIMEOUT)
        except (EOFError, OSError):
            kind, value = "lost", Lost.DIED
        if not worker.ready:
            if kind != "ready":
                raise RuntimeError(f"A grading process ({sys.executable} -m {MODULE}) did not start: {value}.")
            worker.ready = True
            return
        assert worker.task is not None
        if kind == "error":
            raise value
        if kind == "lost":
            self._remove(worker)
            outcomes[worker.task] = Outcome(lost=value)
        else:
            outcomes[worker.task] = Outcome(value)
        worker.task = None

    def _remove(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)


def cores() -> int:
    """How many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
