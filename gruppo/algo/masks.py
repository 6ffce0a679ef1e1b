"""Which tokens take part: truncation, high-entropy tokens, sequences that drifted too far off-policy."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from gruppo.algo.tensors import count, masked_sum, widen

__all__ = ["SLACK", "drop_rows", "entropy_threshold", "is_truncated", "off_policy_mask", "top_entropy_mask"]

# Relative and absolute: more than the float32 entropies of one token differ by in padded and in packed rows, less than
# those of different tokens usually do.
SLACK = (2e-5, 1e-6)


def is_truncated(completion_ids: Sequence[Sequence[int]], stop_ids: Collection[int]) -> list[bool]:
    """Whether each completion lacks a final stop token (end-of-sequence or padding), as an empty one does."""
    return [len(ids) == 0 or ids[-1] not in stop_ids for ids in completion_ids]


def drop_rows(mask_BT: Tensor, rows_B: Tensor | Sequence[bool]) -> Tensor:
    """`mask_BT` with the rows flagged in `rows_B` switched off; dtype kept."""
    dropped_B = torch.as_tensor(rows_B, dtype=torch.bool, device=mask_BT.device)
    return mask_BT.masked_fill(dropped_B.unsqueeze(1), 0)


def entropy_threshold(entropies_N: Tensor, quantile: float) -> Tensor:
    """The entropy (0-d) that the top share `quantile` of the tokens reaches, https://arxiv.org/abs/2506.01939.

    This is the (1 − quantile) quantile with linear interpolation, like `torch.quantile` but without its limit of
    16 million values, less `SLACK`, but by half of it at most; +inf when there are no tokens, so that nothing passes.

    Without the slack, rounding would decide: the quantile is often the entropy of a token, and tokens with the same
    context, such as the first ones of a group's completions, have equal entropies. All of them pass, or none.
    """
    if entropies_N.numel() == 0:
        return entropies_N.new_full((), torch.inf)
    sorted_N = widen(entropies_N).flatten().sort().values
    rank = (1.0 - quantile) * (sorted_N.numel() - 1)
    below, above = math.floor(rank), math.ceil(rank)
    reached = sorted_N[below].lerp(sorted_N[above], rank - below)
    relative, absolute = SLACK
    return reached * (1 - relative) - (reached / 2).clamp(0, absolute)


def top_entropy_mask(entropy_BT: Tensor, mask_BT: Tensor, threshold: Tensor | float) -> Tensor:
    """Loss tokens whose entropy is at least `threshold`, as a bool mask (B, T)."""
    return (widen(entropy_BT.detach()) >= threshold) & mask_BT.bool()


def off_policy_mask(
    advantages_B1: Tensor, logps_BT: Tensor, sampler_logps_BT: Tensor, mask_BT: Tensor, threshold: float
) -> Tensor:
    """Bool (B, 1): keep a sequence if A ≥ 0 or its mean drift ℓ_sampler − ℓ is at most `threshold`.

    Negative samples the policy has already moved away from are dropped (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
    Tokens with unknown (NaN) drift count as 0. Per-token advantages (B, T) give a mask (B, T).
    """
    drift_BT = widen(sampler_logps_BT) - widen(logps_BT.detach())
    drift_BT = drift_BT.masked_fill(drift_BT.isnan(), 0.0)
    length_B1 = count(mask_BT, drift_BT, dim=1, keepdim=True).clamp(min=1.0)
    drift_B1 = masked_sum(drift_BT, mask_BT, dim=1, keepdim=True) / length_B1
    return (advantages_B1 >= 0) | (drift_B1 <= threshold)
