"""Runs tool calls: those of different samples concurrently, those of one sample in order.

    caller ── run() ──► coordinator (an event loop in its own thread)
                          ├─ a worker thread per sample: its plain functions, one after the other
                          └─ the tools' event loop: its async functions, concurrently

The coordinator never runs user code, so that it can enforce time limits on the threads that do.
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

ANSWER_TIME = 0.5  # seconds within which an event loop must respond, or it counts as blocked
TRIES = 3  # event loops to try for a call that does not start because another call blocks the loop
STUCK_PER_SLOT = 4  # most threads with overdue calls, per parallel sample


class ToolExecutor:
    """Runs calls and returns their outcomes, which hold any error.

    Example:
        outcomes = ToolExecutor(timeout=5.0).run([[call_a, call_b], [call_c]])  # two samples
        [[o.value for o in sample] for sample in outcomes] == [["a", "b"], ["c"]]

    A call that takes longer than `timeout` seconds fails. A thread cannot be killed: the call keeps running, its
    result is ignored, and a new thread replaces its thread. Once `4 * max_parallel` threads are stuck this way, calls
    fail until some return. At most `max_parallel` samples run at a time; if that is 1 and there is no timeout, plain
    functions run in the caller's thread.
    """

    def __init__(self, *, timeout: float | None = None, max_parallel: int = 32):
        self.timeout = timeout
        self.max_parallel = max_parallel
        self.given_up: dict[int, Any] = {}  # by id: environments in which a timed-out call may still be running
        self._idle: list[Worker] = []
        self._stuck: list[Worker | LoopThread] = []
        self._loops: dict[str, LoopThread] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _dismiss, self._idle, self._loops)

    @property
    def in_callers_thread(self) -> bool:
        """Whether plain functions run in the thread that calls `run`."""
        return self.max_parallel == 1 and self.timeout is None

    def run(
        self, samples: Sequence[Sequence[Call]], read: Read = shown, timeout: float | None = None
    ) -> list[list[Outcome]]:
        """The outcomes of every sample's calls, in the order of the calls; `read` converts each result.

        `timeout` is used if the executor has none.
        """
        if self.in_callers_thread and not any(call.is_async for calls in samples for call in calls):
            outcomes = [[attempt(call, read) for call in calls] for calls in samples]
            for outcome in (outcome for sample in outcomes for outcome in sample):
                if isinstance(outcome.error, KeyboardInterrupt):  # the user wants to stop the run, not the call
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
        """Start the threads of a later call now, since none can be started during interpreter shutdown."""
        if is_async:
            self._loop("async")
        elif not self.in_callers_thread and not self._idle:
            self._idle.append(Worker())
        if is_async or not self.in_callers_thread:
            self._loop("coordinator")

    @property
    def coordinates_here(self) -> bool:
        """Whether the current thread is the coordinator's, which must not wait for itself."""
        return "coordinator" in self._loops and self._loops["coordinator"].is_current

    def _loop(self, name: str) -> LoopThread:
        """An event loop for the whole run, since clients that a tool keeps between calls are bound to a loop."""
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
        """The outcome of a plain function, and the worker for the next call, if there is one."""
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
            if not made.take_back():  # the call had started
                return self._overran(call, limit)
        return Outcome(error=TimeoutError(f"{call.name} never began: other async tools block their event loop."))

    def _abandon(self, thread: LoopThread, limit: float | None) -> None:
        """Replace a blocked event loop with a new one."""
        if self._loops.get("async") is not thread:
            return  # already replaced
        self._check_stuck()
        with self._lock:
            self._loops["async"] = LoopThread("async")
        self._stuck.append(thread)
        thread.end(after=limit or 0.0)
        logger.warning(
            "An async tool blocks its event loop, so no other async tool can run: it may call time.sleep or wait for "
            "something without `await`. The other tools continue in a new event loop."
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
