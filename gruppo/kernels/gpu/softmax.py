"""Pieces of attention kernels: scores, and a softmax that is kept running while blocks of keys go by.

The running softmax (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867) is a maximum, a sum and a mixture of
values, in float32 and powers of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


def padded(size: int) -> int:
    """The block that holds a head of this size; a product of blocks has at least 16 rows."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def tanh(x):
    # By the side of e^-2|x| that cannot overflow.
    small = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    bounded = (1 - small) / (1 + small)
    return tl.where(x < 0, -bounded, bounded)


@triton.jit
def scores_of(q, keys, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores of queries [M, D] and keys [N, D], scaled and capped, in units of log 2: float32 [M, N]."""
    products = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if HAS_SOFTCAP:
        return tanh(products * (scale / softcap)) * (softcap * LOG2E)
    return products * (scale * LOG2E)


@triton.jit
def accumulate(scores, values, highest, total, mixed, unit=1.0):
    """Take a block of scores [M, N] and values [N, Dv] into the running softmax: maximum, sum [M], mixture [M, Dv].

    Scores are in units of log 2 when multiplied by `unit`, a positive number; inside the exponential that is free.
    """
    higher = tl.maximum(highest, tl.max(scores, 1) * unit)
    # A query that has seen no key yet, the window's edge being in a later block, has -inf here; -inf - -inf is NaN.
    anchor = tl.where(higher > -INF, higher, 0.0)
    weights = tl.exp2(scores * unit - anchor[:, None])
    fade = tl.exp2(highest - anchor)
    total = total * fade + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def start_of(sinks, heads, is_head, counts, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The softmax before any key: nothing, or the sink's score, whose value is zero."""
    highest = tl.full(heads.shape, -INF, tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2E
        highest = tl.where(counts, sink, highest)
        total = tl.where(counts, 1.0, total)
    return highest, total, tl.zeros((heads.shape[0], BLOCK_DV), tl.float32)


@triton.jit
def join(highest, total, mixed, highest_b, total_b, mixed_b):
    """One running softmax of two over different keys."""
    higher = tl.maximum(highest, highest_b)
    anchor = tl.where(higher > -INF, higher, 0.0)
    fade, fade_b = tl.exp2(highest - anchor), tl.exp2(highest_b - anchor)
    return higher, total * fade + total_b * fade_b, mixed * fade[:, None] + mixed_b * fade_b[:, None]
