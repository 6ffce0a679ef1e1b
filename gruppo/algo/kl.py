"""Estimators of KL(policy ‖ reference) from one sampled token: http://joschu.net/blog/kl-approx.html."""

from torch import Tensor

from gruppo.algo.tensors import widen

__all__ = ["k1", "k3", "kl_to_reference"]


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """ℓ − ℓ_ref, elementwise: unbiased, may be negative."""
    return widen(logps) - widen(ref_logps)


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """exp(d) − d − 1 with d = ℓ_ref − ℓ, elementwise: unbiased on-policy and never negative."""
    d = k1(ref_logps, logps)
    return d.exp() - d - 1


def kl_to_reference(logps_BT: Tensor, ref_logps_BT: Tensor, ratio: Tensor, bias_correction: bool) -> Tensor:
    """k3 per token (B, T), times the differentiable importance `ratio` (B, T) or (B, 1) if `bias_correction`.

    The samples come from the old policy, so without the ratio the estimate is biased off-policy, and its gradient is
    not that of the KL even on-policy (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
    """
    kl_BT = k3(logps_BT, ref_logps_BT)
    return kl_BT * widen(ratio) if bias_correction else kl_BT
