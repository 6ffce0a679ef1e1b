"""Triton kernel that puts new keys and values into the engine's pool."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_kv"]

_TILE = 4096  # approximate number of elements per program


@triton.jit
def _write_kernel(
    keys, values, pool_k, pool_v, places, kv_heads,
    stride_kn, stride_kh, stride_vn, stride_vh, stride_pks, stride_pkh, stride_pvs, stride_pvh,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write some heads of one token."""
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
