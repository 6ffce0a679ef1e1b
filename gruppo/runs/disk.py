"""Detect whether an error was caused by a full disk or an exhausted quota."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["FULL", "is_disk_full"]

FULL = (errno.ENOSPC, errno.EDQUOT)
# Messages of torch.save when a write fails: the original error is lost.
LOST_WRITES = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")
ROOM = 1 << 20  # bytes


def is_disk_full(error: BaseException, folder: Path | None = None) -> bool:
    """Whether an error was caused by a full disk or quota.

    torch does not report why a write failed; with `folder`, a test write there checks whether there is room. Call this
    before the half-written files are removed.
    """
    chain = list(_chain(error, set()))
    if any(isinstance(each, OSError) and each.errno in FULL for each in chain):
        return True
    texts = [str(each) for each in chain]
    if any("no space left" in text.lower() or "quota exceeded" in text.lower() for text in texts):
        return True
    lost = any(sign in text for text in texts for sign in LOST_WRITES)
    return lost and folder is not None and not _has_room(folder)


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """An error, and recursively its causes, contexts and group members."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for each in (error.__cause__, error.__context__, *members):
        yield from _chain(each, seen)


def _has_room(folder: Path) -> bool:
    # Only an actual write also detects a quota.
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno not in FULL
    return True
