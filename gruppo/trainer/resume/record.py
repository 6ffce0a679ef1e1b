"""The record of a resumed run: it continues from the position of the checkpoint."""

from pathlib import Path
from typing import Any

from gruppo.runs import checkpoints
from gruppo.runs.identity import position_run
from gruppo.runs.record import RunRecorder
from gruppo.trainer.resume.state import updates_of


def continue_record(recorder: RunRecorder, checkpoint: Path, about: dict[str, Any], *, is_main: bool) -> str | None:
    """Continue the record from the checkpoint's position; what follows it is archived if it has newer checkpoints.

    Returns the id of the run that the checkpoint belongs to, if known.
    """
    manifest = checkpoints.manifest(checkpoint)
    position = None if manifest is None else manifest.about.get("position")
    newer = _newer_ones(checkpoint, recorder.folder)
    recorder.resume(position=position, checkpoint=checkpoint, branch=bool(newer), **about)
    if newer and recorder.archive is not None and is_main:
        checkpoints.put_aside(newer, recorder.archive)
    return position_run(position)


def _newer_ones(checkpoint: Path, folder: Path) -> list[Path]:
    """Checkpoints of the same run with more updates, if `checkpoint` is in this folder."""
    own = checkpoints.run_of(checkpoint)
    if own is None or checkpoint.resolve().parent != folder.resolve():
        return []
    made = updates_of(checkpoint)  # its name need not say it: it may be a link, or have been given another
    newer = [path for path in checkpoints.checkpoints(folder) if checkpoints.updates_in(path.name) > made]
    return [path for path in newer if checkpoints.run_of(path) == own and not path.samefile(checkpoint)]
