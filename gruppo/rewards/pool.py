"""Rewards in worker processes: a whole batch at once, or sample by sample if that fails."""

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

RETRY_FACTOR = 4  # time limit of a retry sample by sample, as a multiple of the limit of a batch


@dataclass(frozen=True)
class Bounds:
    """Resource limits of a reward in a worker."""

    seconds: float  # for a batch
    sample_seconds: float  # for one completion, when the batch is retried sample by sample
    workers: int  # processes for such a retry
    memory_gb: float | None = None
    variables: tuple[str, ...] = ()  # environment variables passed in addition to the usual ones


class Answer(NamedTuple):
    """The result of a request to a worker, and the seconds spent loading the function and calling it."""

    slot: int
    first: int
    content: Reply | BaseException
    loading: float
    calling: float


@dataclass
class TimeLeft:
    """Seconds left to one worker and its replacements in a retry sample by sample.

    Calling and loading are counted separately, because loading a replacement may take longer than all calls together.
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
    """The workers of one reward. The first is started immediately, others when a batch is split."""

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
        """Send a batch to the first worker; `finish` waits for the reply."""
        self._arguments = arguments
        self._answers = queue.SimpleQueue()  # answers of an interrupted call go to the old queue and are dropped
        self._ask(0, packed, 0, count(arguments), self.bounds.seconds)

    def finish(self) -> Reply:
        """The reply to the batch, merged from single samples if the call of the whole batch failed."""
        arguments = self._arguments
        reply = self._reply(self._answers.get().content, count(arguments))
        if reply.lost and not self.whole_batch and count(arguments) > 1:
            reply = self._sample_by_sample(arguments)
        return self._explained(reply)

    def _explained(self, reply: Reply) -> Reply:
        """Append a hint to errors caused by an environment variable that is not passed to workers."""
        hints = {o.error: hint(o.error, self.bounds.variables) for o in reply.outcomes if o.error is not None}
        reply.outcomes = [replace(o, error=o.error + hints[o.error]) if o.error else o for o in reply.outcomes]
        return reply

    def _sample_by_sample(self, arguments: Arguments) -> Reply:
        rows = count(arguments)
        seconds = RETRY_FACTOR * self.bounds.seconds
        waiting = iter(range(rows))
        late = (
            f"The batch was retried sample by sample, but the {seconds:g} s for that, or the {START_SECONDS} s for "
            "loading workers, ran out before this sample."
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
        """Send the next sample to a worker, if there is one and time is left; returns whether it did."""
        if left.over or (i := next(waiting, None)) is None:
            return False
        packed = cloudpickle.dumps(sample(arguments, i), protocol=5)
        self._ask(slot, packed, i, 1, min(self.bounds.sample_seconds, left.calling))
        return True

    def _ask(self, slot: int, packed: bytes, first: int, rows: int, seconds: float) -> None:
        """Send the request in a thread, so that its time limit holds whatever this process does in the meantime."""
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


# ---- pickling


def packed_setup(function: Any, name: str, memory_gb: float | None) -> bytes:
    """The pickled setup message of a new worker."""
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
    """The function pickled by value, as it is in this process.

    If its module holds something that cannot be pickled (a lock, a client), the worker imports the module instead.
    """
    problem: Exception | None = None
    for how in (by_value, contextlib.nullcontext):
        try:
            with how(function):
                return bytes(cloudpickle.dumps(function, protocol=5))
        except Exception as error:
            problem = problem or error
    raise ConfigError(
        f"The reward '{name}' cannot be sent to a worker process: {problem!r}. Create what it uses (clients, locks, "
        "open files) inside the function or in a separate module, or leave reward_timeout at None to run it in "
        "this process."
    ) from problem


@contextlib.contextmanager
def by_value(function: Any) -> Iterator[None]:
    """Within this context, cloudpickle pickles the function's module by value if it is the user's own.

    For a script (`__main__`) it does so anyway. Importing a local module again could repeat its side effects, and
    would miss later changes to its state.
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
    """Whether a module belongs to Python, this package or an installed one, so that the worker can import it."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == __name__.partition(".")[0]:
        return True
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(Path(file).is_relative_to(folder) for folder in folders)


def packed_arguments(arguments: Arguments, warn: Callable[[str], None]) -> tuple[bytes, Arguments]:
    """The pickled arguments for workers, and the arguments they contain: those that cannot be pickled are dropped."""
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
