"""Building blocks of attention kernels: scores, and a running softmax over blocks of keys.

The running softmax (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867) consists of a maximum, a sum and a
mixture of values, in float32 and base 2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


def padded(size: int) -> int:
    """The block size for a head of this size, at least 16: `tl.dot` needs that many."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def tanh(x):
    # Computed from e^-2|x|, which cannot overflow.
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
    """Add a block of scores [M, N] and values [N, Dv] to the running softmax: maximum, sum [M], mixture [M, Dv].

    Multiplying by `unit`, a positive number, gives scores in units of log 2; inside the exponential that is free.
    """
    higher = tl.maximum(highest, tl.max(scores, 1) * unit)
    # A query that has seen no key yet, because its window begins in a later block, has -inf; -inf - -inf is NaN.
    anchor = tl.where(higher > -INF, higher, 0.0)
    weights = tl.exp2(scores * unit - anchor[:, None])
    fade = tl.exp2(highest - anchor)
    total = total * fade + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def start_of(sinks, heads, is_head, counts, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The running softmax before any key: empty, or the sink's score, whose value is zero."""
    highest = tl.full(heads.shape, -INF, tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2E
        highest = tl.where(counts, sink, highest)
        total = tl.where(counts, 1.0, total)
    return highest, total, tl.zeros((heads.shape[0], BLOCK_DV), tl.float32)


@triton.jit
def join(highest, total, mixed, highest_b, total_b, mixed_b):
    """Merge two running softmaxes over different keys."""
    higher = tl.maximum(highest, highest_b)
    anchor = tl.where(higher > -INF, higher, 0.0)
    fade, fade_b = tl.exp2(highest - anchor), tl.exp2(highest_b - anchor)
    return higher, total * fade + total_b * fade_b, mixed * fade[:, None] + mixed_b * fade_b[:, None]
