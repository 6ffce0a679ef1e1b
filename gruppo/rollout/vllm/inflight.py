"""A generation that is sampled in the background: the requests that are out, and what came of them.

Only HTTP runs in other threads. An answer counts when all of them have come and the server is found to be the one that
was asked, with the weights that it had: one that was started again meanwhile has answered from others.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from gruppo.errors import RolloutError
from gruppo.rollout.vllm.client import ServerDownError
from gruppo.types import Completion, SampleRequest

__all__ = ["InFlight"]

LOOK_SECONDS = 0.5  # between two looks at whether the run is to stop
LEAVE_SECONDS = 5.0  # for threads whose connections were cut


class InFlight:
    """Requests that a server works on.

    `sampled_at` is the number of updates that its weights have seen. `read` makes completions of the replies,
    `changed` says what has happened to the server or its weights since it was asked, if anything, and `hang_up` ends
    calls that are given up.

    Example:
        flight = backend.begin(requests)   # the server samples, the trainer trains
        flight.settle(pause)               # waits for the answers
        flight.take()                      # the completions, or None if the server lost them
    """

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        sampled_at: int,
        calls: "Sequence[Future[Any]]",
        read: Callable[[list[Any]], list[Completion]],
        changed: Callable[[], str] = lambda: "",
        hang_up: Callable[[], None] = lambda: None,
    ):
        self.requests, self.sampled_at = list(requests), sampled_at
        self.lost = ""  # why there are no completions, though nothing is wrong with the requests
        self._calls, self._read, self._changed, self._hang_up = list(calls), read, changed, hang_up
        self._completions: list[Completion] | None = None
        self._error: BaseException | None = None
        self._settled = False
        self._began = self._ended = time.perf_counter()
        for call in self._calls:
            call.add_done_callback(self._note_end)

    @classmethod
    def landed(
        cls,
        requests: Sequence[SampleRequest],
        sampled_at: int,
        completions: Sequence[Completion],
        seconds: float = 0.0,
    ) -> "InFlight":
        """One whose answers are known, such as that of a checkpoint."""
        flight = cls(requests, sampled_at, [], lambda replies: list(completions))
        flight.settle()
        flight._began = flight._ended - seconds
        return flight

    def _note_end(self, call: "Future[Any]") -> None:
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """From the asking to the last answer."""
        return self._ended - self._began

    def settle(self, pause: Callable[[], None] = lambda: None) -> None:
        """Wait until no request is out; what came of them is kept. `pause` is called now and then, and may raise."""
        while not self._settled:
            failed, left = self._wait()
            if failed is not None:
                self._fail(failed)
                self.drop()  # the others are of no use any more
            elif left:
                pause()
            else:
                self._land()
                self._settled = True

    def _wait(self) -> tuple[BaseException | None, int]:
        """The first failure, if any, and how many calls have no answer yet."""
        done, left = wait(self._calls, LOOK_SECONDS, FIRST_EXCEPTION)
        failures = (call.exception() for call in self._calls if call in done)
        return next((failure for failure in failures if failure is not None), None), len(left)

    def _land(self) -> None:
        try:
            replies = [call.result() for call in self._calls]
            self.lost = self._changed()
            if not self.lost:
                self._completions = self._read(replies)
        except RolloutError as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        is_slow = isinstance(error.__cause__, TimeoutError)  # asking again would only add to its work
        if isinstance(error, ServerDownError) and not is_slow:
            self.lost = f"went away while it sampled ({error})"
        else:
            self._error = error

    def take(self) -> list[Completion] | None:
        """The completions, None if they were lost; raises what the server said against the requests."""
        assert self._settled
        if self._error is not None:
            raise self._error
        return self._completions

    @property
    def known(self) -> list[Completion] | None:
        """The completions if there are some, whatever else happened."""
        return self._completions

    def drop(self) -> None:
        """Give up what is out; when this returns, no thread works on it any more."""
        if not self._settled and self._error is None:
            self.lost = self.lost or "was not waited for"
        self._settled = True
        for call in self._calls:
            call.cancel()
        self._hang_up()
        wait(self._calls, LEAVE_SECONDS)
