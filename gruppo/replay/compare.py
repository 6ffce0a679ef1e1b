"""Similarity of two gradients, or of two sets of rewards: pure functions."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

__all__ = ["Likeness", "cosine", "length_shares", "likeness", "rank_correlation", "spread_changes"]


class Likeness(NamedTuple):
    """The similarity of two gradients.

    Example, of which the second points the same way, twice as long:
        likeness(torch.tensor([1.0, -1.0]), torch.tensor([2.0, -2.0])) == Likeness(1.0, 2.0, 0.0)
    """

    cosine: float  # NaN if one of them is 0
    norm_ratio: float  # the second norm over the first; NaN if the first is 0
    sign_disagreement: float  # share of opposite signs among the entries where both are nonzero


def cosine(first: Tensor, second: Tensor) -> float:
    """The cosine of the angle between two vectors; NaN if one is 0."""
    a, b = first.double(), second.double()
    norms = a.norm() * b.norm()
    return float((a @ b) / norms) if norms > 0 else math.nan


def likeness(first: Tensor, second: Tensor) -> Likeness:
    """The similarity of two vectors of the same shape."""
    norms = float(first.double().norm()), float(second.double().norm())
    both = (first != 0) & (second != 0)
    opposite = (first.sign() != second.sign()) & both
    return Likeness(
        cosine(first, second),
        norms[1] / norms[0] if norms[0] else math.nan,
        float(opposite.sum() / both.sum()) if both.any() else 0.0,
    )


def length_shares(gradients: Sequence[Tensor], parts: int = 4) -> list[float]:
    """The share of Σ|gradient| in the shortest quarter of the completions, the next quarter, … and the longest.

    Example, two completions of two tokens and two of six, all gradients alike:
        length_shares([torch.ones(2), torch.ones(2), torch.ones(6), torch.ones(6)], parts=2) == [0.25, 0.75]
    """
    order = sorted(range(len(gradients)), key=lambda i: (len(gradients[i]), i))
    sums = [float(gradients[i].double().abs().sum()) for i in order]
    total = sum(sums)
    bounds = [round(len(order) * part / parts) for part in range(parts + 1)]
    return [sum(sums[a:b]) / total if total else 0.0 for a, b in pairwise(bounds)]


def rank_correlation(first_PG: Tensor, second_PG: Tensor) -> list[float]:
    """Kendall's τ-b of each group that has spread under both rewards; rows where either is NaN are left out.

    Example, a pair that changed places among three:
        rank_correlation(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0, 1.0, 3.0]])) == [1 / 3]
    """
    found = []
    for first, second in zip(first_PG, second_PG, strict=True):
        known = ~(first.isnan() | second.isnan())
        a, b = ((x[known][:, None] - x[known][None, :]).sign().triu(1) for x in (first, second))
        norms = math.sqrt(float((a != 0).sum()) * float((b != 0).sum()))
        if norms:
            found.append(float((a * b).sum()) / norms)
    return found


def spread_changes(before_PG: Tensor, after_PG: Tensor) -> tuple[list[int], list[int]]:
    """The groups that gain spread (all rewards were equal, and no longer are), and the groups that lose it."""
    had, has = _differs(before_PG), _differs(after_PG)
    return (has & ~had).nonzero()[:, 0].tolist(), (had & ~has).nonzero()[:, 0].tolist()


def _differs(rewards_PG: Tensor) -> Tensor:
    """Bool (P,): whether two rows of the group have different rewards."""
    high = rewards_PG.nan_to_num(nan=-math.inf, neginf=-math.inf).amax(1)
    low = rewards_PG.nan_to_num(nan=math.inf, posinf=math.inf).amin(1)
    return high > low
