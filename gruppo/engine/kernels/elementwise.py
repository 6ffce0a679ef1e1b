"""Triton kernels of what lies between the matrix products: norms, rotary embedding, gated activation, KV writes.

Each reads and writes its tensors once, computes in float32 and rounds once at the end; the exceptions, where a model's
own rounding is kept, are named.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gated", "rms_norm", "rotary", "write_kv"]

_ACTIVATIONS = ("silu", "gelu_tanh")
_TILE = 4096  # elements a program works on, about


@triton.jit
def _write_kernel(
    keys, values, pool_k, pool_v, places, kv_heads,
    stride_kn, stride_kh, stride_vn, stride_vh, stride_pks, stride_pkh, stride_pvs, stride_pvh,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    place = tl.load(places + token)
    there = (h < kv_heads) & (d < D)
    key = tl.load(keys + token * stride_kn + h * stride_kh + d, mask=there)
    tl.store(pool_k + place * stride_pks + h * stride_pkh + d, key, mask=there)
    there = (h < kv_heads) & (dv < DV)
    value = tl.load(values + token * stride_vn + h * stride_vh + dv, mask=there)
    tl.store(pool_v + place * stride_pvs + h * stride_pvh + dv, value, mask=there)


def write_kv(keys: Tensor, values: Tensor, pool_k: Tensor, pool_v: Tensor, places: Tensor) -> None:
    """`gruppo.engine.reference.write_kv` on a GPU; only the last dimension must be contiguous."""
    tokens, kv_heads, size = keys.shape
    size_v = values.shape[2]
    block_d, block_dv = triton.next_power_of_2(size), triton.next_power_of_2(size_v)
    block_h = min(triton.next_power_of_2(kv_heads), max(1, _TILE // max(block_d, block_dv)))
    _write_kernel[(tokens, triton.cdiv(kv_heads, block_h))](
        keys, values, pool_k, pool_v, places, kv_heads,
        *keys.stride()[:2], *values.stride()[:2], *pool_k.stride()[:2], *pool_v.stride()[:2],
        D=size, DV=size_v, BLOCK_H=block_h, BLOCK_D=block_d, BLOCK_DV=block_dv,
        num_warps=1 if block_h * block_d <= 512 else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "inner"])  # a batch of another size is no reason to compile again
def _norm_kernel(
    x, weight, out, eps, rows, inner, stride_outer, stride_inner,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PLUS_ONE: tl.constexpr, WIDE_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Some rows: row r of x is at (r // inner, r % inner); out is contiguous."""
    r = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    there = (r < rows) & (d < D)
    loaded = tl.load(x + (r // inner) * stride_outer + (r % inner) * stride_inner + d, mask=there, other=0.0)
    wide = loaded.to(tl.float32)
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    if not WIDE_WEIGHT:
        normal = normal.to(loaded.dtype).to(tl.float32)
    factor = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1
    tl.store(out + r * D + d, normal * factor, mask=there)


def _two_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor [..., D] whose rows lie on a two-dimensional grid, with its inner length and both strides.

    Neighbouring dimensions that run on into each other are one; what still has more than two, or a gap inside a row,
    is copied.
    """
    merged: list[tuple[int, int]] = []
    for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if length == 1:
            continue
        if merged and merged[-1][1] == length * stride:
            merged[-1] = (merged[-1][0] * length, stride)
        else:
            merged.append((length, stride))
    if len(merged) > 2 or x.stride(-1) != 1:
        return _two_strides(x.contiguous())
    (_, outer), (inner, stride) = [(1, 0), (1, 0), *merged][-2:]
    return x, inner, outer, stride


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    plus_one: bool,
    in_float32_weight: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`gruppo.engine.reference.rms_norm` on a GPU; x may be a view, such as one head's part of a projection."""
    x, inner, stride_outer, stride_inner = _two_strides(x)
    size = x.shape[-1]
    rows = x.numel() // size
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    block_d = triton.next_power_of_2(size)
    # Heads are short rows: several to a program. Long rows get the warps instead.
    block_r = max(1, min(_TILE // 2 // block_d, triton.next_power_of_2(rows)))
    _norm_kernel[(triton.cdiv(rows, block_r),)](
        x, weight, out, eps, rows, inner, stride_outer, stride_inner,
        D=size, BLOCK_R=block_r, BLOCK_D=block_d, PLUS_ONE=plus_one, WIDE_WEIGHT=in_float32_weight,
        num_warps=min(16, max(1, block_r * block_d // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_heads(
    x, out, cos, sin, token, h, heads, stride_h, stride_n, stride_cn, stride_sn,
    D: tl.constexpr, R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Heads h [BLOCK_H, 1] of one token."""
    half = tl.arange(0, BLOCK_HALF)[None, :]
    turned = half < R // 2
    there = (h < heads) & turned
    source = x + token * stride_n + h * stride_h
    target = out + (token * heads + h) * D
    one = tl.load(source + half, mask=there, other=0.0).to(tl.float32)
    two = tl.load(source + R // 2 + half, mask=there, other=0.0).to(tl.float32)
    at_cos, at_sin = cos + token * stride_cn + half, sin + token * stride_sn + half
    cos_one = tl.load(at_cos, mask=turned, other=0.0).to(tl.float32)
    sin_one = tl.load(at_sin, mask=turned, other=0.0).to(tl.float32)
    cos_two = tl.load(at_cos + R // 2, mask=turned, other=0.0).to(tl.float32)
    sin_two = tl.load(at_sin + R // 2, mask=turned, other=0.0).to(tl.float32)
    tl.store(target + half, one * cos_one - two * sin_one, mask=there)
    tl.store(target + R // 2 + half, two * cos_two + one * sin_two, mask=there)
    if R < D:
        rest = R + tl.arange(0, BLOCK_REST)[None, :]
        there = (h < heads) & (rest < D)
        tl.store(target + rest, tl.load(source + rest, mask=there), mask=there)


@triton.jit
def _rotary_kernel(
    query, key, out_query, out_key, cos, sin, heads, kv_heads,
    stride_qh, stride_qn, stride_kh, stride_kn, stride_cn, stride_sn,
    D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: of the query, and once those are done of the key."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_blocks = tl.cdiv(heads, BLOCK_H)
    h = tl.arange(0, BLOCK_H)[:, None]
    if block < query_blocks:
        _rotate_heads(
            query, out_query, cos, sin, token, block * BLOCK_H + h, heads, stride_qh, stride_qn, stride_cn, stride_sn,
            D, R, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate_heads(
            key, out_key, cos, sin, token, (block - query_blocks) * BLOCK_H + h, kv_heads, stride_kh, stride_kn,
            stride_cn, stride_sn, D, R, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`gruppo.engine.reference.rotary` on a GPU, in one launch; only last dimensions must be contiguous."""
    _, heads, tokens, size = query.shape
    kv_heads, turned = key.shape[1], cos.shape[-1]
    out_query, out_key = query.new_empty(tokens, heads, size), key.new_empty(tokens, kv_heads, size)
    block_half = triton.next_power_of_2(turned // 2)
    block_h = max(1, min(triton.next_power_of_2(heads), _TILE // 4 // block_half))
    blocks = triton.cdiv(heads, block_h) + triton.cdiv(kv_heads, block_h)
    _rotary_kernel[(tokens, blocks)](
        query, key, out_query, out_key, cos, sin, heads, kv_heads,
        *query.stride()[1:3], *key.stride()[1:3], cos.stride(1), sin.stride(1),
        D=size, R=turned, BLOCK_H=block_h, BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(1, size - turned)),
        num_warps=max(1, min(4, block_h * block_half // 256)),
    )  # fmt: skip
    return out_query.transpose(0, 1)[None], out_key.transpose(0, 1)[None]


@triton.jit
def _gated_kernel(gate, up, out, width, stride_gate, stride_up, BLOCK: tl.constexpr, SILU: tl.constexpr):
    """A stretch of one row."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = f < width
    x = tl.load(gate + row * stride_gate + f, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * stride_up + f, mask=there, other=0.0).to(tl.float32)
    # ½(1 + tanh u) is the sigmoid of 2u.
    inside = x if SILU else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    tl.store(out + row * width + f, x * tl.sigmoid(inside) * factor, mask=there)


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """`gruppo.engine.reference.gated` on a GPU; halves of one projection are read where they are."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be 'silu' or 'gelu_tanh', not {activation!r}")
    width = gate.shape[-1]
    rows, factors = gate.reshape(-1, width), up.reshape(-1, width)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = min(2048, triton.next_power_of_2(width))
    _gated_kernel[(len(rows), triton.cdiv(width, block))](
        rows, factors, out, width, rows.stride(0), factors.stride(0), BLOCK=block, SILU=activation == "silu",
        num_warps=4,
    )  # fmt: skip
    return out
