"""The files of a record, and how they are handled when the disk is full."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gruppo.runs.disk import FULL
from gruppo.runs.lines import LineFile, WholeFiles, joined, now, plain
from gruppo.runs.tables import TableFolder

logger = logging.getLogger(__name__)


class RecordFiles:
    """The files that are written into a run folder: rank 0 writes all of them, other ranks only their own tables.

    A full disk never stops a run: what cannot be written waits in memory, and when there is room again, an event
    records since when the disk was full and how much was dropped. With `keeps=False` there are no lines and no events.

    Example:
        files = RecordFiles(Path("runs/demo"), rank=0, keeps=True)
        files.open()
        files.event("started", None, {"run_id": "…"})
        files.metrics.append({"update": 1, "loss": 0.25})
        files.write()
    """

    def __init__(self, folder: Path, rank: int, *, keeps: bool):
        self.folder = folder
        self.whole = WholeFiles()
        self.metrics = LineFile(folder / "metrics.jsonl")
        self.events = LineFile(folder / "events.jsonl")
        self.tables = TableFolder(folder / "rollouts", rank)
        self.updates = TableFolder(folder / "updates", rank)
        self.tables_written = 0  # this rank's rollout tables that are, or will be, in the folder
        self._rank, self._keeps = rank, keeps
        self._full_since: str | None = None

    def open(self) -> None:
        """Open the files of lines; with `keeps=False`, only an existing metrics.jsonl, which has to be cut."""
        for file in (self.metrics, self.events) if self._keeps else (self.metrics,):
            try:
                if self._keeps or file.path.exists():
                    file.open()
            except OSError as error:
                self._accept(error)

    def put_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Add a JSON file, by its name within the folder; the next `write` writes it."""
        text = json.dumps(plain(value), ensure_ascii=False, indent=2) + "\n"
        self.whole.put(self.folder / name, text.encode("utf-8"))

    def event(self, kind: str, update: int | None, fields: Mapping[str, Any]) -> None:
        """Record an event as one line."""
        if self._rank == 0 and self._keeps:
            self.events.append(joined({"time": now(), "event": kind, "update": update}, fields))
            self.write()

    def write(self) -> None:
        """Write the waiting data. A full disk postpones it; once there is room again, an event records that."""
        own = (self.whole, self.metrics, self.events) if self._rank == 0 else ()
        stores: tuple[WholeFiles | LineFile | TableFolder, ...] = (*own, self.tables, self.updates)
        for store in stores:
            try:
                store.flush()
            except OSError as error:
                self._accept(error)
        if self._full_since is None or any(store.waiting for store in stores):
            return
        since, self._full_since = self._full_since, None
        dropped = {
            "lines_dropped": self.metrics.dropped + self.events.dropped,
            "rollouts_dropped": self.tables.dropped,
            "updates_dropped": self.updates.dropped,
        }
        logger.warning("There is space on the disk again; recording continues in %s (%s)", self.folder, dropped)
        self.tables_written -= self.tables.dropped
        self.metrics.dropped = self.events.dropped = self.tables.dropped = self.updates.dropped = 0
        self.event("disk_full", None, {"since": since, **dropped})

    def sync(self) -> None:
        """Sync everything to the disk."""
        self.write()
        try:
            if self._rank == 0:
                self.metrics.sync()
                self.events.sync()
            self.tables.sync()
            self.updates.sync()
        except OSError as error:
            self._accept(error)

    def close(self) -> None:
        """Close the files, and warn about data that is lost."""
        lost = self.metrics.waiting + self.events.waiting, self.tables.waiting, self.updates.waiting
        if any(lost):
            said = "%d lines, %d tables of rollouts and %d of updates are lost"
            logger.warning(f"The disk is still full: {said}", *lost)
        if self.whole.waiting:
            logger.warning("The disk is still full: %s could not be written", ", ".join(self.whole.names))
        for store in (self.whole, self.metrics, self.events, self.tables, self.updates):
            store.close()
        self._full_since = None

    def _accept(self, error: OSError) -> None:
        """Continue if the error is a full disk; raise any other error."""
        if error.errno not in FULL:
            raise error
        if self._full_since is None:
            self._full_since = now()
            logger.warning(
                "No space on the disk for the record in %s: it is kept in memory, and the run continues. Free space",
                self.folder,
            )
