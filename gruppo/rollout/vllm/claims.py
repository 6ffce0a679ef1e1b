"""One process a server: two would sample from each other's weights, and the server tells neither.

Trainers of one process may share a server. When one of them sends its weights, the copies of the others are out of
date, and they send theirs again before they sample.
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

    `copy` stands for the weights that the server holds: another object after each transfer from this process.
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
        """One transfer at a time, by `sender` where this process is the one that sends; gives its `copy`."""
        with self._transfer:
            if self._sender is not None and self._sender is not sender:
                self._sender.forget()
            self._sender, self.copy = sender, object()
            yield self.copy


_claims: "weakref.WeakValueDictionary[tuple[int, str], Claim]" = weakref.WeakValueDictionary()
_making = threading.Lock()


def claim(url: str, instance: str, *, exclusive: bool = True) -> Claim:
    """The server of this instance id, held as long as what is returned is kept; raises if another process holds it.

    The id is the same whichever address leads to the server. The lock is one of the operating system, which goes with
    the process; other machines and users do not see it. Without `exclusive` there is no lock: of the processes of a
    run, the main one has it.
    """
    key = os.getpid(), instance  # a forked child inherits the claims of its parent, but not the locks
    with _making:
        found = _claims.get(key)
        if found is None:
            found = _claims[key] = Claim(instance, hold(url, instance) if exclusive else None)
        return found


def hold(url: str, instance: str) -> RunLock:
    """Lock the server for this process; raises if it is locked."""
    # Not the folder of temporary files: TMPDIR may differ between processes of one user.
    folder = Path(f"/tmp/gruppo-{os.getuid()}")
    lock = RunLock(folder, f"vllm-{hashlib.sha256(instance.encode()).hexdigest()[:16]}.lock")
    try:
        lock.acquire()
    except RunLockedError as error:
        raise ConfigError(
            f"Another trainer on this machine samples from the vLLM server at {url} and sends it weights. Start a "
            "server for this one, `gruppo vllm-serve MODEL --port PORT`, and set vllm_server_port."
        ) from error
    return lock
