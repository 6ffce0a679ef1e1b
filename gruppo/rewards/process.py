"""The parent's side of a reward worker: a process that gets requests and is killed if it does not reply."""

import contextlib
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection
from pathlib import Path

from gruppo.rewards.calling import Reply, unpacked_log
from gruppo.rewards.outcomes import Kind
from gruppo.rewards.pipes import CHUNK, LARGEST_REPLY, receive, send
from gruppo.sandbox.variables import environment

START_SECONDS = 120  # time limit for loading the function and its imports


class LostCallError(Exception):
    """A call without a reply; the worker is dead."""

    def __init__(self, kind: Kind, message: str):
        super().__init__(message)
        self.kind = kind


class LoadError(LostCallError):
    """The worker could not load the function."""


class Worker:
    """One process with one function.

    Create it in a thread that outlives it (the main thread): the kernel kills the process when that thread ends.
    `variables` are names of environment variables to pass in addition to the usual ones.
    """

    def __init__(self, setup: bytes, variables: Collection[str] = ()):
        self._setup, self._number = setup, 0
        request_end, self._requests = os.pipe()
        self._replies, reply_end = os.pipe()
        for pipe in (self._requests, self._replies):
            os.set_blocking(pipe, False)
            enlarge(pipe)
        self.process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the same name.
            [sys.executable, "-P", "-m", "gruppo.rewards.worker", *map(str, (request_end, reply_end, os.getpid()))],
            stdin=subprocess.DEVNULL,
            stdout=2,  # to stderr: what rewards print is not output of this program
            pass_fds=(request_end, reply_end),
            start_new_session=True,  # its own process group, which is killed as a whole
            env=environment(variables),
        )
        os.close(request_end)
        os.close(reply_end)
        weakref.finalize(self, _dispose, self.process, (self._requests, self._replies), os.getpid())
        self._load_error: LoadError | None = None
        self._loading = threading.Thread(target=self._load, daemon=True, name="gruppo-reward-worker")
        self._loading.start()

    def _load(self) -> None:
        try:
            error = self._exchange(self._setup, time.monotonic() + START_SECONDS)
        except LostCallError as lost:
            error = str(lost)
        if error is not None:
            self._load_error = LoadError(Kind.FAILURE, str(error))
            self.kill()

    def wait(self) -> None:
        """Wait until the function is loaded, which has its own time limit."""
        self._loading.join()
        if self._load_error is not None:
            raise self._load_error

    def ask(self, packed: bytes, first: int, rows: int, seconds: float) -> Reply:
        """The reply to a call that may take `seconds` once the function is loaded."""
        self.wait()
        self._number += 1
        request = pickle.dumps((self._number, packed, first, rows), protocol=5)
        reply = self._exchange(request, time.monotonic() + seconds)
        problem = self._what_is_wrong(reply, rows)
        if problem is not None:
            self.kill()
            raise LostCallError(Kind.FAILURE, f"The reply of its process {problem}.")
        assert isinstance(reply, Reply)
        reply.log = unpacked_log(reply.log)
        if reply.spent:
            self.kill()
        return reply

    def _what_is_wrong(self, reply: object, rows: int) -> str | None:
        """What is wrong with a reply, or None; something other than the worker may have written to the pipe."""
        if not isinstance(reply, Reply):
            return f"has the type {type(reply).__name__}"
        if reply.number != self._number:
            return f"belongs to request {reply.number}, not {self._number}"
        if reply.broken is None and len(reply.outcomes) != rows:
            return f"has {len(reply.outcomes)} results for {rows} completions"
        return None

    def _exchange(self, message: bytes, deadline: float) -> object:
        start = time.monotonic()
        try:
            send(self._requests, message, deadline, self.alive)
            return pickle.loads(receive(self._replies, deadline, self.alive, LARGEST_REPLY))
        except TimeoutError:
            lost = LostCallError(Kind.TIMEOUT, f"It took longer than {time.monotonic() - start:.3g} s and was killed.")
        except (EOFError, OSError):
            lost = LostCallError(Kind.FAILURE, f"Its process {self._how_it_ended()}.")
        except Exception as error:
            lost = LostCallError(Kind.FAILURE, f"The reply of its process could not be read: {error!r}.")
        except BaseException:  # Ctrl-C: the next call would otherwise read this reply
            self.kill()
            raise
        self.kill()
        raise lost

    def alive(self) -> bool:
        """Whether the process runs. An ended process is not reaped: its pid stays reserved, its group killable."""
        if self.process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):  # macOS
            return self.process.poll() is None
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def _how_it_ended(self) -> str:
        self.kill(first_wait=1.0)
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self, first_wait: float = 0.0) -> None:
        """Kill the process, its group and all descendants, after up to `first_wait` s for it to exit by itself."""
        deadline = time.monotonic() + first_wait
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        end_group(self.process)


def enlarge(pipe: int) -> None:
    """Enlarge the buffer of a pipe, if the system allows it, so that a batch is not transferred piece by piece."""
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, CHUNK)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    if process.returncode is None:
        strays = descendants(process.pid)  # found first: once their parents end, they are reparented
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(ancestor: int) -> list[int]:
    """All descendants of a process, including those in other sessions."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text(encoding="latin-1").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:  # grows during the loop
        found += children.get(pid, ())
    return found


def _dispose(process: "subprocess.Popen[bytes]", pipes: tuple[int, int], owner: int) -> None:
    if os.getpid() != owner:  # a fork of this process that ends must not kill the worker
        return
    end_group(process)
    for pipe in pipes:
        os.close(pipe)
