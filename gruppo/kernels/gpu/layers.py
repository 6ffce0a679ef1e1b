"""Triton kernels of what lies between the matrix products: norms, rotary embedding, gated activation; with gradients.

Each reads and writes its tensors once, computes in float32 and rounds once at the end; the exceptions, where a model's
own rounding is kept, are named. To a gradient, rounding is the identity. Where no gradient is asked for, the forward
kernel is launched and nothing else happens. What the functions compute is said in `gruppo.kernels.layers`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["gated", "gated_linear", "rms_norm", "rotary"]

_ACTIVATIONS = ("silu", "gelu_tanh")
_TILE = 4096  # elements a program works on, about
# Programs that share the rows of a norm's backward pass: four for each of an H200's multiprocessors. Each leaves a row
# of the weight's gradient, so more would mean more to add up.
_NORM_PROGRAMS = 528


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


# ---- norms


@triton.jit(do_not_specialize=["rows", "inner"])  # a batch of another size is no reason to compile again
def _norm_kernel(
    x, weight, out, kept_rstd, eps, rows, inner, stride_outer, stride_inner,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PLUS_ONE: tl.constexpr, WIDE_WEIGHT: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Some rows: row r of x is at (r // inner, r % inner); out is contiguous. KEEP is for a backward pass."""
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
    """Where row r of a grid begins. Divided before it is widened: 64 bits take many times as long."""
    return (r // inner).to(tl.int64) * stride_outer + (r % inner).to(tl.int64) * stride_inner


@triton.jit(do_not_specialize=["rows", "inner", "grad_inner"])
def _norm_backward_kernel(
    x, weight, kept_rstd, grad, d_x, d_weight, rows, inner, stride_outer, stride_inner,
    grad_inner, grad_stride_outer, grad_stride_inner,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PLUS_ONE: tl.constexpr, OF_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Some rows, and again as many further on. With x̂ = x·rstd and w·g as h: dx = rstd·(h − x̂·mean(h·x̂)).

    Of the weight's gradient, Σ g·x̂ over all rows, each program leaves its part: added up afterwards, always in the
    same order.
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


def _norm_blocks(size: int, rows: int, tile: int) -> dict[str, int]:
    """Heads are short rows: several to a program. Long rows get the warps instead."""
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
    return d_x, None if parts is None else parts.sum(0).to(weight.dtype)


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
    if _needs_gradient(x, weight):
        return _Norm.apply(x, weight, eps, plus_one, in_float32_weight, out_dtype or x.dtype)
    return _norm_forward(x, weight, eps, plus_one, in_float32_weight, out_dtype or x.dtype, None)


# ---- rotary embedding


@triton.jit
def _rotate_heads(
    x, out, cos, sin, token, h, heads, stride_h, stride_n, stride_cn, stride_sn,
    D: tl.constexpr, R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Heads h [BLOCK_H, 1] of one token, turned, or with BACK by the transpose of that."""
    half = tl.arange(0, BLOCK_HALF)[None, :]
    turned = half < R // 2
    there = (h < heads) & turned
    source = x + token * stride_n + h.to(tl.int64) * stride_h
    target = out + (token * heads + h) * D
    one = tl.load(source + half, mask=there, other=0.0).to(tl.float32)
    two = tl.load(source + R // 2 + half, mask=there, other=0.0).to(tl.float32)
    at_cos, at_sin = cos + token * stride_cn + half, sin + token * stride_sn + half
    cos_one = tl.load(at_cos, mask=turned, other=0.0).to(tl.float32)
    sin_one = tl.load(at_sin, mask=turned, other=0.0).to(tl.float32)
    cos_two = tl.load(at_cos + R // 2, mask=turned, other=0.0).to(tl.float32)
    sin_two = tl.load(at_sin + R // 2, mask=turned, other=0.0).to(tl.float32)
    if BACK:  # the halves of sin are equal, as a rule; the transpose exchanges them
        sin_one, sin_two = -sin_two, -sin_one
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
    BACK: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: of the query, and once those are done of the key."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_blocks = tl.cdiv(heads, BLOCK_H)
    h = tl.arange(0, BLOCK_H)[:, None]
    if block < query_blocks:
        _rotate_heads(
            query, out_query, cos, sin, token, block * BLOCK_H + h, heads, stride_qh, stride_qn, stride_cn, stride_sn,
            D, R, BLOCK_HALF, BLOCK_REST, BACK,
        )  # fmt: skip
    else:
        _rotate_heads(
            key, out_key, cos, sin, token, (block - query_blocks) * BLOCK_H + h, kv_heads, stride_kh, stride_kn,
            stride_cn, stride_sn, D, R, BLOCK_HALF, BLOCK_REST, BACK,
        )  # fmt: skip


def _turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """Query and key, or their gradients, in one launch; only last dimensions must be contiguous."""
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
        BLOCK_REST=triton.next_power_of_2(max(1, size - turned)), BACK=back,
        num_warps=max(1, min(4, block_h * block_half // 256)),
    )  # fmt: skip
    return out_query.transpose(0, 1)[None], out_key.transpose(0, 1)[None]


def _with_rows(x: Tensor) -> Tensor:
    """Itself, or a copy if there are gaps in the last dimension: a gradient may come with any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        query, key, cos, sin = inputs
        ctx.save_for_backward(cos, sin)
        return _turn(query, key, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (query, key), (cos, sin) = map(_with_rows, grads), ctx.saved_tensors
        return *_turn(query, key, cos, sin, True), None, None


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`gruppo.kernels.layers.rotary` on a GPU, in one launch; only last dimensions must be contiguous."""
    if _needs_gradient(query, key):
        return _Rotary.apply(query, key, cos, sin)
    return _turn(query, key, cos, sin, False)


# ---- gated activation


@triton.jit
def _inside(x, SILU: tl.constexpr):
    """The u of activation(x) = x·sigmoid(u); GELU's ½(1 + tanh v) is the sigmoid of 2v."""
    return x if SILU else 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def _gated_kernel(gate, up, out, width, stride_gate, stride_up, BLOCK: tl.constexpr, SILU: tl.constexpr):
    """A stretch of one row."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = f < width
    x = tl.load(gate + row * stride_gate + f, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * stride_up + f, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * width + f, x * tl.sigmoid(_inside(x, SILU)) * factor, mask=there)


@triton.jit
def _gated_backward_kernel(
    gate, up, grad, d_gate, d_up, product, width, stride_gate, stride_up, stride_grad,
    BLOCK: tl.constexpr, SILU: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """A stretch of one row; with PRODUCT also what the forward kernel wrote, once more."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = f < width
    x = tl.load(gate + row * stride_gate + f, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * stride_up + f, mask=there, other=0.0).to(tl.float32)
    g = tl.load(grad + row * stride_grad + f, mask=there, other=0.0).to(tl.float32)
    switch = tl.sigmoid(_inside(x, SILU))
    slope = 1.0 if SILU else 1.5957691216057308 * (1 + 0.134145 * x * x)  # of what is inside
    active = x * switch
    tl.store(d_up + row * width + f, g * active, mask=there)
    tl.store(d_gate + row * width + f, g * factor * (switch + active * (1 - switch) * slope), mask=there)
    if PRODUCT:
        tl.store(product + row * width + f, active * factor, mask=there)


def _rows_of(x: Tensor) -> Tensor:
    """[..., F] as [rows, F], where it lies if it can be."""
    return _with_rows(x.reshape(-1, x.shape[-1]))


def _gated_options(width: int, activation: str) -> dict[str, Any]:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be 'silu' or 'gelu_tanh', not {activation!r}")
    return dict(BLOCK=min(2048, triton.next_power_of_2(width)), SILU=activation == "silu", num_warps=4)


def _gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    rows, factors, width = _rows_of(gate), _rows_of(up), gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    options = _gated_options(width, activation)
    _gated_kernel[(len(rows), triton.cdiv(width, options["BLOCK"]))](
        rows, factors, out, width, rows.stride(0), factors.stride(0), **options
    )
    return out


def _gated_backward(
    gate: Tensor, up: Tensor, grad: Tensor, activation: str, with_product: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up from that of their product, and on request the product."""
    tensors, width = [_rows_of(x) for x in (gate, up, grad)], gate.shape[-1]
    d_gate, d_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    product = torch.empty_like(d_gate) if with_product else None
    options = _gated_options(width, activation)
    _gated_backward_kernel[(len(tensors[0]), triton.cdiv(width, options["BLOCK"]))](
        *tensors, d_gate, d_up, product, width, *(x.stride(0) for x in tensors), PRODUCT=with_product, **options
    )
    return d_gate, d_up, product


class _Gated(torch.autograd.Function):
    """The product of gate and up, or with a weight its projection. Only gate and up are kept; where the weight's
    gradient needs the product, it is made again.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        gate, up, weight, bias, ctx.activation = inputs
        ctx.save_for_backward(gate, up, weight)
        product = _gated_forward(gate, up, ctx.activation)
        return product if weight is None else functional.linear(product, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.needs_input_grad[2:4]
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        of_product = rows if weight is None else rows @ weight
        d_gate, d_up, product = _gated_backward(gate, up, of_product, ctx.activation, of_weight)
        d_weight = None if product is None else rows.t() @ _rows_of(product)
        return d_gate, d_up, d_weight, rows.sum(0) if of_bias else None, None


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """`gruppo.kernels.layers.gated` on a GPU; halves of one projection are read where they are."""
    if _needs_gradient(gate, up):
        return _Gated.apply(gate, up, None, None, activation)
    return _gated_forward(gate, up, activation)


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, *, activation: str, bias: Tensor | None = None) -> Tensor:
    """`gruppo.kernels.layers.gated_linear` on a GPU; gate, up, weight and bias are of one type."""
    if _needs_gradient(gate, up, weight, bias):
        return _Gated.apply(gate, up, weight, bias, activation)
    return functional.linear(_gated_forward(gate, up, activation), weight, bias)
