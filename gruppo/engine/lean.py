"""A faster forward pass for decoders on a CPU, where Python between small operations costs as much as they do.

It runs the usual decoder (RMSNorm, attention with rotary embedding, RMSNorm, gated MLP) as one function over the
module's own weights. It is used only for a model of standard parts for which it gives the same logits, keys and values
as the model's own forward, and only while no submodule has a hook or a replaced forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gruppo.engine.cache import EngineCache, PrefillLayout
from gruppo.engine.kv import KvPool
from gruppo.engine.runner import forward
from gruppo.policy.fusion import fused_norm, known_activation

_MODEL = {"model", "lm_head"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_PROBE = (3, 2)  # lengths of the sequences on which the two forwards are compared
_TOLERANCE = 1e-4  # relative to the norm; the order of additions differs

Function = Callable[[Tensor], Tensor]


def untouched(model: nn.Module) -> bool:
    """Whether no submodule has a hook or a replaced forward. The engine bypasses those of the model itself anyway."""
    parts = list(model.modules())[1:]
    return not any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts)


@torch.no_grad()
def lean_model(model: Any, shapes: Sequence[tuple[int, int, int]]) -> "LeanModel | None":
    """The lean version of a model, or None. The engine's attention must be installed; `shapes` as in KvPool."""
    if not _is_plain(model) or any(size != value_size for _, size, value_size in shapes):
        return None
    lean = None
    for first in _first_positions(model.config):
        expected = _probe(model, shapes, lambda *inputs: forward(model, *inputs), first)
        if expected is None or set(expected.options) != set(range(len(model.model.layers))):
            return None
        lean = lean or _build(model, expected.heads, expected.options)
        ours = None if lean is None else _probe(model, shapes, lean, first)
        if ours is None or not all(_near(a, b) for a, b in zip(ours.tensors, expected.tensors, strict=True)):
            return None
    return lean


def _first_positions(config: Any) -> list[int]:
    """The first positions to compare at: 0, and beyond the lengths at which some models change their behaviour."""
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = {rope.get("original_max_position_embeddings"), getattr(config, "max_position_embeddings", None)}
    return [0, *sorted(2 * length for length in lengths if isinstance(length, int))]


# ---- recognition


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _linears(layer: Any) -> list[nn.Linear]:
    return [getattr(layer.self_attn, name) for name in _ATTENTION] + [getattr(layer.mlp, name) for name in _MLP]


def _is_plain(model: Any) -> bool:
    """Whether this is a decoder in float32 on the CPU, with the usual parts and nothing else."""
    if any(p.dtype is not torch.float32 or p.device.type != "cpu" for p in model.parameters()):
        return False
    if _children(model) != _MODEL or _children(model.model) != _DECODER:
        return False
    for layer in model.model.layers:
        parts = _children(layer) == _LAYER and _children(layer.self_attn) == set(_ATTENTION)
        if not parts or _children(layer.mlp) != {*_MLP, "act_fn"}:
            return False
    linears = [model.lm_head, *(linear for layer in model.model.layers for linear in _linears(layer))]
    embedding = model.model.embed_tokens
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return False
    # All-zero weights would hide what the model does with a part's output.
    return all(type(linear) is nn.Linear and bool(linear.weight.any()) for linear in linears)


class _Observed(EngineCache):
    """Records the query heads and the attention options of every layer."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.heads: dict[int, int] = {}
        self.options: dict[int, dict[str, Any]] = {}
        self.tensors: list[Tensor] = []

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        self.heads[self.layer], self.options[self.layer] = query.shape[1], options
        return super().attend(query, **options)


def _probe(
    model: Any, shapes: Sequence[tuple[int, int, int]], run: Callable[..., Tensor], first: int
) -> _Observed | None:
    """Run two short sequences, packed like prompts, and record logits, keys and values; None if it fails."""
    count = sum(_PROBE)
    pool = KvPool(shapes, count, dtype=torch.float32, device=torch.device("cpu"))
    starts, none_before = torch.tensor([0, _PROBE[0]]), torch.zeros(2, dtype=torch.long)
    bounds = torch.tensor([0, _PROBE[0], count], dtype=torch.int32)
    cache = _Observed(pool, PrefillLayout(torch.arange(count), starts, none_before, bounds, max(_PROBE)))
    ids = torch.randint(model.lm_head.out_features, (count,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(first, first + length) for length in _PROBE])
    try:
        logits = run(ids, positions, cache)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None  # the model cannot be called this way
    cache.tensors = [logits, *pool.keys, *pool.values]
    return cache


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= _TOLERANCE * b.norm())


# ---- the model


def _build(model: Any, heads: dict[int, int], options: dict[int, dict[str, Any]]) -> "LeanModel | None":
    decoder = model.model
    layers = [_layer(layer, heads[i], options[i]) for i, layer in enumerate(decoder.layers)]
    norm = fused_norm(decoder.norm, {torch.float32})
    complete = [layer for layer in layers if layer is not None]
    if norm is None or len(complete) < len(layers) or not layers:
        return None
    return LeanModel(decoder.embed_tokens.weight, decoder.rotary_emb, complete, norm, _weights(model.lm_head))


def _weights(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def _layer(layer: Any, heads: int, options: dict[str, Any]) -> "LeanLayer | None":
    norms = [fused_norm(norm, {torch.float32}) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    activation = known_activation(layer.mlp.act_fn)
    if norms[0] is None or norms[1] is None or activation is None or options["sinks"] is not None:
        return None
    return LeanLayer(norms[0], norms[1], activation, [_weights(linear) for linear in _linears(layer)], heads, options)


@dataclass(frozen=True)
class LeanLayer:
    """The two halves of a layer: before and after attention."""

    before_attention: Function
    before_mlp: Function
    activation: Function
    weights: list[tuple[Tensor, Tensor | None]]  # (weight, bias) of `_ATTENTION` and `_MLP`
    heads: int
    options: dict[str, Any]  # of its attention

    def heads_of(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (N, heads, D) of (N, hidden)."""
        query, key, value = self.weights[:3]
        size, linear = cos.shape[-1], functional.linear
        x = self.before_attention(x)
        turning = torch.cat((linear(x, *query), linear(x, *key)), -1).view(len(x), -1, size)
        exchanged = turning.roll(size // 2, -1)
        turning.mul_(cos).addcmul_(exchanged, sin)
        return turning[:, : self.heads], turning[:, self.heads :], linear(x, *value).view(len(x), -1, size)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (N, hidden), given its input and the attention output (N, heads, D)."""
        out, gate, up, down = self.weights[3:]
        linear = functional.linear
        x = linear(attended.reshape(len(x), -1), *out).add_(x)
        h = self.before_mlp(x)
        h = self.activation(linear(h, *gate)).mul_(linear(h, *up))
        return linear(h, *down).add_(x)


class LeanModel:
    """Embedding, layers and head; see `__call__`."""

    def __init__(self, embedding: Tensor, rotary: nn.Module, layers: Sequence[LeanLayer], norm: Function, head: Any):
        self.embedding = embedding
        self.rotary = rotary
        self.layers = layers
        self.norm = norm
        self.head = head  # weight and bias
        self._factors: tuple[Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Drop what was derived from the model's buffers, so that the next rollout recomputes it."""
        self._factors = None

    def __call__(self, ids: Tensor, positions: Tensor, cache: EngineCache, logits: bool = True) -> Tensor:
        """Logits (N, V) of packed tokens (N,); with `logits=False` only keys and values are written."""
        x = functional.embedding(ids, self.embedding)
        cos, sin = self._rotation(x, positions)
        for i, layer in enumerate(self.layers):
            query, keys, values = layer.heads_of(x, cos, sin)
            if not logits and i == len(self.layers) - 1:
                cache.write(i, keys, values)
                return x
            x = layer.after_attention(x, cache.write_and_attend(i, query, keys, values, **layer.options))
        return functional.linear(self.norm(x), *self.head)

    def _rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors (N, 1, D) for a head and for the same head with its halves swapped, looked up by position."""
        length = int(positions.max()) + 1
        if self._factors is None or len(self._factors[0]) < length:
            every = torch.arange(2 * length)  # with room for the completions that follow
            cos, sin = self.rotary(x[None], every[None])
            first, second = sin[0].chunk(2, -1)
            self._factors = cos[0, :, None], torch.cat((-first, second), -1)[:, None]  # "rotate half"
        cos, sin = self._factors
        return cos.index_select(0, positions), sin.index_select(0, positions)
