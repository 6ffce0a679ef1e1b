"""A generation that is sampled in the background: the pending requests and their results.

Only HTTP runs in other threads. The answers are valid once all have arrived and the server is confirmed to be the one
that was asked, with the same weights: a server that was restarted in the meantime has sampled from other weights.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from gruppo.errors import RolloutError
from gruppo.rollout.vllm.client import ServerDownError
from gruppo.types import Completion, SampleRequest

__all__ = ["InFlight", "abandon"]

LOOK_SECONDS = 0.5  # between two checks whether the run should stop
LEAVE_SECONDS = 5.0  # time for threads to end after their connections were closed


class InFlight:
    """Requests that a server is working on.

    `sampled_at` is the number of updates that the server's weights have seen. `read` converts the replies to
    completions, `changed` describes any change of the server or its weights since the requests were sent, and
    `hang_up` cancels the pending calls.

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
        """A flight whose completions are already known, for example from a checkpoint."""
        flight = cls(requests, sampled_at, [], lambda replies: list(completions))
        flight.settle()
        flight._began = flight._ended - seconds
        return flight

    def _note_end(self, call: "Future[Any]") -> None:
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time from sending the requests to the last answer."""
        return self._ended - self._began

    def settle(self, pause: Callable[[], None] = lambda: None) -> None:
        """Wait until no request is pending, and keep the results. `pause` is called periodically and may raise."""
        while not self._settled:
            failed, left = self._wait()
            if failed is not None:
                self._fail(failed)
                self.drop()  # the other answers are of no use
            elif left:
                pause()
            else:
                self._land()
                self._settled = True

    def _wait(self) -> tuple[BaseException | None, int]:
        """The first failure, if any, and the number of calls without an answer."""
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
        is_slow = isinstance(error.__cause__, TimeoutError)  # a retry would only add load
        if isinstance(error, ServerDownError) and not is_slow:
            self.lost = f"became unreachable while sampling ({error})"
        else:
            self._error = error

    def take(self) -> list[Completion] | None:
        """The completions, or None if they were lost; raises any other error, such as a rejected request."""
        assert self._settled
        if self._error is not None:
            raise self._error
        return self._completions

    @property
    def known(self) -> list[Completion] | None:
        """The completions if there are any, without raising."""
        return self._completions

    def drop(self) -> None:
        """Cancel the pending requests, and wait up to LEAVE_SECONDS for their threads to end."""
        if not self._settled and self._error is None:
            self.lost = self.lost or "was not waited for"
        self._settled = True
        abandon(self._calls, self._hang_up)


def abandon(calls: "Sequence[Future[Any]]", hang_up: Callable[[], None]) -> None:
    """Cancel calls, those that are running with `hang_up`, and wait up to LEAVE_SECONDS for their threads to end."""
    for call in calls:
        call.cancel()
    hang_up()
    wait(calls, LEAVE_SECONDS)
