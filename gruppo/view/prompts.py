"""What became of each prompt over the course of training: how often it was solved, at first and in the end."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gruppo.errors import DataError
from gruppo.view.groups import Groups, Passing, plain
from gruppo.view.index import Array

__all__ = ["ORDERS", "PromptTable", "history", "prompt_table"]

# The order of a list of prompts: which numbers decide, the first one first, and whether the smaller one comes first.
ORDERS: dict[str, tuple[tuple[str, bool], ...]] = {
    "hardest": (("last", True), ("rate", True), ("times", False)),
    "solved": (("last", False), ("rate", False), ("times", False)),
    "improved": (("change", False), ("times", False)),
    "worsened": (("change", True), ("times", False)),
    "times": (("times", False),),
}


@dataclass(frozen=True)
class PromptTable:
    """One entry for each prompt of a split: in how many groups it was, and its pass rates."""

    codes: Array  # places in frame.names["prompt_id"]
    columns: dict[str, Array]  # times, rate (over all groups), first, last, change

    def order(self, by: str) -> Array:
        if by not in ORDERS:
            raise DataError(f"Prompts cannot be sorted by {by!r}. Choose one of {list(ORDERS)}.")
        keys = [self.columns[name] if ascending else -self.columns[name] for name, ascending in ORDERS[by]]
        return np.lexsort(keys[::-1])


def prompt_table(groups: Groups, passing: Passing, split: str | None) -> PromptTable:
    """The prompts of a split; groups that dynamic sampling replaced count as well, they were sampled."""
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
