"""A run folder can come from a stranger: nothing is written, moved or removed through a link in it.

The folder itself may be a link, as is common where the disk for results is another one: the user named it.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from gruppo.errors import DataError

__all__ = ["FOLDERS", "leading_out", "names_written", "no_link", "refuse_links"]

# What a run writes into its folder besides checkpoints and the record: weights, settings, the tokenizer, results.
_OF_THE_MODEL = (
    *("*.safetensors", "*.bin", "*.index.json", "*config.json", "README.md", "trainer_state.json", "*_results.json"),
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.jinja", "*.model"),
    *("chat_template.json", "additional_chat_templates", "modeling_*.py", "configuration_*.py", "tokenization_*.py"),
    *("processing_*.py", "image_processing*.py"),
)
_ALWAYS = ("run.json", "lock", "earlier", "bad_updates", "bema", *_OF_THE_MODEL)
_OF_THE_RECORD = ("config.yaml", "environment.json", "metrics.jsonl", "events.jsonl")
_OF_ROLLOUTS = ("rollouts", "updates", "tokenizer")

# The folders that a run makes in its folder, besides those of checkpoints. `runs` is TensorBoard's, and may be a link:
# what is written there has names of its own.
FOLDERS = (*_OF_ROLLOUTS, "completions", "bad_updates", "earlier", "bema")


def names_written(record: str, *, completions: bool) -> list[str]:
    """Patterns of the names in its folder that a run with these settings writes to."""
    names = [*_ALWAYS, *(_OF_THE_RECORD if record != "off" else ()), *(["completions"] if completions else [])]
    if record == "all":
        return [*names, *_OF_ROLLOUTS]
    return [name for name in names if name != "tokenizer*"] + ["tokenizer?*"]


def no_link(path: Path) -> Path:
    """The path itself; raises DataError if it is a link."""
    if path.is_symlink():
        raise DataError(
            f"{path} is a link to {os.readlink(path)}. The record is not written or moved through links, so that "
            "nothing outside of the run folder is changed: remove it, or choose another folder."
        )
    return path


def refuse_links(run: Path, written: Iterable[str]) -> None:
    """Raise DataError for a link or a pipe in the way of what a run writes into its folder.

    `written`: patterns of those names. Other links are a user's own business, and so are links to checkpoints, which
    are replaced as a whole (`checkpoints.py`).
    """
    if not run.is_dir():
        return
    patterns, root = list(written), os.path.realpath(run)
    with os.scandir(run) as entries:
        for entry in entries:
            if not any(fnmatch(entry.name.removesuffix(".tmp"), pattern) for pattern in patterns):
                continue
            if entry.name in FOLDERS:
                _refuse_within(no_link(Path(entry.path)))
            elif not entry.is_dir():
                _refuse_file(entry, root)
            elif entry.name == "additional_chat_templates":
                no_link(Path(entry.path))


def leading_out(run: Path) -> Iterator[str]:
    """The files in a folder, by their names within it, that are links to what is not in it."""
    root = os.path.realpath(run)
    for folder, _, files in os.walk(run):
        for path in (Path(folder, name) for name in files):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                yield str(path.relative_to(run))


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
