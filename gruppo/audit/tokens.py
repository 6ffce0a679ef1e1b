"""The tokens of many completions as flat arrays, so that checks need no loop over tokens."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gruppo.errors import RolloutError
from gruppo.types import Rollout

Floats = NDArray[np.float64]
ENOUGH = 1 << 16


class Tokens:
    """The tokens of B completions one after the other: M in all.

    Making an array out of lists takes longer than any check of it, so each is made when it is first asked for.

    Example, [5, 9, 2] and [7, 2]:
        ids [5, 9, 2, 7, 2]   lengths [3, 2]   ends [3, 5]
    """

    def __init__(self, rollouts: Sequence[Rollout]):
        self.rollouts = rollouts
        self.completions = [rollout.completion for rollout in rollouts]
        self.rows = [completion.ids for completion in self.completions]
        self.lengths = np.array([len(row) for row in self.rows], np.int64)  # (B,)
        self.ends = self.lengths.cumsum()  # (B,)

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def some(self) -> "Tokens":
        """Those of every second, third, … completion, if there are many: enough for statistics."""
        step = -(-len(self) // ENOUGH)
        return Tokens(self.rollouts[::step]) if step > 1 else self

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        return _flat(self.rows, np.int64)

    @cached_property
    def own(self) -> NDArray[np.bool_]:
        """Bool (M,): written by the model, not by a tool."""
        masks = [completion.model_mask for completion in self.completions]
        if all(mask is None for mask in masks):
            return np.ones(len(self), np.bool_)
        ones = [[1] * len(row) if mask is None else mask for row, mask in zip(self.rows, masks, strict=True)]
        return _flat(ones, np.bool_)

    @cached_property
    def logps(self) -> Floats | None:
        """Log-probs (M,) under the tempered distribution; None if those of any completion are not known."""
        return self._known([completion.plain_logps for completion in self.completions])

    @cached_property
    def entropies(self) -> Floats | None:
        """Those of that distribution (M,), or None."""
        return self._known([completion.entropies for completion in self.completions])

    @cached_property
    def given_logps(self) -> Floats:
        """Log-probs that rollout functions gave; 0 for those that they did not know."""
        rows = [completion.logps for completion in self.completions if completion.logps is not None]
        values = _flat(rows, np.float64)  # None becomes NaN
        if not np.isnan(values).any():
            return values
        return _flat([[0.0 if value is None else value for value in row] for row in rows], np.float64)

    def keys(self) -> list[bytes]:
        """One for each completion; equal if all their tokens are."""
        whole = self.ids.tobytes()
        ends = (self.ends * self.ids.itemsize).tolist()
        return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def row_sums(self, values: Floats) -> Floats:
        """Sums (B,) over the tokens of each completion of values (M,)."""
        sums = np.zeros(len(self.lengths))
        filled = self.lengths > 0  # reduceat would give an empty row its neighbour's first value
        if filled.any():
            sums[filled] = np.add.reduceat(values, (self.ends - self.lengths)[filled])
        return sums

    def _known(self, values: Sequence[Sequence[float] | None]) -> Floats | None:
        """The numbers of all completions, or None if one that has tokens has none."""
        if any(value is None and len(row) for value, row in zip(values, self.rows, strict=True)):
            return None
        for value, row in zip(values, self.rows, strict=True):
            if value is not None and len(value) != len(row):
                raise RolloutError(f"A completion of {len(row)} tokens came with {len(value)} log-probs or entropies.")
        return _flat([value for value in values if value is not None], np.float64)


def _flat(rows: Sequence[Sequence[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(rows), dtype, count=sum(map(len, rows)))
