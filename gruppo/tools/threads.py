"""The threads in which user code runs: one for each call in progress, and event loops that survive failing tasks.

All are daemon threads: a call that never returns must not keep the program from exiting.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from gruppo.tools.calls import Call, Outcome, shown

Read = Callable[[Any], Any]


class NoThreadError(RuntimeError):
    """A call needs a thread, and none is available."""


def _start(name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True, name=name)
    try:
        thread.start()
    except RuntimeError as error:  # the system limit is reached, or the interpreter is shutting down
        raise NoThreadError(f"No thread could be started: {error}.") from error
    return thread


class Worker:
    """A thread that makes one call after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = _start("gruppo-tool", _work, self._jobs)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, call: Call, read: Read) -> "asyncio.Future[Outcome]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not future.done():  # else the outcome came too late
                future.set_result(outcome)

        self._jobs.put(lambda: loop.call_soon_threadsafe(settle, attempt(call, read)))
        return future

    def dismiss(self) -> None:
        """End the thread once its current call has returned."""
        self._jobs.put(None)


def _work(jobs: "queue.SimpleQueue[Callable[[], Any] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()


class LoopThread:
    """An event loop in its own thread, which keeps running whatever a task raises."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._ended = threading.Event()
        try:
            self._thread = _start(f"gruppo-tools-{name}", _serve, self.loop, self._ended)
        except NoThreadError:
            self.loop.close()
            raise

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def answers(self, seconds: float) -> bool:
        """Whether the loop responds within this time; awaited in another loop."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self.submit(_nothing())), seconds)
        except TimeoutError:
            return False
        return True

    def end(self, after: float = 0.0) -> None:
        """End the thread, `after` seconds after its loop is no longer blocked."""
        self.loop.call_soon_threadsafe(self.loop.call_later, after, _stop, self.loop, self._ended)


def _serve(loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
    while not ended.is_set() and not loop.is_closed():
        try:
            loop.run_forever()
        except BaseException:  # a task's SystemExit propagates out of the loop; the awaiter of the task gets it too
            continue


def _stop(loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
    ended.set()
    loop.stop()


async def _nothing() -> None: ...


class AsyncCall:
    """A call in an event loop, which can be withdrawn until it starts."""

    def __init__(self, call: Call, read: Read):
        self._call, self._read = call, read
        self._claim = threading.Lock()  # acquired once: by `make` when the call starts, or by `take_back`

    async def make(self) -> Outcome:
        if not self._claim.acquire(blocking=False):
            return Outcome(error=asyncio.CancelledError())
        assert self._call.function is not None
        try:
            return Outcome(self._read(await self._call.function(**self._call.arguments)))
        except BaseException as error:  # CancelledError too: nothing awaits a cancelled call
            return Outcome(error=error)

    def take_back(self) -> bool:
        return self._claim.acquire(blocking=False)


def attempt(call: Call, read: Read = shown) -> Outcome:
    """Make a call. Whatever a tool raises, SystemExit included, becomes an outcome, and the run continues."""
    if call.function is None:
        return Outcome(error=ValueError(call.problem))
    try:
        return Outcome(read(call.function(**call.arguments)))
    except BaseException as error:
        return Outcome(error=error)
