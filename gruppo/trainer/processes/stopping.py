"""An orderly end on SIGTERM and SIGINT.

The first signal only sets a flag. A run checks it at points where it can stop safely: between the steps of a rollout,
between packs, between updates. A run of a single process drops the unfinished update and saves the state before it;
several processes finish the update and stop together. The process then exits with a distinct code, which tells a
scheduler that the run should be resumed. A second signal exits at once.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Exit codes from sysexits.h: "try again later" (EX_TEMPFAIL), and "could not be written" (EX_IOERR).
STOPPED, STOPPED_UNSAVED = 75, 74
logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(BaseException):
    """Unwinds an update that is abandoned. Not an Exception, so that no error handling catches it."""


class Stopper:
    """Handles signals during a run.

    `alone`: this is the only process, so an update may be abandoned without coordinating with others.
    """

    def __init__(self, *, enabled: bool, alone: bool):
        self.enabled, self.alone = enabled, alone
        self.requested: signal.Signals | None = None
        self._requested_at = 0.0
        self._may_abandon = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside this context signals end the run in an orderly way; it only works in the main thread."""
        self.requested = None
        if not self.enabled:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("save_on_signal=True has no effect: signals can only be handled in the main thread.")
            yield
            return
        # Ignored signals stay ignored: a background job of a shell must not react to an interrupt of another job.
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set in C

    def _note(self, number: int, frame: Any) -> None:
        if self.requested is not None:
            os._exit(128 + number)
        self.requested, self._requested_at = signal.Signals(number), time.monotonic()
        # Print instead of logging: the interrupted code may hold the lock of logging.
        print(
            f"{self.requested.name}: saving the run, then ending it. A second signal ends it at once.",
            file=sys.stderr,
            flush=True,
        )

    def request(self) -> None:
        """Stop because another process was asked to stop."""
        if self.requested is None:
            self.requested, self._requested_at = signal.SIGTERM, time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since this process was asked to stop; 0 if it was not."""
        return 0.0 if self.requested is None else time.monotonic() - self._requested_at

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Inside this context `check` may abandon the update, if this is the only process."""
        self._may_abandon = self.alone
        try:
            self.check()
            yield
        finally:
            self._may_abandon = False

    def check(self) -> None:
        """Mark a point at which the run can stop safely; raises `StopRequested` if a signal has arrived."""
        if self._may_abandon and self.requested is not None:
            raise StopRequested(self.requested.name)
