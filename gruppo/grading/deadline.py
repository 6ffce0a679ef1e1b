"""A time limit that works in every thread.

Alarm signals reach only the main thread, and would replace a handler that other code has set. Here a watcher thread
raises an exception in the working thread. It arrives between two Python instructions: a single long call into C (a
power with a million digits) is not interrupted, so callers reject such input beforehand.
"""

import _thread
import ctypes
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["run_within"]

Result = TypeVar("Result")

AGAIN_AFTER = 1.0  # seconds until the exception is raised again, since a bare `except` may swallow it


class _Overrun(BaseException):
    """Not an Exception, so that `except Exception` in the limited code does not catch it."""


class _Watch:
    """Raises in the thread that created it once the time is over, from `begin` until `stop`.

    The exception may also interrupt `stop`, which is then called again. So `stop` must not hold a lock that could stay
    locked, as the events of `threading` do. It uses only two flags, and a gate that may safely be opened twice.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.worker = ctypes.c_ulong(_thread.get_ident())
        self.gate = _thread.allocate_lock()
        self.start = _thread.allocate_lock()
        self.over = self.ended = False
        self.gate.acquire()
        self.start.acquire()
        _thread.start_new_thread(self._watch, ())

    def begin(self) -> None:
        self.start.release()

    def _watch(self) -> None:
        self.start.acquire()
        wait = self.seconds
        while not self.gate.acquire(timeout=wait) and not self.over:
            _raise_in(self.worker, _Overrun)
            wait = AGAIN_AFTER
        self.ended = True

    def stop(self) -> None:
        """Raise nothing from now on, and withdraw an exception that has not yet arrived."""
        self.over = True
        if self.gate.locked():
            self.gate.release()
        while not self.ended:
            time.sleep(0.0001)
        _raise_in(self.worker, None)


def _raise_in(thread: ctypes.c_ulong, kind: type[BaseException] | None) -> None:
    exception = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, exception)


def run_within(seconds: float, function: Callable[[], Result]) -> Result:
    """Return `function()`; raise TimeoutError if it takes longer than `seconds`.

    Example:
        run_within(5.0, lambda: sympy.simplify(expression))
    """
    watch = _Watch(seconds)
    try:
        try:
            watch.begin()
            return function()
        finally:
            watch.stop()
    except _Overrun:
        watch.stop()  # the exception may have interrupted the first call
        raise TimeoutError(f"It took longer than {seconds:g} s.") from None
