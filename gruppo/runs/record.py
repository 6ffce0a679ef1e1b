"""Writes the record of a run into its folder while it trains."""

import errno
import json
import logging
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gruppo.runs.files import RolloutFolder
from gruppo.runs.lines import LineFile, fsync_folder, now, plain, write_file
from gruppo.runs.rollouts import RolloutRow, encode, to_table

logger = logging.getLogger(__name__)

FORMAT = 1  # of the run folder

# What a record consists of. `run.json` comes first: a folder without it holds no record.
PARTS = ("run.json", "config.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "rollouts")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class RunRecorder:
    """The record of a run: who it is, its metrics, what happened, and every completion.

    Rank 0 writes everything; other ranks write their own rollouts and ignore the rest. A full disk never stops a run:
    what cannot be written waits in memory.

    Example:
        recorder = RunRecorder(Path("runs/demo"))
        recorder.begin(config={"learning_rate": 1e-6}, environment={"python": "3.12"})
        recorder.metrics(1, {"loss": 0.25, "reward": 0.5})
        position = recorder.sync()     # goes into the checkpoint; `resume` takes it
    """

    def __init__(self, folder: Path, *, rank: int = 0, world: int = 1, rollouts: bool = True):
        self.folder = Path(folder)
        self.run_id: str | None = None
        self._rank = rank
        self._world = world
        self._keeps_rollouts = rollouts
        self._metrics = LineFile(self.folder / "metrics.jsonl")
        self._events = LineFile(self.folder / "events.jsonl")
        self._tables = RolloutFolder(self.folder / "rollouts", rank)
        self._number = 0  # of the next generation
        self._files = 0  # tables of this rank that are, or will be, in the folder
        self._position: Mapping[str, Any] | None = None  # that ranks other than 0 go on from
        self._full_since: str | None = None

    # Starting

    def begin(self, *, config: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
        """Start the record of a new run; that of an earlier one moves to `earlier/`. Returns the run's id (rank 0)."""
        if self._rank != 0:
            return ""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        archive = _archive(self.folder)
        self._number, self._files = 0, 0
        self._write_config(config)
        self._add_environment(environment)
        self.run_id = secrets.token_hex(8)
        self._write_json("run.json", {"format": FORMAT, "run_id": self.run_id, "started": now()})
        self._metrics.open()
        self._events.open()
        self.event("started", run_id=self.run_id, earlier_record=archive)
        return self.run_id

    def join(self, run_id: str) -> None:
        """On other ranks, once rank 0 has begun or resumed the run of this id."""
        if self._rank != 0:
            self.run_id = run_id
            self._follow()

    def resume(
        self, *, config: Mapping[str, Any], environment: Mapping[str, Any], position: Mapping[str, Any] | None
    ) -> None:
        """Go on from `position`, which `sync` returned when the checkpoint was made; what came after it is cut.

        If the folder does not hold the record that the position is of, a new one begins. Other ranks go on when they
        have both this and `join`.
        """
        if self._rank != 0:
            self._position = position
            self._follow()
            return
        self.close()
        found = recorded_run(self.folder)
        if position is None or found != position["run_id"]:
            self.begin(config=config, environment=environment)
            reason = _why_new(position, found)
            self.event("resumed", record="new", reason=reason, found_run=found, checkpoint_run=_run_of(position))
            return
        self.run_id = found
        self._metrics.open()
        self._events.open()
        self._events.cut()
        missing = self._cut(position)
        changed = self._changed_settings(config)
        if changed:
            self._write_config(config)
            self.event("config_changed", settings=changed)
        self._add_environment(environment)
        if missing:
            logger.warning("The record in %s is incomplete: %s", self.folder, "; ".join(missing))
            self.event("record_incomplete", missing=missing)

    # Recording

    def metrics(self, update: int, values: Mapping[str, float | None], *, kind: str = "train") -> None:
        """One line of metrics. NaN and the infinities become null, and `nonfinite` lists their names."""
        if self._rank != 0:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        nonfinite = [name for name, value in numbers.items() if isinstance(value, float) and not math.isfinite(value)]
        line: dict[str, Any] = {"update": update, "kind": kind, "time": now()}
        if nonfinite:
            line["nonfinite"] = nonfinite
        numbers.update(dict.fromkeys(nonfinite))
        self._metrics.append(_joined(line, numbers, reserved=("nonfinite",)))
        self._write()

    def event(self, kind: str, /, *, update: int | None = None, **fields: Any) -> None:
        """One line about something that happened; fields that are not JSON become text."""
        if self._rank == 0:
            self._events.append(_joined({"time": now(), "event": kind, "update": update}, fields))
            self._write()

    def rollouts(self, rows: Sequence[RolloutRow]) -> None:
        """One table of completions. All ranks call this equally often: the number goes on without rows too."""
        number = self._number
        self._number += 1
        if rows and self._keeps_rollouts:
            if self.run_id is None:
                raise RuntimeError("The record has no run yet: call begin, resume or join first")
            self._tables.add(number, encode(to_table(rows, number)))
            self._files += 1
            self._write()

    def sync(self) -> dict[str, Any]:
        """Bring everything onto the disk; returns the position, for the checkpoint."""
        self._write()
        try:
            if self._rank == 0:
                self._metrics.sync()
                self._events.sync()
            self._tables.sync()
        except OSError as error:
            self._accept(error)
        return self.position()

    def position(self) -> dict[str, Any]:
        """Where the record is now, what waits for room on the disk included; `resume` goes on from there."""
        return {
            "run_id": self.run_id,
            "metrics_bytes": self._metrics.length,
            "rollouts": self._number,
            "rollout_files": self._files - self._tables.dropped,
        }

    def close(self) -> None:
        """Write what waits, and close the files."""
        if self.run_id is not None:
            self.sync()
        lost = self._metrics.waiting + self._events.waiting, self._tables.waiting
        if any(lost):
            logger.warning("The disk is still full: %d lines and %d tables of rollouts are lost", *lost)
        for store in (self._metrics, self._events, self._tables):
            store.close()
        self.run_id = self._full_since = None

    # Going on

    def _follow(self) -> None:
        """On other ranks: take the place in the run that rank 0 has taken."""
        here = self._position is not None and self._position["run_id"] == self.run_id
        self._number = self._position["rollouts"] if here and self._position else 0
        if here:
            self._tables.cut(self._number)

    def _cut(self, position: Mapping[str, Any]) -> list[str]:
        """Remove what was recorded after the position, and say what is missing before it."""
        wanted, self._number = position["metrics_bytes"], position["rollouts"]
        metrics_bytes, metrics_lines = self._metrics.cut(wanted)
        tables = self._tables.cut(self._number, gone=self._world)
        self.event(
            "resumed",
            record="continued",
            metrics_bytes_cut=metrics_bytes,
            metrics_lines_cut=metrics_lines,
            rollout_files_cut=tables,
        )
        self._files = self._tables.own()
        missing = []
        if self._metrics.length < wanted:
            missing.append(f"metrics.jsonl had {wanted:,} bytes at the checkpoint, {self._metrics.length:,} are left")
        if self._files < position.get("rollout_files", 0):
            missing.append(
                f"rank 0 had written {position['rollout_files']:,} files of rollouts, {self._files:,} are left"
            )
        return missing

    def _changed_settings(self, config: Mapping[str, Any]) -> list[str]:
        """Names of the settings that differ from the recorded ones."""
        new = plain(config, finite=False)
        try:
            old = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            old = None
        if not isinstance(old, dict):
            return sorted(new)
        # As text, because NaN differs from itself.
        return sorted(name for name in {*old, *new} if repr(old.get(name, ...)) != repr(new.get(name, ...)))

    # Writing

    def _write(self) -> None:
        """Write what waits. A full disk postpones it; when that is over, an event says so."""
        stores = (self._metrics, self._events, self._tables) if self._rank == 0 else (self._tables,)
        for store in stores:
            try:
                store.flush()
            except OSError as error:
                self._accept(error)
        if self._full_since is None or any(store.waiting for store in stores):
            return
        since, self._full_since = self._full_since, None
        dropped = {
            "lines_dropped": self._metrics.dropped + self._events.dropped,
            "rollouts_dropped": self._tables.dropped,
        }
        logger.warning("There is room on the disk again; the record goes on in %s (%s)", self.folder, dropped)
        self._files -= self._tables.dropped
        self._metrics.dropped = self._events.dropped = self._tables.dropped = 0
        self.event("disk_full", since=since, **dropped)

    def _accept(self, error: OSError) -> None:
        """Go on without room on the disk; raise what else is wrong."""
        if error.errno not in _DISK_FULL:
            raise error
        if self._full_since is None:
            self._full_since = now()
            logger.warning(
                "No room on the disk for the record in %s: it waits in memory, and the run goes on. Make room",
                self.folder,
            )

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        write_file(self.folder / name, (json.dumps(plain(value), ensure_ascii=False, indent=2) + "\n").encode("utf-8"))

    def _write_config(self, config: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(plain(config, finite=False), sort_keys=False, allow_unicode=True)
        write_file(self.folder / "config.yaml", text.encode("utf-8"))

    def _add_environment(self, environment: Mapping[str, Any]) -> None:
        starts = _read_json(self.folder / "environment.json").get("starts")
        starts = starts if isinstance(starts, list) else []
        self._write_json("environment.json", {"starts": [*starts, {**environment, "time": now()}]})


def _archive(folder: Path) -> str | None:
    """Move the record of an earlier run out of the way; where to, or None if there was none."""
    parts = [name for name in PARTS if os.path.lexists(folder / name)]
    if not parts:
        return None
    (folder / "earlier").mkdir(exist_ok=True)
    numbers = [int(name) for name in os.listdir(folder / "earlier") if name.isdecimal()]
    place = folder / "earlier" / f"{max(numbers, default=0) + 1:04d}"
    place.mkdir()
    for name in parts:
        os.rename(folder / name, place / name)
    for changed in (place, place.parent, folder):
        fsync_folder(changed)
    return place.relative_to(folder).as_posix()


def _read_json(path: Path) -> dict[str, Any]:
    """An object from a file; empty if there is none, or nothing that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def recorded_run(folder: Path) -> str | None:
    """The id of the run whose record, in this format, is in a folder."""
    info = _read_json(folder / "run.json")
    return info["run_id"] if info.get("format") == FORMAT and isinstance(info.get("run_id"), str) else None


def _run_of(position: Mapping[str, Any] | None) -> str | None:
    return None if position is None else position["run_id"]


def _why_new(position: Mapping[str, Any] | None, found: str | None) -> str:
    if position is None:
        return "the checkpoint says nothing about a record"
    if found is None:
        return "there was no record in the folder"
    return "the record in the folder was of another run"


def _number(value: Any) -> Any:
    """A metric as a Python number; text if it is none, because a strange metric is no reason to stop."""
    if value is None or isinstance(value, int | float):
        return plain(value, finite=False)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return plain(value)


def _joined(line: Mapping[str, Any], values: Mapping[str, Any], reserved: Sequence[str] = ()) -> dict[str, Any]:
    """One flat line. A value that has the name of one of our own keys is called `value/<name>`."""
    own = {*line, *reserved}
    return {**line, **{f"value/{name}" if name in own else name: value for name, value in values.items()}}
