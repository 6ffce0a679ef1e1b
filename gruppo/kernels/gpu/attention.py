"""`gruppo.kernels.attention.packed_attention` on a GPU, with its gradient: which kernels run, in which blocks."""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from gruppo.kernels.attention import Segments
from gruppo.kernels.gpu import attention_kernels as kernels
from gruppo.kernels.gpu.blocks import Blocks, launch_fitting
from gruppo.kernels.gpu.softmax import padded
from gruppo.kernels.gpu.tensors import with_rows

__all__ = ["packed_attention"]

Table = dict[int, tuple[int, int, int, int]]

# Padded head size -> queries per block, keys per block, warps, stages: the most that is tried. For the forward pass:
FORWARD_HALF: Table = {
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (128, 64, 4, 3),
    128: (128, 64, 8, 3),
    256: (128, 32, 8, 2),
    512: (64, 32, 8, 1),
}
FORWARD_FLOAT: Table = {
    16: (32, 32, 4, 1),
    32: (32, 32, 4, 1),
    64: (32, 32, 8, 1),
    128: (32, 32, 8, 1),
    256: (16, 16, 4, 1),
    512: (16, 16, 8, 1),
}
# For the gradient of the queries:
QUERIES_HALF: Table = {
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (128, 64, 8, 3),
    128: (128, 64, 8, 3),
    256: (128, 32, 8, 2),
    512: (32, 32, 8, 1),
}
QUERIES_FLOAT: Table = {**FORWARD_FLOAT, 256: (16, 16, 8, 1)}
# For the gradient of keys and values:
KEYS_HALF: Table = {
    16: (64, 128, 4, 3),
    32: (64, 128, 4, 3),
    64: (64, 128, 8, 3),
    128: (64, 128, 8, 2),
    256: (32, 64, 8, 2),
    512: (32, 32, 8, 1),
}
KEYS_FLOAT: Table = {**FORWARD_FLOAT, 128: (16, 32, 8, 1), 256: (16, 32, 8, 1)}
_ADD_UP = 1024  # numbers per program


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`gruppo.kernels.attention.packed_attention` of a non-empty pack, in float32, bfloat16 or float16."""
    query, key, value = (with_rows(x) for x in (query, key, value))
    sinks = None if sinks is None else sinks.contiguous()
    return _PackedAttention.apply(query, key, value, sinks, segments, scale, window, softcap)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        segments: Segments,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        (tokens, heads, size), (_, kv_heads, size_v) = query.shape, value.shape
        shape = dict(
            D=size, DV=size_v, HEADS=heads, GROUP=heads // kv_heads, BLOCK_D=padded(size), BLOCK_DV=padded(size_v),
            HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        )  # fmt: skip
        # `inner`, the factor inside the tanh of a softcap; `unit`, which scales scores to units of log 2; the window.
        numbers = (scale / (softcap or scale), (softcap or scale) * math.log2(math.e), window or 0)
        out = query.new_empty(tokens, heads, size_v)
        lse = _per_query(query, shape)

        def launch(blocks: Blocks) -> None:
            tiles = segments.query_tiles(blocks.queries)
            kernels.forward_kernel[(len(tiles) * heads,)](
                query, key, value, sinks, tiles, out, lse, tokens, *numbers, *_strides(query, key, value),
                **shape, **blocks.options, HAS_SINKS=sinks is not None,
            )  # fmt: skip

        launch_fitting(launch, _blocks(query, shape, FORWARD_HALF, FORWARD_FLOAT), _kind("forward", query, shape))
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.rest = (segments, shape, (scale, *numbers))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad_out = with_rows(grad_out)
        grad_query, delta = _query_gradient(query, key, value, out, grad_out, lse, *ctx.rest)
        grad_key, grad_value = _key_gradient(query, key, value, grad_out, lse, delta, *ctx.rest)
        grad_sinks = None
        if sinks is not None:
            lse, delta = (x[: out.shape[0] * out.shape[1]].view(len(sinks), -1) for x in (lse, delta))
            weights = torch.exp2(sinks.float()[:, None] * math.log2(math.e) - lse)
            grad_sinks = -(weights * delta).sum(1).to(sinks.dtype)
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None, None


def _query_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    segments: Segments,
    shape: dict[str, Any],
    numbers: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    """The gradient (N, H, D) of the queries, and output times its gradient, summed over a head (see `_per_query`)."""
    tokens, heads, _ = query.shape
    grad_query, delta = torch.empty(query.shape, dtype=query.dtype, device=query.device), torch.empty_like(lse)

    def launch(blocks: Blocks) -> None:
        tiles = segments.query_tiles(blocks.queries)
        kernels.query_gradient_kernel[(len(tiles) * heads,)](
            query, key, value, out, grad_out, tiles, lse, delta, grad_query, tokens, *numbers,
            *_strides(query, key, value, grad_out), **shape, **blocks.options,
        )  # fmt: skip

    launch_fitting(launch, _blocks(query, shape, QUERIES_HALF, QUERIES_FLOAT), _kind("queries", query, shape))
    return grad_query, delta


def _key_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    segments: Segments,
    shape: dict[str, Any],
    numbers: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    """The gradients (N, Hkv, D) of the keys and (N, Hkv, Dv) of the values."""
    tokens, kv_heads, _ = key.shape
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (key, value)]
    sums = [grad.new_empty(segments.sum_rows, *grad.shape[1:], dtype=torch.float32) for grad in grads]

    def launch(blocks: Blocks) -> None:
        tiles = segments.key_tiles(blocks.keys)
        kernels.key_gradient_kernel[(len(tiles) * kv_heads,)](
            query, key, value, grad_out, lse, delta, segments.positions(), tiles, *grads, *sums, tokens, *numbers,
            *_strides(query, key, value, grad_out), **shape, **blocks.options,
        )  # fmt: skip

    launch_fitting(launch, _blocks(query, shape, KEYS_HALF, KEYS_FLOAT), _kind("keys", query, shape))
    if segments.shared:
        for grad, partial in zip(grads, sums, strict=True):
            width = grad.shape[1] * grad.shape[2]
            grid = (len(segments.shared), triton.cdiv(segments.longest_shared * width, _ADD_UP))
            kernels.add_up_kernel[grid](partial, grad, segments.shared_table(), WIDTH=width, BLOCK=_ADD_UP)
    return grads[0], grads[1]


def _blocks(query: Tensor, shape: dict[str, Any], half: Table, full: Table) -> Blocks:
    table = full if query.dtype == torch.float32 else half
    return Blocks(*table[max(shape["BLOCK_D"], shape["BLOCK_DV"])])


def _kind(name: str, query: Tensor, shape: dict[str, Any]) -> tuple[Any, ...]:
    return (name, query.device, query.dtype, *shape.values())


def _per_query(query: Tensor, shape: dict[str, Any]) -> Tensor:
    """A buffer of one float32 per head and query, (H * N,), plus one block at the end, which is read but not used."""
    past = _blocks(query, shape, KEYS_HALF, KEYS_FLOAT).queries
    return query.new_empty(query.shape[0] * query.shape[1] + past, dtype=torch.float32)


def _strides(*tensors: Tensor) -> list[int]:
    """The token stride and the head stride of each tensor."""
    return [stride for x in tensors for stride in x.stride()[:2]]
