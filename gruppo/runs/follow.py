"""Reads a run incrementally, while it continues: one file of rollouts at a time, and the lines added since.

It opens files by the same rules as `Run`: nothing outside of the folder, also not through links; no pipes or devices.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gruppo.errors import DataError
from gruppo.runs.read import Run, _known_columns
from gruppo.runs.tables import TableFile, table_files

__all__ = ["new_lines", "read_rollouts", "read_text", "whole_files"]


def whole_files(run: Run) -> list[TableFile]:
    """The complete files of rollouts, in order: one for each generation and process."""
    folder = run._inside("rollouts")
    return [] if folder is None else [file for file in table_files(folder) if file.whole]


def read_rollouts(run: Run, file: TableFile, columns: Sequence[str], *, dictionaries: Sequence[str] = ()) -> pa.Table:
    """Read those of the columns that one file has; text columns in `dictionaries` are dictionary-encoded.

    "reward/" and "reward_kind/" stand for the columns of all named rewards. Raises DataError if the file cannot be
    read: a resumed run may have removed it since it was listed.

    Example:
        read_rollouts(run, whole_files(run)[-1], ["completion", "reward/"]).to_pylist()
    """
    name = f"rollouts/{file.path.name}"
    try:
        with run._open(name) as source, pq.ParquetFile(source, read_dictionary=list(dictionaries)) as table:
            known = _known_columns(_without_dictionaries(table.schema_arrow), f"{run.folder / name}")
            wanted = [each for each in known if each in columns or f"{each.partition('/')[0]}/" in columns]
            return table.read(columns=wanted).replace_schema_metadata(None)
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{run.folder / name} cannot be read: {error}") from error


def new_lines(run: Run, name: str, position: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of metrics.jsonl or events.jsonl from byte `position` on, and the position after them.

    A file that is shorter than `position` was cut when the run was resumed: then all of its lines are returned, and
    the new position is below the old one. Lines that are not JSON objects are left out.

    Example:
        lines, position = new_lines(run, "metrics.jsonl")
        later, position = new_lines(run, "metrics.jsonl", position)
    """
    try:
        with run._open(name) as file:
            start = position if position <= os.fstat(file.fileno()).st_size else 0
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    lines = []
    for text in whole.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines, start + len(whole)


def read_text(run: Run, name: str) -> str | None:
    """The text of a file in the folder, or None if it does not exist; raises DataError if it cannot be one of ours."""
    return run._text(name) if os.path.lexists(run.folder / name) else None


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """The schema as stored in the file; reading texts as dictionaries changes their types."""
    kinds = [(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema]
    return pa.schema(kinds, metadata=schema.metadata)
