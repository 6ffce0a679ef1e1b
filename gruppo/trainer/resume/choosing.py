"""Which checkpoint a run resumes from: a complete one, made with the same settings."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gruppo.errors import CheckpointError
from gruppo.runs import checkpoints
from gruppo.trainer.resume.forms import POSITION, TRAINER_STATE, anything, check, mapped, maybe
from gruppo.trainer.resume.loaded import reading
from gruppo.trainer.resume.settings import changed, common

logger = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """A checkpoint, and the names of settings that differ from those it was made with."""

    path: Path
    differing: list[str]


def choose_checkpoint(asked: Any, output_dir: Path, settings: Mapping[str, Any], allowed: Sequence[str]) -> Chosen:
    """The checkpoint that was asked for (True: the newest good one); raises if it cannot be resumed from.

    `allowed` names settings that may differ.
    """
    # Absolute, because the random state is read after rewards have run, which may change the working directory.
    path = newest_good(output_dir) if asked is True else checked(Path(os.path.abspath(asked)))
    check_texts(path)
    return Chosen(path, differing_settings(path, settings, allowed))


def check_texts(path: Path) -> None:
    """Raise if the state of transformers' Trainer, or the place in the record, cannot be one."""
    with reading("state of the trainer", path):
        state = path / "trainer_state.json"
        check(json.loads(state.read_text(encoding="utf-8")), TRAINER_STATE, str(state))
    if (manifest := checkpoints.manifest(path)) is not None:
        what = str(path / checkpoints.MANIFEST)
        check(manifest.about.get("position"), POSITION, f"{what}: position")
        check(manifest.about.get("settings"), maybe(mapped(anything)), f"{what}: settings")


def newest_good(folder: Path) -> Path:
    choice = checkpoints.newest_of_run(folder)
    for path, wrong in choice.rejected:
        logger.warning(f"{path} is not used: {' '.join(wrong)}")
    if choice.path is None:
        damaged = "".join(f" {path.name}: {' '.join(wrong)}" for path, wrong in choice.rejected)
        raise CheckpointError(
            f"No valid checkpoint found in output directory ({folder}).{damaged} Call train() without "
            "resume_from_checkpoint to start from scratch, or name a checkpoint."
        )
    if choice.rejected:
        logger.warning(f"Resuming from {choice.path}, the newest complete checkpoint.")
    return choice.path


def checked(path: Path) -> Path:
    """A checkpoint that was named; raises if it is damaged."""
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    if wrong := checkpoints.problems(path):
        choice = checkpoints.newest_good(path.parent)
        other = "" if choice.path is None else f" The newest complete one is {choice.path}."
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {' '.join(wrong)}{other} To use it nevertheless, remove its "
            f"{checkpoints.MANIFEST}: it then counts as a plain checkpoint."
        )
    return path


def differing_settings(path: Path, settings: Mapping[str, Any], allowed: Sequence[str]) -> list[str]:
    """The names of settings that differ from the checkpoint's; raises if one is not allowed to."""
    manifest = checkpoints.manifest(path)
    if manifest is None:
        return []  # a plain checkpoint does not store settings
    saved, now = common(manifest.about.get("settings") or {}, settings)
    found = checkpoints.differences(saved, now, ignore=())
    differing = [line.partition(":")[0] for line in found]
    names = changed(differing, allowed)
    if refused := [line for line in found if line.partition(":")[0] in names]:
        listed = "\n".join(f"  {line}" for line in refused)
        raise CheckpointError(
            f"The checkpoint {path} was made with different settings:\n{listed}\nSet them back, or allow them with "
            f"resume_allow_changes={names} (['*'] allows everything)."
        )
    if found:
        logger.warning(f"Resuming with settings that differ from those of {path}: {'; '.join(found)}")
    return differing
