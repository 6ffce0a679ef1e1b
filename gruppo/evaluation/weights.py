"""Resolve a name or folder to the weights to load.

A run folder may be reused: the record of the earlier run moves to `earlier/`, but its final model and checkpoints stay
in place, since only the user may move or delete them. They are not mistaken for those of the run that is now recorded
in the folder.
"""

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

from gruppo.errors import ConfigError
from gruppo.runs.checkpoints import MANIFEST, checkpoints, newest_of_run
from gruppo.runs.identity import read_json, recorded_run

__all__ = ["find_weights"]

logger = logging.getLogger(__name__)

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "model*.safetensors.index.json", "adapter_model*")


def find_weights(model: str | Path) -> str:
    """The folder that holds the weights: the given one, or a run's final model or newest intact checkpoint.

    A final model that is older than the recorded run, or older than a resume that has since saved checkpoints, is
    skipped with a warning.
    """
    folder = Path(model)
    if not folder.is_dir():
        return str(model)
    final = [path for pattern in WEIGHTS for path in folder.glob(pattern)]
    outdated = _outdated(folder, final) if final else None
    if outdated is None and (final or (folder / "adapter_config.json").exists()):
        return str(folder)
    if not final and not checkpoints(folder):
        raise ConfigError(
            f"{folder} holds neither a model (config.json and weights), nor an adapter, nor checkpoints of a run."
        )
    choice = newest_of_run(folder)
    if choice.path is not None:
        if outdated is not None:
            logger.warning(f"{outdated} {choice.path.name} is evaluated instead.")
        return str(choice.path)
    found = "; ".join(f"{path.name}: {reasons[0]}" for path, reasons in choice.rejected) or "there is none"
    said = f"{folder} has no intact checkpoint of its run: {found}."
    raise ConfigError(
        said if outdated is None else f"{outdated} {said} To evaluate that model, copy it to another folder."
    )


def _outdated(folder: Path, final: list[Path]) -> str | None:
    """Why the final model of a folder is outdated, as a sentence; None if it is not.

    The start times come from the record, since copying a folder changes the modification times of its files. That can
    only make a model look newer than it is, never older.
    """
    if recorded_run(folder) is None:
        return None
    saved = max(path.stat().st_mtime for path in final)
    began = _time(read_json(folder / "run.json").get("started"))
    if began is not None and saved < began:
        return f"The model in {folder} is older than the run that is recorded there: it belongs to another run."
    listed = read_json(folder / "environment.json").get("starts")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    starts = [_time(entry.get("time")) for entry in entries]
    manifests = [path for each in checkpoints(folder) if (path := each / MANIFEST).exists()]
    resumed = any(start is not None and saved < start for start in starts)
    if resumed and any(saved < path.stat().st_mtime for path in manifests):
        return f"The run in {folder} was resumed after its model was saved, and has newer checkpoints."
    return None


def _time(text: Any) -> float | None:
    """The timestamp of a time string from the record; None if it cannot be parsed."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
