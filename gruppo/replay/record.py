"""What a replay reads: generations with their rewards, and the rows of updates with their log-probs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from gruppo.errors import DataError
from gruppo.runs.read import Run
from gruppo.runs.rollouts import REWARD

__all__ = ["MicroBatch", "RecordedGeneration", "RecordedUpdate", "Recording"]

KEPT = 8  # generations cached in memory: an update may have rows of several


@dataclass
class RecordedGeneration:
    """The completions of one generation, of all processes, in group order."""

    number: int
    group_size: int
    table: pa.Table  # of the rollouts, sorted by row
    names: list[str]  # of the rewards
    rewards_NR: Tensor  # NaN where a reward function gave no reward
    advantages_N: Tensor  # as recorded
    token_advantages: list[np.ndarray | None]  # one advantage per token; None for rows with a single advantage
    kl_penalty: Callable[[], Tensor | None]  # (N,): β Σ_t (ℓ_old − ℓ_ref) with the run's β; None if not recorded

    def __len__(self) -> int:
        return len(self.advantages_N)

    @property
    def width(self) -> int:
        """The length of the longest completion in tokens."""
        return int(pc.max(pc.list_value_length(self.table["completion_tokens"])).as_py() or 1)

    @property
    def has_steps(self) -> bool:
        return any(values is not None for values in self.token_advantages)


@dataclass
class MicroBatch:
    """The rows that one process had in one micro-batch of an update; tensors are (B, T), padded on the right."""

    index: int
    generation: list[int]
    row: list[int]
    lengths: list[int]
    mask_BT: Tensor  # tokens of the completion that the model wrote
    truncated_B: Tensor
    logps_BT: Tensor
    known_B: Tensor  # bool: whether the update ran the row and so recorded its log-probs
    sampled_BT: Tensor  # log-probs from the rollouts; NaN where unknown
    old: str
    old_logps_BT: Tensor | None
    old_sum_B: Tensor | None
    ref_logps_BT: Tensor | None
    sampler_logps_BT: Tensor | None
    entropy_BT: Tensor | None
    entropy_coef: float

    def __len__(self) -> int:
        return len(self.row)


@dataclass
class RecordedUpdate:
    """All rows of an update."""

    number: int
    micro_batches: list[MicroBatch]
    loss: float | None  # summed over all processes, as the run computed it; None if a subclass computes its own loss
    facts: dict[str, float]  # beta and clip widths at the time of the update


class Recording:
    """Generations and updates of a run folder, read when they are needed."""

    def __init__(self, run: Run, group_size: int, beta: float = 0.0):
        self.run = run
        self.group_size = group_size
        self.beta = beta  # of the run
        self._generations: dict[int, RecordedGeneration] = {}
        self._penalties: dict[int, Tensor | None] = {}
        self._updates: dict[int, list[int]] | None = None  # by generation

    def generation(self, number: int) -> RecordedGeneration:
        """Return a generation; raises DataError if it is incomplete."""
        if number not in self._generations:
            while len(self._generations) >= KEPT:
                self._generations.pop(next(iter(self._generations)))
            self._generations[number] = self._read_generation(number)
        return self._generations[number]

    def _read_generation(self, number: int) -> RecordedGeneration:
        table = self.run.rollouts(generations=[number], split="train")
        table = table.filter(pc.invert(table["replaced"])).sort_by("row")
        count = len(table)
        if table["row"].to_pylist() != list(range(count)) or count % self.group_size or not count:
            raise DataError(
                f"Generation {number} of {self.run.folder} is incomplete: it has {count} rows. The table of a process "
                "is missing, or the record was not kept."
            )
        names = [name.removeprefix(REWARD) for name in table.column_names if name.startswith(REWARD)]
        rewards = [table[REWARD + name].to_numpy() for name in names]
        return RecordedGeneration(
            number,
            self.group_size,
            table,
            names,
            torch.from_numpy(np.stack(rewards, 1)).float() if rewards else torch.zeros(count, 0),
            torch.from_numpy(table["advantage"].to_numpy().copy()).float(),
            arrays(table["advantages"]),
            partial(self._kl_penalty, number, count),
        )

    def _kl_penalty(self, number: int, count: int) -> Tensor | None:
        """The KL penalty of each row (whether or not the run applied it), from the updates that contain the rows."""
        if number in self._penalties:
            return self._penalties[number]
        updates = self._updates_with(number)
        table = self.run.update_logps(["generation", "row", "kl_penalty"], updates=updates)
        table = table.filter(pc.and_(pc.equal(table["generation"], number), pc.is_valid(table["kl_penalty"])))
        known = dict(zip(table["row"].to_pylist(), table["kl_penalty"].to_pylist(), strict=True))
        known = known or self._kl_of_tokens(number, updates)
        if known and len(known) < count:
            raise DataError(
                f"The KL of {count - len(known)} of the {count} rows of generation {number} is not known: the run "
                "ended before they were trained on."
            )
        costs = torch.tensor([known[row] for row in range(count)], dtype=torch.float32) if known else None
        self._penalties[number] = costs
        return costs

    def _updates_with(self, generation: int) -> list[int]:
        """The updates that contain rows of a generation."""
        if self._updates is None:
            pairs = self.run.update_logps(["generation", "update"]).group_by(["generation", "update"]).aggregate([])
            self._updates = {}
            for own, update in zip(pairs["generation"].to_pylist(), pairs["update"].to_pylist(), strict=True):
                self._updates.setdefault(own, []).append(update)
        return sorted(self._updates.get(generation, []))

    def _kl_of_tokens(self, number: int, updates: Sequence[int]) -> dict[int, float]:
        """The KL penalty of each row, computed from log-probs, for runs that had the KL in the loss."""
        found: dict[int, float] = {}
        for batch in (batch for update in updates for batch in self.update(update).micro_batches):
            if batch.ref_logps_BT is None:
                return {}
            old = {"own": batch.logps_BT, "rollout": batch.sampled_BT, "row": batch.old_logps_BT}.get(batch.old)
            if old is not None:
                kl_B = ((old - batch.ref_logps_BT).masked_fill(~batch.mask_BT, 0.0)).sum(1)
                rows = zip(batch.generation, batch.row, kl_B.tolist(), strict=True)
                found = {row: self.beta * kl for own, row, kl in rows if own == number} | found
        return found

    def update(self, number: int) -> RecordedUpdate:
        """Return an update; raises DataError if rows of it are missing."""
        table = self.run.update_logps(updates=[number])
        if not len(table):
            raise DataError(f"There is no update {number} in {self.run.folder / 'updates'}.")
        first = table.slice(0, 1).to_pylist()[0]
        if len(table) != first["update_rows"]:
            raise DataError(
                f"Update {number} of {self.run.folder} is incomplete: {len(table)} of its {first['update_rows']} rows "
                "are recorded. The table of a process is missing."
            )
        micro_batches, losses = [], []
        for _, part in _parts(table, "process"):
            losses.append(part["loss"][0].as_py())
            micro_batches += [self._micro_batch(index, rows) for index, rows in _parts(part, "micro_batch")]
        facts = {name: first[name] for name in ("beta", "epsilon_low", "epsilon_high")}
        return RecordedUpdate(number, micro_batches, None if None in losses else sum(losses), facts)

    def _micro_batch(self, index: int, table: pa.Table) -> MicroBatch:
        generation, row = table["generation"].to_pylist(), table["row"].to_pylist()
        rollouts = self._rollouts(generation, row)
        lengths = [len(ids) if ids is not None else 0 for ids in arrays(rollouts["completion_tokens"])]
        width = max([*lengths, 1])
        written = [
            np.ones(n) if m is None else m for m, n in zip(arrays(rollouts["model_mask"]), lengths, strict=True)
        ]
        logps = arrays(table["logps"])
        entropies = table["entropies"] if table["entropies"].null_count < len(table) else rollouts["entropies"]
        coef = table["entropy_coef"][0].as_py()
        return MicroBatch(
            index,
            generation,
            row,
            lengths,
            padded(written, width).bool(),
            torch.tensor(rollouts["truncated"].to_pylist()),
            padded(logps, width),
            torch.tensor([values is not None for values in logps]),
            padded(arrays(rollouts["logps"]), width, absent=torch.nan),
            table["old"][0].as_py(),
            _tokens(table["old_logps"], width),
            _numbers(table["old_sum"]),
            _tokens(table["ref_logps"], width),
            _tokens(table["sampler_logps"], width, absent=torch.nan),
            _tokens(entropies, width),
            0.0 if coef is None else coef,
        )

    def _rollouts(self, generation: Sequence[int], row: Sequence[int]) -> pa.Table:
        """The rollout columns of these rows, in the given order."""
        columns = ["completion_tokens", "model_mask", "truncated", "logps", "entropies"]
        numbers = sorted(set(generation))
        starts, tables, count = {}, [], 0
        for number in numbers:
            starts[number] = count
            tables.append(self.generation(number).table.select(columns))
            count += len(tables[-1])
        places = [starts[g] + r for g, r in zip(generation, row, strict=True)]
        return pa.concat_tables(tables).take(pa.array(places))


def _parts(table: pa.Table, column: str) -> Iterator[tuple[int, pa.Table]]:
    """Yield each distinct value of a column with its rows, in ascending order of the value."""
    values = table[column].to_numpy()
    for value in np.unique(values):
        yield int(value), table.filter(pa.array(values == value))


def arrays(column: Any) -> list[np.ndarray | None]:
    """A column of lists as arrays; None for null."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    lengths = whole.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    parts = np.split(whole.flatten().to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1]) if len(whole) else []
    known = whole.is_valid().to_numpy(zero_copy_only=False)
    return [part if valid else None for part, valid in zip(parts, known, strict=True)]


def padded(rows: Sequence[np.ndarray | None], width: int, absent: float = 0.0) -> Tensor:
    """Arrays as one tensor, padded on the right."""
    out = np.full((len(rows), width), absent, dtype=np.float32)
    for place, values in zip(out, rows, strict=True):
        if values is not None:
            place[: len(values)] = values
    return torch.from_numpy(out)


def _tokens(column: Any, width: int, absent: float = 0.0) -> Tensor | None:
    """A column of lists as a tensor, or None if all entries are null."""
    return None if column.null_count == len(column) else padded(arrays(column), width, absent)


def _numbers(column: Any) -> Tensor | None:
    return None if column.null_count == len(column) else torch.tensor(column.to_pylist(), dtype=torch.float32)
