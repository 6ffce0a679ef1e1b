"""A lock that allows one process per run folder.

    with RunLock(folder):       RunLockedError if another process holds it
        …

The kernel holds the lock (flock) and releases it when the process ends, however it ends. The lock file names the
owner; only a killed process leaves the file behind. On file systems without flock the content of the file decides: the
lock is held if the process it names, with that start time, still runs on this machine.
"""

import contextlib
import errno
import json
import logging
import os
import platform
import stat
import sys
import weakref
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from gruppo.errors import RunLockedError
from gruppo.runs.disk import FULL

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

__all__ = ["Owner", "RunLock"]

logger = logging.getLogger(__name__)

NAME = "lock"
NO_FLOCK = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
ATTEMPTS = 100  # the file may change owners while it is read, but not forever
LONGEST = 1 << 16  # bytes of a lock file that are read
PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock. Process ids are reused; start time and boot id tell processes apart."""

    pid: int
    host: str
    started: str
    boot: str | None
    pid_started: int | None
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started},"

    @classmethod
    def here(cls) -> "Owner":
        pid = os.getpid()
        # The program without its arguments: they may contain a token, and run folders are shared.
        command = os.path.basename(sys.argv[0]) if sys.argv else ""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(pid, platform.node(), now, _boot(), _start_of(pid), command)

    @classmethod
    def read(cls, content: bytes) -> "Owner | None":
        """The owner named in a lock file; None if there is none, as while the file is being written."""
        try:
            fields = json.loads(content)
            owner = cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except (ValueError, RecursionError, TypeError, KeyError):
            return None
        return owner if type(owner.pid) is int and owner.pid > 0 else None

    def may_run(self) -> bool:
        """Whether the process may still be running. On another machine this cannot be checked, so it may."""
        if self.host != platform.node():
            return True
        if self.boot is not None and self.boot != _boot():
            return False
        if self.pid_started is not None:
            return _start_of(self.pid) == self.pid_started
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            return True
        return True


class RunLock:
    """The lock of a run folder: the file `lock` in it. Other locks use other file names.

    Example:
        lock = RunLock(Path("runs/demo"))
        lock.acquire()      None, or a sentence about a lock that a killed process left
        lock.release()
    """

    def __init__(self, folder: Path, name: str = NAME) -> None:
        self.folder = folder
        self._path = folder / name
        self._handle: int | None = None  # with flock: the open file
        self._content: bytes | None = None  # of the file while this object holds the lock

    def acquire(self) -> str | None:
        """Take the lock; returns a sentence if a killed process had left it behind, otherwise None."""
        if self._content is not None:
            raise RunLockedError(f"This lock of {self.folder} is already held.")
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(asdict(Owner.here())).encode()
        with_flock = fcntl is not None
        for _ in range(ATTEMPTS):
            try:
                found = self._take(content) if with_flock else self._take_without_flock(content)
            except _NoFlockError:
                with_flock = False
                continue
            if found is not None:
                break
        else:
            raise self._refusal(None)
        self._content = content
        _held.add(self)
        return (
            f"The lock of {_named(found)} was left by a process that has ended: it is taken over." if found else None
        )

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._content is None:
            return
        if self._handle is not None:
            # Removed while locked: a process that opened the file before finds it gone after locking, and opens again.
            if self._is_in_place(self._handle):
                self._path.unlink()
            fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
        elif self._read_path() == self._content:
            self._path.unlink()
        self._forget()

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take(self, content: bytes) -> bytes | None:
        """One attempt: returns the earlier content of the file (empty: it is new), or None to try again."""
        handle = self._open()
        try:
            found = _read(handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._refusal(found) from None
            except OSError as error:
                if error.errno in NO_FLOCK:
                    raise _NoFlockError from None
                raise
            if not self._is_in_place(handle):
                os.close(handle)
                return None
            found = _read(handle)  # read again: only now it cannot change
            self._sign(handle, content)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return found

    def _sign(self, handle: int, content: bytes) -> None:
        """Write the owner into the file. On a full disk the lock is still held; only its owner is unknown."""
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, content, 0)
        except OSError as error:
            if error.errno not in FULL:
                raise
            logger.warning(f"No space on the disk of {self.folder}: the lock is held, but does not name its owner.")

    def _take_without_flock(self, content: bytes) -> bytes | None:
        """One attempt without flock: creating a hard link fails if the name exists, so only one process wins."""
        found = self._read_path()
        owner = Owner.read(found) if found else None
        if owner is not None and owner.may_run():
            raise self._refusal(found)
        own = self._path.with_name(f"{self._path.name}.{os.getpid()}.{id(self):x}")
        try:
            own.write_bytes(content)
            if found is not None and not self._move_away(found):
                return None
            self._name(own, content)
        except FileExistsError:
            return None
        finally:
            own.unlink(missing_ok=True)
        return found or b""

    def _name(self, own: Path, content: bytes) -> None:
        """Link the finished file to the lock's name; raises FileExistsError if the name is taken."""
        try:
            os.link(own, self._path)
        except FileExistsError:
            raise
        except OSError:  # no hard links either, as on a mounted object store: briefly the file exists but is empty
            with open(self._path, "xb") as file:
                file.write(content)

    def _move_away(self, stale: bytes) -> bool:
        """Remove a stale file; False if a faster process has replaced it meanwhile."""
        aside = self._path.with_name(f"{self._path.name}.stale.{os.getpid()}.{id(self):x}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return True
        if _head(aside) != stale:
            os.rename(aside, self._path)
            return False
        aside.unlink()
        return True

    def _open(self) -> int:
        # flock belongs to the open file, which forked children share, so the lock would last until the last of them
        # ends. O_CLOEXEC closes the file in children that exec; children that only fork close it in `_forked`.
        # O_NOFOLLOW: a link in an untrusted folder must not redirect the write elsewhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            handle = os.open(self._path, flags, 0o644)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._not_a_file() from error
            raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise self._not_a_file()
        return handle

    def _read_path(self) -> bytes | None:
        try:
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise self._not_a_file()
            return _head(self._path)
        except FileNotFoundError:
            return None

    def _is_in_place(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(handle))
        except FileNotFoundError:
            return False

    def _not_a_file(self) -> RunLockedError:
        return RunLockedError(f"{self._path} is not a plain file, so it cannot be a lock. Remove it, and start again.")

    def _refusal(self, content: bytes | None) -> RunLockedError:
        owner = Owner.read(content) if content else None
        advice = "Give this run another output_dir, or stop that process first."
        if owner is not None and (owner.pid, owner.host) == (os.getpid(), platform.node()):
            advice = "That is this same process: give each of its trainers a separate output_dir."
        elif owner is not None and owner.host != platform.node():
            advice += f" If you are sure that it has ended, remove {self._path}."
        return RunLockedError(
            f"{self.folder} is in use by {owner or 'another process,'} which writes into it. {advice}"
        )

    def _forget(self) -> None:
        self._handle = self._content = None
        _held.discard(self)


class _NoFlockError(Exception):
    """The file system does not support flock."""


_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: drop the parent's lock. Closing does not unlock; only the last close, or LOCK_UN, does."""
    for lock in list(_held):
        if lock._handle is not None:
            os.close(lock._handle)
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _named(content: bytes) -> str:
    return str(Owner.read(content) or "an unknown process")


def _read(handle: int) -> bytes:
    return os.pread(handle, LONGEST, 0)


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(LONGEST)


def _boot() -> str | None:
    """The id of the current boot of the machine."""
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return None


def _start_of(pid: int) -> int | None:
    """The start time of a process, in clock ticks since boot; None if it has ended or is a zombie."""
    try:
        # The second field is the name of the program in parentheses: any bytes, also spaces and parentheses.
        state, *fields = (PROC / str(pid) / "stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])
