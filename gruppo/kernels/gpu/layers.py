"""Triton kernels for the operations between the matrix products: rotary embedding, gated activation; with gradients.

Each reads and writes its tensors once, computes in float32 and rounds once at the end; exceptions, where a model's own
rounding is reproduced, are noted. Gradients treat rounding as the identity. If no gradient is needed, only the forward
kernel is launched. `gruppo.kernels.layers` documents what the functions compute.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gruppo.kernels.gpu.norm import rms_norm
from gruppo.kernels.gpu.tensors import needs_gradient, with_rows

__all__ = ["gated", "gated_linear", "rms_norm", "rotary"]

_ACTIVATIONS = ("silu", "gelu_tanh")
_TILE = 4096  # approximate number of elements per program


# ---- rotary embedding


@triton.jit
def _rotate_heads(
    x, out, cos, sin, token, h, heads, stride_h, stride_n, stride_cn, stride_sn,
    D: tl.constexpr, R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate heads h [BLOCK_H, 1] of one token; with BACK apply the transpose of the rotation."""
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
    if BACK:  # the transpose swaps the halves of sin, which are usually equal
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
    """Some heads of one token: the first blocks are heads of the query, the others of the key."""
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
    """Rotate query and key, or their gradients, in one launch; only last dimensions must be contiguous."""
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


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        query, key, cos, sin = inputs
        ctx.save_for_backward(cos, sin)
        return _turn(query, key, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (query, key), (cos, sin) = map(with_rows, grads), ctx.saved_tensors
        return *_turn(query, key, cos, sin, True), None, None


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`gruppo.kernels.layers.rotary` on a GPU, in one launch; only last dimensions must be contiguous."""
    if needs_gradient(query, key):
        return _Rotary.apply(query, key, cos, sin)
    return _turn(query, key, cos, sin, False)


# ---- gated activation


@triton.jit
def _inside(x, SILU: tl.constexpr):
    """The u of activation(x) = x·sigmoid(u); GELU's ½(1 + tanh v) is the sigmoid of 2v."""
    return x if SILU else 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def _gated_kernel(gate, up, out, width, stride_gate, stride_up, BLOCK: tl.constexpr, SILU: tl.constexpr):
    """A block of one row."""
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
    """A block of one row; with PRODUCT it also recomputes the output of the forward kernel."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = f < width
    x = tl.load(gate + row * stride_gate + f, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * stride_up + f, mask=there, other=0.0).to(tl.float32)
    g = tl.load(grad + row * stride_grad + f, mask=there, other=0.0).to(tl.float32)
    switch = tl.sigmoid(_inside(x, SILU))
    slope = 1.0 if SILU else 1.5957691216057308 * (1 + 0.134145 * x * x)  # of `_inside`
    active = x * switch
    tl.store(d_up + row * width + f, g * active, mask=there)
    tl.store(d_gate + row * width + f, g * factor * (switch + active * (1 - switch) * slope), mask=there)
    if PRODUCT:
        tl.store(product + row * width + f, active * factor, mask=there)


def _rows_of(x: Tensor) -> Tensor:
    """[..., F] as [rows, F], without a copy if possible."""
    return with_rows(x.reshape(-1, x.shape[-1]))


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
    """Gradients of gate and up from the gradient of their product, and on request the product."""
    tensors, width = [_rows_of(x) for x in (gate, up, grad)], gate.shape[-1]
    d_gate, d_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    product = torch.empty_like(d_gate) if with_product else None
    options = _gated_options(width, activation)
    _gated_backward_kernel[(len(tensors[0]), triton.cdiv(width, options["BLOCK"]))](
        *tensors, d_gate, d_up, product, width, *(x.stride(0) for x in tensors), PRODUCT=with_product, **options
    )
    return d_gate, d_up, product


class _Gated(torch.autograd.Function):
    """The product of gate and up, or with a weight its projection.

    Of the activations only gate and up are saved; if the weight's gradient needs the product, it is recomputed.
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
    """`gruppo.kernels.layers.gated` on a GPU; halves of one projection are read without a copy."""
    if needs_gradient(gate, up):
        return _Gated.apply(gate, up, None, None, activation)
    return _gated_forward(gate, up, activation)


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, *, activation: str, bias: Tensor | None = None) -> Tensor:
    """`gruppo.kernels.layers.gated_linear` on a GPU; gate, up, weight and bias have the same dtype."""
    if needs_gradient(gate, up, weight, bias):
        return _Gated.apply(gate, up, weight, bias, activation)
    return functional.linear(_gated_forward(gate, up, activation), weight, bias)
