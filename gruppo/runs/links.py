"""A run folder can come from a stranger: nothing is written, moved or removed through a link in it.

The folder itself may be a link, as is common where the disk for results is another one: the user named it.
"""

import os
import stat
from pathlib import Path

from gruppo.errors import DataError

__all__ = ["FOLDERS", "no_link", "refuse_links"]

# The folders that a run makes in its folder, besides those of checkpoints; `runs` is TensorBoard's.
FOLDERS = ("rollouts", "updates", "tokenizer", "completions", "bad_updates", "earlier", "bema", "runs")


def no_link(path: Path) -> Path:
    """The path itself; raises DataError if it is a link."""
    if path.is_symlink():
        raise DataError(
            f"{path} is a link to {os.readlink(path)}. The record is not written or moved through links, so that "
            "nothing outside of the run folder is changed: remove it, or choose another folder."
        )
    return path


def refuse_links(run: Path) -> None:
    """Raise DataError for a link or a pipe in the way of what a run writes into its folder.

    Files have many names there, those of the tokenizer and of users' scripts too: so no file may be a link that leads
    out. Links to folders that a run does not write into may stay. So may checkpoints, which are replaced as a whole
    (`checkpoints.py`).
    """
    if not run.is_dir():
        return
    root = os.path.realpath(run)
    with os.scandir(run) as entries:
        for entry in entries:
            if entry.name in FOLDERS:
                _refuse_within(no_link(Path(entry.path)))
            elif not entry.is_dir():
                _refuse_file(entry, root)


def _refuse_within(folder: Path) -> None:
    if not folder.is_dir() or folder.name == "earlier":  # what was moved there is not touched again
        return
    root = os.path.realpath(folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            _refuse_file(entry, root)


def _refuse_file(entry: os.DirEntry[str], root: str) -> None:
    if entry.is_symlink():
        if not Path(os.path.realpath(entry.path)).is_relative_to(root):
            no_link(Path(entry.path))
    elif stat.S_ISFIFO(entry.stat(follow_symlinks=False).st_mode):
        raise DataError(f"{entry.path} is a pipe, which would be waited for: remove it, or choose another folder.")
