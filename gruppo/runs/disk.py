"""Whether a full disk, or a quota that is used up, is behind an error."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["FULL", "is_disk_full"]

FULL = (errno.ENOSPC, errno.EDQUOT)
# What torch.save raises when a write fails: which error it was is lost.
LOST_WRITES = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")
ROOM = 1 << 20  # bytes


def is_disk_full(error: BaseException, folder: Path | None = None) -> bool:
    """Whether a full disk or quota is behind an error.

    torch does not say why it could not write; with `folder`, whether there is room is tried out there. Ask before the
    half-written files are removed.
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
    """An error, what it came from, and what those came from."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for each in (error.__cause__, error.__context__, *members):
        yield from _chain(each, seen)


def _has_room(folder: Path) -> bool:
    # Writing is the one question that a quota answers as well.
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno not in FULL
    return True
