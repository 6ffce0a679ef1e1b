"""Writes the record of a run into its folder while it trains."""

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.runs.earlier import archive_record, new_place
from gruppo.runs.identity import FORMAT, origin, position_run, read_json, recorded_run
from gruppo.runs.lines import joined, now, plain
from gruppo.runs.links import no_link
from gruppo.runs.record_files import RecordFiles
from gruppo.runs.rollouts import RolloutRow, encode, to_table
from gruppo.runs.settings import read_settings, settings_text
from gruppo.runs.updates import UpdateRows
from gruppo.runs.updates import to_table as update_table

__all__ = ["RunRecorder", "recorded_run"]

logger = logging.getLogger(__name__)


class RunRecorder:
    """The record of a run: its identity, metrics, events and every completion.

    Rank 0 writes everything; other ranks write their own rollouts and ignore the rest. A full disk never stops a run,
    see `RecordFiles`. With `keeps=False` only run.json is written, which has the run's id.

    Example:
        recorder = RunRecorder(Path("runs/demo"))
        recorder.begin(config={"learning_rate": 1e-6}, environment={"python": "3.12"})
        recorder.metrics(1, {"loss": 0.25, "reward": 0.5})
        position = recorder.sync()     # goes into the checkpoint; `resume` takes it
    """

    def __init__(self, folder: Path, *, rank: int = 0, world: int = 1, rollouts: bool = True, keeps: bool = True):
        self.folder = Path(folder)
        self.run_id: str | None = None
        self.archive: Path | None = None  # where `begin` or `resume` moved older data
        self._rank = rank
        self._world = world
        self._keeps = keeps
        self._keeps_rollouts = rollouts and keeps
        self._files = RecordFiles(self.folder, rank, keeps=keeps)
        self._starts: list[Any] = []  # of environment.json
        self._number = 0  # the number of the next generation
        self._update = 1  # the number of the next update
        self._position: Mapping[str, Any] | None = None  # from which ranks other than 0 continue

    # Starting

    def begin(
        self, *, config: Mapping[str, Any], environment: Mapping[str, Any], continues: Mapping[str, Any] | None = None
    ) -> str:
        """Start the record of a new run; an earlier run's record moves to `earlier/`. Returns the run's id (rank 0).

        `continues`: the checkpoint of another run that this one continues from, see `identity.py`.
        """
        if self._rank != 0:
            return ""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.archive = archive_record(self.folder)
        self._number, self._files.tables_written, self._update = 0, 0, 1
        self.run_id = secrets.token_hex(8)
        self._put_config(config)
        self._add_start(environment)
        info = {"format": FORMAT, "run_id": self.run_id, "started": now()}
        self._files.put_json("run.json", {**info, "continues": [] if continues is None else [continues]})
        self._files.write()
        self._files.open()
        self.event("started", run_id=self.run_id, earlier_record=self._archive_name())
        return self.run_id

    def join(self, run_id: str) -> None:
        """Call on other ranks, once rank 0 has begun or resumed the run with this id."""
        if self._rank != 0:
            self.run_id = run_id
            self._follow()

    def resume(
        self,
        *,
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        position: Mapping[str, Any] | None,
        checkpoint: Path | None = None,
        branch: bool = False,
    ) -> None:
        """Continue from `position`, which `sync` returned at the checkpoint; everything recorded after it is removed.

        If the folder does not hold the record that the position belongs to, a new record begins, and notes
        `checkpoint` as its origin. With `branch`, removed data moves to `archive`, a folder in `earlier/` that is
        created even if nothing is removed. Other ranks continue once both this and `join` have been called.
        """
        if self._rank != 0:
            self._position = position
            self._follow()
            return
        self.close()
        found = recorded_run(self.folder)
        source = origin(self.folder, checkpoint, position_run(position))
        name = None if source is None else source["checkpoint"]
        if position is None or not found or found != position["run_id"]:
            self.begin(config=config, environment=environment, continues=source)
            if branch:
                self._branch(name)
            self.event(
                "resumed",
                record="new",
                checkpoint=name,
                archive=self._archive_name(),
                reason=_why_new(position, found),
                found_run=found,
                checkpoint_run=position_run(position),
            )
            return
        self.run_id, self.archive = found, None
        if branch:
            self._branch(name)
        self._files.open()
        self._files.events.cut()
        missing = self._cut(position, name)
        if changed := self._changed_settings(config):
            self.event("config_changed", settings=changed)
        self._put_config(config)
        self._add_start(environment)
        self._files.write()
        if missing:
            logger.warning("The record in %s is incomplete: %s", self.folder, "; ".join(missing))
            self.event("record_incomplete", missing=missing)

    def plan(self, plan: Mapping[str, Any]) -> None:
        """Add the execution plan of this start of the run to environment.json, once it is decided."""
        if self._rank == 0 and self._keeps:
            if self.run_id is None:
                raise RuntimeError("The record has no run yet: call begin or resume first")
            self._starts[-1] = {**self._starts[-1], "plan": plan}
            self._files.put_json("environment.json", {"starts": self._starts})
            self._files.write()

    def tokenizer(self, text: str | None) -> None:
        """Store the tokenizer.json of the recorded tokens, so that a reader can decode them.

        None: the tokenizer has no such form. It is stored only with rollouts; that of an earlier start is overwritten.
        """
        if self._rank == 0 and self._keeps_rollouts and text is not None:
            place = no_link(self.folder / "tokenizer") / "tokenizer.json"
            self._files.whole.put(place, text.encode("utf-8"))
            self._files.write()

    # Recording

    def metrics(self, update: int, values: Mapping[str, float | None], *, kind: str = "train") -> None:
        """Record a line of metrics. NaN and the infinities become null, and `nonfinite` lists their names."""
        if self._rank != 0 or not self._keeps:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        nonfinite = [name for name, value in numbers.items() if isinstance(value, float) and not math.isfinite(value)]
        line: dict[str, Any] = {"update": update, "kind": kind, "time": now()}
        if nonfinite:
            line["nonfinite"] = nonfinite
        numbers.update(dict.fromkeys(nonfinite))
        self._files.metrics.append(joined(line, numbers, reserved=("nonfinite",)))
        self._files.write()

    def event(self, kind: str, /, *, update: int | None = None, **fields: Any) -> None:
        """Record an event as one line; fields that are not JSON become text."""
        self._files.event(kind, update, fields)

    def rollouts(self, rows: Sequence[RolloutRow]) -> int:
        """Record a table of completions; returns the number of the generation.

        All ranks must call this equally often: the number also advances without rows.
        """
        number = self._number
        self._number += 1
        if rows and self._keeps_rollouts:
            if self.run_id is None:
                raise RuntimeError("The record has no run yet: call begin, resume or join first")
            self._files.tables.add(number, encode(to_table(rows, number)))
            self._files.tables_written += 1
            self._files.write()
        return number

    def update(self, number: int, rows: UpdateRows | None) -> None:
        """Record an update's per-row values, if there are any; updates count from 1."""
        self._update = number + 1
        if rows is not None and self._keeps_rollouts:
            if self.run_id is None:
                raise RuntimeError("The record has no run yet: call begin, resume or join first")
            self._files.updates.add(number, encode(update_table(rows, number, self._rank)))
            self._files.write()

    def sync(self) -> dict[str, Any]:
        """Sync everything to the disk; returns the position, for the checkpoint."""
        self._files.sync()
        return self.position()

    def position(self) -> dict[str, Any]:
        """The current position of the record, including data that waits for disk space; `resume` continues from it."""
        return {
            "run_id": self.run_id,
            "metrics_bytes": self._files.metrics.length,
            "rollouts": self._number,
            "rollout_files": self._files.tables_written - self._files.tables.dropped,
            "updates": self._update,
        }

    def close(self) -> None:
        """Write the waiting data, and close the files."""
        if self.run_id is not None:
            self.sync()
        self._files.close()
        self.run_id = None

    # Resuming

    def _follow(self) -> None:
        """On other ranks: move to the same position in the run as rank 0."""
        here = self._position is not None and self._position["run_id"] == self.run_id
        self._number = self._position["rollouts"] if here and self._position else 0
        if here and self._position:
            self._update = _next_update(self._position)
            self._files.tables.cut(self._number)
            self._files.updates.cut(self._update)

    def _branch(self, checkpoint: str | None) -> None:
        """Create a folder for the data recorded after the checkpoint that the run returns to, with a note about it."""
        if self.archive is None:
            self.archive = new_place(self.folder)
        why = "The run was resumed from an older checkpoint. This is what it had recorded after that checkpoint."
        note = {"time": now(), "run_id": self.run_id, "checkpoint": checkpoint, "why": why}
        self._files.put_json(f"{self._archive_name()}/note.json", note)
        self._files.write()

    def _archive_name(self) -> str | None:
        return None if self.archive is None else self.archive.relative_to(self.folder).as_posix()

    def _cut(self, position: Mapping[str, Any], checkpoint: str | None) -> list[str]:
        """Remove what was recorded after the position; returns sentences about what is missing before it."""
        wanted, self._number, self._update = position["metrics_bytes"], position["rollouts"], _next_update(position)
        kept = [self.archive and self.archive / name for name in ("metrics.jsonl", "rollouts", "updates")]
        files = self._files
        metrics_bytes, metrics_lines = files.metrics.cut(wanted, kept[0])
        tables = files.tables.cut(self._number, gone=self._world, keep=kept[1])
        updates = files.updates.cut(self._update, gone=self._world, keep=kept[2])
        self.event(
            "resumed",
            record="continued",
            checkpoint=checkpoint,
            archive=self._archive_name(),
            metrics_bytes_cut=metrics_bytes,
            metrics_lines_cut=metrics_lines,
            rollout_files_cut=tables,
            update_files_cut=updates,
        )
        files.tables_written = left = files.tables.own()
        missing = []
        if files.metrics.length < wanted:
            missing.append(f"metrics.jsonl had {wanted:,} bytes at the checkpoint, {files.metrics.length:,} are left")
        if left < position.get("rollout_files", 0):
            missing.append(f"rank 0 had written {position['rollout_files']:,} files of rollouts, {left:,} are left")
        return missing

    def _changed_settings(self, config: Mapping[str, Any]) -> list[str]:
        """Names of the settings that differ from the recorded ones."""
        new = plain(config, finite=False)
        try:
            old = read_settings(no_link(self.folder / "config.yaml").read_text(encoding="utf-8"))
        except FileNotFoundError:  # the run was not recorded before: nothing to compare with
            return []
        except (OSError, ValueError):
            return sorted(new)
        # Compared by repr, because NaN is not equal to itself.
        return sorted(name for name in {*old, *new} if repr(old.get(name, ...)) != repr(new.get(name, ...)))

    def _put_config(self, config: Mapping[str, Any]) -> None:
        if self._keeps:
            self._files.whole.put(self.folder / "config.yaml", settings_text(config).encode("utf-8"))

    def _add_start(self, environment: Mapping[str, Any]) -> None:
        if self._keeps:
            self._starts = [*_earlier_starts(self.folder), {**environment, "time": now()}]
            self._files.put_json("environment.json", {"starts": self._starts})


def _next_update(position: Mapping[str, Any]) -> int:
    """The number of the update after a position; 1 for positions of versions that recorded no updates."""
    return int(position.get("updates", 1))


def _earlier_starts(folder: Path) -> list[Any]:
    """The starts in environment.json; empty if it was changed into something that cannot be written again."""
    starts = read_json(folder / "environment.json").get("starts")
    try:
        return plain(starts) if isinstance(starts, list) else []
    except RecursionError:
        return []


def _why_new(position: Mapping[str, Any] | None, found: str | None) -> str:
    if position is None:
        return "the checkpoint does not mention a record"
    if found is None:
        return "there was no record in the folder"
    return "the record in the folder was of another run"


def _number(value: Any) -> Any:
    """A metric as a Python number; otherwise as text, since an odd metric is no reason to stop the run."""
    if value is None or isinstance(value, int | float):
        return plain(value, finite=False)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return plain(value)
