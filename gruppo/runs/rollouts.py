"""One completion as a row of the record, and rows as a parquet table.

A table is a pure function of its rows: no timestamps, no randomness, fixed writer options. Equal runs write equal
bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gruppo.runs.lines import clean, to_json
from gruppo.types import Message

FORMAT_KEY, FORMAT = b"gruppo.rollouts", 1

REWARD, REWARD_KIND = "reward/", "reward_kind/"  # prefixes of the columns of a named reward

# The columns of every table, in order; those of the named rewards come before `reward`.
COLUMNS: dict[str, pa.DataType] = {
    "update": pa.int64(),
    "generation": pa.int64(),
    "split": pa.string(),
    "row": pa.int64(),
    "group": pa.int64(),
    "round": pa.int32(),
    "replaced": pa.bool_(),
    "prompt_id": pa.string(),
    "prompt_index": pa.int64(),
    "prompt": pa.string(),
    "prompt_format": pa.string(),
    "prompt_tokens": pa.list_(pa.int32()),
    "completion": pa.string(),
    "completion_format": pa.string(),
    "completion_tokens": pa.list_(pa.int32()),
    "model_mask": pa.list_(pa.int8()),
    "logps": pa.list_(pa.float32()),
    "entropies": pa.list_(pa.float32()),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "advantages": pa.list_(pa.float32()),
    "stop": pa.string(),
    "truncated": pa.bool_(),
    "turns": pa.int32(),
    "extra": pa.string(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One completion with everything that is known about it.

    Example:
        RolloutRow(update=3, split="train", row=0, group=0, prompt_id=prompt_id("2+2="), prompt="2+2=",
                   prompt_tokens=[17, 10], completion="4", completion_tokens=[19, 2], stop="eos", truncated=False,
                   rewards={"accuracy": 1.0}, reward_kinds={"accuracy": "score"}, reward=1.0, advantage=0.7)
    """

    update: int  # updates made before it was sampled
    split: str  # "train", "eval" or "eval_<name>"
    row: int  # its index in the batch of all processes
    group: int
    round: int = 0  # of dynamic sampling
    replaced: bool = False  # its group was replaced by another
    prompt_id: str
    prompt_index: int | None = None  # in the dataset
    prompt: str | Sequence[Message]
    prompt_tokens: Sequence[int]
    completion: str | Sequence[Message]
    completion_tokens: Sequence[int]
    model_mask: Sequence[int] | None = None  # 1 = written by the model, 0 = by a tool; None = all by the model
    logps: Sequence[float | None] | None = None  # None for an unknown value, recorded as NaN
    entropies: Sequence[float | None] | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward_kinds: Mapping[str, str] = field(default_factory=dict)  # "score", "abstain", "timeout", "failure"
    reward: float | None = None  # the weighted sum
    advantage: float | None = None
    advantages: Sequence[float] | None = None  # only if each token has its own
    stop: str
    truncated: bool
    turns: int = 1
    extra: Mapping[str, Any] | None = None


def as_text(content: str | Sequence[Message]) -> str:
    """A prompt or completion as it is stored: text unchanged, messages as canonical JSON."""
    return clean(content) if isinstance(content, str) else to_json(content, canonical=True)


def prompt_id(prompt: str | Sequence[Message]) -> str:
    """An id for a prompt that is the same in every run: a 64-bit hash of its stored text.

    Example:
        prompt_id("2+2=")     "8ef82285d4dc1c2d"
    """
    return blake2b(as_text(prompt).encode("utf-8"), digest_size=8).hexdigest()


def to_table(rows: Sequence[RolloutRow], generation: int) -> pa.Table:
    """The rows as a table in the recorded format."""
    columns = {name: _column(name, kind, rows, generation) for name, kind in COLUMNS.items()}
    names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    rewards: dict[str, pa.Array] = {}
    for name in names:
        rewards[REWARD + clean(name)] = pa.array([row.rewards.get(name) for row in rows], pa.float64())
    for name in names:
        rewards[REWARD_KIND + clean(name)] = _texts([row.reward_kinds.get(name) for row in rows])
    at = list(columns).index("reward")
    ordered = [*list(columns.items())[:at], *rewards.items(), *list(columns.items())[at:]]
    schema = pa.schema([(name, array.type) for name, array in ordered], {FORMAT_KEY: str(FORMAT).encode()})
    return pa.Table.from_arrays([array for _, array in ordered], schema=schema)


def encode(table: pa.Table) -> pa.Buffer:
    """A table as the bytes of a parquet file."""
    sink = pa.BufferOutputStream()
    flat = [name for name in table.column_names if not pa.types.is_list(table.schema.field(name).type)]
    pq.write_table(
        table,
        sink,
        row_group_size=max(len(table), 1),
        version="2.6",
        compression="zstd",
        compression_level=1,
        # Texts repeat within a group. Tokens hardly do, and a dictionary of them takes longer than all the rest.
        use_dictionary=[name for name in flat if pa.types.is_string(table.schema.field(name).type)],
        write_statistics=flat,
    )
    return sink.getvalue()


def _column(name: str, kind: pa.DataType, rows: Sequence[RolloutRow], generation: int) -> pa.Array:
    if name == "generation":
        return pa.array([generation] * len(rows), kind)
    if name in ("prompt_format", "completion_format"):
        content = name.removesuffix("_format")
        return pa.array(["text" if isinstance(getattr(row, content), str) else "messages" for row in rows], kind)
    values = [getattr(row, name) for row in rows]
    if name in ("prompt", "completion"):
        return _texts(_each_once(values))
    if name == "extra":
        return _texts([None if value is None else to_json(value) for value in values])
    if pa.types.is_string(kind):
        return _texts(values)
    return lists(values, kind) if pa.types.is_list(kind) else pa.array(values, kind)


def _each_once(contents: Iterable[Any]) -> list[str]:
    """The stored texts; a conversation that several rows share is converted only once."""
    known: dict[int, str] = {}
    texts = []
    for content in contents:
        if id(content) not in known:
            known[id(content)] = as_text(content)
        texts.append(known[id(content)])
    return texts


def _texts(values: Sequence[str | None]) -> pa.Array:
    return pa.array([None if value is None else clean(str(value)) for value in values], pa.string())


def lists(values: Sequence[Sequence[Any] | np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """A list array built from flat values and offsets, so that Python handles each list, not each number."""
    dtype = kind.value_type.to_pandas_dtype()
    parts = [np.asarray(() if value is None else value, dtype=dtype) for value in values]
    offsets = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    flat = np.concatenate(parts) if parts else np.empty(0, dtype)
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=kind, mask=missing)
