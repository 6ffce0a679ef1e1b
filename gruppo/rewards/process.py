"""A reward worker as its parent sees it: a process that is asked, and killed if it does not answer."""

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

START_SECONDS = 120  # to import what the function needs


class LostCallError(Exception):
    """A call without a reply; the worker is dead."""

    def __init__(self, kind: Kind, message: str):
        super().__init__(message)
        self.kind = kind


class LoadError(LostCallError):
    """The worker could not load the function."""


class Worker:
    """One process with one function.

    Make it in a thread that lives as long as it is needed (the main one): the kernel kills it when that thread ends.
    `variables` are the names of environment variables that it gets beside the usual ones.
    """

    def __init__(self, setup: bytes, variables: Collection[str] = ()):
        self._setup, self._number = setup, 0
        request_end, self._requests = os.pipe()
        self._replies, reply_end = os.pipe()
        for pipe in (self._requests, self._replies):
            os.set_blocking(pipe, False)
            enlarge(pipe)
        self.process = subprocess.Popen(
            # -P: a file in the working folder that is called like a module must not take its place.
            [sys.executable, "-P", "-m", "gruppo.rewards.worker", *map(str, (request_end, reply_end, os.getpid()))],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what rewards print goes to the error stream, as it is no output of this program
            pass_fds=(request_end, reply_end),
            start_new_session=True,  # a process group of its own, which is killed as a whole
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
        """Until the function is loaded, which has a bound of its own."""
        self._loading.join()
        if self._load_error is not None:
            raise self._load_error

    def ask(self, packed: bytes, first: int, rows: int, seconds: float) -> Reply:
        """The reply to a call that may take so many seconds from when the function is loaded."""
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
        """With a reply: something else may have written to the pipe."""
        if not isinstance(reply, Reply):
            return f"was {type(reply).__name__}"
        if reply.number != self._number:
            return f"was to request {reply.number}, not to {self._number}"
        if reply.broken is None and len(reply.outcomes) != rows:
            return f"was about {len(reply.outcomes)} completions, not {rows}"
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
        except BaseException:  # Ctrl-C: the reply would be taken for that of the next call
            self.kill()
            raise
        self.kill()
        raise lost

    def alive(self) -> bool:
        """Whether the process runs. Asking leaves its number taken, so that its group can still be killed safely."""
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
        """End the process, its group and all it started; `first_wait` lets one that is ending say how."""
        deadline = time.monotonic() + first_wait
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        end_group(self.process)


def enlarge(pipe: int) -> None:
    """Let a pipe hold a whole batch, where the system allows it, so that it is not handed over piece by piece."""
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, CHUNK)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    if process.returncode is None:
        strays = descendants(process.pid)  # before their parents end, and they are nobody's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(ancestor: int) -> list[int]:
    """The processes that a process started, and those that these did, sessions of their own included."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:  # grows meanwhile
        found += children.get(pid, ())
    return found


def _dispose(process: "subprocess.Popen[bytes]", pipes: tuple[int, int], owner: int) -> None:
    if os.getpid() != owner:  # a fork of this process that ends has no say in it
        return
    end_group(process)
    for pipe in pipes:
        os.close(pipe)
