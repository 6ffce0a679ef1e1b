"""Checks and conversions of input tensors that several kernels need."""

import torch
from torch import Tensor

__all__ = ["needs_gradient", "with_rows"]


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def with_rows(x: Tensor) -> Tensor:
    """`x`, or a copy if its last dimension is not contiguous: a gradient may have any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
