"""Statistics that skip NaN: a missing reward is not a zero reward."""

import torch
from torch import Tensor

__all__ = ["nancenter", "nanmax", "nanmin", "nanstd"]

Dims = int | tuple[int, ...] | None


def nancenter(x: Tensor, dim: Dims = None) -> Tensor:
    """`x` minus its mean over the non-NaN values along `dim`; same shape as `x`, NaN stays NaN.

    Values are shifted by their maximum first, because the rounded mean of n equal numbers need not be that number:
    equal values come out as exactly 0, and an infinite value as NaN instead of spreading −inf over its neighbours.
    """
    dims = tuple(range(x.ndim)) if dim is None else dim
    shifted = x - torch.where(x.isnan(), -torch.inf, x).amax(dims, keepdim=True)
    return shifted - shifted.nanmean(dims, keepdim=True)


def nanstd(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Bessel-corrected standard deviation of the non-NaN values along `dim` (all of them by default).

    NaN where fewer than two values remain; exactly 0 where the values are equal.
    """
    dims = tuple(range(x.ndim)) if dim is None else dim
    missing = x.isnan()
    n = (~missing).sum(dims, keepdim=keepdim)
    squares = nancenter(x, dims).square().masked_fill(missing, 0.0).sum(dims, keepdim=keepdim)
    return torch.where(n > 1, (squares / (n - 1)).sqrt(), torch.nan)


def nanmin(x: Tensor) -> Tensor:
    """Smallest non-NaN value of a 1-D tensor, as a 0-d tensor; NaN if there is none."""
    return -nanmax(-x)


def nanmax(x: Tensor) -> Tensor:
    """Largest non-NaN value of a 1-D tensor, as a 0-d tensor; NaN if there is none."""
    missing = x.isnan()
    if x.numel() == 0:
        return x.new_full((), torch.nan)
    return torch.where(missing.all(), torch.nan, torch.where(missing, -torch.inf, x).max())
