"""Move existing data that is in the way of a run to `earlier/0001`, `earlier/0002`, …, so that it is not lost."""

import os
from pathlib import Path

from gruppo.runs.lines import fsync_folder
from gruppo.runs.links import no_link

__all__ = ["PARTS", "archive_record", "new_place"]

# The parts of a record. `run.json` comes first: a folder without it holds no record.
PARTS = (
    *("run.json", "config.yaml", "environment.json", "metrics.jsonl", "events.jsonl"),
    *("rollouts", "updates", "tokenizer"),
)
TABLES = "completions"  # of `log_completions`: they belong to a record, but are none


def new_place(run: Path) -> Path:
    """Create a new, empty folder in `earlier/`."""
    earlier = no_link(run / "earlier")
    earlier.mkdir(exist_ok=True)
    numbers = [int(name) for name in os.listdir(earlier) if name.isdecimal()]
    place = earlier / f"{max(numbers, default=0) + 1:04d}"
    place.mkdir()
    for changed in (earlier, run):
        fsync_folder(changed)
    return place


def archive_record(run: Path) -> Path | None:
    """Move the record of an earlier run out of the way; returns its new place, or None if there was no record."""
    parts = [name for name in (*PARTS, TABLES) if os.path.lexists(run / name)]
    if parts in ([], [TABLES]):  # of an evaluation before the run, or of no run that is known
        return None
    place = new_place(run)
    for name in parts:
        os.rename(run / name, place / name)
    for changed in (place, run):
        fsync_folder(changed)
    return place
