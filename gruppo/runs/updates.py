"""The values that an update computed for each of its rows, as a parquet table alongside the rollouts.

As for rollouts, a table is a pure function of the recorded values: equal runs write equal bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from gruppo.runs.rollouts import lists

FORMAT_KEY, FORMAT = b"gruppo.updates", 1

# The columns of every table, in order.
COLUMNS: dict[str, pa.DataType] = {
    "update": pa.int64(),
    "process": pa.int32(),
    "generation": pa.int64(),
    "row": pa.int64(),
    "micro_batch": pa.int32(),
    "logps": pa.list_(pa.float32()),
    "old": pa.string(),
    "loss": pa.float64(),
    "update_rows": pa.int64(),
    "update_tokens": pa.int64(),
    "update_micro_batches": pa.int64(),
    "beta": pa.float64(),
    "epsilon_low": pa.float64(),
    "epsilon_high": pa.float64(),
}
# Optional columns, present only in tables that have values for them; a reader returns nulls for the other tables.
FURTHER: dict[str, pa.DataType] = {
    "old_logps": pa.list_(pa.float32()),
    "old_sum": pa.float32(),
    "ref_logps": pa.list_(pa.float32()),
    "sampler_logps": pa.list_(pa.float32()),
    "entropies": pa.list_(pa.float32()),
    "entropy_coef": pa.float64(),
    "kl_penalty": pa.float32(),
}


@dataclass(frozen=True, kw_only=True)
class UpdateRows:
    """The rows of one process in an update, in the order in which they were trained on.

    Example, an on-policy update of two completions, the second of which was left out because it could not matter:
        UpdateRows(generation=[0, 0], row=[1, 0], micro_batch=[0, 0], logps=[[-0.5, -0.1], None], old="own",
                   facts={"loss": 0.25, "update_rows": 2, "update_tokens": 4, "update_micro_batches": 1, "beta": 0.0,
                          "epsilon_low": 0.2, "epsilon_high": 0.2})
    """

    generation: Sequence[int]  # of each row; with `row`, its index there, it identifies a row of the rollouts
    row: Sequence[int]
    micro_batch: Sequence[int]
    logps: Sequence[Sequence[float] | None]  # used for the loss; None: the row was not run
    old: str  # denominator of the ratios: "own" (the same log-probs), "rollout" (those recorded there), "row" or "sum"
    facts: Mapping[str, float | None]  # columns with the same value in all rows
    further: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns of FURTHER


def to_table(rows: UpdateRows, update: int, process: int) -> pa.Table:
    """The rows as a table in the recorded format."""
    count = len(rows.row)
    same = {"update": update, "process": process, "old": rows.old, **rows.facts}
    values = {name: getattr(rows, name) for name in ("generation", "row", "micro_batch", "logps")} | dict(rows.further)
    kinds = {name: kind for name, kind in (COLUMNS | FURTHER).items() if name in COLUMNS or name in values}
    arrays = [
        pa.repeat(pa.scalar(same[name], kind), count) if name in same else _column(values[name], kind)
        for name, kind in kinds.items()
    ]
    schema = pa.schema(list(kinds.items()), {FORMAT_KEY: str(FORMAT).encode()})
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return lists(values, kind) if pa.types.is_list(kind) else pa.array(values, kind)
