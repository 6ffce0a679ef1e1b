"""Groups of completions as a table of numbers, with filters and sort orders.

A group consists of the completions sampled for one prompt in one generation. Dynamic sampling replaces groups, so a
position in the batch may have had several groups, one per round.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gruppo.errors import DataError
from gruppo.view.index import Array, Frame

__all__ = ["FILTERS", "ORDERS", "Groups", "Passing", "summarise"]

EVEN = 1e-9  # a group whose rewards differ by no more than this has no spread

# For each filter, the condition that a group must meet.
FILTERS: dict[str, str] = {
    "zero_spread": "all completions have the same reward, so nothing is learned from them",
    "truncated": "a completion was cut off before its end",
    "tool_failures": "a tool call failed",
    "reward_failures": "a reward failed or ran out of time",
    "disagreement": "two rewards order the completions in opposite ways",
    "replaced": "dynamic sampling replaced the group",
}
ORDERS = ("update", "spread", "accuracy", "length", "reward")


@dataclass(frozen=True)
class Passing:
    """When a completion counts as correct: one reward, or the weighted sum ("reward"), is at least `at`."""

    reward: str = "reward"
    at: float = 0.5

    def rows(self, frame: Frame) -> NDArray[np.bool_]:
        values = frame.columns["reward"] if self.reward == "reward" else frame.rewards.get(self.reward)
        if values is None:
            raise DataError(f"There is no reward {self.reward!r}. There are {['reward', *frame.rewards]}.")
        with np.errstate(invalid="ignore"):
            return np.asarray(values >= self.at)


@dataclass(frozen=True)
class Groups:
    """The groups of a frame: `rows[starts[g]:starts[g + 1]]` are the rows of group g."""

    frame: Frame
    rows: Array
    starts: Array
    columns: Mapping[str, Array]  # one value per group

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, group: int) -> list[int]:
        """The rows of a group, as indices into the frame, in batch order."""
        end = self.starts[group + 1] if group + 1 < len(self) else len(self.rows)
        return [int(row) for row in self.rows[self.starts[group] : end]]

    def any_row(self, flags: Array) -> Array:
        """For each group, the number of its rows whose flag is set."""
        return _sums(flags[self.rows].astype(np.int64), self.starts)

    def accuracy(self, passing: Passing) -> Array:
        """The share of correct completions of each group."""
        return self.any_row(passing.rows(self.frame)) / np.maximum(self.columns["size"], 1)

    def select(self, filters: Collection[str], *, split: str | None = None, update: int | None = None) -> Array:
        """A boolean array: which groups pass all filters."""
        unknown = [name for name in filters if name not in FILTERS]
        if unknown:
            raise DataError(f"There is no filter {unknown[0]!r}. There are {list(FILTERS)}.")
        chosen = np.ones(len(self), bool)
        for name in filters:
            chosen &= self.columns["zero_spread"] if name == "zero_spread" else self.columns[name] > 0
        if split is not None:
            chosen &= self.columns["split"] == self.frame.code("split", split)
        if update is not None:
            chosen &= self.columns["update"] == update
        return chosen

    def order(self, chosen: Array, by: str, *, descending: bool, passing: Passing) -> Array:
        """The chosen groups, sorted; groups without a value, such as those without a reward, come last."""
        if by not in ORDERS:
            raise DataError(f"Groups cannot be sorted by {by!r}. Choose one of {list(ORDERS)}.")
        values = (self.accuracy(passing) if by == "accuracy" else self.columns[by]).astype(np.float64)[chosen]
        keys = np.where(np.isnan(values), np.inf, -values if descending else values)
        return np.flatnonzero(chosen)[np.argsort(keys, kind="stable")]


def summarise(frame: Frame) -> Groups:
    """The groups of a frame, in the order in which they were sampled."""
    columns = frame.columns
    order = np.lexsort((columns["row"], columns["group"], columns["round"], columns["generation"]))
    keys = np.stack([columns[name][order] for name in ("generation", "round", "group")])
    new = np.ones(len(order), bool)
    new[1:] = (keys[:, 1:] != keys[:, :-1]).any(0)
    starts = np.flatnonzero(new)
    if not len(starts):
        return Groups(frame, order, starts, {name: np.zeros(0, np.int64) for name in (*_FIRST, *_SUMMED, *_MADE)})
    first = order[starts]
    found = {name: columns[name][first] for name in _FIRST}
    found |= {name: _sums(columns[name][order].astype(np.int64), starts) for name in _SUMMED}
    found["size"] = np.diff(np.append(starts, len(order)))
    found["length"] = _sums(columns["length"][order].astype(np.float64), starts) / found["size"]
    reward = columns["reward"][order]
    found["reward"], found["spread"] = _mean_and_spread(reward, starts)
    lowest, highest = (np.asarray(f.reduceat(reward, starts)) for f in (np.fmin, np.fmax))
    found["lowest"], found["highest"] = lowest, highest
    with np.errstate(invalid="ignore"):
        found["zero_spread"] = (highest - lowest <= EVEN) & (found["size"] > 1)
    found["disagreement"] = _disagreements({name: values[order] for name, values in frame.rewards.items()}, starts)
    return Groups(frame, order, starts, found)


_FIRST = ("update", "generation", "round", "group", "split", "prompt_id")
_SUMMED = ("truncated", "tool_failures", "reward_failures", "replaced")
_MADE = ("size", "length", "reward", "spread", "lowest", "highest", "zero_spread", "disagreement")


def _sums(values: Array, starts: Array) -> Array:
    return np.asarray(np.add.reduceat(values, starts)) if len(starts) else np.zeros(0, values.dtype)


def _mean_and_spread(values: Array, starts: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of the known values of each group; NaN where there are none."""
    known = ~np.isnan(values)
    counts = _sums(known.astype(np.int64), starts)
    filled = np.where(known, values, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = _sums(filled, starts) / counts
        sizes = np.diff(np.append(starts, len(values)))
        away = np.where(known, values - np.repeat(mean, sizes), 0.0)
        return mean, np.sqrt(_sums(away * away, starts) / counts)


def _disagreements(rewards: Mapping[str, Array], starts: Array) -> Array:
    """For each group, the number of pairs of rewards whose covariance is negative: one falls while the other rises."""
    found = np.zeros(len(starts), np.int64)
    for first, second in combinations(rewards.values(), 2):
        both = ~(np.isnan(first) | np.isnan(second))
        a, b = (np.where(both, values, np.nan) for values in (first, second))
        mean_a, mean_b = (_mean_and_spread(values, starts)[0] for values in (a, b))
        sizes = np.diff(np.append(starts, len(both)))
        product = (a - np.repeat(mean_a, sizes)) * (b - np.repeat(mean_b, sizes))
        found += _sums(np.where(both, product, 0.0), starts) < -EVEN
    return found


def plain(value: Any) -> Any:
    """An array element for JSON: NaN and infinities become None."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
