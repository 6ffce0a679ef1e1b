"""Runs tool calls: those of different samples at the same time, those of one sample in order.

    caller ── run() ──► coordinator (an event loop on a thread of its own)
                          ├─ a worker thread per sample: its plain functions, one after the other
                          └─ the tools' event loop: its async functions, together

The coordinator never runs a user's code, so that it can count the seconds of those who do.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from gruppo.tools.calls import Call, Outcome, shown
from gruppo.tools.threads import AsyncCall, LoopThread, NoThreadError, Read, Worker, attempt

logger = logging.getLogger(__name__)

ANSWER_TIME = 0.5  # seconds in which an event loop must show that nothing blocks it
TRIES = 3  # event loops in which a call may find itself behind one that blocks
STUCK_PER_SLOT = 4


class ToolExecutor:
    """Runs calls and keeps whatever goes wrong in their outcomes.

    Example:
        outcomes = ToolExecutor(timeout=5.0).run([[call_a, call_b], [call_c]])  # two samples
        [[o.value for o in sample] for sample in outcomes] == [["a", "b"], ["c"]]

    A call that takes longer than `timeout` seconds fails. A thread cannot be killed: the call goes on unheard, and
    another thread takes over, up to `4 * max_parallel` of them; then calls fail until some have come back. At most
    `max_parallel` samples run at a time; with one, and no timeout, plain functions run in the caller's thread.
    """

    def __init__(self, *, timeout: float | None = None, max_parallel: int = 32):
        self.timeout = timeout
        self.max_parallel = max_parallel
        self.given_up: dict[int, Any] = {}  # by id: environments in which a call that overran may still be at work
        self._idle: list[Worker] = []
        self._stuck: list[Worker | LoopThread] = []
        self._loops: dict[str, LoopThread] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _dismiss, self._idle, self._loops)

    @property
    def in_callers_thread(self) -> bool:
        """Whether plain functions run where they are asked for."""
        return self.max_parallel == 1 and self.timeout is None

    def run(
        self, samples: Sequence[Sequence[Call]], read: Read = shown, timeout: float | None = None
    ) -> list[list[Outcome]]:
        """The outcomes of every sample's calls, in the order of the calls; `read` turns a result into the value.

        `timeout` is used where the executor has none.
        """
        if self.in_callers_thread and not any(call.is_async for calls in samples for call in calls):
            outcomes = [[attempt(call, read) for call in calls] for calls in samples]
            for outcome in (outcome for sample in outcomes for outcome in sample):
                if isinstance(outcome.error, KeyboardInterrupt):  # someone wants to stop the run, not the call
                    raise outcome.error
            return outcomes
        limit = timeout if self.timeout is None else self.timeout
        try:
            coordinator = self._loop("coordinator")
        except NoThreadError as error:
            return [[Outcome(error=error) for _ in calls] for calls in samples]
        found: list[list[Outcome]] = coordinator.submit(self._run(samples, read, limit)).result()
        return found

    def prepare(self, is_async: bool) -> None:
        """Start what a call needs, since a program that is about to end cannot start threads any more."""
        if is_async:
            self._loop("async")
        elif not self.in_callers_thread and not self._idle:
            self._idle.append(Worker())
        if is_async or not self.in_callers_thread:
            self._loop("coordinator")

    @property
    def coordinates_here(self) -> bool:
        """Whether this is the coordinator's thread, which must not wait for itself."""
        return "coordinator" in self._loops and self._loops["coordinator"].is_current

    def _loop(self, name: str) -> LoopThread:
        """An event loop for the whole run: clients that a tool keeps between calls are bound to theirs."""
        with self._lock:
            if name not in self._loops or not self._loops[name].alive:
                self._loops[name] = LoopThread(name)
            return self._loops[name]

    async def _run(self, samples: Sequence[Sequence[Call]], read: Read, limit: float | None) -> list[list[Outcome]]:
        slots = asyncio.Semaphore(self.max_parallel)

        async def one(calls: Sequence[Call]) -> list[Outcome]:
            async with slots:
                return await self._run_sample(calls, read, limit)

        return await asyncio.gather(*map(one, samples))

    async def _run_sample(self, calls: Sequence[Call], read: Read, limit: float | None) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        worker: Worker | None = None
        for i, call in enumerate(calls):
            if not call.is_async:
                outcomes[i], worker = await self._plain(call, read, limit, worker)
        if worker is not None:
            self._idle.append(worker)
        together = [i for i, call in enumerate(calls) if call.is_async]
        results = await asyncio.gather(*(self._async(calls[i], read, limit) for i in together))
        outcomes.update(zip(together, results, strict=True))
        return [outcomes[i] for i in range(len(calls))]

    async def _plain(
        self, call: Call, read: Read, limit: float | None, worker: Worker | None
    ) -> tuple[Outcome, Worker | None]:
        """The outcome of a plain function, and the worker that makes the next call."""
        if refused := self._refused(call):
            return refused, worker
        try:
            worker = worker or (self._idle.pop() if self._idle else self._new_worker())
        except NoThreadError as error:
            return Outcome(error=error), None
        future = worker.submit(call, read)
        done, _ = await asyncio.wait([future], timeout=limit)
        if done:
            return future.result(), worker
        worker.dismiss()
        self._stuck.append(worker)
        return self._overran(call, limit), None

    def _new_worker(self) -> Worker:
        self._check_stuck()
        return Worker()

    def _check_stuck(self) -> None:
        self._stuck = [thread for thread in self._stuck if thread.alive]
        if len(self._stuck) >= STUCK_PER_SLOT * self.max_parallel:
            raise NoThreadError(
                f"No thread is left for this call: {len(self._stuck)} calls that took too long are still running."
            )

    async def _async(self, call: Call, read: Read, limit: float | None) -> Outcome:
        for _ in range(TRIES):
            if refused := self._refused(call):
                return refused
            made = AsyncCall(call, read)
            try:
                thread = self._loop("async")
                future = asyncio.wrap_future(thread.submit(made.make()))
                await asyncio.wait([future], timeout=limit)
                if not future.done() and not await thread.answers(ANSWER_TIME):
                    self._abandon(thread, limit)
            except NoThreadError as error:
                if made.take_back():
                    return Outcome(error=error)
                return self._overran(call, limit)
            if future.done():
                return future.result()
            future.cancel()
            if not made.take_back():  # it had begun
                return self._overran(call, limit)
        return Outcome(error=TimeoutError(f"{call.name} never began: other async tools block their event loop."))

    def _abandon(self, thread: LoopThread, limit: float | None) -> None:
        """Let another event loop take the place of one that is blocked."""
        if self._loops.get("async") is not thread:
            return  # it has been done already
        self._check_stuck()
        with self._lock:
            self._loops["async"] = LoopThread("async")
        self._stuck.append(thread)
        thread.end(after=limit or 0.0)
        logger.warning(
            "An async tool blocks its event loop, so that no other async tool can run: it may call time.sleep or wait "
            "for something without `await`. The others go on in a new event loop."
        )

    def _refused(self, call: Call) -> Outcome | None:
        if id(call.owner) not in self.given_up:
            return None
        owner = type(call.owner).__name__
        said = f"{call.name} was not called: an earlier call took too long and may still be at work in the {owner}."
        return Outcome(error=RuntimeError(said))

    def _overran(self, call: Call, limit: float | None) -> Outcome:
        if call.owner is not None:
            self.given_up[id(call.owner)] = call.owner
        return Outcome(error=TimeoutError(f"{call.name} took longer than {limit:g} s."), timed_out=True)


def _dismiss(workers: list[Worker], loops: dict[str, LoopThread]) -> None:
    for worker in workers:
        worker.dismiss()
    for thread in loops.values():
        thread.end()
