"""The engine's attention: how a transformers model reads and writes the KV cache pool.

Inside a layer a transformers model does two things that matter here: it calls `past_key_values.update(k, v, layer)`
and then the attention function registered under the config's attention name. `EngineCache` serves both: its `update`
writes the new keys and values to their places, and the attention function registered here passes it the queries.
The cache is passed as a forward argument, so there is no global state.

Tokens are packed: a forward pass has one row of N tokens, whichever sequences they belong to.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache

from gruppo.engine import ops
from gruppo.engine.kv import KvPool
from gruppo.engine.reference import KeyTable, Workspace, decode_attention_at
from gruppo.errors import RolloutError

ATTENTION_NAME = "gruppo_engine"


@dataclass
class PrefillLayout:
    """N prompt tokens of P sequences, concatenated; `past[p]` tokens of sequence p are already in the pool."""

    places: Tensor  # (N,) where each token's key and value are written
    starts: Tensor  # (P,) where each sequence begins in the pool
    past: Tensor  # (P,)
    cu_query: Tensor  # (P + 1,) int32
    max_query: int

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        return ops.prefill_attention(
            query, keys, values, self.starts, self.past, self.cu_query, max_query=self.max_query, **options
        )


@dataclass
class DecodeLayout:
    """One token of each of N completions; all tensors are (N,)."""

    places: Tensor
    prompt_start: Tensor
    prompt_len: Tensor
    tail_start: Tensor
    tail_len: Tensor  # this token included
    splits: int = 1
    shared: bool = False  # neighbouring rows often have the same prompt
    workspace: Workspace = field(default_factory=Workspace)
    tables: dict[int | None, KeyTable] = field(default_factory=dict)  # by window

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, *, window: int | None, **options: Any) -> Tensor:
        context = (self.prompt_start, self.prompt_len, self.tail_start, self.tail_len)
        if query.is_cuda:
            options |= {"splits": self.splits, "shared": self.shared}
            return ops.decode_attention(query, keys, values, *context, window=window, **options)
        if window not in self.tables:
            self.tables[window] = KeyTable.of(*context, window)
        return decode_attention_at(query, keys, values, self.tables[window], workspace=self.workspace, **options)


class EngineCache(Cache):
    """The cache object that the model receives in one forward pass of the engine."""

    def __init__(self, pool: KvPool, layout: PrefillLayout | DecodeLayout):
        # Cache.__init__ is not called: it would create storage, and here the pool is the storage.
        self.layers: list[Any] = []
        self.pool = pool
        self.layout = layout
        self.layer = -1

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write (1, Hkv, N, D) keys and values to their places; the attention reads them from there."""
        self.layer = layer_idx
        self.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return key_states, value_states

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """(1, H, N, D) queries to (1, N, H, Dv) outputs."""
        keys, values = self.pool.layer(self.layer)
        out = self.layout.attend(query[0].transpose(0, 1).to(self.pool.dtype), keys, values, **options)
        return out[None]

    # Called by a lean model (lean.py) instead of `update` and `attend`; nothing is transposed.

    def write_and_attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        """Write one layer's keys and values (N, heads, D) and return the attention output (N, H, Dv)."""
        self.write(layer, keys, values)
        return self.layout.attend(query, *self.pool.layer(layer), **options)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's keys and values (N, heads, D) to their places."""
        dtype = self.pool.dtype
        ops.write_kv(keys.to(dtype), values.to(dtype), *self.pool.layer(layer), self.layout.places)

    # The rest of the interface that models use. Positions are always passed in and this attention needs no mask, so
    # constants suffice.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.pool.keys)


class ShapeProbe(Cache):
    """A cache that stores nothing and only records which layers use it and the shapes of their keys and values."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.dtype = torch.float32
        self.last = -1

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.dtype = value_states.dtype
        self.last = layer_idx
        return key_states, value_states

    def attend(self, query: Tensor, **_: Any) -> Tensor:
        return query.new_zeros(1, query.shape[2], query.shape[1], self.shapes[self.last][2])

    get_seq_length = EngineCache.get_seq_length
    get_query_offset = EngineCache.get_query_offset
    get_mask_sizes = EngineCache.get_mask_sizes
    get_max_cache_shape = EngineCache.get_max_cache_shape
    is_compileable = EngineCache.is_compileable


def engine_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    engine_cache: EngineCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls while the engine runs."""
    if engine_cache is None:
        raise RolloutError(
            f"{type(module).__name__} does not pass forward arguments on to its attention; the built-in engine cannot "
            "run it."
        )
    if attention_mask is not None:
        raise RolloutError(
            f"{type(module).__name__} makes its own attention mask, which the built-in engine does not support."
        )
    out = engine_cache.attend(
        query,
        scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.to(query.dtype), None


AttentionInterface.register(ATTENTION_NAME, engine_attention)
