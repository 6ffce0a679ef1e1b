"""The entropy bonus and the controller of its coefficient (Skywork-OR1, https://arxiv.org/abs/2505.22312)."""

from torch import Tensor

from gruppo.algo.tensors import count, masked_sum

__all__ = ["active_entropy_coef", "entropy_bonus", "next_entropy_coef"]


def entropy_bonus(entropy_BT: Tensor, mask_BT: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Mean entropy over the tokens of `mask_BT`, differentiable, 0-d; 0 when there are no tokens.

    When the rows are only part of the set that the mean is taken over, `tokens` (B, 1) gives the number of tokens to
    divide by.
    """
    tokens = count(mask_BT, entropy_BT) if tokens is None else tokens
    return masked_sum(entropy_BT / tokens.clamp(min=1.0), mask_BT)


def active_entropy_coef(coef: float, last_entropy: float, target: float, adaptive: bool) -> float:
    """The coefficient to apply in this update: `coef`, but 0 while the previous update's entropy is above `target`.

    `last_entropy` starts at +inf, so an adaptive run begins without a bonus.
    """
    return coef if not adaptive or last_entropy <= target else 0.0


def next_entropy_coef(coef: float, mean_entropy: float, target: float, delta: float, low: float, high: float) -> float:
    """The coefficient after an update whose mean entropy was `mean_entropy`: up by `delta` if low, else down."""
    return min(coef + delta, high) if mean_entropy <= target else max(coef - delta, low)
