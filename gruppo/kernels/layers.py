"""Decoder operations between the matrix products: norms, rotary embedding, gated activation; with gradients.

On CUDA these are Triton kernels, imported at the first use with a CUDA tensor; elsewhere, and in float64, the plain
torch code of this file, against which the kernels are tested. Shapes: D and F are sizes of rows, N tokens, H and Hkv
heads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["gated", "gated_linear", "rms_norm", "rotary"]


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype is not torch.float64  # the kernels compute in float32


def _gpu() -> Any:
    from gruppo.kernels.gpu import layers

    return layers


# ---- norms


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    plus_one: bool,
    in_float32_weight: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x / rms(x) times a weight [D], over the last dimension of x [..., D], with float32 statistics.

    `plus_one` is Gemma's 1 + weight. The normalised x is rounded to x's dtype before the weight, as Llama does, unless
    `in_float32_weight` (Gemma, OLMo 2). The result is contiguous, in `out_dtype` or x's.
    """
    if _has_kernels(x):
        options = dict(plus_one=plus_one, in_float32_weight=in_float32_weight, out_dtype=out_dtype)
        return _gpu().rms_norm(x, weight, eps, **options)
    if x.dtype == weight.dtype == torch.float32 and out_dtype in (None, torch.float32):
        factor = weight + 1 if plus_one else weight
        if torch.is_grad_enabled() and (x.requires_grad or factor.requires_grad):
            return _Norm.apply(x, factor, eps)
        return _normalised(x, factor, eps)[0]
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if not in_float32_weight:
        normal = normal.to(x.dtype).float()
    factor = weight.float() + 1 if plus_one else weight.float()
    return (normal * factor).to(out_dtype or x.dtype).contiguous()


def _normalised(x: Tensor, factor: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x [..., D] in float32 and 1 / rms(x) [..., 1].

    It uses as few operations as possible: torch's own rms_norm is slow on a CPU, especially for long rows.
    """
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    rstd = squares.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * rstd).mul_(factor).contiguous(), rstd


class _Norm(torch.autograd.Function):
    """`_normalised` with a gradient: of the activations it saves only x, and it takes half the time of autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, factor, eps = inputs
        out, rstd = _normalised(x, factor, eps)
        ctx.save_for_backward(x, factor, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,), (x, factor, rstd) = grads, ctx.saved_tensors
        size, products = x.shape[-1], grad * x
        rows = products.reshape(-1, size)
        # mv, because autocast does not affect it. The sum of w·g·x̂ over a row is rstd times this.
        inner = torch.mv(rows, factor).view(rstd.shape)
        d_factor = torch.mv(rows.t(), rstd.reshape(-1)) if ctx.needs_input_grad[1] else None
        towards_x = rstd.square().mul_(inner).mul_(-1 / size)
        d_x = torch.mul(grad, factor, out=products).addcmul_(x, towards_x).mul_(rstd)  # allocating costs more
        return d_x, d_factor, None


# ---- rotary embedding


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding, "rotate half": query [1, H, N, D], key [1, Hkv, N, D], cos and sin [1, N, R], R <= D.

    The first R dimensions are rotated, the others pass through. Computed in float32 and rounded once, whereas
    transformers rounds each product. The results have the inputs' shapes and dtypes and the memory layout
    [N, heads, D]. Cosines and sines are constants: they get no gradient.
    """
    if _has_kernels(query):
        return _gpu().rotary(query, key, cos, sin)
    cos, sin = cos.detach(), sin.detach()
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    by_token = x[0].transpose(0, 1)
    wide = _wide(by_token[..., :turned])
    half = torch.cat((-wide[..., turned // 2 :], wide[..., : turned // 2]), dim=-1)
    rotated = (wide * _wide(cos[0, :, None]) + half * _wide(sin[0, :, None])).to(x.dtype)
    return torch.cat((rotated, by_token[..., turned:]), dim=-1).contiguous().transpose(0, 1)[None]


# ---- gated activation


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * up, [..., F], in float32 inside and rounded once; "silu" or "gelu_tanh"."""
    if _has_kernels(gate):
        return _gpu().gated(gate, up, activation=activation)
    wide = _wide(gate)
    if activation == "silu":
        active = functional.silu(wide)
    elif activation == "gelu_tanh":
        active = functional.gelu(wide, approximate="tanh")
    else:
        raise ValueError(f"activation must be 'silu' or 'gelu_tanh', not {activation!r}")
    return (active * _wide(up)).to(gate.dtype).contiguous()


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, *, activation: str, bias: Tensor | None = None) -> Tensor:
    """`gated` times a weight [out, F], [..., F] -> [..., out], with the bias [out] if there is one.

    On CUDA the product of gate and up is not saved for the backward pass, which recomputes it: of the three tensors of
    this size that a gated layer would save, two remain.
    """
    if _has_kernels(gate) and gate.dtype == up.dtype == weight.dtype and not _is_cast(gate):
        return _gpu().gated_linear(gate, up, weight, activation=activation, bias=bias)
    return functional.linear(gated(gate, up, activation=activation), weight, bias)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast would compute the product in another dtype."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype
