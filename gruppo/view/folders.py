"""Find the runs and evaluations under the paths given on the command line."""

import contextlib
import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gruppo.errors import DataError

__all__ = ["Folders", "find_folders", "search_again", "short_names"]

DEPTH = 2  # levels of subfolders that are searched


class Folders(NamedTuple):
    """Example: find_folders([Path("runs"), Path("evaluations/before")])."""

    runs: list[Path]
    evaluations: list[Path]
    paths: Sequence[Path] = ()  # where they were searched for


def find_folders(paths: Sequence[Path]) -> Folders:
    """The run folders and evaluation folders among these paths, and below those paths that are neither."""
    runs: dict[Path, None] = {}
    evaluations: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise DataError(f"{path} is not a folder.{_nearest(path)}")
        found = list(_search(path, DEPTH))
        if not found:
            raise DataError(
                f"{path} holds neither a run (run.json) nor an evaluation (results.json), up to {DEPTH} folders deep. "
                "A run writes its record into its output_dir unless record='off'."
            )
        for folder in found:
            (runs if is_run(folder) else evaluations).setdefault(folder)
    return Folders(list(runs), list(evaluations), list(paths))


def search_again(paths: Sequence[Path]) -> Folders:
    """The folders that exist now; a path that no longer exists or cannot be read contributes nothing."""
    found: dict[Path, None] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found.update(dict.fromkeys(_search(path, DEPTH)))
    return Folders([each for each in found if is_run(each)], [each for each in found if not is_run(each)], paths)


def is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def is_evaluation(folder: Path) -> bool:
    return (folder / "results.json").is_file() or (folder / "completions").is_dir()


def _search(folder: Path, depth: int) -> Iterable[Path]:
    if is_run(folder) or is_evaluation(folder):
        yield folder
    elif depth:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _search(folder / entry.name, depth - 1)


def _nearest(path: Path) -> str:
    siblings = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.6)
    return f" Did you mean {path.parent / close[0]}?" if close else ""


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest suffix of each path that distinguishes it from the others.

    Example:
        short_names([Path("/a/x/run"), Path("/a/y/run"), Path("/b/demo")]) == ["x/run", "y/run", "demo"]
    """
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    lengths = [1] * len(parts)
    for i, own in enumerate(parts):
        others = [other for other in parts if other != own]
        while lengths[i] < len(own) and any(other[-lengths[i] :] == own[-lengths[i] :] for other in others):
            lengths[i] += 1
    return ["/".join(own[-length:]) for own, length in zip(parts, lengths, strict=True)]
