"""Detects processes that die or fail during distributed training, and ends the others with the reason.

Processes that train together wait for each other in every gather and in every backward pass. If one is gone, the
others wait until the backend times out, with an error that does not name it. Therefore each process has a thread that
writes a status line every second to the store of the process group, whatever the process itself is doing. The main
process reads all lines; the others read the main process's line and its verdict. No collectives are involved, and no
work waits for this.

    dead      the process is gone: seen at once on the same host; on another host, no line for `silence` seconds
    failed    the process reported an error
    missing   alive, but frozen or in work that the others wait for, for `deadline` seconds; before that only a warning
    overdue   a signal asked the run to stop, and its update has not ended within `stop_within` seconds

Slow is not dead: a process that sleeps or computes still writes its line. A process that is stopped, or that holds the
GIL, cannot write: on the same host it is seen to be alive, on another host it counts as dead.
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

LOST = 69  # the exit code of a process that ends because of another one: EX_UNAVAILABLE of sysexits.h
BEAT = 1.0  # seconds between two lines
SHORT = 0.05  # the minimum seconds between two lines, however often the phase changes
CALL = 10.0  # timeout of a call to the store, in seconds
GRACE = 5.0  # seconds that a process has to end by itself once it knows that another one is lost
_SESSIONS = itertools.count()  # numbers the sessions, which all processes begin in the same order
# Parts of the error messages of torch's backends when a collective has lost a peer.
_OF_A_PEER = (
    *("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket", "timed out", "store"),
    "pair closure",  # gloo in a backward pass, once the timeout is over
)


class Verdict(NamedTuple):
    """Why the processes end, and with which exit code."""

    said: str
    code: int = LOST


class Phase(NamedTuple):
    """What a process is doing, and whether it may be waiting for the others in it, as in an exchange of gradients."""

    name: str
    waits: bool = False


WAITING = Phase("", waits=True)  # between two phases


class Presence:
    """Publishes the status of this process and watches the others; does nothing alone or with `silence=None`.

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
        self._phases: list[Phase] = []
        self._since = time.monotonic()
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed_in: str | None = None
        self._line = Line.here()
        self._watch: _Watch | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside this context the processes watch each other, and an error of this process ends all of them."""
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
        except BaseException as end:  # an orderly exit, which the others reach as well, or an interrupt
            self._watch.end("left" if isinstance(end, SystemExit) else "failed", _short(end))
            raise
        finally:
            self._watch.end("left")
            self._watch = None

    @contextmanager
    def during(self, phase: str, *, waits: bool = False) -> Iterator[None]:
        """The code inside is this process's own work, which the others may have to wait for.

        With `waits`, it also waits for the others itself, at a point that cannot be told from here.
        """
        self._failed_in = None  # clears the phase of an earlier error that was handled
        self._enter([*self._phases, Phase(phase, waits)])
        since = None
        try:
            yield
        except BaseException as error:
            self._failed_in = self._failed_in or phase
            since = self._since if _is_of_a_peer(error) else None
            raise
        finally:
            self._enter(self._phases[:-1])
            # After the failure of a peer, keep the start of the phase: this process has been waiting since then, and
            # verdicts depend on how long processes wait.
            self._since = since or self._since

    @property
    def phase(self) -> tuple[str, float]:
        """The current phase, and its duration so far in seconds."""
        return self._current.name, time.monotonic() - self._since

    @property
    def _current(self) -> Phase:
        phases = self._phases
        return phases[-1] if phases else WAITING

    def take_seconds(self, phase: str) -> float:
        """Seconds of own work in a phase since the last call, excluding phases nested inside it and waiting."""
        return self._seconds.pop(phase, 0.0)

    def waiting(self) -> AbstractContextManager[None]:
        """Inside this context, nested in some phase, this process waits for the others."""
        return self.during(WAITING.name, waits=True)

    def _enter(self, phases: list[Phase]) -> None:
        now, phase = time.monotonic(), self._current
        if not phase.waits:
            self._seconds[phase.name] += now - self._since
        self._phases, self._since = phases, now
        if self._watch is not None:
            self._watch.wake.set()

    def line(self) -> Line:
        """The current status line."""
        phase, since = self._current, self._since
        return replace(
            self._line,
            phase=phase.name,
            waits=phase.waits,
            seconds=round(time.monotonic() - since, 1),
            update=self.update(),
            stopping=round(self.stopping(), 1),
        )

    def _explained(self, error: Exception) -> BaseException:
        """The error itself, after reporting it to the others, or one that names the lost peer that caused it."""
        assert self._watch is not None
        assert self.silence is not None
        if _is_of_a_peer(error):
            # A broken connection is noticed earlier than the silence of the process that broke it.
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
    """The thread of a process that writes its status line and reads those of the others.

    Only this thread uses its store client, which must not be shared between threads. It is not a daemon thread, and
    it ends when the main thread does: a program that exits waits until the thread has left the store, where no call
    takes longer than `CALL` if the store responds at all.
    """

    def __init__(self, presence: Presence, store: Any):
        assert presence.silence is not None
        self.presence, self.store = presence, store
        self.register = Register(
            silence=presence.silence, deadline=presence.deadline, stop_within=presence.stop_within
        )
        self.judged = threading.Event()
        self.wake = threading.Event()  # the status of this process has changed
        self._spoken = threading.Event()
        self._ended = threading.Event()
        self._last: Line | None = None  # the final line
        self._beat = 0
        self._turned = time.monotonic()
        self._said_late = False
        self._thread = threading.Thread(target=self._run, name="gruppo-presence", daemon=False)

    def start(self) -> None:
        """Start the thread, and wait until its first line is in the store."""
        self._thread.start()
        self._spoken.wait(CALL)

    def end(self, state: str, said: str = "", phase: str | None = None) -> None:
        """Write a final line and wait for the thread to end: nothing may be torn down while it uses the store."""
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
        """Exit at once if the thread is blocked in a store whose process is stopped: it would wait forever.

        The timeout of calls does not help here: it limits how long the store waits for a key, not how long a client
        waits for a store that does not respond.
        """
        seconds = time.monotonic() - self._turned
        if seconds > self.register.silence and self._thread.is_alive():
            self._exit(
                Verdict(f"process 0, or whichever process holds the store, has not answered for {seconds:.0f} s")
            )

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.is_set() and threading.main_thread().is_alive():
            self._turned, verdict = time.monotonic(), None
            try:
                self._say(self.presence.line())
                self._spoken.set()
                if time.monotonic() >= due:
                    due, verdict = time.monotonic() + BEAT, self._listen()
            except (RuntimeError, OSError) as error:  # from the store: its host process, or the launcher, is gone
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
        """Write the final line; after an error, wait until the others know: the store may end with this process."""
        try:
            if self._last is not None:
                self._say(self._last)
            if self._last is not None and self._last.state == "failed":
                self.store.add("heard", 1)  # a process that fails itself need not be notified
                limit = time.monotonic() + 3 * BEAT
                while self.store.add("heard", 0) < self.presence.world and time.monotonic() < limit:
                    time.sleep(BEAT / 10)
        except (RuntimeError, OSError):  # the store is gone, together with the process that hosted it
            logger.debug("the last status line could not be written", exc_info=True)

    def _listen(self) -> Verdict | None:
        """Read lines: the main process reads all and decides; the others read the main one's line and its verdict."""
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
        self.register.note(rank, self.presence.line(), now)  # so that waiting for the main process is registered
        if rank == 0 or (rank == 1 and self.register.is_silent(0, now)):  # a silent main process cannot report itself
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
        overdue = self.register.overdue(now) if self.presence.rank == 0 else None  # only the main one has all lines
        return None if overdue is None else Verdict(overdue, STOPPED_UNSAVED)

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _report_late(self, now: float) -> None:
        late = self.register.late(now)
        if late is not None and not self._said_late:
            logger.warning(late)
        self._said_late = late is not None

    def _without_store(self, error: Exception) -> Verdict:
        """The verdict when the store is gone: its host is the main process, or a launcher that ended with it."""
        main = self.register.lines.get(0)
        last = "" if main is None else f" It was {main}."
        return Verdict(f"process 0, or the launcher, is gone: {str(error).splitlines()[0][:200]}.{last}")

    def _give_up(self, verdict: Verdict) -> None:
        """Set the verdict, and exit if the program does not: it may be blocked in a collective that never returns."""
        self.presence.verdict = verdict
        self.judged.set()
        with suppress(RuntimeError, OSError):  # the store may be gone
            self.store.add("heard", 1)
        own = self.presence.line()
        # Two beats are enough for the others to read the verdict.
        if not self._ended.wait(GRACE if verdict.code == LOST else 2 * BEAT):
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
    """A separate connection to the store of the process group, since another thread may be blocked on the original."""
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
    """The error on one line; a long message, such as one with a traceback, is cut to its beginning and end."""
    text = " ".join(str(error).split())
    if len(text) > 600:
        text = f"{text[:300]} … {text[-300:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def presence_of(args: Any, update: Callable[[], int], stopping: Callable[[], float]) -> Presence:
    """The presence as configured."""
    return Presence(
        rank=args.process_index,
        world=args.world_size,
        silence=args.process_timeout,
        deadline=float(args.ddp_timeout),
        stop_within=args.stop_timeout,
        update=update,
        stopping=stopping,
    )
