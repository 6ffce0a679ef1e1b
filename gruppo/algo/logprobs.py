"""Log-probs and entropies of sampled tokens from full-vocabulary logits, without a second tensor of that size.

Both are autograd functions that process the rows in blocks. For the backward pass they keep only their inputs and at
most one number per row; the gradient is written into a single tensor.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gruppo.algo.tensors import widen

__all__ = ["entropy_from_logits", "selective_log_softmax"]

_CHUNK = 128


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """log softmax(logits / temperature) at `index` only: logits (…, V), index and result (…) or (…, K).

    Rows where `row_mask` (…) is off give 0 and get no gradient. Half-precision inputs are computed and returned in
    float32: a sum of log-probs rounded to bfloat16 is off by whole nats.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    one_per_row = index.ndim == logits.ndim - 1
    picked = index.unsqueeze(-1) if one_per_row else index
    out = cast(Tensor, _SelectiveLogSoftmax.apply(logits, picked, float(temperature)))
    if row_mask is not None:
        out = out.masked_fill(~row_mask.bool().unsqueeze(-1), 0.0)
    return out.squeeze(-1) if one_per_row else out


def entropy_from_logits(logits: Tensor, chunk_size: int = _CHUNK, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature), `chunk_size` rows at a time: logits (…, V), result (…).

    Half-precision inputs are computed and returned in float32.
    """
    return cast(Tensor, _Entropy.apply(logits, chunk_size, temperature))


class _SelectiveLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, temperature: float) -> Tensor:
        wide = widen(logits.new_empty(0))
        out, logsumexp = wide.new_empty(index.shape), wide.new_empty((*logits.shape[:-1], 1))
        for x, i, o, z in _blocks(_CHUNK, logits, index, out, logsumexp):
            scaled = widen(x) / temperature
            z.copy_(scaled.logsumexp(-1, keepdim=True))
            o.copy_(scaled.gather(-1, i) - z)
        ctx.save_for_backward(logits, index, logsumexp)
        ctx.temperature = temperature
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, index, logsumexp = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for x, i, z, g, into in _blocks(_CHUNK, logits, index, logsumexp, grads[0], grad_logits):
            g = widen(g)
            block = (widen(x) / ctx.temperature).sub_(z).exp_().mul_(-g.sum(-1, keepdim=True))
            # A row whose incoming gradient is 0 must not pass on a NaN from its logits.
            block.masked_fill_((g == 0).all(-1, keepdim=True), 0.0)
            into.copy_(block.scatter_add_(-1, i, g).div_(ctx.temperature))
        return grad_logits, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, chunk_size: int, temperature: float) -> Tensor:
        out = widen(logits.new_empty(0)).new_empty((*logits.shape[:-1], 1))
        for x, o in _blocks(chunk_size, logits, out):
            o.copy_(_surprise(x, temperature)[1])
        ctx.save_for_backward(logits)
        ctx.chunk_size, ctx.temperature = chunk_size, temperature
        return out.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (logits,) = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for x, g, into in _blocks(ctx.chunk_size, logits, grads[0].unsqueeze(-1), grad_logits):
            surprise, entropy, p = _surprise(x, ctx.temperature)
            block = p.mul_(surprise.sub_(entropy)).mul_(widen(g) / ctx.temperature)
            into.copy_(block.masked_fill_(g == 0, 0.0))
        return grad_logits, None, None


def _surprise(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """−log p with 0 for an impossible token (it adds nothing to the entropy), the entropy, and p."""
    log_p = (widen(logits) / temperature).log_softmax(-1)
    p = log_p.exp()
    surprise = log_p.neg_().masked_fill_(p == 0, 0.0)
    return surprise, (p * surprise).sum(-1, keepdim=True), p


def _blocks(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching views of at most `rows` rows; splits dimension by dimension, so slices need not be contiguous."""
    if tensors[0].ndim == 1:
        tensors = tuple(t.unsqueeze(0) for t in tensors)
    if tensors[0].ndim > 2:
        for parts in zip(*tensors, strict=True):
            yield from _blocks(rows, *parts)
    else:
        yield from zip(*(t.split(rows) for t in tensors), strict=True)
