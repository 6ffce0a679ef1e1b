"""The engine's operations, dispatched by device: Triton kernels on CUDA, plain torch elsewhere and for float64.

`gruppo.engine.reference` documents what they compute. Triton is imported at the first use with a CUDA tensor.
"""

from typing import Any

import torch
from torch import Tensor

from gruppo.engine import reference

__all__ = [
    "choose_splits",
    "decode_attention",
    "prefill_attention",
    "sample_tokens",
    "write_kv",
]

# The least number of programs in a decode launch: two for each of an H200's 132 multiprocessors.
_ENOUGH_PROGRAMS = 264
_MOST_SPLITS = 32


def _home(tensor: Tensor) -> Any:
    if not tensor.is_cuda or tensor.dtype is torch.float64:  # the kernels compute in float32
        return reference
    from gruppo.engine import kernels

    return kernels


def choose_splits(batch: int, kv_heads: int) -> int:
    """How many programs share a row's keys: a power of two that fills a GPU, or 1 if the batch alone does."""
    splits = 1
    while batch * kv_heads * splits < _ENOUGH_PROGRAMS and splits < _MOST_SPLITS:
        splits *= 2
    return splits


def write_kv(keys: Tensor, values: Tensor, pool_k: Tensor, pool_v: Tensor, places: Tensor) -> None:
    _home(keys).write_kv(keys, values, pool_k, pool_v, places)


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
    context = (prompt_start, prompt_len, tail_start, tail_len)
    options = dict(scale=scale, window=window, softcap=softcap, sinks=sinks, splits=splits, shared=shared)
    return _home(query).decode_attention(query, pool_k, pool_v, *context, **options)


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
    options = dict(max_query=max_query, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return _home(query).prefill_attention(query, pool_k, pool_v, starts, past, cu_query, **options)


def sample_tokens(
    logits: Tensor,
    noise_keys: Tensor,
    positions: Tensor,
    inverse_temperature: Tensor,
    *,
    greedy: bool,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    options = dict(greedy=greedy, entropy=entropy)
    return _home(logits).sample_tokens(logits, noise_keys, positions, inverse_temperature, **options)
