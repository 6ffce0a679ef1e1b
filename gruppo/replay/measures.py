"""What is said about an update and its groups: losses, reported statistics, and how alike two gradients are."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.replay.compare import length_shares, likeness
from gruppo.replay.compute import Computed
from gruppo.replay.record import RecordedUpdate

__all__ = ["groups_of", "of_groups", "of_update"]


def of_update(update: RecordedUpdate, computed: Sequence[Computed]) -> dict[str, Any]:
    """One line about an update; with two recipes, also how alike their gradients are.

    `length_shares` are the shares of Σ|d loss / d log-prob| of the shortest quarter of the completions, of the next, …
    and of the longest.
    """
    first = computed[0]
    said: dict[str, Any] = {
        "update": update.number,
        "rows": len(first.gradients),
        "rows_assumed": max(sum(each.assumed) for each in computed),
        "recorded_loss": update.loss,
        "loss": first.loss,
        "metrics": first.metrics,
        "gradient_norm": float(torch.cat(first.gradients).double().norm()),
        "length_shares": length_shares(first.gradients),
    }
    if len(computed) == 2:
        second = computed[1]
        said |= {
            "second_loss": second.loss,
            "second_metrics": second.metrics,
            "second_length_shares": length_shares(second.gradients),
            **likeness(torch.cat(first.gradients), torch.cat(second.gradients))._asdict(),
        }
    return said


def groups_of(update: RecordedUpdate, group_size: int) -> dict[tuple[int, int], list[int]]:
    """The rows of each group, by generation and group, as they are numbered in `Computed`."""
    places: dict[tuple[int, int], list[int]] = {}
    numbers = [(g, r) for batch in update.micro_batches for g, r in zip(batch.generation, batch.row, strict=True)]
    for place, (generation, row) in enumerate(numbers):
        places.setdefault((generation, row // group_size), []).append(place)
    return places


def of_groups(update: RecordedUpdate, computed: Sequence[Computed], group_size: int) -> list[dict[str, Any]]:
    """How alike two gradients are in each group of an update."""
    first, second = computed
    said = []
    for (generation, group), places in groups_of(update, group_size).items():
        pair = [torch.cat([each.gradients[place] for place in places]) for each in (first, second)]
        where: Mapping[str, int] = {"update": update.number, "generation": generation, "group": group}
        said.append({**where, **likeness(*pair)._asdict(), "gradient_norm": _norm(pair[0])})
    return said


def _norm(vector: Tensor) -> float:
    return float(vector.double().norm())
