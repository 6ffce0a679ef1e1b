"""Manifests of checkpoints, and checks against them.

Our checkpoints have a manifest: the size and the SHA-256 of every file, and metadata from the trainer.

    {"format": 1,
     "about": {"step": 40, "run_id": "…", …},
     "files": {"model.safetensors": {"size": 2048, "sha256": "…"}, …},
     "sha256": "…"}                      the checksum of the three above

A checkpoint without a manifest is a plain Hugging Face checkpoint (`plain.py`). Folders are untrusted input: no name
or link that leads out of the folder is followed.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from gruppo.errors import CheckpointError
from gruppo.runs.lines import fsync_folder, write_file

__all__ = ["MANIFEST", "FileEntry", "Manifest", "damages", "describe", "manifest", "write"]

MANIFEST = "manifest.json"
FORMAT = 1
THREADS = 8  # hashing and fsync release the GIL

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What was saved: the trainer's metadata, and the files with sizes and checksums.

    Example: Manifest(about={"step": 40}, files={"model.safetensors": FileEntry(2048, "9f86d0…")})
    """

    about: Mapping[str, Any]
    files: Mapping[str, FileEntry]


# ---- writing


def describe(folder: Path, about: Mapping[str, Any]) -> Manifest:
    """Hash and fsync every file of a folder."""
    (folder / MANIFEST).unlink(missing_ok=True)  # from an earlier attempt that failed
    paths = sorted(_files(folder))
    if not paths:
        raise CheckpointError(f"{folder} is empty: nothing was saved into it, so it cannot become a checkpoint.")
    entries = _in_threads(_hash_and_sync, paths)
    names = [path.relative_to(folder).as_posix() for path in paths]
    return Manifest(json.loads(json.dumps(about)), dict(zip(names, entries, strict=True)))


def write(folder: Path, content: Manifest) -> None:
    """Write the manifest atomically into its folder; on return it and all names in the folder are on the disk."""
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in content.files.items()}
    body = {"format": FORMAT, "about": content.about, "files": files}
    write_file(folder / MANIFEST, json.dumps({**body, "sha256": _checksum(body)}, indent=1).encode())
    for path, _, _ in os.walk(folder):
        fsync_folder(Path(path))


def _files(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry)
        else:
            raise CheckpointError(f"{entry.path} is a link or a device: a checkpoint may hold regular files only.")


def _hash_and_sync(path: Path) -> FileEntry:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileEntry(os.fstat(file.fileno()).st_size, digest)


def _in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="gruppo-hash") as pool:
        return list(pool.map(function, items))


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# ---- reading


def manifest(checkpoint: Path) -> Manifest | None:
    """The manifest of a checkpoint, or None if it has none; raises CheckpointError if it is invalid."""
    path = checkpoint / MANIFEST
    if not os.path.lexists(path):
        return None
    if not stat.S_ISREG(os.lstat(path).st_mode):  # a pipe would block, a link may lead anywhere
        raise CheckpointError(f"{MANIFEST} is not a plain file")
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{MANIFEST} is not a manifest of a checkpoint")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {content['format']!r}, and this version of gruppo reads format {FORMAT}: "
            f"it is damaged, or another version wrote it"
        )
    body = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256") != _checksum(body):
        raise CheckpointError(f"{MANIFEST} does not match its own checksum: it was changed")
    return _parsed(body)


def _parsed(body: Mapping[str, Any]) -> Manifest:
    """Validate the content: the checksum only shows that it was not changed, not that it is well-formed."""
    try:
        about, files = body["about"], body["files"]
        entries = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in files.items()}
        sound = all(type(entry.size) is int and isinstance(entry.sha256, str) for entry in entries.values())
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound or not isinstance(about, dict):
        raise CheckpointError(f"{MANIFEST} lacks required entries: about, and files with size and sha256")
    return Manifest(about, entries)


def damages(checkpoint: Path, content: Manifest, thorough: bool) -> list[str]:
    """One sentence for each file that does not match the manifest. `thorough=False` checks sizes only."""
    if not content.files:
        return [f"{MANIFEST} names no files"]
    found = _in_threads(lambda item: _damage(checkpoint, *item, thorough=thorough), sorted(content.files.items()))
    return [sentence for sentence in found if sentence is not None]


def _damage(checkpoint: Path, name: str, entry: FileEntry, thorough: bool) -> str | None:
    path = checkpoint / name
    if not _stays_inside(checkpoint, name):
        return f"{name!r} in {MANIFEST} leads out of the checkpoint"
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a file"
        if status.st_size != entry.size:
            what = "it was cut off" if status.st_size < entry.size else "something was added to it"
            return f"{name} has {status.st_size:,} bytes, the manifest says {entry.size:,}: {what}"
        if not thorough:
            return None
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name!r} cannot be read: {error}"
    if digest != entry.sha256:
        return f"{name} has changed: its SHA-256 is {digest[:12]}…, the manifest says {entry.sha256[:12]}…"
    return None


def _stays_inside(checkpoint: Path, name: str) -> bool:
    """Whether a name, and the target if it is a link, is inside the folder."""
    pure = PurePosixPath(name)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts:
        return False
    try:
        real = os.path.realpath(checkpoint / name)
    except ValueError:  # a name that no file can have; reading it fails
        return True
    return Path(real).is_relative_to(os.path.realpath(checkpoint))
