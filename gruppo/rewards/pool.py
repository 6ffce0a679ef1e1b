"""Rewards in workers: whole batches, and sample by sample where that fails."""

import contextlib
import os
import pickle
import queue
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from gruppo.errors import ConfigError, RewardError
from gruppo.rewards.calling import Arguments, Reply, count, join, lost, sample
from gruppo.rewards.marks import innermost, wants_whole_batch
from gruppo.rewards.outcomes import Kind
from gruppo.rewards.process import START_SECONDS, LoadError, LostCallError, Worker
from gruppo.sandbox.variables import hint

RETRY_FACTOR = 4  # a retry sample by sample may take so many times what the batch could


@dataclass(frozen=True)
class Bounds:
    """What a reward in a worker may use."""

    seconds: float  # for a batch
    sample_seconds: float  # for one completion, when the batch is asked again sample by sample
    workers: int  # processes at work on that
    memory_gb: float | None = None
    variables: tuple[str, ...] = ()  # environment variables that it sees beside the usual ones


class Answer(NamedTuple):
    """What came of a question to a worker, and the seconds it took: to load the function, and to call it."""

    slot: int
    first: int
    content: Reply | BaseException
    loading: float
    calling: float


@dataclass
class TimeLeft:
    """Seconds that one worker and those that replace it may still use in a retry sample by sample.

    They are counted apart, because a replacement may take longer to load than all calls together.
    """

    calling: float
    loading: float = START_SECONDS

    def take(self, answer: Answer) -> None:
        self.calling -= answer.calling
        self.loading -= answer.loading

    @property
    def over(self) -> bool:
        return self.calling <= 0 or self.loading <= 0


class Pool:
    """The workers of one reward. The first is started at once; others join when a batch is split."""

    def __init__(self, function: Any, name: str, bounds: Bounds):
        self.name, self.bounds = name, bounds
        self.whole_batch = wants_whole_batch(function)
        self._setup = packed_setup(function, name, bounds.memory_gb)
        self._workers = [self._new_worker()]
        self._has_answered = False
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def _new_worker(self) -> Worker:
        return Worker(self._setup, self.bounds.variables)

    def begin(self, packed: bytes, arguments: Arguments) -> None:
        """Send a batch to the first worker; `finish` waits for what it says."""
        self._arguments = arguments
        self._answers = queue.SimpleQueue()  # whatever an interrupted call still puts into the old one is lost
        self._ask(0, packed, 0, count(arguments), self.bounds.seconds)

    def finish(self) -> Reply:
        """The reply to the batch, put together from single samples if the batch was lost."""
        arguments = self._arguments
        reply = self._reply(self._answers.get().content, count(arguments))
        if reply.lost and not self.whole_batch and count(arguments) > 1:
            reply = self._sample_by_sample(arguments)
        return self._explained(reply)

    def _explained(self, reply: Reply) -> Reply:
        """Errors that come of an environment variable which workers do not get say so."""
        hints = {o.error: hint(o.error, self.bounds.variables) for o in reply.outcomes if o.error is not None}
        reply.outcomes = [replace(o, error=o.error + hints[o.error]) if o.error else o for o in reply.outcomes]
        return reply

    def _sample_by_sample(self, arguments: Arguments) -> Reply:
        rows = count(arguments)
        seconds = RETRY_FACTOR * self.bounds.seconds
        waiting = iter(range(rows))
        late = (
            f"The batch was asked again sample by sample, and the {seconds:g} s for that, or the {START_SECONDS} s to "
            "load workers, were over."
        )
        replies = [lost(Kind.TIMEOUT, late, 1) for _ in range(rows)]
        left = [TimeLeft(seconds) for _ in range(min(self.bounds.workers, rows))]
        busy = sum(self._ask_next(slot, waiting, arguments, left[slot]) for slot in range(len(left)))
        while busy:
            answer = self._answers.get()
            replies[answer.first] = self._reply(answer.content, 1)
            left[answer.slot].take(answer)
            busy += self._ask_next(answer.slot, waiting, arguments, left[answer.slot]) - 1
        return join(replies)

    def _ask_next(self, slot: int, waiting: Iterator[int], arguments: Arguments, left: TimeLeft) -> bool:
        """Give a worker the next sample, if there is one and time is left."""
        if left.over or (i := next(waiting, None)) is None:
            return False
        packed = cloudpickle.dumps(sample(arguments, i), protocol=5)
        self._ask(slot, packed, i, 1, min(self.bounds.sample_seconds, left.calling))
        return True

    def _ask(self, slot: int, packed: bytes, first: int, rows: int, seconds: float) -> None:
        """Ask in a thread, so that the bound holds whatever this process is doing meanwhile."""
        while slot >= len(self._workers):
            self._workers.append(self._new_worker())
        if not self._workers[slot].alive():
            self._workers[slot] = self._new_worker()
        worker, answers = self._workers[slot], self._answers

        def ask() -> None:
            content: Reply | BaseException
            start = ready = time.monotonic()
            try:
                worker.wait()
                ready = time.monotonic()
                content = worker.ask(packed, first, rows, seconds)
            except LoadError as error:
                content, ready = error, time.monotonic()
            except BaseException as error:
                content = error
            answers.put(Answer(slot, first, content, ready - start, time.monotonic() - ready))

        threading.Thread(target=ask, daemon=True, name=f"gruppo-reward-{self.name}").start()

    def _reply(self, answer: Reply | BaseException, rows: int) -> Reply:
        if isinstance(answer, LoadError) and not self._has_answered:
            raise ConfigError(
                f"The reward '{self.name}' could not be loaded in its worker process. What it needs must be "
                f"importable there, as it is here:\n{answer}{hint(str(answer), self.bounds.variables)}"
            )
        if isinstance(answer, LostCallError):
            self._has_answered |= not isinstance(answer, LoadError)
            return lost(answer.kind, f"The reward '{self.name}' ran in a worker. {answer}", rows)
        if isinstance(answer, BaseException):
            raise answer
        self._has_answered = True
        if answer.broken is not None:
            raise RewardError(answer.broken)
        return answer

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()


# ---- what is sent


def packed_setup(function: Any, name: str, memory_gb: float | None) -> bytes:
    """Everything a new worker is told."""
    return pickle.dumps(
        {
            "function": packed_function(function, name),
            "name": name,
            "path": [os.path.abspath(entry) for entry in sys.path],
            "python_path": os.environ.get("PYTHONPATH"),
            "memory_gb": memory_gb,
        }
    )


def packed_function(function: Any, name: str) -> bytes:
    """The function by value, as it is in this process.

    If something that its module holds cannot be copied (a lock, a client), the module is imported in the worker.
    """
    problem: Exception | None = None
    for how in (by_value, contextlib.nullcontext):
        try:
            with how(function):
                return bytes(cloudpickle.dumps(function, protocol=5))
        except Exception as error:
            problem = problem or error
    raise ConfigError(
        f"The reward '{name}' cannot be sent to a worker process: {problem!r}. Make what it uses (clients, locks, "
        "open files) inside the function or in a module of its own, or leave reward_timeout at None to run it in "
        "this process."
    ) from problem


@contextlib.contextmanager
def by_value(function: Any) -> Iterator[None]:
    """In here, cloudpickle copies the function's module, if it is the user's own, instead of naming it.

    It does so with a script anyway. To import a local module again could start what it starts, and would miss what was
    changed in it since.
    """
    inner = innermost(function)
    owner = getattr(inner, "__module__", None) or type(inner).__module__
    module = sys.modules.get(owner)
    if module is None or is_installed(module) or owner == "__main__":
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def is_installed(module: Any) -> bool:
    """Whether a module is part of Python, of this package or of an installed one: the worker finds it too."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == __name__.partition(".")[0]:
        return True
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(Path(file).is_relative_to(folder) for folder in folders)


def packed_arguments(arguments: Arguments, warn: Callable[[str], None]) -> tuple[bytes, Arguments]:
    """The arguments for workers, pickled, and as they are in there: what cannot be pickled is left out."""
    try:
        return cloudpickle.dumps(arguments, protocol=5), arguments
    except Exception:
        kept = {name: value for name, value in arguments.items() if is_picklable(value)}
        for name in arguments.keys() - kept.keys():
            warn(name)
        return cloudpickle.dumps(kept, protocol=5), kept


def is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value, protocol=5)
    except Exception:
        return False
    return True
