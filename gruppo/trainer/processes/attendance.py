"""The status lines of processes that train together, and the rules by which a process counts as lost."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 30.0  # seconds of waiting after which a warning names, once, the processes that are waited for
PER_LOOK = 3.0  # the most seconds between two looks that count as silence; beyond that the reader itself was away


@dataclass(frozen=True)
class Line:
    """The status that a process publishes.

    Example:
        Line(host="a", pid=17, place="…", beat=3, phase="sampling", seconds=2.5, update=7)
        str(…) == "sampling in update 7"
    """

    host: str
    pid: int
    place: str  # identifies the PID namespace: a host, or a container on it
    beat: int = 0
    phase: str = ""  # "": between two phases, waiting for the others or about to
    waits: bool = False  # in this phase it may also be waiting for the others
    seconds: float = 0.0  # in this phase, or since the end of the last one
    update: int = 0
    stopping: float = 0.0  # seconds since a signal asked it to stop
    state: str = "here"  # or "left", or "failed"
    said: str = ""  # its error

    @classmethod
    def here(cls) -> "Line":
        return cls(host=platform.node(), pid=os.getpid(), place=_place())

    def __str__(self) -> str:
        return f"{self.phase or 'waiting for the others'} in update {self.update}"

    @property
    def may_wait(self) -> bool:
        """Whether the process is waiting for the others, as far as its line says."""
        return self.waits or not self.phase

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False if that cannot be seen from this process."""
        return self.place == _place() and not _is_alive(self.pid)


def _place() -> str:
    """An identifier of the PID namespace: processes with the same one can look up each other's PIDs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux: a lost process is detected by its silence only
        return f"{platform.node()}/{os.getpid()}"


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # cannot be determined
        return True
    return state not in ("Z", "X")


class Register:
    """The latest status lines of several processes, and which processes are lost, overdue or late.

    A frozen process cannot report that it is frozen, so its silence is measured from its last line, by the reader's
    clock.

    Example, process 1 was last heard of 21 seconds ago:
        register = Register(silence=20, deadline=1800)
        register.note(1, line, now=0.0)
        register.lost(now=21.0) == "process 1 (pid 17 on a) or its host died or is frozen: no sign of life …"
    """

    def __init__(self, *, silence: float, deadline: float, stop_within: float | None = None):
        self.silence, self.deadline, self.stop_within = silence, deadline, stop_within
        self.lines: dict[int, Line] = {}
        self._heard: dict[int, float] = {}  # when a line last changed, by the clock of the reader
        self._looked: float | None = None

    def look(self, now: float) -> None:
        """Start a round of reading; time in which the reader itself was frozen, or in a slow store, is not silence."""
        away = 0.0 if self._looked is None else max(now - self._looked - PER_LOOK, 0.0)
        self._heard = {process: heard + away for process, heard in self._heard.items()}
        self._looked = now

    def note(self, process: int, line: Line, now: float) -> None:
        if self.lines.get(process) != line:
            self.lines[process], self._heard[process] = line, now

    def lost(self, now: float) -> str | None:
        """The first lost process, failed ones first, and why the others cannot continue; None if all are well."""
        for process, line in sorted(self.lines.items(), key=lambda item: item[1].state != "failed"):
            if (reason := self._wrong(process, line, now)) is not None:
                return reason
        return None

    def _wrong(self, process: int, line: Line, now: float) -> str | None:
        who, quiet = f"process {process} (pid {line.pid} on {line.host})", self._quiet(process, now)
        if line.state == "failed":
            return f"process {process} failed: {line.said}, while {line}"
        if line.state == "left":
            return None
        if line.is_gone:
            return f"{who} died while {line}"
        if self.is_silent(process, now) and line.place != _place():
            return f"{who} or its host died or is frozen: no sign of life for {quiet:.0f} s, while {line}"
        if min(self._away(process, now), self._waited_for(process, now)) > self.deadline:
            return (
                f"{who} did not return within {self.deadline:.0f} s (ddp_timeout) from {line}, and others are "
                f"waiting{self._silent(process, now)}"
            )
        return None

    def is_silent(self, process: int, now: float) -> bool:
        return process in self.lines and self._quiet(process, now) > self.silence

    def _quiet(self, process: int, now: float) -> float:
        return now - self._heard[process]

    def _away(self, process: int, now: float) -> float:
        """Seconds that a process has been in its own work or, if it may be waiting, since its last line."""
        line = self.lines[process]
        return self._quiet(process, now) + (0.0 if line.may_wait else line.seconds)

    def _silent(self, process: int, now: float) -> str:
        quiet = self._quiet(process, now)
        return f"; it is alive, but has been silent for {quiet:.0f} s" if self.is_silent(process, now) else ""

    def _waited_for(self, process: int, now: float) -> float:
        """The longest time, in seconds, that another process has been waiting.

        If this process is silent, the others count as waiting in any phase: passes of the model contain collectives,
        in which they may be blocked.
        """
        silent = self.is_silent(process, now)
        waits = [
            line.seconds
            for other, line in self.lines.items()
            if line.state == "here" and (silent or line.may_wait) and not self.is_silent(other, now)
        ]
        return max(waits, default=0.0)

    def overdue(self, now: float) -> str | None:
        """Which processes delay the end of a run that was asked to stop too long ago; None while one is saving."""
        here = {process: line for process, line in self.lines.items() if line.state == "here"}
        waited = max(
            (line.stopping + self._quiet(process, now) for process, line in here.items() if line.stopping), default=0.0
        )
        saves = any(line.phase == "saving" for line in here.values())
        if self.stop_within is None or waited <= self.stop_within or saves:
            return None
        busy = [self._described(process, now) for process in here if self._is_away(process, now)]
        return (
            f"the run was asked to stop {waited:.0f} s ago (stop_timeout={self.stop_within:g}), and its update has "
            f"not finished: {', '.join(busy) or 'all processes are waiting'}. Updates after the last checkpoint are "
            "lost"
        )

    def late(self, now: float) -> str | None:
        """The processes that the others have been waiting for longer than `PATIENCE`."""
        waited = {
            process: self._waited_for(process, now)
            for process, line in sorted(self.lines.items())
            if line.state == "here" and self._is_away(process, now) and self._away(process, now) > PATIENCE
        }
        busy = [self._described(process, now) for process, seconds in waited.items() if seconds > PATIENCE]
        return f"Waiting for {', '.join(busy)}, for {max(waited.values()):.0f} s so far." if busy else None

    def _is_away(self, process: int, now: float) -> bool:
        return not self.lines[process].may_wait or self.is_silent(process, now)

    def _described(self, process: int, now: float) -> str:
        away = f"process {process} ({self.lines[process]}, for {self._away(process, now):.0f} s"
        return f"{away}{self._silent(process, now)})"
