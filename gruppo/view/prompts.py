"""How the pass rate of each prompt changed over the course of training."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gruppo.errors import DataError
from gruppo.view.groups import Groups, Passing, plain
from gruppo.view.index import Array

__all__ = ["ORDERS", "PromptTable", "history", "prompt_table"]

# The sort orders of the list of prompts: columns in order of priority, and whether each is ascending.
ORDERS: dict[str, tuple[tuple[str, bool], ...]] = {
    "hardest": (("last", True), ("rate", True), ("times", False)),
    "solved": (("last", False), ("rate", False), ("times", False)),
    "improved": (("change", False), ("times", False)),
    "worsened": (("change", True), ("times", False)),
    "times": (("times", False),),
}


@dataclass(frozen=True)
class PromptTable:
    """One entry per prompt of a split: the number of its groups, and its pass rates."""

    codes: Array  # indices into frame.names["prompt_id"]
    columns: dict[str, Array]  # times, rate (over all groups), first, last, change

    def order(self, by: str) -> Array:
        if by not in ORDERS:
            raise DataError(f"Prompts cannot be sorted by {by!r}. Choose one of {list(ORDERS)}.")
        keys = [self.columns[name] if ascending else -self.columns[name] for name, ascending in ORDERS[by]]
        return np.lexsort(keys[::-1])


def prompt_table(groups: Groups, passing: Passing, split: str | None) -> PromptTable:
    """The prompts of a split; groups that dynamic sampling replaced count as well, because they were sampled."""
    chosen = np.flatnonzero(groups.select((), split=split))
    codes, rates = groups.columns["prompt_id"][chosen], groups.accuracy(passing)[chosen]
    order = np.lexsort((groups.columns["round"][chosen], groups.columns["generation"][chosen], codes))
    own, starts, counts = np.unique(codes[order], return_index=True, return_counts=True)
    sorted_rates = rates[order]
    total = np.add.reduceat(sorted_rates, starts) if len(starts) else np.zeros(0)
    first, last = sorted_rates[starts], sorted_rates[starts + counts - 1]
    columns = {"times": counts, "rate": total / counts, "first": first, "last": last, "change": last - first}
    return PromptTable(own, columns)


def history(groups: Groups, passing: Passing, prompt_id: str) -> list[dict[str, Any]]:
    """All groups of one prompt, the earliest first."""
    code = groups.frame.code("prompt_id", prompt_id)
    if code < 0:
        raise DataError(f"This run has no prompt {prompt_id!r}.")
    rates = groups.accuracy(passing)
    names = ("update", "generation", "round", "group", "size", "reward", "spread", "length")
    return [
        {
            **{name: plain(groups.columns[name][group]) for name in names},
            "split": groups.frame.names["split"][groups.columns["split"][group]],
            "accuracy": plain(rates[group]),
        }
        for group in np.flatnonzero(groups.columns["prompt_id"] == code)
    ]
