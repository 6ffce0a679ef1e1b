"""Rewards to advantages: how much better than its group was this completion?

Rows are in group order, `group_size` consecutive rows per prompt. A NaN reward means "does not apply"; a row whose
rewards are all NaN is unscorable: left out of every mean and deviation, advantage 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gruppo.algo.stats import nancenter, nanstd
from gruppo.algo.tensors import widen

__all__ = [
    "Advantages",
    "combine_rewards",
    "frac_zero_std",
    "leave_one_out",
    "normalize_then_sum",
    "sum_of_normalized",
    "sum_then_normalize",
]

_EPS = 1e-4


class Advantages(NamedTuple):
    """Advantages of a generation batch and what they were made from, (B,) each.

    >>> sum_then_normalize(torch.tensor([[1.0], [0.0]]), torch.ones(1), group_size=2, scale="none").advantages_B
    tensor([ 0.5000, -0.5000])
    """

    advantages_B: Tensor
    """Always finite: a row without a baseline, or with one beyond float32, gets 0."""
    rewards_B: Tensor
    """The raw weighted sum of the rewards; NaN where unscorable."""
    std_B: Tensor
    """The standard deviation of the row's group (of the batch if scale="batch"); 0 means nothing to learn."""
    compared_B: Tensor | None = None
    """The values by which the rows of a group were compared, before a KL penalty; None if they are `rewards_B`."""


def combine_rewards(rewards_BR: Tensor, weights_R: Tensor) -> Tensor:
    """Weighted sum (B,) of the rewards that apply; NaN for a row where none applies."""
    rewards_BR = widen(rewards_BR)
    summed_B = (rewards_BR * weights_R.to(rewards_BR)).nansum(dim=1)
    return summed_B.masked_fill(rewards_BR.isnan().all(dim=1), torch.nan)


def sum_then_normalize(rewards_BR: Tensor, weights_R: Tensor, group_size: int, scale: str) -> Advantages:
    """A = (r − group mean) / (σ + 1e-4), with r the weighted sum of the rewards (B, R).

    `scale` is "group" (σ of the group: GRPO, https://arxiv.org/abs/2402.03300), "batch" (σ of all rows:
    https://arxiv.org/abs/2508.08221) or "none" (no division: Dr. GRPO, https://arxiv.org/abs/2503.20783; `std_B` is
    then the group's).
    """
    rewards_B = combine_rewards(rewards_BR, weights_R)
    rewards_PG = rewards_B.view(-1, group_size)
    centered_B = nancenter(rewards_PG, dim=1).view(-1)
    if scale == "batch":
        std_B = _std(rewards_B, dim=0).expand_as(rewards_B)
    elif scale in ("group", "none"):
        std_B = _std(rewards_PG, dim=1).expand_as(rewards_PG).reshape(-1)
    else:
        raise ValueError(f"scale must be 'group', 'batch' or 'none', not {scale!r}")
    advantages_B = centered_B if scale == "none" else centered_B / (std_B + _EPS)
    return Advantages(_finite(advantages_B), rewards_B, std_B)


def normalize_then_sum(rewards_BR: Tensor, weights_R: Tensor, group_size: int) -> Advantages:
    """Standardise each reward within its group, then the weighted sum of the results within the batch (GDPO).

    A reward with a small spread thus counts as much as one with a large spread, https://arxiv.org/abs/2601.05242.
    """
    summed_B = sum_of_normalized(rewards_BR, weights_R, group_size)
    std_B = _std(summed_B, dim=0).expand_as(summed_B)
    raw_B = combine_rewards(rewards_BR, weights_R)
    return Advantages(_finite(nancenter(summed_B) / (std_B + _EPS)), raw_B, std_B, summed_B)


def sum_of_normalized(rewards_BR: Tensor, weights_R: Tensor, group_size: int) -> Tensor:
    """Weighted sum (B,) of the rewards, each standardised within its group; NaN for a row where none applies.

    Two rewards that rank the rows in opposite order cancel each other, whatever the scale of their values:

    >>> sum_of_normalized(torch.tensor([[0.0, 9.0], [1.0, 0.0]]), torch.ones(2), group_size=2).abs() < 1e-3
    tensor([True, True])
    """
    rewards_PGR = widen(rewards_BR).unflatten(0, (-1, group_size))
    scaled_PGR = nancenter(rewards_PGR, dim=1) / (_std(rewards_PGR, dim=1) + _EPS)
    # A reward whose spread in its group is undefined (NaN) is skipped, but the row stays scorable.
    summed_B = (scaled_PGR.flatten(0, 1) * weights_R.to(scaled_PGR)).nansum(dim=1)
    return summed_B.masked_fill(rewards_BR.isnan().all(dim=1), torch.nan)


def leave_one_out(
    rewards_BR: Tensor,
    weights_R: Tensor,
    group_size: int,
    *,
    kl_penalty_B: Tensor | None = None,
    clip_range: tuple[float, float] | None = None,
    normalize: bool = False,
) -> Advantages:
    """RLOO: A = r − mean of the *other* scorable rows of the group, https://arxiv.org/abs/2402.14740.

    The weighted sum (B,) is first clamped to `clip_range`, then charged `kl_penalty_B` = β Σ_t (ℓ_old − ℓ_ref).
    `normalize` standardises the advantages over the whole batch.
    """
    raw_B = combine_rewards(rewards_BR, weights_R)
    clipped_B = raw_B if clip_range is None else raw_B.clamp(*clip_range)
    rewards_B = clipped_B if kl_penalty_B is None else clipped_B - kl_penalty_B.to(clipped_B)
    rewards_PG = rewards_B.view(-1, group_size)
    n_P1 = (~rewards_PG.isnan()).sum(dim=1, keepdim=True).to(rewards_PG)
    # r − (Σ r − r)/(n − 1) = (r − mean)·n/(n − 1), in a form that is exactly 0 for equal rewards.
    correction_P1 = torch.where(n_P1 > 1, n_P1 / (n_P1 - 1), torch.nan)
    advantages_B = (nancenter(rewards_PG, dim=1) * correction_P1).view(-1)
    if normalize:
        advantages_B = nancenter(advantages_B) / (nanstd(advantages_B) + _EPS)
    std_B = _std(rewards_PG, dim=1).expand_as(rewards_PG).reshape(-1)
    return Advantages(_finite(advantages_B), raw_B, std_B, clipped_B)


def frac_zero_std(std_B: Tensor) -> Tensor:
    """Share of rows whose rewards have no spread, 0-d; the same as the share of groups, which have equal size."""
    return std_B.isclose(torch.zeros_like(std_B)).float().mean()


def _std(x: Tensor, dim: int) -> Tensor:
    """`nanstd` along `dim`, keeping it; a single row (evaluation with one completion) has spread 0 rather than NaN."""
    if x.shape[dim] == 1:
        return torch.zeros_like(x)
    return nanstd(x, dim=dim, keepdim=True)


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), 0.0)
