"""Correction for a sampler whose numerics differ from the trainer's: importance weights ρ, without gradient."""

import math

import torch
from torch import Tensor

from gruppo.algo.tensors import masked_sum, widen

__all__ = ["MODES", "importance_weights"]

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@torch.no_grad()
def importance_weights(
    old_logps_BT: Tensor,
    sampler_logps_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """ρ = exp(ℓ_old − ℓ_sampler) per token (B, T), or its product over the row (B, 1) for the "sequence" modes.

    "truncate" clamps ρ to [clip_min, clip_max] (None leaves a side open), "mask" keeps ρ inside that band and makes it
    0 outside. Masked tokens, and tokens whose sampler log-prob is unknown (NaN), count as ρ = 1 before clamping.
    """
    if mode not in MODES:
        raise ValueError(f"importance sampling mode must be one of {MODES}, not {mode!r}")
    difference_BT = widen(old_logps_BT) - widen(sampler_logps_BT)
    difference_BT = difference_BT.masked_fill(difference_BT.isnan() | ~mask_BT.bool(), 0.0)
    level, treatment = mode.split("_")
    log_weights = masked_sum(difference_BT, mask_BT, dim=1, keepdim=True) if level == "sequence" else difference_BT
    weights = log_weights.exp()
    low = 0.0 if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if treatment == "truncate":
        return weights.clamp(low, high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)
