"""Locks a server for one process: two would sample from each other's weights without noticing.

Trainers in one process may share a server. When one of them sends its weights, the others' weights are overwritten,
and they send theirs again before they sample.
"""

import hashlib
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gruppo.errors import ConfigError, RunLockedError
from gruppo.rollout.vllm.transfer import Sender
from gruppo.runs.lock import RunLock

__all__ = ["Claim", "claim", "hold"]


class Claim:
    """A server that this process samples from, shared by its trainers.

    `copy` identifies the weights that the server holds: it is a new object after each transfer from this process.
    """

    def __init__(self, instance: str, lock: RunLock | None):
        self.instance = instance
        self.copy = object()
        self._sender: Sender | None = None
        self._transfer = threading.Lock()
        if lock is not None:
            weakref.finalize(self, lock.release)

    @contextmanager
    def sending(self, sender: Sender | None) -> Iterator[object]:
        """Allow one transfer at a time and yield its `copy`; `sender` is None if another process sends."""
        with self._transfer:
            if self._sender is not None and self._sender is not sender:
                self._sender.forget()
            self._sender, self.copy = sender, object()
            yield self.copy


_claims: "weakref.WeakValueDictionary[tuple[int, str], Claim]" = weakref.WeakValueDictionary()
_making = threading.Lock()


def claim(url: str, instance: str, *, exclusive: bool = True) -> Claim:
    """Claim the server with this instance id for as long as the result is kept; raises if another process holds it.

    The id is the same whichever address leads to the server. The lock is one of the operating system, released when
    the process ends; other machines and users do not see it. Without `exclusive` no lock is taken: in a run with
    several processes, only the main one takes it.
    """
    key = os.getpid(), instance  # a forked child inherits the claims of its parent, but not the locks
    with _making:
        found = _claims.get(key)
        if found is None:
            found = _claims[key] = Claim(instance, hold(url, instance) if exclusive else None)
        return found


def hold(url: str, instance: str) -> RunLock:
    """Lock the server for this process; raises if it is locked."""
    folder = _folder()
    lock = RunLock(folder, f"vllm-{hashlib.sha256(instance.encode()).hexdigest()[:16]}.lock")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to someone else")
        lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"The lock on the vLLM server at {url} could not be taken: {error}. The folder {folder} must be a folder "
            "of your own; remove it, or have it removed."
        ) from error
    except RunLockedError as error:
        raise ConfigError(
            f"Another trainer on this machine samples from the vLLM server at {url} and sends it weights. Start "
            "another server for this one (`gruppo vllm-serve MODEL --port PORT`) and set vllm_server_port."
        ) from error
    return lock


def _folder() -> Path:
    # Not tempfile.gettempdir(): TMPDIR may differ between processes of one user.
    return Path(f"/tmp/gruppo-{os.getuid()}")
