"""Checkpoints that are whole or not there.

    staged = stage(run, "checkpoint-40")       run/.saving-checkpoint-40: write everything into it
    publish(staged, {"step": 40})              hash, sync, manifest, and only then its real name
    rotate(run, keep=3)                        run/.deleting-checkpoint-10, then gone
    put_aside([checkpoint], run/earlier/0001)  what another run, or another way from here, has left is kept

A kill at any moment leaves under a real name only what is complete. What it leaves under the other two names is
finished or undone by `clean_leftovers`, at the next start. Only one process may do this in a run folder at a time: the
one that holds its lock (`lock.py`).
"""

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppo.errors import CheckpointError
from gruppo.runs import manifests, plain
from gruppo.runs.disk import is_disk_full
from gruppo.runs.earlier import new_place
from gruppo.runs.identity import origins
from gruppo.runs.lines import fsync_folder
from gruppo.runs.manifests import MANIFEST, Manifest, manifest

__all__ = [
    "MANIFEST",
    "Choice",
    "Manifest",
    "checkpoints",
    "clean_leftovers",
    "differences",
    "discard",
    "is_disk_full",
    "manifest",
    "newest_good",
    "problems",
    "publish",
    "put_aside",
    "rotate",
    "run_of",
    "stage",
]

logger = logging.getLogger(__name__)

SAVING, DELETING = ".saving-", ".deleting-"
NAME = re.compile(r"checkpoint-([0-9]+)")
LEFTOVER = re.compile(rf"(?:{re.escape(SAVING)}|{re.escape(DELETING)})(checkpoint-[0-9]+)")


# ---- saving


def stage(run: Path, name: str) -> Path:
    """An empty folder to save `checkpoint-N` into; what an interrupted save of it left is dealt with first."""
    if not NAME.fullmatch(name):
        raise CheckpointError(f"A checkpoint is named checkpoint-N, with the number of its step, not {name!r}.")
    _settle(run, name)
    staged = run / f"{SAVING}{name}"
    staged.mkdir(parents=True)
    return staged


def publish(staged: Path, about: Mapping[str, Any]) -> Path:
    """Give a staged folder its real name, once all of it is on the disk; returns where it is now.

    One of that name is replaced if it is of the same run; one of another run moves to `earlier/`.

    Example: publish(stage(run, "checkpoint-40"), {"step": 40, "run_id": "…"}) == run / "checkpoint-40"
    """
    manifests.write(staged, manifests.describe(staged, about))
    return _put_in_place(staged)


def discard(staged: Path) -> None:
    """Give a save up, and its space back."""
    _remove(staged)


def _put_in_place(staged: Path) -> Path:
    """Two renames where the name is taken. Between them there is no checkpoint of that name: `_settle` knows."""
    run, final = staged.parent, staged.with_name(staged.name.removeprefix(SAVING))
    old = _way_out(staged, final) if os.path.lexists(final) else None
    if old is not None:
        os.rename(final, old)
    try:
        if old is not None:
            _sync_move(old, run)
        os.rename(staged, final)
    except OSError:  # the run goes on, and may discard what it staged
        if old is not None:
            os.rename(old, final)
        raise
    fsync_folder(run)
    _remove(_doomed(final))
    return final


def _way_out(staged: Path, final: Path) -> Path:
    """Where the one goes that is replaced: away if it is of the same run, else to where nothing is deleted."""
    if run_of(final) != run_of(staged):
        return new_place(final.parent) / final.name
    _remove(_doomed(final))
    return _doomed(final)


def _doomed(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{DELETING}{checkpoint.name}")


def _sync_move(target: Path, source: Path) -> None:
    """Make a move outlive a crash: its new name first, so that there is one at any moment."""
    fsync_folder(target.parent)
    if target.parent != source:
        fsync_folder(source)


def _remove(path: Path) -> None:
    """Remove what has no real name (any more). What cannot be removed now is tried again at the next start."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:  # a file that is open over a network, say: no reason to end a run
        logger.warning(f"{path} could not be removed ({error}). The next start of the run tries again.")


# ---- after a kill


def clean_leftovers(run: Path) -> list[str]:
    """Finish or undo what a kill interrupted; returns what was done, in sentences. Call it before looking for
    checkpoints."""
    if not run.is_dir():
        return []
    left = [LEFTOVER.fullmatch(path.name) for path in run.iterdir()]
    names = {match[1] for match in left if match}
    return [sentence for name in sorted(names) for sentence in _settle(run, name)]


def _settle(run: Path, name: str) -> list[str]:
    """What a kill left of one checkpoint: at most one folder, under its real name, remains.

    A complete `.saving-` one goes into place, whatever is there. Where it is not complete, the one that it was about
    to replace may have been moved aside already, and comes back.
    """
    final, staged, old = run / name, run / f"{SAVING}{name}", _doomed(run / name)
    done = []
    if staged.is_dir() and (staged / MANIFEST).exists() and not problems(staged):
        _put_in_place(staged)
        done.append(f"{name} had been saved completely, but did not have its name yet: it has it now.")
    elif os.path.lexists(staged):
        if not final.exists() and old.is_dir() and not problems(old):
            os.rename(old, final)
            fsync_folder(run)
            done.append(f"{name} had been moved aside for a save that was not finished: it is back.")
        _remove(staged)
        done.append(f"A save of {name} was interrupted: what there was of it is removed.")
    if os.path.lexists(old):
        _remove(old)
        done.append(f"The removal of {name} was interrupted: it is finished now.")
    return done


# ---- choosing


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and the newer ones that were not good enough, each with its problems."""

    path: Path | None
    rejected: list[tuple[Path, list[str]]] = field(default_factory=list)


def checkpoints(run: Path) -> list[Path]:
    """The folders `checkpoint-N`, highest N first."""
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def _step(checkpoint: Path) -> tuple[int, str]:
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1]), checkpoint.name


def run_of(checkpoint: Path) -> str | None:
    """The id of the run that a checkpoint is of; None if nobody can tell."""
    try:
        return _named_run(manifest(checkpoint))
    except CheckpointError:
        return None


def _named_run(content: Manifest | None) -> str | None:
    run_id = None if content is None else content.about.get("run_id")
    return run_id if isinstance(run_id, str) and run_id else None


def newest_good(run: Path, *, run_id: str | None = None) -> Choice:
    """The newest checkpoint without problems.

    With `run_id`, only one of that run, or the one that it went on from (as run.json has it).
    """
    known = origins(run)
    rejected: list[tuple[Path, list[str]]] = []
    for checkpoint in checkpoints(run):
        found = _stranger(checkpoint, run_id, known) or problems(checkpoint)
        if not found:
            return Choice(checkpoint, rejected)
        rejected.append((checkpoint, found))
    return Choice(None, rejected)


def _stranger(checkpoint: Path, run_id: str | None, known: Collection[tuple[str | None, str]]) -> list[str]:
    try:
        owner = _named_run(manifest(checkpoint))
    except CheckpointError:  # `problems` says so
        return []
    if run_id in (None, owner) or (owner, checkpoint.name) in known:
        return []
    if owner is None:
        return ["it has no manifest that names its run, as this run's have: name the checkpoint if you trust it"]
    return [f"it is of another run ({owner}), this one is {run_id}"]


def problems(checkpoint: Path, *, thorough: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; empty if it is good. Not thorough: without checksums.

    Example: ["model.safetensors has 1,024 bytes, the manifest says 2,048: it was cut off"]
    """
    if not checkpoint.is_dir():
        return [f"{checkpoint} is not a folder"]
    try:
        content = manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    return plain.damages(checkpoint) if content is None else manifests.damages(checkpoint, content, thorough)


# ---- removing


def put_aside(checkpoints: Sequence[Path], archive: Path) -> None:
    """Move checkpoints into a folder of `earlier/`, where nothing looks for them and nothing is deleted.

    Example: put_aside([run / "checkpoint-40"], run / "earlier" / "0001")
    """
    archive.mkdir(parents=True, exist_ok=True)
    for checkpoint in checkpoints:
        os.rename(checkpoint, archive / checkpoint.name)
        _sync_move(archive / checkpoint.name, checkpoint.parent)


def rotate(run: Path, keep: int | None, spare: Collection[Path] = (), *, run_id: str | None = None) -> list[Path]:
    """Remove the oldest checkpoints until `keep` are left (None or 0: all stay); returns those removed.

    Those in `spare` stay, and so do the newest, the newest that looks good and the one that was saved last: after a
    resume from an older checkpoint these need not be the same. With `run_id`, those of other runs stay, uncounted.
    """
    found = [path for path in checkpoints(run) if run_id is None or run_of(path) == run_id]
    if keep is None or keep <= 0 or len(found) <= keep:
        return []
    good = next((path for path in found if not problems(path, thorough=False)), found[0])
    saved_last = max(found, key=_saved_at)
    kept = {path.resolve() for path in (found[0], good, saved_last, *spare)}
    excess = [path for path in reversed(found) if path.resolve() not in kept][: len(found) - keep]
    for path in excess:
        _remove(_doomed(path))
        os.rename(path, _doomed(path))
        fsync_folder(run)
        _remove(_doomed(path))
    return excess


def _saved_at(checkpoint: Path) -> float:
    path = checkpoint / MANIFEST
    return (path if path.exists() else checkpoint).stat().st_mtime


# ---- settings


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], *, ignore: Collection[str]) -> list[str]:
    """The settings that are not as they were, by name; `ignore` names some that may differ, with all below them.

    Example: ["learning_rate: 1e-06 in the checkpoint, 2e-06 now", "peft.r: absent in the checkpoint, 8 now"]
    """
    before, after = dict(_flat(saved)), dict(_flat(now))
    sentences = []
    for name in sorted(before.keys() | after.keys()):
        if any(name == other or name.startswith(f"{other}.") for other in ignore):
            continue
        was = repr(before[name]) if name in before else "absent"
        is_now = repr(after[name]) if name in after else "absent"
        # Equal numbers may be written differently (1 and 1.0); a NaN equals only its name.
        if was != is_now and not (name in before and name in after and before[name] == after[name]):
            sentences.append(f"{name}: {was} in the checkpoint, {is_now} now")
    return sentences


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            # JSON has no tuples; what was one when it was saved is a list now.
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
