"""A time limit that works in every thread.

Alarm signals reach the main thread only, and take them away from whoever else waits for one. Here a watching thread
raises an exception in the working one. It arrives between two Python instructions: a single long call into C (a power
with a million digits) is not interrupted, so callers refuse those beforehand.
"""

import _thread
import ctypes
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["run_within"]

Result = TypeVar("Result")

AGAIN_AFTER = 1.0  # seconds; the exception may have been swallowed by a bare `except`


class _Overrun(BaseException):
    """Not an Exception, so that `except Exception` in the code under the limit lets it pass."""


class _Watch:
    """Raises in the thread that made it, from `begin` until `stop`.

    The exception may also hit `stop`, which is then called again. So it holds no lock that could stay locked, and uses
    nothing of `threading`, whose events do; there are two flags and a gate that is opened once or twice alike.
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
        """After this nothing is raised any more: what was raised and has not yet arrived is withdrawn."""
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
    """What `function()` returns; TimeoutError if it takes longer than `seconds`.

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
        watch.stop()  # the first call may have been the one that was interrupted
        raise TimeoutError(f"It took longer than {seconds:g} s.") from None
