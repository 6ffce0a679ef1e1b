"""The identity of the run in a folder, and its origin: run.json.

    {"format": 1, "run_id": "…", "started": "…", "continues": [{"run_id": "…", "checkpoint": "checkpoint-40"}]}

`continues` names the checkpoint of another run, or of an unknown one (null), that this run continues from.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "origin", "origins", "position_run", "read_json", "recorded_run"]

FORMAT = 1  # of the run folder


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file is missing or cannot be read as one."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):  # a pipe would block, a link may lead anywhere
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def recorded_run(folder: Path) -> str | None:
    """The id of the run recorded in a folder; None if there is no record in this format."""
    info = read_json(folder / "run.json")
    return info["run_id"] if info.get("format") == FORMAT and isinstance(info.get("run_id"), str) else None


def position_run(position: Mapping[str, Any] | None) -> str | None:
    """The run id of a position in a record; None if it has none."""
    return (None if position is None else position["run_id"]) or None


def origin(folder: Path, checkpoint: Path | None, run_id: str | None) -> dict[str, str | None] | None:
    """The entry of `continues` for a checkpoint. If it is in another folder, its name includes that folder.

    Example: {"run_id": None, "checkpoint": "checkpoint-2"}, or "checkpoint": "sft/checkpoint-2"
    """
    if checkpoint is None:
        return None if run_id is None else {"run_id": run_id, "checkpoint": None}
    path = Path(os.path.abspath(checkpoint))
    here = os.path.realpath(path.parent) == os.path.realpath(folder)
    return {"run_id": run_id, "checkpoint": path.name if here else f"{path.parent.name}/{path.name}"}


def origins(folder: Path) -> set[tuple[str | None, str]]:
    """The checkpoints of other runs that the run in a folder continues from: run id and name."""
    listed = read_json(folder / "run.json").get("continues")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    pairs = [(entry.get("run_id"), entry.get("checkpoint")) for entry in entries]
    return {(run, name) for run, name in pairs if isinstance(run, str | None) and isinstance(name, str)}
