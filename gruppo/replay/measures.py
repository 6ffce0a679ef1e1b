"""What is reported about an update and its groups: losses, metrics, and the similarity of two gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.replay.compare import length_shares, likeness
from gruppo.replay.compute import Computed
from gruppo.replay.record import RecordedUpdate

__all__ = ["groups_of", "of_groups", "of_update"]


def of_update(update: RecordedUpdate, computed: Sequence[Computed]) -> dict[str, Any]:
    """The values reported for one update; for two recipes, including the similarity of their gradients.

    `length_shares` are the shares of Σ|d loss / d log-prob| in the shortest quarter of the completions, the next
    quarter, … and the longest.
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
    """The rows of each group, keyed by generation and group, as indices into the lists of `Computed`."""
    places: dict[tuple[int, int], list[int]] = {}
    numbers = [(g, r) for batch in update.micro_batches for g, r in zip(batch.generation, batch.row, strict=True)]
    for place, (generation, row) in enumerate(numbers):
        places.setdefault((generation, row // group_size), []).append(place)
    return places


def of_groups(update: RecordedUpdate, computed: Sequence[Computed], group_size: int) -> list[dict[str, Any]]:
    """The similarity of two gradients in each group of an update."""
    first, second = computed
    said = []
    for (generation, group), places in groups_of(update, group_size).items():
        pair = [torch.cat([each.gradients[place] for place in places]) for each in (first, second)]
        where: Mapping[str, int] = {"update": update.number, "generation": generation, "group": group}
        said.append({**where, **likeness(*pair)._asdict(), "gradient_norm": _norm(pair[0])})
    return said


def _norm(vector: Tensor) -> float:
    return float(vector.double().norm())
