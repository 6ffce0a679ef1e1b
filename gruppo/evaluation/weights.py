"""Which weights a name or folder stands for.

A run folder may be used again: the record of the run before moves to `earlier/`, but its final model and its
checkpoints stay where they are, as nobody but their owner may move or delete them. They are not taken for those of the
run whose record is there.
"""

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

from gruppo.errors import ConfigError
from gruppo.runs.checkpoints import MANIFEST, checkpoints, newest_good
from gruppo.runs.identity import read_json, recorded_run

__all__ = ["find_weights"]

logger = logging.getLogger(__name__)

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "model*.safetensors.index.json", "adapter_model*")


def find_weights(model: str | Path) -> str:
    """The folder that holds the weights: the one given, or a run's final model or newest whole checkpoint.

    A final model from before the run of the record in that folder, or from before it was resumed and saved again, is
    passed over with a warning.
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
    choice = newest_good(folder, run_id=recorded_run(folder))
    if choice.path is not None:
        if outdated is not None:
            logger.warning(f"{outdated} {choice.path.name} is evaluated instead.")
        return str(choice.path)
    found = "; ".join(f"{path.name}: {reasons[0]}" for path, reasons in choice.rejected) or "there is none"
    said = f"No checkpoint of {folder} is whole and of its run: {found}."
    raise ConfigError(said if outdated is None else f"{outdated} {said} To evaluate that model, copy it elsewhere.")


def _outdated(folder: Path, final: list[Path]) -> str | None:
    """What is wrong with the final model of a folder, as a sentence, if something is.

    The times of starts are read from the record, as a copy of the folder has new times on its files: those make a
    model look newer than it is, and never older.
    """
    if recorded_run(folder) is None:
        return None
    saved = max(path.stat().st_mtime for path in final)
    began = _time(read_json(folder / "run.json").get("started"))
    if began is not None and saved < began:
        return f"The model in {folder} is older than the run whose record is there: it is of another one."
    listed = read_json(folder / "environment.json").get("starts")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    starts = [_time(entry.get("time")) for entry in entries]
    manifests = [path for each in checkpoints(folder) if (path := each / MANIFEST).exists()]
    resumed = any(start is not None and saved < start for start in starts)
    if resumed and any(saved < path.stat().st_mtime for path in manifests):
        return f"The run in {folder} went on after its model was saved, and has newer checkpoints."
    return None


def _time(text: Any) -> float | None:
    """Seconds, of a time as the record writes it; None if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
