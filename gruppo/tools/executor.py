"""Runs tool calls: those of different samples at the same time, those of one sample in order.

    caller ── run() ──► coordinator (an event loop on a thread of its own)
                          ├─ a worker thread per sample: its plain functions, one after the other
                          └─ the tools' event loop: its async functions, together

The coordinator never runs a user's code, so that it can count the seconds of those who do.
"""

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gruppo.tools.calls import Call, Outcome, shown

Read = Callable[[Any], Any]


class ToolExecutor:
    """Runs calls and keeps whatever goes wrong in their outcomes.

    Example:
        outcomes = ToolExecutor(timeout=5.0).run([[call_a, call_b], [call_c]])  # two samples
        [[o.value for o in sample] for sample in outcomes] == [["a", "b"], ["c"]]

    A call that takes longer than `timeout` seconds fails. A thread cannot be killed: the call goes on unheard, and
    another thread takes over. At most `max_parallel` samples run at a time; with one, and no timeout, plain functions
    run in the caller's thread.
    """

    def __init__(self, *, timeout: float | None = None, max_parallel: int = 32):
        self.timeout = timeout
        self.max_parallel = max_parallel
        self._idle: list[_Worker] = []  # touched by the coordinator only
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}
        weakref.finalize(self, _dismiss, self._idle, self._loops)

    def run(self, samples: Sequence[Sequence[Call]], read: Read = shown) -> list[list[Outcome]]:
        """The outcomes of every sample's calls, in the order of the calls; `read` turns a result into the value."""
        plain = not any(call.is_async for calls in samples for call in calls)
        if self.max_parallel == 1 and self.timeout is None and plain:
            outcomes = [[attempt(call, read) for call in calls] for calls in samples]
        else:
            coordinator = self._loop("coordinator")
            outcomes = asyncio.run_coroutine_threadsafe(self._run(samples, read), coordinator).result()
        for outcome in (outcome for sample in outcomes for outcome in sample):
            if isinstance(outcome.error, KeyboardInterrupt):  # someone wants to stop the run, not the call
                raise outcome.error
        return outcomes

    def _loop(self, name: str) -> asyncio.AbstractEventLoop:
        """An event loop for the whole run: clients that a tool keeps between calls are bound to theirs."""
        if name not in self._loops:
            self._loops[name] = asyncio.new_event_loop()
            threading.Thread(target=self._loops[name].run_forever, daemon=True, name=f"gruppo-tools-{name}").start()
        return self._loops[name]

    async def _run(self, samples: Sequence[Sequence[Call]], read: Read) -> list[list[Outcome]]:
        slots = asyncio.Semaphore(self.max_parallel)

        async def one(calls: Sequence[Call]) -> list[Outcome]:
            async with slots:
                return await self._run_sample(calls, read)

        return await asyncio.gather(*map(one, samples))

    async def _run_sample(self, calls: Sequence[Call], read: Read) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        worker = None
        for i, call in enumerate(calls):
            if not call.is_async:
                worker = worker or (self._idle.pop() if self._idle else _Worker())
                outcomes[i] = await self._bounded(call, worker.submit(call, read))
                if outcomes[i].timed_out:
                    worker.dismiss()
                    worker = None
        if worker is not None:
            self._idle.append(worker)
        together = [i for i, call in enumerate(calls) if call.is_async]
        results = await asyncio.gather(*(self._bounded(calls[i], self._awaited(calls[i], read)) for i in together))
        outcomes.update(zip(together, results, strict=True))
        return [outcomes[i] for i in range(len(calls))]

    def _awaited(self, call: Call, read: Read) -> "asyncio.Future[Outcome]":
        coroutine: Coroutine[Any, Any, Outcome] = attempt_async(call, read)
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop("async")))

    async def _bounded(self, call: Call, outcome: "asyncio.Future[Outcome]") -> Outcome:
        done, _ = await asyncio.wait([outcome], timeout=self.timeout)
        if done:
            return outcome.result()
        outcome.cancel()
        return Outcome(error=TimeoutError(f"{call.name} took longer than {self.timeout:g} s."), timed_out=True)


class _Worker:
    """A thread that makes one call after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the program from ending.
        threading.Thread(target=_work, args=[self._jobs], daemon=True, name="gruppo-tool").start()

    def submit(self, call: Call, read: Read) -> "asyncio.Future[Outcome]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not future.done():  # else it came too late
                future.set_result(outcome)

        self._jobs.put(lambda: loop.call_soon_threadsafe(settle, attempt(call, read)))
        return future

    def dismiss(self) -> None:
        """End the thread, once its call has returned."""
        self._jobs.put(None)


def _work(jobs: "queue.SimpleQueue[Callable[[], Any] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()


def _dismiss(workers: list[_Worker], loops: dict[str, asyncio.AbstractEventLoop]) -> None:
    for worker in workers:
        worker.dismiss()
    for loop in loops.values():
        loop.call_soon_threadsafe(loop.stop)


def attempt(call: Call, read: Read) -> Outcome:
    """Make a call. A tool may raise anything, SystemExit included, and the run goes on."""
    if call.function is None:
        return Outcome(error=ValueError(call.problem))
    try:
        return Outcome(read(call.function(**call.arguments)))
    except BaseException as error:
        return Outcome(error=error)


async def attempt_async(call: Call, read: Read) -> Outcome:
    assert call.function is not None
    try:
        return Outcome(read(await call.function(**call.arguments)))
    except BaseException as error:  # a cancelled call as well: nobody listens to it any more
        return Outcome(error=error)
