"""Process supervision: rewards for the steps of a completion, https://arxiv.org/abs/2402.03300, section 4.1.3.

The S steps of a whole generation batch are given as flat tensors. Step s belongs to row `row_S[s]` (rows in group
order, `group_size` consecutive rows per prompt), ends with that row's token `end_S[s]`, counted from 0, and has the
reward `value_S[s]`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gruppo.algo.tensors import widen

__all__ = ["NormalizedSteps", "normalize_steps", "step_advantages"]

_EPS = 1e-4


class NormalizedSteps(NamedTuple):
    """The rewards of steps, normalised within their group."""

    value_S: Tensor
    """Always finite: 0 if the values of a group are beyond float32."""
    std_P: Tensor
    """The standard deviation of each group's steps (of all steps if scale="batch"); 0 means nothing to learn."""


def normalize_steps(value_S: Tensor, row_S: Tensor, *, rows: int, group_size: int, scale: str) -> NormalizedSteps:
    """(v − mean of the group's steps) / (σ + 1e-4), over all steps of all completions of a group.

    `scale` is "group", "batch" (σ of all steps) or "none" (no division; `std_P` is then the group's). The only step of
    a group has nothing to be compared with and gets 0.

    Example, a row with steps worth 1 and 0, its sibling with one worth 1:
        normalize_steps([1, 0, 1], [0, 0, 1], rows=2, group_size=2, scale="none").value_S == [1/3, -2/3, 1/3]
    """
    value_S = widen(value_S)
    group_S = row_S // group_size
    groups = rows // group_size

    def per_group(values_S: Tensor, reduce: str, start: float) -> Tensor:
        return values_S.new_full((groups,), start).scatter_reduce(0, group_S, values_S, reduce)

    # Shift by the largest value, so that equal steps come out as exactly 0.
    shifted_S = value_S - per_group(value_S, "amax", -torch.inf)[group_S]
    n_P = per_group(torch.ones_like(value_S), "sum", 0.0)
    centered_S = shifted_S - (per_group(shifted_S, "sum", 0.0) / n_P.clamp(min=1))[group_S]
    std_P = (per_group(centered_S.square(), "sum", 0.0) / (n_P - 1).clamp(min=1)).sqrt()
    if scale == "batch":
        std_P = (value_S.std() if len(value_S) > 1 else value_S.new_zeros(())).expand(groups)
    elif scale not in ("group", "none"):
        raise ValueError(f"scale must be 'group', 'batch' or 'none', not {scale!r}")
    scaled_S = centered_S if scale == "none" else centered_S / (std_P[group_S] + _EPS)
    return NormalizedSteps(scaled_S.masked_fill(~scaled_S.isfinite(), 0.0), std_P)


def step_advantages(value_S: Tensor, row_S: Tensor, end_S: Tensor, *, rows: int, tokens: int) -> Tensor:
    """(B, T): each token gets the sum of the steps of its row that end at it or after it.

    Example, a row of four tokens with steps that end at tokens 1 and 3:
        step_advantages([0.5, -1.0], [0, 0], [1, 3], rows=1, tokens=4) == [[-0.5, -0.5, -1.0, -1.0]]
    """
    ending_BT = value_S.new_zeros(rows, tokens).index_put_((row_S, end_S), value_S, accumulate=True)
    return ending_BT.flip(1).cumsum(1).flip(1)
