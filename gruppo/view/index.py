"""The numbers of all completions of a run as arrays, read once and cached until their files change.

Texts and tokens stay on disk, so a hundred thousand completions take some ten megabytes here. The texts of a single
group or completion are read from its file on request.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gruppo.errors import DataError
from gruppo.runs import Run
from gruppo.runs.follow import read_rollouts, whole_files
from gruppo.runs.rollouts import REWARD, REWARD_KIND
from gruppo.runs.tables import TableFile

__all__ = ["Frame", "Index"]

logger = logging.getLogger(__name__)

Array = NDArray[Any]

WORKERS = 4
NUMBERS = ("update", "generation", "row", "group", "round", "replaced", "truncated", "turns", "reward", "advantage")
NAMES = ("split", "stop", "prompt_id")  # text columns with few distinct values, stored as integer codes
SHOWN = 2000  # characters of a prompt that are kept for lists and for searching
TEXT_BYTES = 1 << 29  # limit on completion texts cached in memory for searching

# How the answer of a failed tool call begins, for the model and therefore in the record: see gruppo/tools/calls.py.
FAILED_CALL = "{'error': "


class Stamp(NamedTuple):
    """A file, with the size and modification time that change when it is rewritten."""

    file: TableFile
    size: int
    changed: int


@dataclass(frozen=True)
class Part:
    """The numbers of one file, one value per row."""

    stamp: Stamp
    columns: Mapping[str, Array]
    rewards: Mapping[str, Array]
    texts: Mapping[str, list[str]]  # for each column in NAMES, the texts that its codes stand for
    prompts: Mapping[str, str]  # by id: the first SHOWN characters


@dataclass(frozen=True)
class Frame:
    """An immutable snapshot of all rows of a run.

    `columns["split"]`, `["stop"]` and `["prompt_id"]` are indices into `names`. `columns["file"]` (an index into
    `stamps`) and `["place"]` (the row in that file) locate the texts of a row.
    """

    version: int
    stamps: Sequence[Stamp]
    columns: Mapping[str, Array]
    rewards: Mapping[str, Array]
    names: Mapping[str, Sequence[str]]
    prompts: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.columns["row"])

    @cached_property
    def places(self) -> dict[str, dict[str, int]]:
        return {column: {name: place for place, name in enumerate(names)} for column, names in self.names.items()}

    def code(self, column: str, name: str) -> int:
        """The integer code of a text in a column; -1, which no row has, if the text does not occur."""
        return self.places[column].get(name, -1)


@dataclass
class Index:
    """Holds the current frame of a run; `refresh` reads new and changed files.

    Example:
        index = Index(Run("runs/demo"))
        index.refresh()
        index.frame.columns["reward"].mean()
    """

    run: Run
    frame: Frame = field(init=False)
    _parts: dict[str, Part] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _texts: dict[Stamp, pa.ChunkedArray] = field(default_factory=dict)
    _unreadable: set[Stamp] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.frame = join([], 0)

    def refresh(self) -> Frame:
        """Read the files that are new or changed. Files that cannot be read are left out, with a warning."""
        with self._lock:
            return self._refresh()

    def refresh_unless_busy(self) -> Frame:
        """Like `refresh`, but returns the current frame at once if a refresh is already in progress."""
        if self._lock.acquire(blocking=False):
            try:
                return self._refresh()
            finally:
                self._lock.release()
        return self.frame

    def _refresh(self) -> Frame:
        stamps = {stamp.file.path.name: stamp for file in whole_files(self.run) if (stamp := _stamp(file))}
        known = {name: part.stamp for name, part in self._parts.items()}
        if stamps == known and self.frame.version:
            return self.frame
        kept = {name: part for name, part in self._parts.items() if stamps.get(name) == part.stamp}
        new = [stamp for name, stamp in stamps.items() if name not in kept and stamp not in self._unreadable]
        with ThreadPoolExecutor(WORKERS) as pool:
            read = [part for part in pool.map(self._read, new) if part is not None]
        found = kept | {part.stamp.file.path.name: part for part in read}
        self._parts = {name: found[name] for name in stamps if name in found}
        self._texts = {
            stamp: texts for stamp, texts in self._texts.items() if stamps.get(stamp.file.path.name) == stamp
        }
        if {name: part.stamp for name, part in self._parts.items()} != known or not self.frame.version:
            self.frame = join(list(self._parts.values()), self.frame.version + 1)
        return self.frame

    def _read(self, stamp: Stamp) -> Part | None:
        try:
            return read_part(self.run, stamp)
        except (ValueError, pa.ArrowException) as error:  # for example, text that is not valid Unicode
            logger.warning("%s is left out: %s", stamp.file.path, error)
            self._unreadable.add(stamp)
            return None

    def rows(self, frame: Frame, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """The given columns of some rows of a frame, in the order of `rows`; each file is read once."""
        files, places = frame.columns["file"], frame.columns["place"]
        found: dict[int, dict[str, Any]] = {}
        for file in sorted({int(files[row]) for row in rows}):
            own = [row for row in rows if files[row] == file]
            table = read_rollouts(self.run, frame.stamps[file].file, columns)
            if len(table) <= max(places[row] for row in own):
                raise DataError(f"{frame.stamps[file].file.path} was shortened because the run was resumed. Try again")
            try:
                lines = table.take([int(places[row]) for row in own]).to_pylist()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{frame.stamps[file].file.path} has text that is not valid Unicode: {error}"
                ) from error
            found |= dict(zip(own, lines, strict=True))
        return [found[row] for row in rows]

    def preload(self) -> None:
        """Read the completion texts into the cache for searching, until it is full."""
        for stamp in self.frame.stamps:
            if self._kept_bytes() < TEXT_BYTES:
                self._completions(stamp)

    def _kept_bytes(self) -> int:
        return sum(texts.nbytes for texts in list(self._texts.values()))

    def matches(self, frame: Frame, wanted: str, rows: Array) -> Array:
        """For each row of a frame, whether its completion contains this text, ignoring case.

        Only files that contain one of `rows` (indices into the frame) are searched; rows of other files count as not
        matching.
        """
        pattern = _pattern(wanted)
        asked = set(np.unique(frame.columns["file"][rows]).tolist())
        counts = np.bincount(frame.columns["file"], minlength=len(frame.stamps))

        def search(places: Array) -> Array:
            found = []
            for place in places:
                texts = self._completions(frame.stamps[place]) if place in asked else None
                if texts is None or len(texts) != counts[place]:  # not searched, unreadable, or truncated since
                    found.append(np.zeros(counts[place], bool))
                else:
                    found.append(np.asarray(pc.match_substring_regex(texts, pattern).to_numpy(), dtype=bool))
            return np.concatenate(found) if found else np.zeros(0, bool)

        with ThreadPoolExecutor(WORKERS) as pool:
            return np.concatenate(list(pool.map(search, np.array_split(np.arange(len(counts)), WORKERS))))

    def _completions(self, stamp: Stamp) -> pa.ChunkedArray | None:
        """The completion texts of a file in lower case, cached while the total stays below TEXT_BYTES."""
        if (texts := self._texts.get(stamp)) is None:
            try:
                texts = pc.utf8_lower(read_rollouts(self.run, stamp.file, ["completion"])["completion"])
            except (DataError, pa.ArrowException) as error:
                logger.warning("%s is not searched: %s", stamp.file.path, error)
                return None
            if self._kept_bytes() + texts.nbytes <= TEXT_BYTES:
                self._texts[stamp] = texts
        return texts


def _pattern(wanted: str) -> str:
    """A regular expression for a text and for its JSON-escaped form, because messages are stored as JSON."""
    small = pc.utf8_lower(pa.scalar(wanted)).as_py()
    return "|".join(dict.fromkeys(re.escape(each) for each in (small, json.dumps(small, ensure_ascii=False)[1:-1])))


def _stamp(file: TableFile) -> Stamp | None:
    try:
        found = os.stat(file.path)
    except FileNotFoundError:  # removed when the run was resumed
        return None
    return Stamp(file, found.st_size, found.st_mtime_ns)


def read_part(run: Run, stamp: Stamp) -> Part:
    """The numbers of one file."""
    wanted = [*NUMBERS, *NAMES, "prompt", "completion_tokens"]
    table = read_rollouts(run, stamp.file, [*wanted, REWARD, REWARD_KIND], dictionaries=[*NAMES, "prompt"])
    columns = {name: _numbers(table[name]) for name in NUMBERS}
    columns["length"] = pc.list_value_length(table["completion_tokens"]).to_numpy().astype(np.int32)
    columns["tool_failures"] = _failed_calls(run, stamp.file, columns["turns"])
    columns["reward_failures"] = _failed_rewards(table)
    texts = {}
    for name in NAMES:
        columns[name], texts[name] = _codes(table[name])
    named = [name for name in table.column_names if name.startswith(REWARD)]
    rewards = {name.removeprefix(REWARD): _numbers(table[name]) for name in named}
    return Part(stamp, columns, rewards, texts, _prompts(table, columns["prompt_id"], texts["prompt_id"]))


def _numbers(column: pa.ChunkedArray) -> Array:
    """A numeric column with nulls replaced by NaN, 0 or False."""
    if pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy(), dtype=np.float64)
    return np.asarray(pc.fill_null(column, False if pa.types.is_boolean(column.type) else 0).to_numpy())


def _codes(column: pa.ChunkedArray) -> tuple[Array, list[str]]:
    """A text column as integer codes and the list of texts that they index."""
    whole = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    encoded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):  # more than one chunk of a dictionary
        encoded = encoded.unify_dictionaries().combine_chunks()
    texts = [text or "" for text in encoded.dictionary.to_pylist()]
    codes = pc.fill_null(encoded.indices, len(texts)).to_numpy().astype(np.int32)
    return codes, [*texts, ""]


def _prompts(table: pa.Table, codes: Array, ids: Sequence[str]) -> dict[str, str]:
    """The beginning of each prompt, by its id."""
    prompt_codes, prompts = _codes(table["prompt"])
    _, first = np.unique(codes, return_index=True)
    return {ids[codes[row]]: prompts[prompt_codes[row]][:SHOWN] for row in first}


def _failed_rewards(table: pa.Table) -> Array:
    """For each row, whether one of its rewards timed out or failed."""
    failed = np.zeros(len(table), bool)
    for name in table.column_names:
        if name.startswith(REWARD_KIND):
            bad = pc.is_in(table[name], value_set=pa.array(["timeout", "failure"]))
            failed |= np.asarray(bad.to_numpy(), dtype=bool)
    return failed


def _failed_calls(run: Run, file: TableFile, turns: Array) -> Array:
    """The number of failed tool calls of each row. Only rows of several turns have any: most files are not opened."""
    failed = np.zeros(len(turns), np.int32)
    if not (turns > 1).any():
        return failed
    texts = read_rollouts(run, file, ["completion"])["completion"]
    for row in np.flatnonzero(np.asarray(pc.match_substring(texts, FAILED_CALL).to_numpy(), dtype=bool)):
        failed[row] = len(failed_answers(texts[int(row)].as_py()))
    return failed


def failed_answers(completion: str) -> list[int]:
    """The indices of the messages of a stored conversation that are answers of failed tool calls."""
    try:
        messages = json.loads(completion)
    except (ValueError, RecursionError):
        return []
    if not isinstance(messages, list):
        return []
    return [
        place
        for place, message in enumerate(messages)
        if isinstance(message, dict)
        and message.get("role") == "tool"
        and isinstance(message.get("content"), str)
        and message["content"].startswith(FAILED_CALL)
    ]


def join(parts: Sequence[Part], version: int) -> Frame:
    """Concatenate the parts into one frame, with integer codes that are shared by all parts."""
    names: dict[str, dict[str, int]] = {name: {} for name in NAMES}
    columns: dict[str, list[Array]] = {}
    for number, part in enumerate(parts):
        for name, values in part.columns.items():
            if name in NAMES:
                own = names[name]
                places = np.array([own.setdefault(text, len(own)) for text in part.texts[name]], np.int32)
                values = places[values]
            columns.setdefault(name, []).append(values)
        rows = len(part.columns["row"])
        columns.setdefault("file", []).append(np.full(rows, number, np.int32))
        columns.setdefault("place", []).append(np.arange(rows, dtype=np.int32))
    empty = [*NUMBERS, *NAMES, "length", "tool_failures", "reward_failures", "file", "place"]
    joined = {name: np.concatenate(columns[name]) if name in columns else np.zeros(0, np.int64) for name in empty}
    rewards = list(dict.fromkeys(name for part in parts for name in part.rewards))
    return Frame(
        version=version,
        stamps=[part.stamp for part in parts],
        columns=joined,
        rewards={name: np.concatenate([part.rewards.get(name, _blank(part)) for part in parts]) for name in rewards},
        names={name: list(own) for name, own in names.items()},
        prompts={key: text for part in parts for key, text in part.prompts.items()},
    )


def _blank(part: Part) -> Array:
    return np.full(len(part.columns["row"]), np.nan)
