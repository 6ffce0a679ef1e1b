"""Reads a run piece by piece, while it goes on: a file of rollouts at a time, and the lines that have come since.

It opens what `Run` opens, by the same rules: nothing outside of the folder, no links, pipes or devices.
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
    """The files of rollouts that are whole, in order: one for each generation and process."""
    folder = run._inside("rollouts")
    return [] if folder is None else [file for file in table_files(folder) if file.whole]


def read_rollouts(run: Run, file: TableFile, columns: Sequence[str], *, dictionaries: Sequence[str] = ()) -> pa.Table:
    """Those of the columns that one file has; columns of text in `dictionaries` have each text once.

    "reward/" and "reward_kind/" stand for the columns of all named rewards. DataError if it cannot be read: a run that
    goes on may have cut it since it was listed.

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
    """The whole lines of metrics.jsonl or events.jsonl from a byte on, and where the next one will begin.

    A file that is shorter than `position` was cut when the run was resumed: all of its lines come then, and the new
    position is below the old one. What is no JSON object is left out.

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
    """What a file of the folder holds, or None if there is none; DataError if it cannot be one of ours."""
    return run._text(name) if os.path.lexists(run.folder / name) else None


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """The schema that the file has; reading texts as dictionaries changes their types."""
    kinds = [(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema]
    return pa.schema(kinds, metadata=schema.metadata)
