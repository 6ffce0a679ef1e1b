"""Reads a run folder: of a live run, of a finished one, or an untrusted one.

Nothing in a folder is executed, and nothing outside of it is opened: files are JSON, safe YAML and parquet, and a link
that leads out of the folder is not followed.
"""

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from gruppo.errors import DataError
from gruppo.runs import updates as update_tables
from gruppo.runs.identity import FORMAT
from gruppo.runs.rollouts import COLUMNS, FORMAT_KEY, REWARD, REWARD_KIND
from gruppo.runs.rollouts import FORMAT as TABLE_FORMAT
from gruppo.runs.settings import read_settings
from gruppo.runs.tables import TableFile, table_files

logger = logging.getLogger(__name__)

_LARGEST = 64 * 1024 * 1024  # bytes of a file that is read into memory at once


class Run:
    """The record of a run.

    Example:
        run = Run("runs/demo")
        [line["reward"] for line in run.metrics(kind="train")]
        run.rollouts(columns=["prompt", "completion", "reward"], updates=range(10, 20)).to_pylist()
        run.update_logps(updates=[12]).to_pylist()     # the log-probs that update 12 was computed from
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._root = Path(os.path.realpath(folder))
        self.info = self._json("run.json")
        _check_format(self.info.get("format"), FORMAT, f"the run in {self.folder}")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, run_id={self.info.get('run_id')!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        try:
            return read_settings(self._text("config.yaml"))
        except ValueError as error:
            raise DataError(f"{self.folder / 'config.yaml'} cannot be used: {error}") from error

    @property
    def environment(self) -> dict[str, Any]:
        """The environments of the run: one entry in "starts" for each time it was started or resumed."""
        return self._json("environment.json")

    @property
    def checkpoints(self) -> list[Path]:
        """Its checkpoint folders, the newest first; whether they are complete is not checked."""
        found = []
        for entry in os.scandir(self._root):
            match = re.fullmatch(r"checkpoint-(\d+)", entry.name, re.ASCII)
            if match and entry.is_dir() and self._inside(entry.name) is not None:
                found.append((int(match[1]), self.folder / entry.name))
        return [path for _, path in sorted(found, reverse=True)]

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of metrics; only those of a kind ("train", "eval", ...) if given."""
        lines = self._lines("metrics.jsonl")
        return lines if kind is None else [line for line in lines if line.get("kind") == kind]

    def events(self) -> list[dict[str, Any]]:
        """What happened to the run, in order."""
        return self._lines("events.jsonl")

    def rollouts(
        self,
        columns: Sequence[str] | None = None,
        *,
        updates: Container[int] | None = None,
        split: str | None = None,
        generations: Container[int] | None = None,
    ) -> pa.Table:
        """The completions in the order in which they were recorded; of some updates or one split if given.

        With `generations`, only their files are opened. `updates` selects by the number of updates made before a
        completion was sampled. Rewards that only some files have are null in the others. Files that cannot be read are
        skipped, with a warning.
        """
        tables = []
        for file in self._files("rollouts"):
            if generations is None or file.number in generations:
                table = self._table(f"rollouts/{file.path.name}", columns, updates, split)
                tables += [] if table is None else [table]
        whole = _empty() if not tables else pa.concat_tables(tables, promote_options="default")
        if columns is None:
            return whole.select(_in_order(whole.column_names))
        unknown = [name for name in columns if name not in whole.column_names]
        if unknown:
            raise DataError(f"The rollouts in {self.folder} have no columns {unknown}. Call rollouts() to see all")
        return whole.select(list(columns))

    @property
    def updates(self) -> list[int]:
        """The numbers of the updates for which the record has log-probs, in order."""
        return sorted({file.number for file in self._files("updates")})

    def update_logps(self, columns: Sequence[str] | None = None, *, updates: Container[int] | None = None) -> pa.Table:
        """Per-row values of updates: `logps` and the other inputs of the loss; see docs/run-folder.md.

        `generation` and `row` identify the completion in the rollouts. If the run recorded none, there are no rows.
        """
        kinds = update_tables.COLUMNS | update_tables.FURTHER
        names = list(kinds) if columns is None else list(columns)
        if unknown := [name for name in names if name not in kinds]:
            raise DataError(f"The updates of a run have no columns {unknown}; there are {', '.join(kinds)}")
        tables = [pa.schema([(name, kinds[name]) for name in names]).empty_table()]
        for file in self._files("updates"):
            if updates is None or file.number in updates:
                table = self._read(f"updates/{file.path.name}", _known_update_columns, names)
                tables += [] if table is None else [table]
        return pa.concat_tables(tables, promote_options="default").select(names)

    def _files(self, kind: str) -> list[TableFile]:
        """The complete tables of a folder."""
        folder = self._inside(kind)
        return [] if folder is None else [file for file in table_files(folder) if file.whole]

    def _table(
        self, name: str, columns: Sequence[str] | None, updates: Container[int] | None, split: str | None
    ) -> pa.Table | None:
        """The selected rows and columns of one file of rollouts, or None if it cannot be read."""
        table = self._read(name, _known_columns, None if columns is None else {*columns, "update", "split"})
        if table is None:
            return None
        if updates is not None:
            table = table.filter(pa.array([update in updates for update in table["update"].to_pylist()], pa.bool_()))
        if split is not None:
            table = table.filter(pa.array([own == split for own in table["split"].to_pylist()], pa.bool_()))
        return table

    def _read(
        self, name: str, columns_of: Callable[[pa.Schema, str], list[str]], only: Container[str] | None = None
    ) -> pa.Table | None:
        """The known columns of one file, or None if it cannot be read."""
        try:
            with self._open(name) as source, pq.ParquetFile(source) as file:
                known = columns_of(file.schema_arrow, f"{self.folder / name}")
                wanted = [column for column in known if only is None or column in only]
                return file.read(columns=wanted).replace_schema_metadata(None)
        except (DataError, pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, _NewerFormatError):
                raise
            logger.warning("%s is skipped: %s", self.folder / name, error)
            return None

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a file; a last line without a newline is still being written."""
        try:
            with self._open(name) as file:
                whole = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        lines = []
        for number, text in enumerate(whole, 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                lines.append(line)
            else:
                logger.warning("Line %d of %s is skipped: it is not a JSON object", number, self.folder / name)
        return lines

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self._text(name))
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.folder / name} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.folder / name} is not a JSON object")
        return value

    def _text(self, name: str) -> str:
        try:
            with self._open(name) as file:
                data = file.read(_LARGEST + 1)
        except FileNotFoundError as error:
            raise DataError(f"{self.folder} is not a run folder: it has no {name}") from error
        if len(data) > _LARGEST:
            raise DataError(f"{self.folder / name} is larger than {_LARGEST:,} bytes")
        return data.decode("utf-8")

    def _inside(self, name: str) -> Path | None:
        """The resolved path of a name in the folder, or None if it leads out of it."""
        path = Path(os.path.realpath(self._root / name))
        return path if path.is_relative_to(self._root) else None

    def _open(self, name: str) -> IO[bytes]:
        """Open a regular file of the folder: no link that leads out, and no pipe or device, which could block."""
        path = self._inside(name)
        if path is None:
            raise DataError(f"{self.folder / name} is a link that leads out of the folder. It is not followed")
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise DataError(f"{self.folder / name} is not a regular file")
        return file


class _NewerFormatError(DataError):
    """A newer format. It is not skipped: that would look like a run without this data."""


def _check_format(found: Any, known: int, what: str) -> None:
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise DataError(f"The format of {what} is unknown: its number is {found!r}")
    if found > known:
        raise _NewerFormatError(
            f"The format of {what} is {found}; this version of gruppo reads formats up to {known}. Use a newer version"
        )


def _known_columns(schema: pa.Schema, what: str) -> list[str]:
    """The columns of the format that a table has; raises DataError if the table is not one of ours."""
    kinds = _kinds(schema, what, "rollouts", (FORMAT_KEY, TABLE_FORMAT), COLUMNS)
    kind_of = {REWARD: pa.float64(), REWARD_KIND: pa.string()}
    rewards = [
        name for name in kinds for prefix, kind in kind_of.items() if name.startswith(prefix) and kinds[name] == kind
    ]
    return _in_order([*COLUMNS, *rewards])


def _known_update_columns(schema: pa.Schema, what: str) -> list[str]:
    key = update_tables.FORMAT_KEY, update_tables.FORMAT
    kinds = _kinds(schema, what, "updates", key, update_tables.COLUMNS)
    return [*update_tables.COLUMNS, *(n for n, kind in update_tables.FURTHER.items() if kinds.get(n) == kind)]


def _kinds(
    schema: pa.Schema, what: str, table: str, key: tuple[bytes, int], needed: Mapping[str, pa.DataType]
) -> dict[str, pa.DataType]:
    """The types of a table's columns; raises DataError if the table is not one of ours."""
    stored = (schema.metadata or {}).get(key[0], b"")
    _check_format(int(stored) if stored.isdigit() else None, key[1], what)
    kinds = {field.name: field.type for field in schema}
    if len(kinds) < len(schema):
        raise DataError("two of its columns have the same name")
    wrong = [name for name, kind in needed.items() if kinds.get(name) != kind]
    if wrong:
        raise DataError(f"it is not a table of {table}: its columns {wrong} are missing or of another type")
    return kinds


def _in_order(names: Sequence[str]) -> list[str]:
    """Column names in the order of the format: those of the named rewards before `reward`."""
    base, at = list(COLUMNS), list(COLUMNS).index("reward")
    rewards = [name for prefix in (REWARD, REWARD_KIND) for name in names if name.startswith(prefix)]
    return [name for name in [*base[:at], *rewards, *base[at:]] if name in names]


def _empty() -> pa.Table:
    return pa.schema(list(COLUMNS.items())).empty_table()
