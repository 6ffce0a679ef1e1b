"""Who of several processes is there, and what it is doing: one that dies or fails ends the others with the reason.

Processes that train together wait for each other in every gather and in every backward pass. One that is gone leaves
the others waiting until a timeout of the backend, with an error that names nobody. So each has a thread that writes a
line about it into the store by which the processes found each other, every second and whatever the process itself is
busy with. The main process reads all of them, the others read the main one's and its verdict: nothing is exchanged
between the processes that train, and no work waits for it.

    dead      its process is gone, known at once on the same host; of one elsewhere, nothing was heard for `silence` s
    failed    it said so, with its error
    missing   alive, but for `deadline` seconds in the work that the others wait for, or frozen; till then only named
    overdue   a signal asked the run to stop, and its update has not ended within `stop_within` seconds

Slow is not dead: a process that sleeps or computes goes on writing its line. One that is stopped, or holds the
interpreter's lock, cannot write: on the same host its process is seen to be alive, on another it counts as dead.
"""

import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from gruppo.errors import ProcessLostError
from gruppo.trainer.processes.attendance import Line, Register
from gruppo.trainer.processes.stopping import STOPPED_UNSAVED

logger = logging.getLogger(__name__)

LOST = 69  # the exit code of a process that ends because of another one: sysexits.h calls it EX_UNAVAILABLE
BEAT = 1.0  # seconds between two lines
SHORT = 0.05  # at least so many, however often the phase changes
CALL = 10.0  # seconds that a call to the store may take
GRACE = 5.0  # seconds in which a process may end by itself once it is told that another one is lost
_SESSIONS = itertools.count()  # of this program: processes begin them in the same order
# What a collective that lost a peer says in the backends of torch.
_OF_A_PEER = (
    *("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket", "timed out", "store"),
    "pair closure",  # gloo in a backward pass, once the timeout is over
)


class Verdict(NamedTuple):
    """Why the processes end, and with which code."""

    said: str
    code: int = LOST


class Presence:
    """This process among several; without others, or with `silence` None, it does nothing.

    Example:
        presence = Presence(rank=0, world=2, silence=20.0, deadline=1800.0, update=lambda: 7)
        with presence.watching():
            with presence.during("sampling"):
                …
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        silence: float | None,
        deadline: float,
        stop_within: float | None = None,
        update: Callable[[], int] = lambda: 0,
        stopping: Callable[[], float] = lambda: 0.0,
    ):
        self.rank, self.world = rank, world
        self.silence, self.deadline, self.stop_within = silence, deadline, stop_within
        self.update, self.stopping = update, stopping
        self.verdict: Verdict | None = None
        self._phases: list[str] = []
        self._since = time.monotonic()
        self._seconds: dict[str, float] = defaultdict(float)
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
        self._failed_in = None  # of an error that was mended
        self._enter([*self._phases, phase])
        since = None
        try:
            yield
        except BaseException as error:
            self._failed_in = self._failed_in or phase
            since = self._since if _is_of_a_peer(error) else None
            raise
        finally:
            self._enter(self._phases[:-1])
            self._since = since or self._since  # the others were waited for till now, which is what a verdict goes by

    @property
    def phase(self) -> tuple[str, float]:
        """What is done at the moment, and for how many seconds."""
        phases = self._phases
        return (phases[-1] if phases else ""), time.monotonic() - self._since

    def take_seconds(self, phase: str) -> float:
        """Spent in a phase, but not in others inside of it, since this was last asked."""
        return self._seconds.pop(phase, 0.0)

    def waiting(self) -> AbstractContextManager[None]:
        """In here, inside of some work, the others are waited for."""
        return self.during("")

    def _enter(self, phases: list[str]) -> None:
        now, phase = time.monotonic(), self._phases[-1] if self._phases else ""
        self._seconds[phase] += now - self._since
        self._phases, self._since = phases, now
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
            stopping=round(self.stopping(), 1),
        )

    def _explained(self, error: Exception) -> BaseException:
        """The error itself, which the others are told; or, if it only says that a peer is gone, which one that is."""
        assert self._watch is not None
        assert self.silence is not None
        if _is_of_a_peer(error):
            # A broken connection is seen before the silence of the one that broke it.
            self._watch.judged.wait(self.silence + 3 * BEAT)
            if self.verdict is not None and self.verdict.code != LOST:
                logger.error(f"{self.verdict.said}.")
                return SystemExit(self.verdict.code)
            if self.verdict is not None:
                return ProcessLostError(f"{self.verdict.said}. This process ends too.")
            self._watch.end_if_stuck()
        self._watch.end("failed", _short(error), self._failed_in)
        return error


class _Watch:
    """The thread of a process that says its line, and hears those of the others.

    Only this thread speaks to its store: a client of a store is not for two. It is no daemon, and nobody's end is
    missed: a program that ends waits until the thread is out of the store, in which no call takes longer than `CALL`
    if the store answers at all.
    """

    def __init__(self, presence: Presence, store: Any):
        assert presence.silence is not None
        self.presence, self.store = presence, store
        self.register = Register(
            silence=presence.silence, deadline=presence.deadline, stop_within=presence.stop_within
        )
        self.judged = threading.Event()
        self.wake = threading.Event()  # there is news of this process
        self._spoken = threading.Event()
        self._ended = threading.Event()
        self._last: Line | None = None  # what is said at the end
        self._beat = 0
        self._turned = time.monotonic()
        self._said_late = False
        self._thread = threading.Thread(target=self._run, name="gruppo-presence", daemon=False)

    def start(self) -> None:
        """Be there, and known to the others."""
        self._thread.start()
        self._spoken.wait(CALL)

    def end(self, state: str, said: str = "", phase: str | None = None) -> None:
        """Say goodbye, and wait until the thread is gone: nothing may be taken down while it is in the store."""
        if self._ended.is_set():
            return
        line = self.presence.line()
        self._last = replace(line, state=state, said=said, phase=line.phase if phase is None else phase)
        self._ended.set()
        self.wake.set()
        self._thread.join(2 * CALL)
        if self._thread.is_alive():
            logger.warning("The thread that watches the other processes is still waiting for the store.")

    def end_if_stuck(self) -> None:
        """End the program at once if its thread sits in a store that a stopped process holds: it would wait for ever.

        The limit on calls does not help. It is on what the store waits for, not on a store that says nothing.
        """
        seconds = time.monotonic() - self._turned
        if seconds > self.register.silence and self._thread.is_alive():
            self._exit(Verdict(f"process 0, or who else holds the store, has not answered for {seconds:.0f} s"))

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.is_set() and threading.main_thread().is_alive():
            self._turned, verdict = time.monotonic(), None
            try:
                self._say(self.presence.line())
                self._spoken.set()
                if time.monotonic() >= due:
                    due, verdict = time.monotonic() + BEAT, self._listen()
            except (RuntimeError, OSError) as error:  # of the store: a peer that held it, or the launcher, is gone
                verdict = self._without_store(error)
            if verdict is not None and not self._ended.is_set():
                self._give_up(verdict)
                break
            self._ended.wait(SHORT)
            self.wake.wait(max(due - time.monotonic(), 0.0))
            self.wake.clear()
        self._say_last()

    def _say(self, line: Line) -> None:
        self._beat += 1
        self.store.set(f"line/{self.presence.rank}", json.dumps(asdict(replace(line, beat=self._beat))))

    def _say_last(self) -> None:
        """Goodbye; after an error, stay until the others have heard of it: the store may end with this process."""
        try:
            if self._last is not None:
                self._say(self._last)
            if self._last is not None and self._last.state == "failed":
                self.store.add("heard", 1)  # who fails too need not be told
                limit = time.monotonic() + 3 * BEAT
                while self.store.add("heard", 0) < self.presence.world and time.monotonic() < limit:
                    time.sleep(BEAT / 10)
        except (RuntimeError, OSError):  # the store is gone, and with it whoever held it
            logger.debug("the last line could not be said", exc_info=True)

    def _listen(self) -> Verdict | None:
        """The main process hears all and judges; the others hear the main one and its verdict."""
        rank, world = self.presence.rank, self.presence.world
        missing = [process for process in range(world) if process not in self.register.lines and process != rank]
        known = [process for process in (range(world) if rank == 0 else [0]) if process not in (*missing, rank)]
        known += [process for process in missing if (rank == 0 or process == 0) and self._has(f"line/{process}")]
        now = time.monotonic()
        self.register.look(now)
        if known:
            texts = self.store.multi_get([f"line/{process}" for process in known])
            for process, text in zip(known, texts, strict=True):
                self.register.note(process, Line(**json.loads(text)), now)
        self.register.note(rank, self.presence.line(), now)  # one that waits for the main one must know that it does
        if rank == 0 or (rank == 1 and self.register.is_silent(0, now)):  # the main one cannot tell of itself then
            self._report_late(now)
        if rank != 0 and self._has("verdict"):
            return Verdict(*json.loads(self.store.get("verdict")))
        verdict = self._judge(now)
        if rank == 0 and verdict is not None:
            self.store.set("verdict", json.dumps(verdict))
        return verdict

    def _judge(self, now: float) -> Verdict | None:
        if (lost := self.register.lost(now)) is not None:
            return Verdict(lost)
        overdue = self.register.overdue(now) if self.presence.rank == 0 else None  # who knows of all
        return None if overdue is None else Verdict(overdue, STOPPED_UNSAVED)

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _report_late(self, now: float) -> None:
        late = self.register.late(now)
        if late is not None and not self._said_late:
            logger.warning(late)
        self._said_late = late is not None

    def _without_store(self, error: Exception) -> Verdict:
        """The one that held the store is the main process, or a launcher that ended with it."""
        main = self.register.lines.get(0)
        last = "" if main is None else f" It was {main}."
        return Verdict(f"process 0, or the launcher, is gone: {str(error).splitlines()[0][:200]}.{last}")

    def _give_up(self, verdict: Verdict) -> None:
        """Tell the program, and end it if it does not end by itself: it may sit in a collective that never returns."""
        self.presence.verdict = verdict
        self.judged.set()
        with suppress(RuntimeError, OSError):  # of the store, if nobody is there to hear it
            self.store.add("heard", 1)
        own = self.presence.line()
        if not self._ended.wait(GRACE if verdict.code == LOST else 2 * BEAT):  # so long that the others hear of it
            self._exit(verdict, own)

    def _exit(self, verdict: Verdict, own: Line | None = None) -> None:
        sys.stdout.flush()
        print(
            f"gruppo: {verdict.said}. Process {self.presence.rank}, {own or self.presence.line()}, ends too, "
            f"with code {verdict.code}.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(verdict.code)


# ---- small parts


def _has_store() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _store() -> Any:
    """A connection of its own to the store of the process group: another thread may be waiting on the first."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    default: Any = _get_default_store()
    store = PrefixStore(f"gruppo/presence/{next(_SESSIONS)}", default.clone())
    store.set_timeout(timedelta(seconds=CALL))
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


def presence_of(args: Any, update: Callable[[], int], stopping: Callable[[], float]) -> Presence:
    """The presence that a config asks for."""
    return Presence(
        rank=args.process_index,
        world=args.world_size,
        silence=args.process_timeout,
        deadline=float(args.ddp_timeout),
        stop_within=args.stop_timeout,
        update=update,
        stopping=stopping,
    )
