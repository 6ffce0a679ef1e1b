"""Async rewards (mostly judges behind HTTP), each on its own event loop in a separate thread.

Cancelled coroutines are never awaited: one that swallows the cancellation would block forever.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import random
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gruppo.errors import RewardError
from gruppo.rewards.calling import Arguments, Log, Reply, count, end_fork, finished, given, join, lost, sample
from gruppo.rewards.marks import wants_whole_batch
from gruppo.rewards.outcomes import Kind

FIRST_WAIT = 0.5  # seconds before the first retry; each further one waits twice as long
GRACE = 5.0  # seconds past the time limit after which a blocked loop is abandoned
POLL = 0.25  # seconds between checks that the thread of a loop is alive

# Bugs in the code of a reward: a retry would not help.
PROGRAMMING_ERRORS = (TypeError, AttributeError, NameError, ImportError, AssertionError, NotImplementedError)

Timer = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Patience:
    """How long to wait for async rewards, and how often to retry them."""

    seconds: float | None  # for a batch, retries included
    sample_seconds: float | None  # for each try of one completion
    concurrency: int  # most concurrent calls of one reward
    retries: int


class Loop:
    """An event loop that runs in a thread."""

    def __init__(self) -> None:
        self.loop, self.stopped = asyncio.new_event_loop(), False
        self.thread = threading.Thread(target=self._spin, daemon=True, name="gruppo-async-rewards")
        self.thread.start()

    def _spin(self) -> None:
        """Run the loop until `stop`, even if a reward stops the loop or one of its tasks calls sys.exit."""
        while not self.stopped:
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                self.loop.run_forever()

    def stop(self) -> None:
        self.stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def start(self, work: Coroutine[Any, Any, Reply]) -> "concurrent.futures.Future[Reply]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, future: "concurrent.futures.Future[Reply]", deadline: float | None) -> None:
        """Wait until the work is done, the deadline has passed, or the thread has ended."""
        while not future.done() and self.thread.is_alive():
            left = POLL if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return
            concurrent.futures.wait([future], min(POLL, left))


class AsyncRewards:
    """Runs async rewards. Loops are kept between calls, because clients that a reward keeps are bound to its loop."""

    def __init__(self, patience: Patience, timer: Timer = nullcontext):
        self.patience, self.timer = patience, timer
        self._loops: dict[int, Loop] = {}
        self._waits = random.Random()  # separate: the run's random numbers must not depend on retries

    def score(self, functions: dict[int, tuple[Callable[..., Any], str]], arguments: Arguments) -> dict[int, Reply]:
        """The replies of several rewards that run concurrently, by their index."""
        bound = self.patience.seconds
        deadline = None if bound is None else time.monotonic() + bound + GRACE
        futures = {
            i: self._loop(i).start(self._timed(function, name, arguments)) for i, (function, name) in functions.items()
        }
        try:
            return {
                i: self._wait(i, name, futures[i], deadline, count(arguments)) for i, (_, name) in functions.items()
            }
        finally:
            for future in futures.values():
                future.cancel()  # no effect if done

    def _loop(self, i: int) -> Loop:
        if i not in self._loops:
            self._loops[i] = Loop()
            weakref.finalize(self, self._loops[i].stop)
        return self._loops[i]

    def _wait(
        self, i: int, name: str, future: "concurrent.futures.Future[Reply]", deadline: float | None, rows: int
    ) -> Reply:
        """The reply of one reward. A loop that is blocked, or has ended, is abandoned."""
        self._loops[i].wait(future, deadline)
        if future.done():
            return future.result()
        ended = not self._loops.pop(i).thread.is_alive()
        if ended:
            return lost(Kind.FAILURE, f"The event loop of the async reward '{name}' has ended.", rows)
        bound = self.patience.seconds
        return lost(Kind.TIMEOUT, f"The async reward '{name}' blocked its event loop for more than {bound} s.", rows)

    async def _timed(self, function: Callable[..., Any], name: str, arguments: Arguments) -> Reply:
        with self.timer(name):
            return await self._score_one(function, name, arguments)

    async def _score_one(self, function: Callable[..., Any], name: str, arguments: Arguments) -> Reply:
        bound = self.patience.seconds
        if wants_whole_batch(function) or (bound is None and count(arguments) == 1):
            until = None if bound is None else time.monotonic() + bound
            return await self._ask(function, name, arguments, 0, bound, until)
        if bound is None:
            reply, _ = await self._try(function, name, arguments, 0, None)
            if not reply.lost:
                return reply
        return await self._sample_by_sample(function, name, arguments)

    async def _sample_by_sample(self, function: Callable[..., Any], name: str, arguments: Arguments) -> Reply:
        patience, rows = self.patience, count(arguments)
        until = None if patience.seconds is None else time.monotonic() + patience.seconds
        gate = asyncio.Semaphore(patience.concurrency)
        late = f"The async reward '{name}' did not answer within the {patience.seconds} s for the batch."
        replies = [lost(Kind.TIMEOUT, late, 1) for _ in range(rows)]

        async def one(i: int) -> None:
            async with gate:
                seconds = patience.sample_seconds
                replies[i] = await self._ask(function, name, sample(arguments, i), i, seconds, until)

        tasks = [asyncio.ensure_future(one(i)) for i in range(rows)]
        done, waiting = await asyncio.wait(tasks, timeout=patience.seconds)
        for task in waiting:
            task.cancel()
        for task in done:
            task.result()  # raises RewardError if the contract was broken
        return join(replies)

    async def _ask(
        self,
        function: Callable[..., Any],
        name: str,
        arguments: Arguments,
        first: int,
        seconds: float | None,
        until: float | None,
    ) -> Reply:
        """One call, retried after each exception, with waits that double."""
        for attempt in range(self.patience.retries + 1):
            if until is not None:
                left = max(0.0, until - time.monotonic())
                seconds = left if seconds is None else min(seconds, left)
            reply, worth_a_retry = await self._try(function, name, arguments, first, seconds)
            wait = FIRST_WAIT * 2**attempt * self._waits.uniform(0.5, 1.5)
            if not worth_a_retry or (until is not None and time.monotonic() + wait >= until):
                break
            if attempt < self.patience.retries:
                await asyncio.sleep(wait)
        return reply

    async def _try(
        self, function: Callable[..., Any], name: str, arguments: Arguments, first: int, seconds: float | None
    ) -> tuple[Reply, bool]:
        """The reply of one call, and whether a retry might succeed."""
        task = asyncio.ensure_future(guarded(function, name, arguments, first))
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
        finally:
            task.cancel()  # no effect if done
        if done:
            return task.result()
        late = f"The async reward '{name}' took longer than {seconds:.3g} s."
        return lost(Kind.TIMEOUT, late, count(arguments)), False


async def guarded(function: Callable[..., Any], name: str, arguments: Arguments, first: int) -> tuple[Reply, bool]:
    """Await a reward; its exceptions become a reply, so that the loop never sees an exit.

    A KeyboardInterrupt here was raised by the reward itself, since the user's is raised in the main thread. A
    CancelledError may come from a client.
    """
    log, process = Log(count(arguments)), os.getpid()
    try:
        return finished(await function(**given(arguments, log)), name, arguments, log, first), False
    except BaseException as error:
        end_fork(process, error)
        if isinstance(error, RewardError):
            raise
        retried = isinstance(error, Exception | asyncio.CancelledError) and not isinstance(error, PROGRAMMING_ERRORS)
        return lost(Kind.FAILURE, traceback.format_exc(), log.rows), retried
    finally:
        end_fork(process)
