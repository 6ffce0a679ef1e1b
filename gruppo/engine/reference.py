"""Plain torch versions of the GPU kernels: the engine runs them on a CPU, and the kernels are tested against them.

Same names, arguments and results as `gruppo.engine.kernels`. Shapes: B rows, H query heads, Hkv key/value heads,
D and Dv key and value head sizes, N tokens, P sequences, S places of the key/value pool, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gruppo.engine.noise import gumbel, uniform_words

__all__ = [
    "decode_attention",
    "prefill_attention",
    "sample_tokens",
    "write_kv",
]


def write_kv(keys: Tensor, values: Tensor, pool_k: Tensor, pool_v: Tensor, places: Tensor) -> None:
    """Put keys [N, Hkv, D] and values [N, Hkv, Dv] at `places` int64 [N] of the pools [S, Hkv, D] and [S, Hkv, Dv]."""
    pool_k.index_copy_(0, places, keys.to(pool_k.dtype))
    pool_v.index_copy_(0, places, values.to(pool_v.dtype))


class Workspace:
    """Reused memory for the keys and values that a layer gathers: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def gather(self, name: str, pool: Tensor, table: "KeyTable") -> Tensor:
        """Gather the keys [B, L, Hkv, D] that each row sees into the buffer `name`; the next layer overwrites them."""
        shape = (len(table.places), *pool.shape[1:])
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or len(memory) < size or memory.dtype is not pool.dtype:
            memory = self._memory[name] = pool.new_empty(size)
        # index_select is several times quicker than indexing with a matrix of places.
        gathered = torch.index_select(pool, 0, table.places, out=memory[:size].view(shape))
        return gathered.view(-1, table.width, *pool.shape[1:])


class KeyTable(NamedTuple):
    """Which keys one query per row sees: the same in every layer with the same window."""

    places: Tensor  # int64 [B * L], row by row
    width: int  # L
    bias: Tensor | None  # float32 [B, 1, 1, L], -inf where a row has no key; None if every row has L keys

    @classmethod
    def of(
        cls, prompt_start: Tensor, prompt_len: Tensor, tail_start: Tensor, tail_len: Tensor, window: int | None
    ) -> "KeyTable":
        total = (prompt_len + tail_len)[:, None]
        shortest, longest = (int(bound) for bound in total.aminmax())
        width = longest if window is None else min(window, longest)
        key = torch.arange(width, device=total.device)
        if window is not None:
            key = key + (total - window).clamp_(min=0)
        bias = None if shortest >= width else _bias(key < total)
        # Entries past the end read the row's own last place, so no other row's values are multiplied by zero weights.
        key = torch.minimum(key, total - 1)
        start = torch.where(key < prompt_len[:, None], prompt_start[:, None], (tail_start - prompt_len)[:, None])
        return cls(start.add_(key).flatten(), width, None if bias is None else bias[:, None, None])


def _bias(visible: Tensor) -> Tensor:
    """An additive mask: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, float("-inf"))


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
    """Attention of one query per row, [B, H, D] -> [B, H, Dv], over the places of its prompt and then of its tail.

    Keys have the positions 0, 1, ... in that order. The query has the last position; its own key is already in the
    pool. It sees the keys less than `window` positions back. `softcap` bounds the scaled scores; `sinks` [H] are
    scores without a value. The four int64 [B] tensors locate the two ranges; tail_len is at least 1. `splits` and
    `shared` (how a GPU divides the work) have no effect here.
    """
    table = KeyTable.of(prompt_start, prompt_len, tail_start, tail_len, window)
    space = Workspace()
    return decode_attention_at(
        query, pool_k, pool_v, table, scale=scale, softcap=softcap, sinks=sinks, workspace=space
    )


def decode_attention_at(
    query: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    table: KeyTable,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    workspace: Workspace,
) -> Tensor:
    """`decode_attention` with a precomputed table, which layers with the same window share."""
    (batch, heads, _), kv_heads = query.shape, pool_k.shape[1]
    keys = workspace.gather("keys", pool_k, table).transpose(1, 2)
    values = workspace.gather("values", pool_v, table).transpose(1, 2)
    # Query heads that share a key head are treated as several queries of one head, so that no key is repeated.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, -1)
    shaped_sinks = None if sinks is None else sinks.view(1, kv_heads, -1)
    return _attend(grouped, keys, values, table.bias, scale, softcap, shaped_sinks).reshape(batch, heads, -1)


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
    """Causal attention of P sequences' next tokens, packed, [N, H, D] -> [N, H, Dv], over their keys in the pool.

    Sequence p already has `past[p]` tokens in the pool, and its queries are cu_query[p] .. cu_query[p+1]. Query i has
    position past[p] + i and sees the last `window` of the keys at starts[p] + 0 .. position. Scores are computed as in
    `decode_attention`.
    """
    heads, kv_heads = query.shape[1], pool_k.shape[1]
    group = heads // kv_heads
    out = query.new_empty(len(query), heads, pool_v.shape[2])
    bounds = cu_query.tolist()
    plain = softcap is None and sinks is None
    shaped_sinks = None if sinks is None else sinks.view(kv_heads, group, 1)
    for p, (start, before) in enumerate(zip(starts.tolist(), past.tolist(), strict=True)):
        begin, end = bounds[p], bounds[p + 1]
        if begin == end:
            continue
        length = before + end - begin
        first = 0 if window is None else max(0, before - window + 1)  # the first key that the chunk's first query sees
        keys = _per_query_head(pool_k[start + first : start + length], group)
        values = _per_query_head(pool_v[start + first : start + length], group)
        queries = query[begin:end].transpose(0, 1).unflatten(0, (kv_heads, group))
        if plain and not before and (window is None or length <= window):
            attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        else:
            bias = _causal(before, length, first, window, query.device)
            attended = _attend(queries, keys, values, bias, scale, softcap, shaped_sinks)
        out[begin:end] = attended.flatten(0, 1).transpose(0, 1)
    return out


def _causal(before: int, length: int, first: int, window: int | None, device: torch.device) -> Tensor | None:
    """The bias [M, L] for queries at positions before .. length and keys from `first` on; None if all are visible."""
    position = torch.arange(before, length, device=device)[:, None]
    key = torch.arange(first, length, device=device)
    visible = key <= position
    if window is not None:
        visible &= position - key < window
    return None if bool(visible.all()) else _bias(visible)


def _per_query_head(pool: Tensor, group: int) -> Tensor:
    """[L, Hkv, D] as [Hkv, G, L, D], each head shown to the G query heads that use it; a view."""
    return pool.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B, H, M, D] over [B, H, L, D] and [B, H, L, Dv]; `bias` broadcasts to [B, H, M, L], `sinks` to [B, H, M]."""
    if softcap is None and sinks is None:
        bias = None if bias is None else bias.to(query.dtype)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)
    scores = query.float() @ keys.float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    if sinks is not None:
        sink = sinks.float().expand(scores.shape[:-1])[..., None]
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values.float()).to(query.dtype)


def sample_tokens(
    logits: Tensor,
    noise_keys: Tensor,
    positions: Tensor,
    inverse_temperature: Tensor,
    *,
    greedy: bool,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One token per row of logits [B, V], its log-prob and the entropy, all of softmax(logits * inverse_temperature).

    noise_keys and positions, int64 [B], determine the noise (`gruppo.engine.noise`). With `greedy` the largest logit
    is taken instead, and among equals the lowest index. Logits of -inf are never chosen. A row with NaN, +inf or only
    -inf gives token -1 and NaN. Returns int64 [B], float32 [B], and float32 [B] or None.
    """
    x = logits.float() * inverse_temperature
    noisy = x if greedy else x + gumbel(uniform_words(noise_keys, positions, x.shape[1]))
    tokens = noisy.argmax(-1)
    logp_all = x.log_softmax(-1)  # all NaN if the row has NaN, +inf or only -inf
    logps = logp_all.gather(1, tokens[:, None])[:, 0]
    entropies = None
    if entropy:
        entropies = -(logp_all.exp() * logp_all.masked_fill(x == -torch.inf, 0.0)).sum(-1)
    return tokens.masked_fill(logps.isnan(), -1), logps, entropies
