"""Every row of a replay in one table, for custom analysis."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from gruppo.replay.compute import Computed
from gruppo.replay.record import RecordedGeneration, RecordedUpdate
from gruppo.runs.rollouts import lists

__all__ = ["RowTable"]

_WHERE: dict[str, pa.DataType] = {
    "update": pa.int64(),
    "generation": pa.int64(),
    "row": pa.int64(),
    "group": pa.int64(),
    "prompt_id": pa.string(),
    "recorded_advantage": pa.float32(),
    "assumed": pa.bool_(),
}


class RowTable:
    """One row for each completion of each update: its advantage and d loss / d log-prob under each recipe.

    Columns of a second recipe begin with `second_`. `assumed` marks rows whose log-probs are the sampler's.
    """

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []

    def add(
        self, update: RecordedUpdate, generations: Mapping[int, RecordedGeneration], computed: Sequence[Computed]
    ) -> None:
        """Add the rows of an update."""
        where = [(g, r) for batch in update.micro_batches for g, r in zip(batch.generation, batch.row, strict=True)]
        ids = {number: generation.table["prompt_id"].to_pylist() for number, generation in generations.items()}
        values: dict[str, list[Any]] = {
            "update": [update.number] * len(where),
            "generation": [g for g, _ in where],
            "row": [r for _, r in where],
            "group": [r // generations[g].group_size for g, r in where],
            "prompt_id": [ids[g][r] for g, r in where],
            "recorded_advantage": [float(generations[g].advantages_N[r]) for g, r in where],
            "assumed": [any(flags) for flags in zip(*(each.assumed for each in computed), strict=True)],
        }
        columns = {name: pa.array(values[name], kind) for name, kind in _WHERE.items()}
        for prefix, each in zip(("", "second_"), computed, strict=False):
            columns[f"{prefix}advantage"] = pa.array(each.advantages, pa.float32())
            columns[f"{prefix}gradient"] = lists([g.numpy() for g in each.gradients], pa.list_(pa.float32()))
        self._tables.append(pa.table(columns))

    def table(self) -> pa.Table:
        """All rows as one table."""
        return pa.concat_tables(self._tables) if self._tables else pa.schema(list(_WHERE.items())).empty_table()
