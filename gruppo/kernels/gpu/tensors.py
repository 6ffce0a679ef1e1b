"""Questions that several kernels have about the tensors they are given."""

import torch
from torch import Tensor

__all__ = ["needs_gradient", "with_rows"]


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def with_rows(x: Tensor) -> Tensor:
    """Itself, or a copy if there are gaps in the last dimension: a gradient may come with any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
