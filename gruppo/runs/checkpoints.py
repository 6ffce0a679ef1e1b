"""Atomic checkpoints: complete, or absent.

    staged = stage(run, "checkpoint-40")       run/.saving-checkpoint-40: write everything into it
    publish(staged, {"step": 40})              hash, sync, manifest, and only then rename to the final name
    rotate(run, keep=3)                        run/.deleting-checkpoint-10, then gone
    put_aside([checkpoint], run/earlier/0001)  keeps checkpoints of another run or of an abandoned branch

After a kill at any moment, every folder with a final name is complete. At the next start `clean_leftovers` finishes or
undoes what is left under the other two names. Only one process may do this in a run folder at a time: the one that
holds its lock (`lock.py`).
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
from gruppo.runs.identity import origins, recorded_run
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
    "newest_of_run",
    "problems",
    "publish",
    "put_aside",
    "rotate",
    "run_of",
    "stage",
    "updates_in",
]

logger = logging.getLogger(__name__)

SAVING, DELETING = ".saving-", ".deleting-"
NAME = re.compile(r"checkpoint-([0-9]+)")
LEFTOVER = re.compile(rf"(?:{re.escape(SAVING)}|{re.escape(DELETING)})(checkpoint-[0-9]+)")


# ---- saving


def stage(run: Path, name: str) -> Path:
    """Create an empty folder to save `checkpoint-N` into, after cleaning up an interrupted save of it."""
    if not NAME.fullmatch(name):
        raise CheckpointError(f"A checkpoint is named checkpoint-N, with the number of its step, not {name!r}.")
    _settle(run, name)
    staged = run / f"{SAVING}{name}"
    staged.mkdir(parents=True)
    return staged


def publish(staged: Path, about: Mapping[str, Any]) -> Path:
    """Rename a staged folder to its final name, once all of it is on the disk; returns the new path.

    An existing checkpoint of that name is replaced if it is from the same run; one of another run moves to `earlier/`.

    Example: publish(stage(run, "checkpoint-40"), {"step": 40, "run_id": "…"}) == run / "checkpoint-40"
    """
    manifests.write(staged, manifests.describe(staged, about))
    return _put_in_place(staged)


def discard(staged: Path) -> None:
    """Abandon a save, and free its space."""
    _remove(staged)


def _put_in_place(staged: Path) -> Path:
    """Rename to the final name: two renames if it is taken. `_settle` handles a kill between the two."""
    run, final = staged.parent, staged.with_name(staged.name.removeprefix(SAVING))
    old = _way_out(staged, final) if os.path.lexists(final) else None
    if old is not None:
        os.rename(final, old)
    try:
        if old is not None:
            _sync_move(old, run)
        os.rename(staged, final)
    except OSError:  # the run continues, and may discard the staged folder
        if old is not None:
            os.rename(old, final)
        raise
    fsync_folder(run)
    _remove(_doomed(final))
    return final


def _way_out(staged: Path, final: Path) -> Path:
    """Where the replaced checkpoint goes: to deletion if it is from the same run, otherwise to `earlier/`."""
    if run_of(final) != run_of(staged):
        return new_place(final.parent) / final.name
    _remove(_doomed(final))
    return _doomed(final)


def _doomed(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{DELETING}{checkpoint.name}")


def _sync_move(target: Path, source: Path) -> None:
    """Make a move survive a crash: the new name is synced first, so that a name exists at any moment."""
    fsync_folder(target.parent)
    if target.parent != source:
        fsync_folder(source)


def _remove(path: Path) -> None:
    """Remove a path that does not have a final name. If that fails, the next start tries again."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:  # such as an open file on a network share: no reason to end the run
        logger.warning(f"{path} could not be removed ({error}). The next start of the run tries again.")


# ---- after a kill


def clean_leftovers(run: Path) -> list[str]:
    """Finish or undo what a kill interrupted; returns what was done, in sentences. Call before listing checkpoints."""
    if not run.is_dir():
        return []
    left = [LEFTOVER.fullmatch(path.name) for path in run.iterdir()]
    names = {match[1] for match in left if match}
    return [sentence for name in sorted(names) for sentence in _settle(run, name)]


def _settle(run: Path, name: str) -> list[str]:
    """Clean up what a kill left of one checkpoint, so that at most one folder, with the final name, remains.

    A complete `.saving-` folder gets the final name, whatever is there. If it is not complete, the checkpoint that it
    was to replace may have been moved aside already, and is moved back.
    """
    final, staged, old = run / name, run / f"{SAVING}{name}", _doomed(run / name)
    done = []
    if _is_folder(staged) and (staged / MANIFEST).exists() and not problems(staged):
        _put_in_place(staged)
        done.append(f"{name} had been saved completely, but not renamed yet: it has its final name now.")
    elif os.path.lexists(staged):
        if not final.exists() and _is_folder(old) and not problems(old):
            os.rename(old, final)
            fsync_folder(run)
            done.append(f"{name} had been moved aside for a save that was not finished: it was moved back.")
        _remove(staged)
        done.append(f"A save of {name} was interrupted: its incomplete files were removed.")
    if os.path.lexists(old):
        _remove(old)
        done.append(f"The removal of {name} was interrupted: it was completed.")
    return done


# ---- choosing


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from, and the newer ones that were rejected, each with its problems."""

    path: Path | None
    rejected: list[tuple[Path, list[str]]] = field(default_factory=list)


def checkpoints(run: Path) -> list[Path]:
    """The folders `checkpoint-N`, highest N first; links are none: what they lead to belongs to somebody else."""
    return [path for path in _named(run) if not path.is_symlink()]


def _named(run: Path) -> list[Path]:
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _step(checkpoint: Path) -> tuple[int, str]:
    return updates_in(checkpoint.name), checkpoint.name


def updates_in(name: str) -> int:
    """N of `checkpoint-N`."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def run_of(checkpoint: Path) -> str | None:
    """The id of the run that wrote a checkpoint; None if it is unknown."""
    try:
        return _named_run(manifest(checkpoint))
    except CheckpointError:
        return None


def _named_run(content: Manifest | None) -> str | None:
    run_id = None if content is None else content.about.get("run_id")
    return run_id if isinstance(run_id, str) and run_id else None


def newest_of_run(folder: Path, *, thorough: bool = True) -> Choice:
    """The checkpoint that the run recorded in a folder resumes from."""
    return newest_good(folder, run_id=recorded_run(folder), thorough=thorough)


def newest_good(run: Path, *, run_id: str | None = None, thorough: bool = True) -> Choice:
    """The newest checkpoint without problems; `thorough=False` skips the checksums.

    With `run_id`, only a checkpoint of that run, or one that the run continues from according to run.json.
    """
    known = origins(run)
    rejected: list[tuple[Path, list[str]]] = []
    for checkpoint in _named(run):
        found = _links(checkpoint) or _stranger(checkpoint, run_id, known) or problems(checkpoint, thorough=thorough)
        if not found:
            return Choice(checkpoint, rejected)
        rejected.append((checkpoint, found))
    return Choice(None, rejected)


def _links(checkpoint: Path) -> list[str]:
    """Whether a checkpoint is a link, or files of it are links that lead out: such a one has to be asked for."""
    if checkpoint.is_symlink():
        return ["it is a link: to use it, name it explicitly"]
    root = os.path.realpath(checkpoint)
    inside = (Path(folder, name) for folder, *names in os.walk(checkpoint) for name in (*names[0], *names[1]))
    out = (path for path in inside if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root))
    return [f"{path.relative_to(checkpoint)} is a link that leads out: to use it, name it explicitly" for path in out]


def _stranger(checkpoint: Path, run_id: str | None, known: Collection[tuple[str | None, str]]) -> list[str]:
    try:
        owner = _named_run(manifest(checkpoint))
    except CheckpointError:  # `problems` reports it
        return []
    if run_id in (None, owner) or (owner, checkpoint.name) in known:
        return []
    if owner is None:
        return ["it has no manifest that names its run, unlike those of this run: to use it, name it explicitly"]
    return [f"it belongs to another run ({owner}); this run is {run_id}"]


def problems(checkpoint: Path, *, thorough: bool = True) -> list[str]:
    """The problems of a checkpoint, one sentence each; empty if it is good. `thorough=False` skips the checksums.

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
    """Move checkpoints into a folder in `earlier/`, which is never searched or deleted from.

    Example: put_aside([run / "checkpoint-40"], run / "earlier" / "0001")
    """
    archive.mkdir(parents=True, exist_ok=True)
    for checkpoint in checkpoints:
        os.rename(checkpoint, archive / checkpoint.name)
        _sync_move(archive / checkpoint.name, checkpoint.parent)


def rotate(run: Path, keep: int | None, spare: Collection[Path] = (), *, run_id: str | None = None) -> list[Path]:
    """Remove the oldest checkpoints until `keep` are left (None or 0: keep all); returns those removed.

    Those in `spare` are kept, and so are the newest, the newest that looks good and the one saved last: after a resume
    from an older checkpoint these may differ. With `run_id`, checkpoints of other runs are kept and not counted.
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
    """The settings that have changed, by name; those in `ignore`, and all nested below them, may differ.

    Example: ["learning_rate: 1e-06 in the checkpoint, 2e-06 now", "peft.r: absent in the checkpoint, 8 now"]
    """
    before, after = dict(_flat(saved)), dict(_flat(now))
    sentences = []
    for name in sorted(before.keys() | after.keys()):
        if any(name == other or name.startswith(f"{other}.") for other in ignore):
            continue
        was = repr(before[name]) if name in before else "absent"
        is_now = repr(after[name]) if name in after else "absent"
        # Equal numbers may have different reprs (1 and 1.0); NaN is equal only by its repr.
        if was != is_now and not (name in before and name in after and before[name] == after[name]):
            sentences.append(f"{name}: {was} in the checkpoint, {is_now} now")
    return sentences


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            # JSON has no tuples: they were saved as lists.
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
