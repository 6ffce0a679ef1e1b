"""The files of rollouts and updates: one table per number and process, with a queue for a full disk."""

import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from gruppo.runs.lines import fsync_folder, write_file
from gruppo.runs.links import no_link

MOST_BYTES = 256 * 1024 * 1024  # of tables kept in memory while the disk is full

_NAME = re.compile(r"(\d{8,})-(\d{4,})\.parquet(\.tmp)?", re.ASCII)


class TableFile(NamedTuple):
    """Example: rollouts/00000012-0001.parquet is TableFile(12, 1, whole=True, path=...)."""

    number: int
    rank: int
    whole: bool  # False: an interrupted write left it
    path: Path


def table_files(folder: Path) -> list[TableFile]:
    """The files in a folder of tables, in order; other files are left out."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    return sorted(TableFile(int(m[1]), int(m[2]), m[3] is None, folder / m[0]) for m in matches)


class TableFolder:
    """The tables that one process writes. Those that could not be written wait; the oldest are dropped first."""

    def __init__(self, folder: Path, rank: int):
        self.folder = folder
        self.dropped = 0
        self._rank = rank
        self._waiting: deque[tuple[int, pa.Buffer]] = deque()
        self._unsynced: list[Path] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, number: int, table: pa.Buffer) -> None:
        """Add a table; `flush` writes it."""
        self._waiting.append((number, table))
        while len(self._waiting) > 1 and sum(table.size for _, table in self._waiting) > MOST_BYTES:
            self._waiting.popleft()
            self.dropped += 1

    def flush(self) -> None:
        while self._waiting:
            number, table = self._waiting[0]
            no_link(self.folder).mkdir(exist_ok=True)
            path = self.folder / f"{number:08d}-{self._rank:04d}.parquet"
            write_file(path, table, durable=False)
            self._waiting.popleft()
            self._unsynced.append(path)

    def own(self) -> int:
        """The number of complete tables of this process."""
        return sum(file.whole and file.rank == self._rank for file in table_files(self.folder))

    def cut(self, number: int, gone: int | None = None, keep: Path | None = None) -> int:
        """Remove the tables from `number` on, and half-written ones, of this rank and of ranks from `gone` on.

        With `keep`, the complete tables of all ranks from `number` on move into that folder instead. Returns the
        number of complete tables of all ranks from `number` on.
        """
        no_link(self.folder)
        beyond = [file for file in table_files(self.folder) if file.whole and file.number >= number]
        if keep is not None and beyond:
            self._move(beyond, keep)
        for file in table_files(self.folder):
            ours = file.rank == self._rank or (gone is not None and file.rank >= gone)
            if ours and (file.number >= number or not file.whole):
                file.path.unlink(missing_ok=True)
        return len(beyond)

    def _move(self, files: Sequence[TableFile], folder: Path) -> None:
        folder.mkdir()
        for file in files:
            os.rename(file.path, folder / file.path.name)
        for changed in (folder, folder.parent, self.folder):
            fsync_folder(changed)

    def close(self) -> None:
        self._waiting.clear()
        self._unsynced.clear()
        self.dropped = 0

    def sync(self) -> None:
        if not self._unsynced:
            return
        for path in self._unsynced:
            try:
                file = os.open(path, os.O_RDONLY)
            except FileNotFoundError:  # removed by hand
                continue
            try:
                os.fsync(file)
            finally:
                os.close(file)
        fsync_folder(self.folder)
        fsync_folder(self.folder.parent)
        self._unsynced.clear()
