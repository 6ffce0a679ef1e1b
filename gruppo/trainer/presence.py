"""Who of several processes is there, and what it is doing: one that dies or fails ends the others with the reason.

Processes that train together wait for each other in every gather and in every backward pass. One that is gone leaves
the others waiting until a timeout of the backend, with an error that names nobody. So each has a thread that writes a
line about it into the store by which the processes found each other, every second and whatever the process itself is
busy with. The main process reads all of them, the others read the main one's and its verdict: nothing is exchanged
between the processes that train, and no work waits for it.

    dead      its process is gone (known at once on the same host), or nothing was heard of it for `silence` seconds
    failed    it said so, with its error
    missing   alive, but for `deadline` seconds in the work that the others wait for; before that it is only named

Slow is not dead: a process that sleeps or computes goes on writing its line.
"""

import itertools
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from gruppo.errors import ProcessLostError

logger = logging.getLogger(__name__)

LOST = 69  # the exit code of a process that ends because of another one: sysexits.h calls it EX_UNAVAILABLE
BEAT = 1.0  # seconds between two lines
SHORT = 0.05  # at least so many, however often the phase changes
GRACE = 5.0  # seconds in which a process may end by itself once it is told that another one is lost
PATIENCE = 30.0  # seconds of waiting after which it is said, once, whom one waits for
_SESSIONS = itertools.count()  # of this program: processes begin them in the same order
# What a collective that lost a peer says in the backends of torch.
_OF_A_PEER = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket", "timed out", "store")


@dataclass(frozen=True)
class Line:
    """What a process says of itself.

    Example:
        Line(host="a", pid=17, place="…", beat=3, phase="sampling", seconds=2.5, update=7)
        str(…) == "sampling in update 7"
    """

    host: str
    pid: int
    place: str  # where process numbers mean the same: a host, or a container on it
    beat: int = 0
    phase: str = ""  # "": between two phases, waiting for the others or about to
    seconds: float = 0.0  # in this phase, or since the last one
    update: int = 0
    state: str = "here"  # or "left", or "failed"
    said: str = ""  # its error

    @classmethod
    def here(cls) -> "Line":
        return cls(host=platform.node(), pid=os.getpid(), place=_place())

    def __str__(self) -> str:
        return f"{self.phase or 'waiting for the others'} in update {self.update}"

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended, as far as can be seen from here."""
        return self.place == _place() and not _is_alive(self.pid)


def _place() -> str:
    """Two processes with the same answer know each other's numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux: only silence tells
        return f"{platform.node()}/{os.getpid()}"


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # nobody can say
        return True
    return state not in ("Z", "X")


class Register:
    """The lines of several processes as they come in, and what follows from them.

    Example, process 1 was last heard of 21 seconds ago:
        register = Register(silence=20, deadline=1800)
        register.note(1, line, now=0.0)
        register.lost(now=21.0) == "process 1 (pid 17 on a) died, or its host did: nothing was heard of it for 21 s, …"
    """

    def __init__(self, *, silence: float, deadline: float):
        self.silence, self.deadline = silence, deadline
        self.lines: dict[int, Line] = {}
        self._heard: dict[int, float] = {}  # when a line last changed, by the clock of the reader

    def note(self, process: int, line: Line, now: float) -> None:
        if self.lines.get(process) != line:
            self.lines[process], self._heard[process] = line, now

    def lost(self, now: float) -> str | None:
        """The first process that the others cannot go on without, and why; None if all are well."""
        for process, line in sorted(self.lines.items(), key=lambda item: item[1].state != "failed"):
            if (reason := self._wrong(process, line, now)) is not None:
                return reason
        return None

    def _wrong(self, process: int, line: Line, now: float) -> str | None:
        who, quiet = f"process {process} (pid {line.pid} on {line.host})", now - self._heard[process]
        if line.state == "failed":
            return f"process {process} failed: {line.said}, while {line}"
        if line.state == "left":
            return None
        if line.is_gone:
            return f"{who} died while {line}"
        if quiet > self.silence and line.place != _place():
            return f"{who} died, or its host did: nothing was heard of it for {quiet:.0f} s, while {line}"
        if line.phase and line.seconds > self.deadline and self._waiting() > self.deadline:
            return f"{who} did not come back within {self.deadline:.0f} s (ddp_timeout) from {line}, and others wait"
        return None

    def _waiting(self) -> float:
        """For how long the one that waits longest has done so."""
        return max(
            (line.seconds for line in self.lines.values() if line.state == "here" and not line.phase), default=0
        )

    def late(self) -> str | None:
        """Whom the others have been waiting for longer than is usual."""
        waited = self._waiting()
        busy = [
            f"process {process} ({line}, for {line.seconds:.0f} s)"
            for process, line in sorted(self.lines.items())
            if line.state == "here" and line.phase and line.seconds > PATIENCE
        ]
        return f"Waiting for {', '.join(busy)} since {waited:.0f} s." if busy and waited > PATIENCE else None


class Presence:
    """This process among several; without others, or with `silence` None, it does nothing.

    Example:
        presence = Presence(rank=0, world=2, silence=20.0, deadline=1800.0, update=lambda: 7)
        with presence.watching():
            with presence.during("sampling"):
                …
    """

    def __init__(
        self, *, rank: int, world: int, silence: float | None, deadline: float, update: Callable[[], int] = lambda: 0
    ):
        self.rank, self.world, self.silence, self.deadline = rank, world, silence, deadline
        self.update = update
        self.verdict: str | None = None
        self._phases: list[str] = []
        self._since = time.monotonic()
        self._failed_in: str | None = None
        self._line = Line.here()
        self._watch: _Watch | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In here the processes watch each other. An error of this one ends them all."""
        if self._watch is not None or self.world == 1 or self.silence is None or not _has_store():
            yield
            return
        self.verdict, self._phases, self._failed_in = None, [], None
        self._watch = _Watch(self, _store())
        self._watch.start()
        try:
            yield
        except Exception as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error
        except BaseException as end:  # an orderly end, which the others come to as well, or an interrupt
            self._watch.end("left" if isinstance(end, SystemExit) else "failed", _short(end))
            raise
        finally:
            self._watch.end("left")
            self._watch = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is done in here is this process's own work, which the others may have to wait for."""
        self._enter([*self._phases, phase])
        try:
            yield
        except BaseException:
            self._failed_in = self._failed_in or phase
            raise
        finally:
            self._enter(self._phases[:-1])

    def waiting(self) -> AbstractContextManager[None]:
        """In here, inside of some work, the others are waited for."""
        return self.during("")

    def _enter(self, phases: list[str]) -> None:
        self._phases, self._since = phases, time.monotonic()
        if self._watch is not None:
            self._watch.wake.set()

    def line(self) -> Line:
        """What is to be said now."""
        phases, since = self._phases, self._since
        return replace(
            self._line,
            phase=phases[-1] if phases else "",
            seconds=round(time.monotonic() - since, 1),
            update=self.update(),
        )

    def _explained(self, error: Exception) -> Exception:
        """The error itself, which the others are told; or, if it only says that a peer is gone, which one that is."""
        assert self._watch is not None
        assert self.silence is not None
        if _is_of_a_peer(error):
            # A broken connection is seen before the silence of the one that broke it.
            self._watch.judged.wait(self.silence + 3 * BEAT)
            if self.verdict is not None:
                return ProcessLostError(f"{self.verdict}. This process ends too.")
        self._watch.end("failed", _short(error), self._failed_in)
        return error


class _Watch:
    """The thread of a process that says its line, and hears those of the others."""

    def __init__(self, presence: Presence, store: Any):
        assert presence.silence is not None
        self.presence, self.store = presence, store
        self.register = Register(silence=presence.silence, deadline=presence.deadline)
        self.judged = threading.Event()
        self.wake = threading.Event()  # there is news of this process
        self._ended = threading.Event()
        self._beat = 0
        self._said_late = False
        self._lock = threading.Lock()  # of the store, and of what is said last
        self._thread = threading.Thread(target=self._run, name="gruppo-presence", daemon=True)

    def start(self) -> None:
        self._say(self.presence.line())
        self._thread.start()

    def end(self, state: str, said: str = "", phase: str | None = None) -> None:
        """Say goodbye; after an error wait a moment, until the others have heard of it: the store may end with us."""
        if self._ended.is_set():
            return
        self._ended.set()
        self.wake.set()
        line = self.presence.line()
        try:
            self._say(replace(line, state=state, said=said, phase=line.phase if phase is None else phase))
            if state == "failed":
                self._wait_for_listeners()
        except (RuntimeError, OSError):  # the store is gone, and with it whoever held it
            logger.debug("the last line could not be said", exc_info=True)
        self._thread.join(2 * BEAT)

    def _wait_for_listeners(self) -> None:
        limit = time.monotonic() + 3 * BEAT
        while self.store.add("heard", 0) < self.presence.world - 1 and time.monotonic() < limit:
            time.sleep(BEAT / 10)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.is_set():
            verdict = None
            try:
                self._say(self.presence.line())
                if time.monotonic() >= due:
                    due, verdict = time.monotonic() + BEAT, self._listen()
            except (RuntimeError, OSError) as error:  # of the store: a peer that held it, or the launcher, is gone
                verdict = self._without_store(error)
            if verdict is not None and not self._ended.is_set():
                self._give_up(verdict)
                return
            self._ended.wait(SHORT)
            self.wake.wait(max(due - time.monotonic(), 0.0))
            self.wake.clear()

    def _say(self, line: Line) -> None:
        with self._lock:
            self._beat += 1
            self.store.set(f"line/{self.presence.rank}", json.dumps(asdict(replace(line, beat=self._beat))))

    def _listen(self) -> str | None:
        """The main process hears all and judges; the others hear the main one and its verdict."""
        rank, world = self.presence.rank, self.presence.world
        missing = [process for process in range(world) if process not in self.register.lines and process != rank]
        known = [process for process in (range(world) if rank == 0 else [0]) if process not in (*missing, rank)]
        known += [process for process in missing if (rank == 0 or process == 0) and self._has(f"line/{process}")]
        now = time.monotonic()
        if known:
            texts = self.store.multi_get([f"line/{process}" for process in known])
            for process, text in zip(known, texts, strict=True):
                self.register.note(process, Line(**json.loads(text)), now)
        if rank == 0:
            own = self.presence.line()
            self.register.note(0, own, now)
            self._report_late()
        verdict = self.register.lost(now)
        if rank == 0 and verdict is not None:
            self.store.set("verdict", verdict)
        if rank != 0 and self._has("verdict"):
            return str(self.store.get("verdict").decode())
        return verdict

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _report_late(self) -> None:
        late = self.register.late()
        if late is not None and not self._said_late:
            logger.warning(late)
        self._said_late = late is not None

    def _without_store(self, error: Exception) -> str:
        """The one that held the store is the main process, or a launcher that ended with it."""
        main = self.register.lines.get(0)
        last = "" if main is None else f" It was {main}."
        return f"process 0, or the launcher, is gone: {str(error).splitlines()[0][:200]}.{last}"

    def _give_up(self, verdict: str) -> None:
        """Tell the program, and end it if it does not end by itself: it may sit in a collective that never returns."""
        self.presence.verdict = verdict
        self.judged.set()
        with suppress(RuntimeError, OSError):  # of the store, if nobody is there to hear it
            self.store.add("heard", 1)
        own = self.presence.line()
        if self._ended.wait(GRACE):
            return
        sys.stdout.flush()
        print(
            f"gruppo: {verdict}. Process {self.presence.rank}, {own}, ends too, with code {LOST}.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)


# ---- small parts


def _has_store() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _store() -> Any:
    """A connection of its own to the store of the process group: another thread may be waiting on the first."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    default: Any = _get_default_store()
    store = PrefixStore(f"gruppo/presence/{next(_SESSIONS)}", default.clone())
    store.set_timeout(timedelta(seconds=10))
    return store


def _is_of_a_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _OF_A_PEER)
    )


def _short(error: BaseException) -> str:
    """The error in a line; of a long one, as one with a traceback, its beginning and its end."""
    text = " ".join(str(error).split())
    if len(text) > 600:
        text = f"{text[:300]} … {text[-300:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def presence_of(args: Any, update: Callable[[], int]) -> Presence:
    """The presence that a config asks for."""
    return Presence(
        rank=args.process_index,
        world=args.world_size,
        silence=args.process_timeout,
        deadline=float(args.ddp_timeout),
        update=update,
    )
