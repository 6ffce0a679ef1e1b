"""Async rewards, on one event loop in a thread of its own: judges behind HTTP, mostly.

Nothing here waits for a coroutine that was cancelled: one that swallows the cancellation would be waited for for ever.
"""

import asyncio
import concurrent.futures
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
from gruppo.rewards.calling import Arguments, Log, Reply, count, finished, join, lost, sample, with_log
from gruppo.rewards.marks import wants_whole_batch
from gruppo.rewards.outcomes import Kind

FIRST_WAIT = 0.5  # seconds before the first retry; each further one waits twice as long
GRACE = 5.0  # seconds beyond its bound after which a loop that is blocked is given up

# Mistakes in the code of a reward: asking again would not help.
PROGRAMMING_ERRORS = (TypeError, AttributeError, NameError, ImportError, AssertionError, NotImplementedError)

Timer = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Patience:
    """How long async rewards are waited for, and how often they are asked."""

    seconds: float | None  # for a batch, retries included
    sample_seconds: float | None  # for each try of one completion
    concurrency: int  # calls of one reward at a time
    retries: int


class AsyncRewards:
    """Runs async rewards. The loop is kept between calls, because clients that a reward keeps are bound to it."""

    def __init__(self, patience: Patience, timer: Timer = nullcontext):
        self.patience, self.timer = patience, timer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits = random.Random()  # of its own: the run's random numbers must not depend on retries

    def score(self, functions: dict[int, tuple[Callable[..., Any], str]], arguments: Arguments) -> dict[int, Reply]:
        """The replies of several rewards that run at the same time, by their number."""
        replies: dict[int, Reply] = {}

        async def one(i: int, function: Callable[..., Any], name: str) -> None:
            with self.timer(name):
                replies[i] = await self._score_one(function, name, arguments)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(i, function, name) for i, (function, name) in functions.items()))

        self._run(all_of_them())
        rows, bound = count(arguments), self.patience.seconds
        for i, (_, name) in functions.items():
            blocked = f"The async reward '{name}' blocked its event loop for more than {bound} s."
            replies.setdefault(i, lost(Kind.TIMEOUT, blocked, rows))
        return dict(replies)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work on the loop. A loop that is blocked for longer than the bound is left to itself."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="gruppo-async-rewards").start()
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        bound = self.patience.seconds
        try:
            future.result(None if bound is None else bound + GRACE)
        except concurrent.futures.TimeoutError:
            if future.done():  # the work itself said so
                raise
            future.cancel()
            self._loop = None
        except BaseException:
            future.cancel()
            raise

    async def _score_one(self, function: Callable[..., Any], name: str, arguments: Arguments) -> Reply:
        bound, whole_batch = self.patience.seconds, wants_whole_batch(function)
        if bound is None:
            reply, _ = await self._try(function, name, arguments, 0, None)
            if not reply.lost or whole_batch or count(arguments) == 1:
                return reply
        elif whole_batch:
            return await self._ask(function, name, arguments, 0, bound, time.monotonic() + bound)
        return await self._sample_by_sample(function, name, arguments)

    async def _sample_by_sample(self, function: Callable[..., Any], name: str, arguments: Arguments) -> Reply:
        patience, rows = self.patience, count(arguments)
        until = None if patience.seconds is None else time.monotonic() + patience.seconds
        gate = asyncio.Semaphore(patience.concurrency)
        late = f"The async reward '{name}' had no answer when the {patience.seconds} s for the batch were over."
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
            task.result()  # raises what broke the contract
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
        """One call, again after each exception, with waits that double."""
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
        """One call, and whether another might do better."""
        task = asyncio.ensure_future(guarded(function, name, arguments, first))
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
        finally:
            task.cancel()  # does nothing to one that is done
        if done:
            return task.result()
        late = f"The async reward '{name}' took longer than {seconds:.3g} s."
        return lost(Kind.TIMEOUT, late, count(arguments)), False


async def guarded(function: Callable[..., Any], name: str, arguments: Arguments, first: int) -> tuple[Reply, bool]:
    """Await a reward; what it raises becomes a reply, so that the loop never sees a SystemExit."""
    log = Log(count(arguments))
    try:
        return finished(await function(**with_log(arguments, log)), name, arguments, log, first), False
    except RewardError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the last may be a client's, not ours
        again = not isinstance(error, (*PROGRAMMING_ERRORS, SystemExit))
        return lost(Kind.FAILURE, traceback.format_exc(), log.rows), again
