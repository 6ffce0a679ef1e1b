"""The process in which answers are compared: `python -m gruppo.evaluation.worker`, started by `graders.py`.

It reads one call after the other from a pipe, and writes what each returned.
"""

import contextlib
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 4 << 30  # bytes; a sum that is multiplied out can fill any machine
PATIENCE = 5.0  # seconds after which it ends itself, if whoever asked did not; that process may be gone


def main(pipe_number: int, parent: int) -> None:
    pipe: Connection[Any, Any] = Connection(pipe_number)
    os.set_inheritable(pipe_number, False)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Before the first question, so that its time is not spent on imports. Without it, questions that need it say so.
    with contextlib.suppress(ImportError):
        import math_verify  # noqa: F401
    with contextlib.suppress(ValueError, OSError):  # there may be a lower limit already, or none can be set
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    pipe.send(("ready", None))
    while True:
        try:
            function, arguments, seconds = pipe.recv()
        except EOFError:
            return
        # The alarm has no handler, so it ends the process in the middle of a call into C, too.
        signal.setitimer(signal.ITIMER_REAL, seconds + PATIENCE)
        reply = _reply(function, arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(reply)


def _reply(function: Any, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "value", function(*arguments)
    except MemoryError:
        os._exit(1)  # what is left of this process is not to be trusted
    except Exception as error:  # raised again by whoever asked
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some exceptions cannot be copied, in ways of their own
            return "error", RuntimeError(traceback.format_exc())
        return "error", error


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
