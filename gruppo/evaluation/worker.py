"""The process that compares answers: `python -m gruppo.evaluation.worker`, started by `graders.py`.

It reads calls from a pipe one at a time, and writes back the result of each.
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

MEMORY = 4 << 30  # bytes; expanding a sum can exhaust the memory of any machine
PATIENCE = 5.0  # seconds past a call's limit before the worker ends itself; the parent should have, but may be gone


def main(pipe_number: int, parent: int) -> None:
    pipe: Connection[Any, Any] = Connection(pipe_number)
    os.set_inheritable(pipe_number, False)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Imported before the first call, whose time limit it would use up. If it is missing, calls that need it raise.
    with contextlib.suppress(ImportError):
        import math_verify  # noqa: F401
    with contextlib.suppress(ValueError, OSError):  # a lower limit may already apply, or limits may be unsupported
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    pipe.send(("ready", None))
    while True:
        try:
            function, arguments, seconds = pipe.recv()
        except EOFError:
            return
        # SIGALRM has no handler, so it ends the process even in the middle of a C call.
        signal.setitimer(signal.ITIMER_REAL, seconds + PATIENCE)
        reply = _reply(function, arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(reply)


def _reply(function: Any, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "value", function(*arguments)
    except MemoryError:
        os._exit(1)  # the state of this process can no longer be trusted
    except Exception as error:  # raised again in the parent
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some exceptions cannot be pickled, and fail in various ways
            return "error", RuntimeError(traceback.format_exc())
        return "error", error


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
