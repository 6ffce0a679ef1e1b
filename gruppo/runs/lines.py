"""JSON for any value, and append-only files of complete JSON lines, which a full disk only delays."""

import json
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from gruppo.runs.links import no_link

MOST_LINES = 10_000  # kept in memory while the disk is full

_CHUNK = 1 << 20
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def now() -> str:
    """The current time in the format of the record; always the same length."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def clean(text: str) -> str:
    """Text that is valid UTF-8: a lone surrogate becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def plain(value: Any, *, finite: bool = True) -> Any:
    """Convert a value to types that JSON and safe YAML have; anything else becomes text.

    With `finite`, NaN and the infinities become text too: YAML can express them, JSON cannot.

    Example:
        plain({"out": Path("runs"), "betas": (0.9, math.inf)})     {"out": "runs", "betas": [0.9, "inf"]}
    """
    if isinstance(value, Enum):
        return plain(value.value, finite=finite)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean("".join(value))  # a plain str, even if it is of a subclass
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if not finite or abs(number) < float("inf") else str(number)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, finite=finite) for item in value]
    if isinstance(value, Set):
        return sorted((plain(item, finite=finite) for item in value), key=str)  # sets have no fixed order
    if hasattr(value, "tolist"):  # arrays and tensors
        return plain(value.tolist(), finite=finite)
    return _ADDRESS.sub("", clean(str(value)))  # memory addresses would differ between otherwise equal runs


def to_json(value: Any, *, canonical: bool = False) -> str:
    """Strict JSON of any value, see `plain`; `canonical`: sorted keys and no spaces, so equal values match."""
    separators = (",", ":") if canonical else None

    def dumps(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=canonical, separators=separators)

    try:
        return clean(dumps(value))
    except (TypeError, ValueError):
        return clean(dumps(plain(value)))


def joined(line: Mapping[str, Any], values: Mapping[str, Any], reserved: Sequence[str] = ()) -> dict[str, Any]:
    """Merge into one flat line. A value whose name is one of our own keys is renamed to `value/<name>`."""
    own = {*line, *reserved}
    return {**line, **{f"value/{name}" if name in own else name: value for name, value in values.items()}}


def write_all(file: int, data: Any) -> None:
    """Write all of a bytes-like object to a descriptor."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_file(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write a file atomically, through a temporary file and a rename. `durable`: it is on the disk afterwards."""
    beside = path.with_name(path.name + ".tmp")
    beside.unlink(missing_ok=True)
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(file, data)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


class WholeFiles:
    """Small files that are written atomically. Those that could not be written wait, with their latest content."""

    def __init__(self) -> None:
        self._waiting: dict[Path, bytes] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def names(self) -> list[str]:
        """The names of the waiting files."""
        return [path.name for path in self._waiting]

    def put(self, path: Path, data: bytes) -> None:
        """Add a file; `flush` writes it."""
        self._waiting[path] = data

    def flush(self) -> None:
        for path, data in list(self._waiting.items()):
            path.parent.mkdir(exist_ok=True)
            write_file(path, data)
            del self._waiting[path]

    def close(self) -> None:
        self._waiting.clear()


class LineFile:
    """A file of JSON lines, appended one complete line at a time.

    Lines that could not be written wait, the rest of a partly written one first; the next `flush` that succeeds writes
    them.
    """

    def __init__(self, path: Path):
        self.path = path
        self.dropped = 0  # waiting lines discarded because there were too many
        self._file: int | None = None
        self._due = False  # the disk was too full even for an empty file: the next `flush` creates it
        self._written = 0
        self._waiting: deque[bytes] = deque()
        self._torn = False  # the first waiting entry is the rest of a line whose beginning is in the file
        self._dirty = False

    @property
    def length(self) -> int:
        """The size of the file in bytes once all waiting lines are written."""
        return self._written + sum(map(len, self._waiting))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def open(self) -> None:
        self._due = True
        try:
            # O_APPEND: a line is one write at the end, so that readers see complete lines.
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError:
            no_link(self.path)
            raise
        self._due = False
        self._written = os.fstat(self._file).st_size

    def cut(self, length: int | None = None, keep: Path | None = None) -> tuple[int, int]:
        """Truncate to `length` bytes, and to the end of a complete line; returns the bytes and lines removed.

        With `keep`, the removed complete lines are written to that file first.
        """
        if self._file is None:  # nothing was ever written
            return 0, 0
        file = self._file
        end = self._end_of_lines(self._written if length is None else min(length, self._written))
        lines, place, tail = 0, end, bytearray()
        while chunk := os.pread(file, _CHUNK, place):
            lines += chunk.count(b"\n")
            place += len(chunk)
            tail += chunk if keep is not None else b""
        removed = self._written - end
        if lines and keep is not None:
            write_file(keep, tail[: tail.rfind(b"\n") + 1])
        if removed:
            os.ftruncate(file, end)
            self._written, self._dirty = end, True
        return removed, lines

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line; `flush` writes it."""
        self._waiting.append(to_json(record).encode("utf-8") + b"\n")
        if len(self._waiting) > MOST_LINES:
            del self._waiting[int(self._torn)]
            self.dropped += 1

    def flush(self) -> None:
        if not self._waiting:
            return
        if self._due:
            self.open()
        file = self._opened()
        while self._waiting:
            line = self._waiting[0]
            written = os.write(file, line)
            self._written += written
            self._dirty = True
            if written < len(line):
                self._waiting[0], self._torn = line[written:], True
            else:
                self._waiting.popleft()
                self._torn = False

    def sync(self) -> None:
        if self._dirty:
            os.fsync(self._opened())
            self._dirty = False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._waiting.clear()
        self._torn = self._due = self._dirty = False
        self._written = self.dropped = 0

    def _opened(self) -> int:
        if self._file is None:
            raise RuntimeError(f"{self.path.name} is not open: begin or resume the record first")
        return self._file

    def _end_of_lines(self, before: int) -> int:
        """The end of the last complete line within the first `before` bytes."""
        while before > 0:
            start = max(before - _CHUNK, 0)
            newline = os.pread(self._opened(), before - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            before = start
        return 0
