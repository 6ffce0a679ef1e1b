"""Triton attention of packed prompts over the engine's key/value pool: causal, of variable length."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.kernels.gpu.blocks import Blocks, launch_fitting
from gruppo.kernels.gpu.softmax import INF, accumulate, padded, scores_of, start_of

__all__ = ["prefill_attention"]

# Padded head size -> queries per block, keys per block, warps, stages: the most that is tried.
PREFILL_HALF = {
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (128, 64, 4, 3),
    128: (128, 64, 8, 3),
    256: (128, 32, 8, 2),
    512: (64, 32, 8, 2),
}
PREFILL_FLOAT = {
    16: (32, 32, 4, 1),
    32: (32, 32, 4, 1),
    64: (32, 32, 8, 1),
    128: (32, 32, 8, 1),
    256: (16, 16, 4, 1),
    512: (16, 16, 8, 1),
}


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
    highest, total, mixed = start_of(sinks, same_head, is_query, is_query, BLOCK_DV, HAS_SINKS)

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
        scores = tl.where(seen, scores_of(q, keys, scale, softcap, HAS_SOFTCAP), -INF)
        values = tl.load(
            pool_v + place[:, None] * stride_vs + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0
        )
        highest, total, mixed = accumulate(scores, values, highest, total, mixed)

    at = (token * heads + head)[:, None] * DV + dv[None, :]
    tl.store(out + at, mixed / total[:, None], mask=is_query[:, None] & (dv < DV)[None, :])


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
    block_d, block_dv = padded(size), padded(size_v)
    table = PREFILL_FLOAT if pool_k.dtype == torch.float32 else PREFILL_HALF
    most = Blocks(*table[max(block_d, block_dv)])
    if max_query <= 16:  # a short chunk after a long past: as in decoding, most of a larger block would be padding
        most = most._replace(queries=16, warps=4)
    out = query.new_empty(tokens, heads, size_v)
    shape = dict(
        D=size, DV=size_v, GROUP=heads // kv_heads, BLOCK_D=block_d, BLOCK_DV=block_dv,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
    )  # fmt: skip

    def launch(blocks: Blocks) -> None:
        _prefill_kernel[(triton.cdiv(max_query, blocks.queries), len(starts), heads)](
            query, pool_k, pool_v, starts, past, cu_query, sinks, out, scale, softcap or 1.0, window or 0,
            *query.stride()[:2], *pool_k.stride()[:2], *pool_v.stride()[:2], heads, **shape, **blocks.options,
        )  # fmt: skip

    launch_fitting(launch, most, ("prefill", query.device, pool_k.dtype, *shape.values()))
    return out
