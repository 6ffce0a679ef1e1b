"""Triton attention of one query per row over the engine's key/value pool.

A row's context is two ranges of places: its prompt and its own tail. The kernel numbers the keys 0, 1, ... across both
ranges and maps each number to a place when it loads the key, so no block of keys is left half empty where the ranges
meet. Rows of one group share their prompt: in large batches a separate kernel reads each prompt once for several rows,
and the decode kernel continues from its partial softmax. Places are int64: a pool can have more than 2³¹ elements.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.kernels.gpu.blocks import Blocks, launch_fitting
from gruppo.kernels.gpu.softmax import INF, accumulate, join, padded, scores_of, start_of

__all__ = ["decode_attention"]

# Padded head size -> keys per block, warps, stages: the most that is tried. The entries for 64 and 128 are the fastest
# of 15 on an H200.
_DECODE_HALF = {16: (64, 2, 3), 32: (64, 2, 3), 64: (64, 2, 3), 128: (128, 4, 2), 256: (32, 4, 3), 512: (16, 4, 2)}
_DECODE_FLOAT = {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 2), 128: (32, 4, 2), 256: (16, 4, 2), 512: (16, 4, 1)}
# The same for prompts shared by several rows, with the queries per block in front.
_PROMPT_HALF = {
    16: (64, 64, 4, 3),
    32: (64, 64, 4, 3),
    64: (64, 64, 4, 3),
    128: (64, 64, 4, 3),
    256: (64, 32, 4, 2),
    512: (32, 16, 4, 2),
}
_PROMPT_FLOAT = {size: (32, *blocks) for size, blocks in _DECODE_FLOAT.items()}
_ENOUGH_PROGRAMS = 100  # keep a GPU busy with the prompts of a batch; with fewer programs, the keys are split


@triton.jit(do_not_specialize=["batch"])
def _prompt_kernel(
    query, pool_k, pool_v, prompt_start, prompt_len, tail_len, out, part_max, part_sum, batch, scale, softcap, window,
    stride_qb, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head of several rows, over one split of the keys of each prompt among these rows.

    Neighbouring rows mostly have the same prompt, which is then read once. The softmax is left open (not normalised):
    the decode kernel completes it.
    """
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n = tl.arange(0, ROWS * BLOCK_G), tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row, g = tile * ROWS + m // BLOCK_G, m % BLOCK_G
    is_row = row < batch
    is_query, head = is_row & (g < GROUP), kv_head * GROUP + g
    start = tl.load(prompt_start + row, mask=is_row, other=-1)
    length = tl.load(prompt_len + row, mask=is_row, other=0).to(tl.int32)
    context = length + tl.load(tail_len + row, mask=is_row, other=0).to(tl.int32)
    q_at = query + row[:, None].to(tl.int64) * stride_qb + head[:, None] * stride_qh + d[None, :]
    q = tl.load(q_at, mask=is_query[:, None] & (d < D)[None, :], other=0.0).to(pool_k.dtype.element_ty)
    pool_k += kv_head * stride_kh
    pool_v += kv_head * stride_vh
    highest, total, mixed = start_of(None, head, is_query, is_query, BLOCK_DV, False)

    start = tl.where(is_query & (length > 0), start, -1)  # -1: nothing to do, or done
    prompt = tl.max(start, 0)
    while prompt >= 0:
        mine = start == prompt
        end = tl.max(tl.where(mine, length, 0), 0)
        first = 0
        if HAS_WINDOW:
            first = tl.maximum(tl.min(tl.where(mine, context, 2147483647), 0) - window, 0)
        per_split = tl.cdiv(tl.maximum(tl.cdiv(end - first, BLOCK_N), 0), SPLITS) * BLOCK_N
        from_key = first + split * per_split
        for key_first in range(from_key, tl.minimum(from_key + per_split, end), BLOCK_N):
            key = key_first + n
            there = key < end
            place = prompt + key
            keys = tl.load(
                pool_k + place[:, None] * stride_ks + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
            )
            seen = mine[:, None] & there[None, :]
            if HAS_WINDOW:
                seen &= context[:, None] - key[None, :] <= window
            scores = tl.where(seen, scores_of(q, keys, scale, softcap, HAS_SOFTCAP), -INF)
            values = tl.load(
                pool_v + place[:, None] * stride_vs + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0
            )
            highest, total, mixed = accumulate(scores, values, highest, total, mixed)
        start = tl.where(mine, -1, start)
        prompt = tl.max(start, 0)

    at = (row.to(tl.int64) * (tl.num_programs(0) * GROUP) + head) * SPLITS + split
    tl.store(part_max + at, highest, mask=is_query)
    tl.store(part_sum + at, total, mask=is_query)
    tl.store(out + at[:, None] * DV + dv[None, :], mixed, mask=is_query[:, None] & (dv < DV)[None, :])


@triton.jit
def _load_part(mixed, highest, total, at, counts, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Load part `at` [M] of an open softmax; rows outside `counts` get an empty part."""
    dv = tl.arange(0, BLOCK_DV)
    mixture = tl.load(mixed + at[:, None] * DV + dv[None, :], mask=counts[:, None] & (dv < DV)[None, :], other=0.0)
    return tl.load(highest + at, mask=counts, other=-INF), tl.load(total + at, mask=counts, other=0.0), mixture


@triton.jit
def _decode_kernel(
    query, pool_k, pool_v, prompt_start, prompt_len, tail_start, tail_len, sinks,
    out, part_max, part_sum, prompt_out, prompt_max, prompt_sum, scale, softcap, window,
    stride_qb, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, PROMPT_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head of one row, over one split of the row's visible keys.

    If PROMPT_SPLITS > 0, the prompt's keys are already done and their open softmax is stored in PROMPT_SPLITS parts.
    """
    # A row's key heads are adjacent in memory and the rows of a group share a prompt, so they are launched together.
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prompt = tl.load(prompt_len + row).to(tl.int32)
    context = prompt + tl.load(tail_len + row).to(tl.int32)
    prompt_base = tl.load(prompt_start + row)
    tail_base = tl.load(tail_start + row) - prompt
    first = prompt if PROMPT_SPLITS > 0 else 0
    if HAS_WINDOW:
        first = tl.maximum(context - window, first)
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
    highest, total, mixed = start_of(sinks, head, is_head, split == 0, BLOCK_DV, HAS_SINKS)
    row_head = row.to(tl.int64) * (tl.num_programs(0) * GROUP) + head
    adds = g < tl.where(split == 0, GROUP, 0)  # Triton's interpreter wants masks of one shape
    for part in tl.static_range(PROMPT_SPLITS):
        found = _load_part(prompt_out, prompt_max, prompt_sum, row_head * PROMPT_SPLITS + part, adds, DV, BLOCK_DV)
        highest, total, mixed = join(highest, total, mixed, *found)

    for block in range(from_block, tl.minimum(from_block + per_split, blocks)):
        key = first + block * BLOCK_N + n
        seen = key < context
        place = tl.where(key < prompt, prompt_base, tail_base) + key
        keys = tl.load(
            pool_k + place[:, None] * stride_ks + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0
        )
        scores = tl.where(seen[None, :], scores_of(q, keys, scale, softcap, HAS_SOFTCAP), -INF)
        values = tl.load(
            pool_v + place[:, None] * stride_vs + dv[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0
        )
        highest, total, mixed = accumulate(scores, values, highest, total, mixed)

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
    """Merge the splits of a row and head into one softmax.

    Maxima and sums are [rows·heads, splits], mixtures [..., splits, Dv].
    """
    at = tl.program_id(0).to(tl.int64)
    s, dv = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    is_split = s < SPLITS
    highest = tl.load(part_max + at * SPLITS + s, mask=is_split, other=-INF)
    top = tl.max(highest, 0)
    # A split without keys has maximum -inf and weight 0. Where none has keys, the result is zero.
    weight = tl.exp2(highest - tl.where(top > -INF, top, 0.0))
    total = tl.sum(weight * tl.load(part_sum + at * SPLITS + s, mask=is_split, other=0.0), 0)
    mixed = tl.load(
        part_out + (at * SPLITS + s)[:, None] * DV + dv[None, :],
        mask=is_split[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    merged = tl.sum(mixed * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + at * DV + dv, merged, mask=dv < DV)


def _open_softmax(query: Tensor, splits: int, size_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers for the mixtures [B, H, splits, Dv], maxima and sums [B, H, splits] of a softmax in parts."""
    mixed = query.new_empty(*query.shape[:2], splits, size_v, dtype=torch.float32)
    highest, total = mixed.new_empty(2, *mixed.shape[:3])
    return mixed, highest, total


def _read_prompts(
    query: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    prompt_start: Tensor,
    prompt_len: Tensor,
    tail_len: Tensor,
    numbers: tuple[float, ...],
    shape: dict[str, Any],
) -> tuple[int, tuple[Any, ...]]:
    """Attend to the prompts; returns the number of parts of the open softmax, and these parts."""
    batch, kv_heads = len(query), pool_k.shape[1]
    table = _PROMPT_FLOAT if pool_k.dtype == torch.float32 else _PROMPT_HALF
    most = Blocks(*table[max(shape["BLOCK_D"], shape["BLOCK_DV"])])
    block_g = triton.next_power_of_2(shape["GROUP"])

    def rows_of(blocks: Blocks) -> int:
        return max(blocks.queries // block_g, 16 // block_g, 1)

    splits = 1 if kv_heads * triton.cdiv(batch, rows_of(most)) >= _ENOUGH_PROGRAMS else 4
    parts = _open_softmax(query, splits, shape["DV"])

    def launch(blocks: Blocks) -> None:
        rows = rows_of(blocks)
        _prompt_kernel[(kv_heads, triton.cdiv(batch, rows), splits)](
            query, pool_k, pool_v, prompt_start, prompt_len, tail_len, *parts, batch, *numbers, **shape,
            ROWS=rows, BLOCK_G=block_g, BLOCK_N=blocks.keys, SPLITS=splits,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    launch_fitting(launch, most, ("prompts", query.device, pool_k.dtype, splits, *shape.values()))
    return splits, parts


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
    shared: bool = False,
) -> Tensor:
    """`gruppo.engine.reference.decode_attention` on a GPU. The keys of a row are divided among `splits` programs.

    With `shared`, prompts are read once for the neighbouring rows that have them. Lengths are read on the device
    without synchronisation, so the call can be captured in a CUDA graph.
    """
    (batch, heads, size), (_, kv_heads, size_v) = query.shape, pool_v.shape
    block_d, block_dv = padded(size), padded(size_v)
    table = _DECODE_FLOAT if pool_k.dtype == torch.float32 else _DECODE_HALF
    most = Blocks(padded(heads // kv_heads), *table[max(block_d, block_dv)])
    numbers = (scale, softcap or 1.0, window or 0, *query.stride()[:2], *pool_k.stride()[:2], *pool_v.stride()[:2])
    shape = dict(D=size, DV=size_v, GROUP=heads // kv_heads, BLOCK_D=block_d, BLOCK_DV=block_dv)
    shape |= dict(HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None)
    prompt_splits, prompt_parts = 0, (None, None, None)
    if shared:
        prompt_splits, prompt_parts = _read_prompts(
            query, pool_k, pool_v, prompt_start, prompt_len, tail_len, numbers, shape
        )
    out = query.new_empty(batch, heads, size_v)
    parts = (out, None, None) if splits == 1 else _open_softmax(query, splits, size_v)
    options = dict(SPLITS=splits, PROMPT_SPLITS=prompt_splits, HAS_SINKS=sinks is not None)

    def launch(blocks: Blocks) -> None:
        _decode_kernel[(kv_heads, batch, splits)](
            query, pool_k, pool_v, prompt_start, prompt_len, tail_start, tail_len, sinks, *parts, *prompt_parts,
            *numbers, **shape, **options, BLOCK_G=most.queries, BLOCK_N=blocks.keys,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    launch_fitting(launch, most, ("decode", query.device, pool_k.dtype, *options.values(), *shape.values()))
    if splits > 1:
        _merge_kernel[(batch * heads,)](
            *parts, out, DV=size_v, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), BLOCK_DV=block_dv,
            num_warps=1 if splits < 8 else 4,
        )  # fmt: skip
    return out
