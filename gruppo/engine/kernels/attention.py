"""Triton attention over the engine's key/value pool: one query per row (decode) and packed sequences (prefill).

A row's context is two ranges of places, its prompt's and its own tail's. Both kernels number the keys 0, 1, ... across
that seam and turn a number into a place on the way, so no block of keys is left half empty where the ranges meet.
Softmax is kept running (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867) in float32 and powers of two.
Places are int64: a pool's elements can number more than 2³¹.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["decode_attention", "prefill_attention"]

_LOG2E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))

# Padded head size -> keys per block, warps, stages. By what fits: three decode programs share a multiprocessor.
_DECODE_HALF = {16: (128, 4, 3), 32: (128, 4, 3), 64: (128, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3), 512: (16, 4, 3)}
_DECODE_FLOAT = {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 2), 128: (32, 4, 2), 256: (16, 4, 2), 512: (16, 4, 1)}
# Padded head size -> queries per block, keys per block, warps, stages.
_PREFILL_HALF = {
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (128, 64, 4, 3),
    128: (128, 64, 8, 3),
    256: (128, 32, 8, 2),
    512: (64, 32, 8, 2),
}
_PREFILL_FLOAT = {
    16: (32, 32, 4, 1),
    32: (32, 32, 4, 1),
    64: (32, 32, 8, 1),
    128: (32, 32, 8, 1),
    256: (16, 16, 4, 1),
    512: (16, 16, 8, 1),
}


@triton.jit
def _scores(q, keys, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores of queries [M, D] and keys [N, D], scaled and capped, in units of log 2: float32 [M, N]."""
    products = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if HAS_SOFTCAP:
        x = products * (scale / softcap)
        # tanh by the side of e^-2|x| that cannot overflow.
        small = tl.exp2(tl.abs(x) * (-2 * _LOG2E))
        bounded = (1 - small) / (1 + small)
        return tl.where(x < 0, -bounded, bounded) * (softcap * _LOG2E)
    return products * (scale * _LOG2E)


@triton.jit
def _accumulate(scores, values, highest, total, mixed):
    """Take a block of scores [M, N] and values [N, Dv] into the running softmax: maximum, sum [M], mixture [M, Dv]."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    # A query that has seen no key yet, the window's edge being in a later block, has -inf here; -inf - -inf is NaN.
    anchor = tl.where(higher > -_INF, higher, 0.0)
    weights = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(highest - anchor)
    total = total * fade + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def _start(sinks, heads, is_head, counts, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The softmax before any key: nothing, or the sink's score, whose value is zero."""
    highest = tl.full(heads.shape, -_INF, tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2E
        highest = tl.where(counts, sink, highest)
        total = tl.where(counts, 1.0, total)
    return highest, total, tl.zeros((heads.shape[0], BLOCK_DV), tl.float32)


@triton.jit
def _decode_kernel(
    query, pool_k, pool_v, prompt_start, prompt_len, tail_start, tail_len, sinks,
    out, part_max, part_sum, scale, softcap, window,
    stride_qb, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head of one row, over one split of the row's visible keys."""
    # The key heads of a row are neighbours in memory, the rows of a group share a prompt: launched side by side.
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prompt = tl.load(prompt_len + row).to(tl.int32)
    context = prompt + tl.load(tail_len + row).to(tl.int32)
    prompt_base = tl.load(prompt_start + row)
    tail_base = tl.load(tail_start + row) - prompt
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context - window, 0)
    blocks = tl.cdiv(context - first, BLOCK_N)
    per_split = tl.cdiv(blocks, SPLITS)
    from_block = split * per_split

    g, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    is_head, head = g < GROUP, kv_head * GROUP + g
    q_at = query + row.to(tl.int64) * stride_qb + head[:, None] * stride_qh + d[None, :]
    q = tl.load(q_at, mask=is_head[:, None] & (d < D)[None, :], other=0.0).to(pool_k.dtype.element_ty)
    pool_k += kv_head * stride_kh
    pool_v += kv_head * stride_vh
    highest, total, mixed = _start(sinks, head, is_head, split == 0, BLOCK_DV, HAS_SINKS)

    for block in range(from_block, tl.minimum(from_block + per_split, blocks)):
        key = first + block * BLOCK_N + n
        seen = key < context
        place = tl.where(key < prompt, prompt_base, tail_base) + key
        keys = tl.load(
            pool_k + place[:, None] * stride_ks + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0
        )
        scores = tl.where(seen[None, :], _scores(q, keys, scale, softcap, HAS_SOFTCAP), -_INF)
        values = tl.load(
            pool_v + place[:, None] * stride_vs + dv[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0
        )
        highest, total, mixed = _accumulate(scores, values, highest, total, mixed)

    row_head = row.to(tl.int64) * (tl.num_programs(0) * GROUP) + head
    at = row_head * SPLITS + split
    if SPLITS == 1:
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    else:
        tl.store(part_max + at, highest, mask=is_head)
        tl.store(part_sum + at, total, mask=is_head)
    tl.store(out + at[:, None] * DV + dv[None, :], mixed, mask=is_head[:, None] & (dv < DV)[None, :])


@triton.jit
def _merge_kernel(
    part_out, part_max, part_sum, out, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One softmax of a row and head's splits: maxima and sums [rows·heads, splits], mixtures [..., splits, Dv]."""
    at = tl.program_id(0).to(tl.int64)
    s, dv = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    is_split = s < SPLITS
    highest = tl.load(part_max + at * SPLITS + s, mask=is_split, other=-_INF)
    top = tl.max(highest, 0)
    # A split without keys has maximum -inf and weight 0. Where none has keys, the result is zero.
    weight = tl.exp2(highest - tl.where(top > -_INF, top, 0.0))
    total = tl.sum(weight * tl.load(part_sum + at * SPLITS + s, mask=is_split, other=0.0), 0)
    mixed = tl.load(
        part_out + (at * SPLITS + s)[:, None] * DV + dv[None, :],
        mask=is_split[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    merged = tl.sum(mixed * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + at * DV + dv, merged, mask=dv < DV)


@triton.jit
def _prefill_kernel(
    query, pool_k, pool_v, starts, past, cu_query, sinks, out, scale, softcap, window,
    stride_qn, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, heads,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One block of a sequence's queries, one head, over the keys any of them sees."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    query_first = tl.load(cu_query + sequence)
    queries = tl.load(cu_query + sequence + 1) - query_first
    m_first = tl.program_id(0) * BLOCK_M
    if m_first >= queries:
        return
    before = tl.load(past + sequence).to(tl.int32)
    base = tl.load(starts + sequence)
    kv_head = head // GROUP

    m, n = m_first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    position, is_query = before + m, m < queries
    token = (query_first + m).to(tl.int64)
    q_at = query + token[:, None] * stride_qn + head * stride_qh + d[None, :]
    q = tl.load(q_at, mask=is_query[:, None] & (d < D)[None, :], other=0.0).to(pool_k.dtype.element_ty)
    pool_k += kv_head * stride_kh
    pool_v += kv_head * stride_vh
    same_head = tl.zeros((BLOCK_M,), tl.int32) + head
    highest, total, mixed = _start(sinks, same_head, is_query, is_query, BLOCK_DV, HAS_SINKS)

    end = before + tl.minimum(m_first + BLOCK_M, queries)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(before + m_first - window + 1, 0)
    for key_first in range(first, end, BLOCK_N):
        key = key_first + n
        there = key < end
        place = base + key
        keys = tl.load(
            pool_k + place[:, None] * stride_ks + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
        )
        seen = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen &= position[:, None] - key[None, :] < window
        scores = tl.where(seen, _scores(q, keys, scale, softcap, HAS_SOFTCAP), -_INF)
        values = tl.load(
            pool_v + place[:, None] * stride_vs + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0
        )
        highest, total, mixed = _accumulate(scores, values, highest, total, mixed)

    at = (token * heads + head)[:, None] * DV + dv[None, :]
    tl.store(out + at, mixed / total[:, None], mask=is_query[:, None] & (dv < DV)[None, :])


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def decode_attention(
    query: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    prompt_start: Tensor,
    prompt_len: Tensor,
    tail_start: Tensor,
    tail_len: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    splits: int = 1,
) -> Tensor:
    """`gruppo.engine.reference.decode_attention` on a GPU. The keys of a row are divided among `splits` programs.

    Lengths are read on the device and nothing is synchronised: it can be captured in a CUDA graph.
    """
    (batch, heads, size), (_, kv_heads, size_v) = query.shape, pool_v.shape
    block_d, block_dv = _padded(size), _padded(size_v)
    table = _DECODE_FLOAT if pool_k.dtype == torch.float32 else _DECODE_HALF
    block_n, warps, stages = table[max(block_d, block_dv)]
    out = query.new_empty(batch, heads, size_v)
    target, part_max, part_sum = out, None, None
    if splits > 1:
        target = query.new_empty(batch, heads, splits, size_v, dtype=torch.float32)
        part_max, part_sum = target.new_empty(2, batch, heads, splits)
    _decode_kernel[(kv_heads, batch, splits)](
        query, pool_k, pool_v, prompt_start, prompt_len, tail_start, tail_len, sinks,
        target, part_max, part_sum, scale, softcap or 1.0, window or 0,
        *query.stride()[:2], *pool_k.stride()[:2], *pool_v.stride()[:2],
        D=size, DV=size_v, GROUP=heads // kv_heads,
        BLOCK_G=_padded(heads // kv_heads), BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_DV=block_dv,
        SPLITS=splits, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(batch * heads,)](
            target, part_max, part_sum, out, DV=size_v, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_DV=block_dv, num_warps=1 if splits < 8 else 4,
        )  # fmt: skip
    return out


def prefill_attention(
    query: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    starts: Tensor,
    past: Tensor,
    cu_query: Tensor,
    *,
    max_query: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`gruppo.engine.reference.prefill_attention` on a GPU; `max_query` bounds the queries of one sequence."""
    (tokens, heads, size), (_, kv_heads, size_v) = query.shape, pool_v.shape
    block_d, block_dv = _padded(size), _padded(size_v)
    table = _PREFILL_FLOAT if pool_k.dtype == torch.float32 else _PREFILL_HALF
    block_m, block_n, warps, stages = table[max(block_d, block_dv)]
    if max_query <= 16:  # a short chunk after a long past: as in decoding, most of a larger block would be padding
        block_m, warps = 16, 4
    out = query.new_empty(tokens, heads, size_v)
    _prefill_kernel[(triton.cdiv(max_query, block_m), len(starts), heads)](
        query, pool_k, pool_v, starts, past, cu_query, sinks, out, scale, softcap or 1.0, window or 0,
        *query.stride()[:2], *pool_k.stride()[:2], *pool_v.stride()[:2], heads,
        D=size, DV=size_v, GROUP=heads // kv_heads,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_DV=block_dv,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
