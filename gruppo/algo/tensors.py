"""Helpers that every formula uses: half precision is widened, and masked positions never affect the result."""

from torch import Tensor, float32

__all__ = ["count", "masked_sum", "widen"]


def widen(x: Tensor) -> Tensor:
    """`x` in float32 if it is narrower (float16, bfloat16, integer, bool), otherwise `x` itself."""
    return x if x.is_floating_point() and x.itemsize >= 4 else x.to(float32)


def masked_sum(x: Tensor, mask_BT: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Sum of `x` (B, T) or (B, 1) over the positions where `mask_BT` is on.

    Selects instead of multiplying, so an infinity or a NaN under the mask contributes exactly 0, also to the gradient.
    """
    kept = widen(x).expand(mask_BT.shape).masked_fill(~mask_BT.bool(), 0.0)
    return kept.sum() if dim is None else kept.sum(dim, keepdim=keepdim)


def count(mask_BT: Tensor, like: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Number of positions that are on, in the (widened) dtype of `like`."""
    on = mask_BT.bool().to(widen(like).dtype)
    return on.sum() if dim is None else on.sum(dim, keepdim=keepdim)
