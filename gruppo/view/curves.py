"""The metrics of a run as curves, read incrementally while the run writes them."""

import contextlib
import math
import threading
from dataclasses import dataclass, field
from typing import Any

from gruppo.runs import Run
from gruppo.runs.follow import new_lines
from gruppo.runs.lines import plain

__all__ = ["Curves", "finite", "thin"]

POINTS = 2000  # maximum number of points drawn per curve
OWN_KEYS = {"update", "kind", "time", "nonfinite"}
STARTS = {"started", "resumed"}


@dataclass
class Curve:
    """One metric: update numbers and values; NaN where a value was not finite."""

    updates: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class Curves:
    """Metrics and events of a run; `refresh` adds the lines written since the last call.

    Example:
        curves = Curves(Run("runs/demo"))
        curves.refresh()
        curves.of("loss").values[-1]
    """

    def __init__(self, run: Run):
        self.run = run
        self.version = 0
        self.events: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}  # the metrics line of kind "end"
        self.last_update: int | None = None
        self.last_time: str | None = None
        self._curves: dict[str, Curve] = {}
        self._positions = {"metrics.jsonl": 0, "events.jsonl": 0}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._curves)

    def of(self, name: str) -> Curve:
        return self._curves.get(name, Curve())

    def changed(self) -> float:
        """Modification time of the most recently written file, by the file system's clock."""
        times = [0.0]
        for name in self._positions:
            with contextlib.suppress(OSError):
                times.append((self.run.folder / name).lstat().st_mtime)
        return max(times)

    def refresh(self) -> int:
        """Read new lines and return the version, which increases if there were any."""
        with self._lock:
            events = self._new("events.jsonl")
            # Resuming a run may truncate metrics.jsonl, so it is read again from the start.
            if any(str(event.get("event")) in STARTS for event in events):
                self._curves, self.summary, self._positions["metrics.jsonl"] = {}, {}, 0
            self.events += events
            lines = self._new("metrics.jsonl")
            for line in lines:
                self._add(line)
            self.version += bool(events or lines)
            return self.version

    def _new(self, name: str) -> list[dict[str, Any]]:
        before = self._positions[name]
        lines, after = new_lines(self.run, name, before)
        if after < before:  # the file was truncated, and `lines` are all of its lines
            if name == "events.jsonl":
                self.events = []
            else:
                self._curves, self.summary = {}, {}
            self.version += 1
        self._positions[name] = after
        return lines

    def _add(self, line: dict[str, Any]) -> None:
        if line.get("kind") == "end":
            self.summary = line
            return
        update = line.get("update")
        if not isinstance(update, int):
            return
        self.last_update, self.last_time = update, str(line.get("time") or "")
        bad = line.get("nonfinite")
        nonfinite = set(map(str, bad)) if isinstance(bad, list) else set()
        for name, value in line.items():
            if name in OWN_KEYS or isinstance(value, bool):
                continue
            if isinstance(value, int | float) or name in nonfinite:
                curve = self._curves.setdefault(name, Curve())
                curve.updates.append(update)
                curve.values.append(_float(value))


def _float(value: Any) -> float:
    """A value of a metrics line as float; NaN if it is not finite, not a number, or too large for a float."""
    try:
        return math.nan if value is None or isinstance(value, str | list | dict) else float(value)
    except OverflowError:
        return math.nan


def finite(value: Any) -> Any:
    """A parsed JSON value without NaN and infinities; None if it is nested too deeply to be traversed."""
    try:
        return plain(value)
    except RecursionError:
        return None


def thin(updates: list[int], values: list[float], most: int = POINTS) -> tuple[list[int], list[float | None]]:
    """At most `most` points of a curve: the lowest and the highest point of each interval, so that spikes remain.

    Example:
        thin([1, 2, 3, 4], [0.0, 9.0, 1.0, 2.0], most=2) == ([1, 2], [0.0, 9.0])
    """
    if len(updates) <= most:
        return list(updates), [value if math.isfinite(value) else None for value in values]
    chosen: list[int] = []
    stretches = max(most // 2, 1)
    for stretch in range(stretches):
        own = range(stretch * len(updates) // stretches, (stretch + 1) * len(updates) // stretches)
        known = [i for i in own if math.isfinite(values[i])] or [own[0]]
        chosen += sorted({min(known, key=values.__getitem__), max(known, key=values.__getitem__)})
    kept = [values[i] if math.isfinite(values[i]) else None for i in chosen]
    return [updates[i] for i in chosen], kept
