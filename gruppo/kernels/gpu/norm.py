"""Triton kernels for norms, with gradients. `gruppo.kernels.layers` documents what they compute.

Statistics are float32. Gradients treat rounding as the identity. If no gradient is needed, only the forward kernel is
launched.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gruppo.kernels.gpu.tensors import needs_gradient

__all__ = ["rms_norm"]

_TILE = 4096  # approximate number of elements per program
# Number of programs that share the rows of a norm's backward pass: four for each of an H200's multiprocessors. Each
# writes a partial gradient of the weight, so more programs would mean more to add up.
_NORM_PROGRAMS = 528


@triton.jit(do_not_specialize=["rows", "inner"])  # no recompilation for another batch size
def _norm_kernel(
    x, weight, out, kept_rstd, eps, rows, inner, stride_outer, stride_inner,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PLUS_ONE: tl.constexpr, WIDE_WEIGHT: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Some rows: row r of x is at (r // inner, r % inner); out is contiguous. KEEP stores rstd for backward."""
    r = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    there = (r < rows) & (d < D)
    loaded = tl.load(x + (r // inner) * stride_outer + (r % inner) * stride_inner + d, mask=there, other=0.0)
    wide = loaded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    if KEEP:
        tl.store(kept_rstd + r, rstd, mask=r < rows)
    normal = wide * rstd
    if not WIDE_WEIGHT:
        normal = normal.to(loaded.dtype).to(tl.float32)
    factor = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1
    tl.store(out + r * D + d, normal * factor, mask=there)


@triton.jit
def _place(r, inner, stride_outer, stride_inner):
    """The offset of row r of a grid. It divides before widening: 64-bit division takes many times as long."""
    return (r // inner).to(tl.int64) * stride_outer + (r % inner).to(tl.int64) * stride_inner


@triton.jit(do_not_specialize=["rows", "inner", "grad_inner"])
def _norm_backward_kernel(
    x, weight, kept_rstd, grad, d_x, d_weight, rows, inner, stride_outer, stride_inner,
    grad_inner, grad_stride_outer, grad_stride_inner,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PLUS_ONE: tl.constexpr, OF_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Blocks of rows in a grid-stride loop. With x̂ = x·rstd and h = w·g: dx = rstd·(h − x̂·mean(h·x̂)).

    The weight's gradient is Σ g·x̂ over all rows. Each program writes its part; the parts are added up afterwards,
    always in the same order.
    """
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)[None, :]
    factor = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1
    part = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in range(program * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        r = (first + tl.arange(0, BLOCK_R))[:, None]
        there = (r < rows) & (d < D)
        at = x + _place(r, inner, stride_outer, stride_inner) + d
        at_grad = grad + _place(r, grad_inner, grad_stride_outer, grad_stride_inner) + d
        rstd = tl.load(kept_rstd + r, mask=r < rows, other=0.0)
        normal = tl.load(at, mask=there, other=0.0).to(tl.float32) * rstd
        g = tl.load(at_grad, mask=there, other=0.0).to(tl.float32)
        if OF_WEIGHT:
            part += g * normal
        g *= factor
        inside = g - normal * (tl.sum(g * normal, 1) / D)[:, None]
        tl.store(d_x + r.to(tl.int64) * D + d, inside * rstd, mask=there)
    if OF_WEIGHT:
        column = tl.arange(0, BLOCK_D)
        tl.store(d_weight + program * D + column, tl.sum(part, 0), mask=column < D)


def _two_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """View the rows of a tensor [..., D] as a two-dimensional grid: the tensor, its inner length and both strides.

    Adjacent dimensions that are contiguous with each other are merged. A tensor that still has more than two, or whose
    rows are not contiguous, is copied.
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


def _norm_blocks(size: int, rows: int, tile: int) -> dict[str, int]:
    """Short rows, such as heads, share a program; long rows get more warps instead."""
    block_d = triton.next_power_of_2(size)
    block_r = max(1, min(tile // block_d, triton.next_power_of_2(rows)))
    return dict(D=size, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=min(16, max(1, block_r * block_d // 512)))


def _norm_forward(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool, wide: bool, dtype: torch.dtype, kept_rstd: Tensor | None
) -> Tensor:
    x, inner, stride_outer, stride_inner = _two_strides(x)
    rows = x.numel() // x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    blocks = _norm_blocks(x.shape[-1], rows, _TILE // 2)
    _norm_kernel[(triton.cdiv(rows, blocks["BLOCK_R"]),)](
        x, weight, out, kept_rstd, eps, rows, inner, stride_outer, stride_inner,
        PLUS_ONE=plus_one, WIDE_WEIGHT=wide, KEEP=kept_rstd is not None, **blocks,
    )  # fmt: skip
    return out


def _norm_backward(
    x: Tensor, weight: Tensor, rstd: Tensor, grad: Tensor, *, plus_one: bool, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    x, inner, *strides = _two_strides(x)
    grad, grad_inner, *grad_strides = _two_strides(grad)
    size, rows = x.shape[-1], len(rstd)
    blocks = _norm_blocks(size, rows, _TILE)
    programs = max(1, min(triton.cdiv(rows, blocks["BLOCK_R"]), _NORM_PROGRAMS))
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(programs, size, dtype=torch.float32, device=x.device) if of_weight else None
    _norm_backward_kernel[(programs,)](
        x, weight, rstd, grad, d_x, parts, rows, inner, *strides, grad_inner, *grad_strides,
        PLUS_ONE=plus_one, OF_WEIGHT=of_weight, **blocks,
    )  # fmt: skip
    if parts is None:
        return d_x, None
    # The sum over programs as a matrix product: torch's reduction takes several times as much host time.
    return d_x, torch.mm(_ones(programs, x.device), parts)[0].to(weight.dtype)


@cache
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(1, count, device=device)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight, eps, plus_one, wide, dtype = inputs
        rstd = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        ctx.plus_one = plus_one
        return _norm_forward(x, weight, eps, plus_one, wide, dtype, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_weight = ctx.needs_input_grad[1]
        gradients = _norm_backward(*ctx.saved_tensors, *grads, plus_one=ctx.plus_one, of_weight=of_weight)
        return *gradients, None, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    plus_one: bool,
    in_float32_weight: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`gruppo.kernels.layers.rms_norm` on a GPU; x may be a view, such as one head's part of a projection."""
    if needs_gradient(x, weight):
        return _Norm.apply(x, weight, eps, plus_one, in_float32_weight, out_dtype or x.dtype)
    return _norm_forward(x, weight, eps, plus_one, in_float32_weight, out_dtype or x.dtype, None)
