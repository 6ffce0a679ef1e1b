"""An orderly end on SIGTERM and SIGINT.

The first signal only leaves a note. A run reads it where nothing is half done: between the steps of a rollout, between
packs, between updates. What an update has done so far is dropped, the state before it is saved, and the process exits
with a code of its own, so that a scheduler knows that the run wants to go on. A second signal exits at once.
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

# Exit codes, those of sysexits.h: try again later (EX_TEMPFAIL), and: that could not be written (EX_IOERR).
STOPPED, STOPPED_UNSAVED = 75, 74
logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(BaseException):
    """Unwinds an update that is abandoned. Not an Exception: nothing that mends failures may catch it."""


class Stopper:
    """Listens for signals while a run is under way.

    `alone`: no other process takes part, so that an update may be abandoned without a word to the others.
    """

    def __init__(self, *, enabled: bool, alone: bool):
        self.enabled, self.alone = enabled, alone
        self.requested: signal.Signals | None = None
        self._requested_at = 0.0
        self._may_abandon = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In here signals end the run in order; only the main thread can listen."""
        self.requested = None
        if not self.enabled:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("save_on_signal=True has no effect: only the main thread of a program hears signals.")
            yield
            return
        # What is ignored stays so: a job in the background of a shell does not hear the interrupts of another.
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was set in C

    def _note(self, number: int, frame: Any) -> None:
        if self.requested is not None:
            os._exit(128 + number)
        self.requested, self._requested_at = signal.Signals(number), time.monotonic()
        # Not logging, whose lock the interrupted code may hold.
        print(
            f"{self.requested.name}: the run is saved and then ends. A second signal ends it at once.",
            file=sys.stderr,
            flush=True,
        )

    def request(self) -> None:
        """Stop because another process was asked to."""
        if self.requested is None:
            self.requested, self._requested_at = signal.SIGTERM, time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since this process was asked to stop; 0 if it was not."""
        return 0.0 if self.requested is None else time.monotonic() - self._requested_at

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """In here `check` abandons what is under way."""
        self._may_abandon = self.alone
        try:
            self.check()
            yield
        finally:
            self._may_abandon = False

    def check(self) -> None:
        """A place where nothing is half done."""
        if self._may_abandon and self.requested is not None:
            raise StopRequested(self.requested.name)
