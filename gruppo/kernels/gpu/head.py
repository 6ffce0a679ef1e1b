"""Triton kernels of the head: what happens to a block of logits between the matrix products.

Both read the block once and compute in float32; `gruppo.kernels.head` documents what they compute. The rows of a
block's buffer may be longer than the block is wide. Rows are read, and those of the gradient written, to the end of
the buffer: the last block of a vocabulary may have any width, and a mask of that width would prevent 16-byte accesses.
"""

import triton
import triton.language as tl
from torch import Tensor

from gruppo.kernels.head import Curve, Incoming, Running

__all__ = ["differentiate", "take_in"]

_INF = tl.constexpr(float("inf"))
_FLOOR = tl.constexpr(-1e4)  # e to this is 0, and so is 0 times this; 0 times -inf would be NaN
_TAKEN = 4096  # columns that a program adds to the running softmax at once
_DIFFERENTIATED = 2048  # columns per program of the backward pass


@triton.jit
def _bend(
    products, bias, column, readable, width, inner, outer, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """z = logit / temperature of a row's columns."""
    x = tl.load(products + column, mask=readable, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + column, mask=readable & (column < width), other=0.0).to(tl.float32)
    z = x * inner
    if CAPPED:
        # tanh from e^-2|z|, which cannot overflow.
        small = tl.exp(-2 * tl.abs(z))
        bounded = (1 - small) / (1 + small)
        z = tl.where(z < 0, -bounded, bounded) * outer
    return z


@triton.jit(do_not_specialize=["first", "width"])
def _take_in_kernel(
    products, bias, targets, highest, total, moment, picked, first, width, inner, outer, stride,
    HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: its row of the block is read once."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    place = tl.load(targets + row) - first
    inside = (place >= 0) & (place < width)
    z_picked = _bend(products, bias, place, inside, width, inner, outer, HAS_BIAS, CAPPED)
    tl.store(picked + row, z_picked, mask=inside)

    top, mass = tl.load(highest + row), tl.load(total + row)
    weighted = tl.load(moment + row) if ENTROPY else 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = _bend(products, bias, column, column < stride, width, inner, outer, HAS_BIAS, CAPPED)
        z = tl.where(column < width, z, -_INF)
        higher = tl.maximum(top, tl.max(z, 0))
        anchor = tl.where(higher > -_INF, higher, 0.0)  # only -inf so far: -inf - -inf is NaN
        moved = tl.maximum(top - anchor, _FLOOR)
        fade = tl.exp(moved)
        # The maxima may ignore a NaN. The sum of the masses includes it and stays NaN.
        below = z - anchor
        masses = tl.exp(below)
        if ENTROPY:
            moments = tl.where(below > -_INF, below, 0.0) * masses
            weighted = (weighted + moved * mass) * fade + tl.sum(moments, 0)
        mass = mass * fade + tl.sum(masses, 0)
        top = higher
    tl.store(highest + row, top)
    tl.store(total + row, mass)
    if ENTROPY:
        tl.store(moment + row, weighted)


@triton.jit(do_not_specialize=["first", "width"])
def _differentiate_kernel(
    products, bias, targets, logsumexp, by_logp, entropy, by_entropy, into, first, width, inner, outer,
    stride, stride_into,
    HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of one token. `into` may be `products`: each entry is read and written by the same program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(by_logp + row).to(tl.float32)
    incoming = tl.zeros((BLOCK,), tl.float32) + tl.abs(g)  # a block: the interpreter cannot widen a scalar mask
    if ENTROPY:
        g_entropy = tl.load(by_entropy + row).to(tl.float32)
        incoming += tl.abs(g_entropy)
    present = incoming != 0
    readable = (column < stride) & present
    z = _bend(products + row * stride, bias, column, readable, width, inner, outer, HAS_BIAS, CAPPED)
    log_p = z - tl.load(logsumexp + row)
    p = tl.exp(log_p)
    grad = tl.where(column == tl.load(targets + row) - first, g, 0.0) - g * p
    if ENTROPY:
        grad -= g_entropy * p * (tl.where(p > 0, log_p, 0.0) + tl.load(entropy + row))
    # The derivative of z with respect to the product; with a cap it is inner * outer * (1 - tanh²).
    slope = inner * (outer - z * z / outer) if CAPPED else inner
    grad = tl.where(present, grad * slope, 0.0)
    tl.store(into + row * stride_into + column, grad.to(into.dtype.element_ty), mask=column < stride_into)


def take_in(
    products: Tensor, bias: Tensor | None, targets: Tensor, first: int, curve: Curve, running: Running
) -> None:
    """Add a block to the running softmax: products (M, W) of the vocabulary entries starting at `first`."""
    tokens, width = products.shape
    block = min(_TAKEN, triton.next_power_of_2(products.stride(0)))  # the same for the last block, which is narrower
    _take_in_kernel[(tokens,)](
        products, bias, targets, *running, first, width, curve.inner, curve.outer or 1.0, products.stride(0),
        HAS_BIAS=bias is not None, CAPPED=curve.outer is not None, ENTROPY=running.moment is not None,
        BLOCK=block, num_warps=max(1, block // 512),
    )  # fmt: skip


def differentiate(
    products: Tensor, bias: Tensor | None, first: int, curve: Curve, incoming: Incoming, into: Tensor
) -> None:
    """Write the gradient of a block's products (M, W), given as in `take_in`, to `into`, which may be `products`.

    The rows of `into` are overwritten to the end of their buffer, beyond the width of the block.
    """
    tokens, width = products.shape
    block = min(_DIFFERENTIATED, triton.next_power_of_2(products.stride(0)))
    _differentiate_kernel[(tokens, triton.cdiv(width, block))](
        products, bias, *incoming, into, first, width, curve.inner, curve.outer or 1.0,
        products.stride(0), into.stride(0),
        HAS_BIAS=bias is not None, CAPPED=curve.outer is not None, ENTROPY=incoming.by_entropy is not None,
        BLOCK=block, num_warps=max(1, block // 512),
    )  # fmt: skip
