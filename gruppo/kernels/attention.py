"""Causal attention of packed sequences that may share a prefix, with a gradient.

The pack contains a prompt once, followed by its completions: each completion sees the whole prompt and itself, but not
the other completions. On CUDA the Triton kernels of `gruppo.kernels.gpu.attention` compute it; elsewhere, and in
float64, segments of similar size are gathered into padded batches for torch's own attention. Shapes: N tokens,
S segments, H query heads, Hkv key/value heads, D and Dv key and value head sizes; in a batch B segments, with M
queries and L keys each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Segments", "packed_attention"]

# Number of child queries that one program of the backward pass sums over, for a block of their parent's keys. With
# more, a few programs run longer than all others; with fewer, there are more partial sums to add up.
QUERIES_PER_SUM = 512
# Number of scores that cost about as much as one more call of torch's attention.
_CELLS_PER_CALL = 1 << 14


class Span(NamedTuple):
    """The tokens of a segment and of its parent. Without a parent `before` is 0 and `parent_start` is `start`."""

    start: int
    length: int
    parent_start: int
    before: int


class Reading(NamedTuple):
    """The keys of one segment and a run of queries that see them: all keys, or if `causal` those not after the query.

    The children of a parent are adjacent and see all of it, so their queries form one run of tokens, which is cut into
    pieces regardless of the boundaries between children.
    """

    key_start: int
    keys: int
    query_start: int
    queries: int
    causal: int
    sum_row: int  # first row of these keys' gradient among the partial sums; -1: no other reading has these keys


class Shared(NamedTuple):
    """A parent's tokens and its partial sums: `pieces` times `length` rows, starting at `first_row`."""

    start: int
    length: int
    first_row: int
    pieces: int


@dataclass(frozen=True, eq=False)
class Segments:
    """N packed tokens in S consecutive segments.

    A segment may have a parent, whose tokens it sees before its own. `Segments.of` creates one object per batch, which
    every layer uses; it also caches what the layers have in common.
    """

    lengths: tuple[int, ...]  # at least 1 each
    parents: tuple[int, ...]  # the parent's index or -1; parents have no parent, children directly follow theirs
    bounds: Tensor  # (S + 1,) int32: segment s has the tokens from bounds[s] to bounds[s + 1]
    spans: tuple[Span, ...] = field(repr=False)
    readings: tuple[Reading, ...] = field(repr=False)
    shared: tuple[Shared, ...] = field(repr=False)
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, lengths: Sequence[int], parents: Sequence[int], device: torch.device | str | None = None
    ) -> "Segments":
        """Segments of these lengths, e.g. (3, 2, 4, 5) with parents (-1, 0, 0, -1): 0 is the prompt of 1 and 2."""
        lengths, parents = tuple(lengths), tuple(parents)
        _check(lengths, parents)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        spans = tuple(
            Span(start, length, start, 0) if parent < 0 else Span(start, length, starts[parent], lengths[parent])
            for start, length, parent in zip(starts, lengths, parents, strict=False)
        )
        bounds = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
        return cls(lengths, parents, bounds, spans, *_readings(spans, parents))

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """The largest number of tokens that any token sees, itself included."""
        return max((span.before + span.length for span in self.spans), default=0)

    @cached_property
    def sum_rows(self) -> int:
        """The number of rows of all partial sums."""
        return sum(shared.length * shared.pieces for shared in self.shared)

    @cached_property
    def longest_shared(self) -> int:
        return max((shared.length for shared in self.shared), default=0)

    def positions(self) -> Tensor:
        """(N,) int64: positions as if each segment directly followed its parent."""

        def make() -> Tensor:
            device = self.bounds.device
            shift = torch.tensor([span.before - span.start for span in self.spans], dtype=torch.int64)
            lengths = torch.tensor(self.lengths, dtype=torch.int64)
            shift = shift.to(device).repeat_interleave(lengths.to(device), output_size=self.tokens)
            return torch.arange(self.tokens, device=device) + shift

        return self.keep("positions", make)

    def keep(self, name: Any, make: Callable[[], Any]) -> Any:
        """The cached result of `make` under this name; the first call computes it."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def query_tiles(self, block: int) -> Tensor:
        """(T, 5) int32: one row per block of a segment's queries, its span and first query; most keys first."""

        def make() -> Tensor:
            tiles = [(*span, first) for span in self.spans for first in range(0, span.length, block)]
            return self._table(sorted(tiles, key=lambda tile: tile[3] + min(tile[1], tile[4] + block), reverse=True))

        return self.keep(("query tiles", block), make)

    def key_tiles(self, block: int) -> Tensor:
        """(T, 7) int32: one row per block of a reading's keys, the reading and the first key; most queries first."""

        def make() -> Tensor:
            tiles = [(*reading, first) for reading in self.readings for first in range(0, reading.keys, block)]
            return self._table(sorted(tiles, key=lambda tile: tile[3] - tile[4] * tile[6], reverse=True))

        return self.keep(("key tiles", block), make)

    def shared_table(self) -> Tensor:
        """(parents with children, 4) int32: `Shared`."""
        return self.keep("shared", lambda: self._table(self.shared))

    def _table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32).to(self.bounds.device, non_blocking=True)


def _check(lengths: Sequence[int], parents: Sequence[int]) -> None:
    if len(lengths) != len(parents):
        raise ValueError(f"there must be one parent per length, not {len(parents)} for {len(lengths)}")
    if lengths and min(lengths) < 1:
        raise ValueError(f"every segment must have at least one token, not {min(lengths)}")
    for s, parent in enumerate(parents):
        if parent >= 0 and (
            parent >= s or parents[parent] >= 0 or parents[s - 1] != (parent if parent < s - 1 else -1)
        ):
            raise ValueError(
                f"segment {s} does not directly follow its parent, segment {parent}, or another child of it"
            )


def _readings(spans: Sequence[Span], parents: Sequence[int]) -> tuple[tuple[Reading, ...], tuple[Shared, ...]]:
    """Which queries read which keys, for the gradient of keys and values."""
    readings, shared, rows = [], [], 0
    # The end of each parent's last child.
    ends = {parent: child.start + child.length for parent, child in zip(parents, spans, strict=True)}
    for s, (start, length, _, _) in enumerate(spans):
        own = Reading(start, length, start, length, 1, -1)
        if s in ends:
            first_row, after = rows, start + length
            own = own._replace(sum_row=rows)
            for query in range(after, ends[s], QUERIES_PER_SUM):
                rows += length
                queries = min(QUERIES_PER_SUM, ends[s] - query)
                readings.append(Reading(start, length, query, queries, 0, rows))
            rows += length
            shared.append(Shared(start, length, first_row, (rows - first_row) // length))
        readings.append(own)
    return tuple(readings), tuple(shared)


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
    """Attention of query (N, H, D) over key (N, Hkv, D) and value (N, Hkv, Dv): (N, H, Dv), contiguous.

    A token sees the parent of its segment and its segment up to itself; with a window, only the tokens less than
    `window` positions back. `softcap` bounds the scaled scores; `sinks` (H,) are scores without a value.
    Differentiable in query, key, value and sinks. Under autocast it is computed in the autocast dtype, like torch's
    attention.
    """
    if scale <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"scale {scale} and softcap {softcap} must be positive")
    if not len(query) == len(key) == len(value) == segments.tokens:
        raise ValueError(
            f"query, key and value must have {segments.tokens} tokens, as the segments do, not {len(query)}, "
            f"{len(key)}, {len(value)}"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must have one dtype, not {query.dtype}, {key.dtype}, {value.dtype}")
    if window is not None and window >= segments.longest:
        window = None
    options: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap, sinks=sinks)
    if not len(query):
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if not query.is_cuda or query.dtype is torch.float64:  # the kernels compute in float32
        with torch.autocast(device, enabled=False):
            return padded_attention(query, key, value, segments, **options)
    from gruppo.kernels.gpu.attention import packed_attention as on_gpu

    return on_gpu(query, key, value, segments, **options)


class Batch(NamedTuple):
    """B segments, padded to M queries each, with P keys of the parent before M keys of their own.

    Parents are right-aligned: they all end at key P, and shorter ones begin later. So query j is key P + j, and the
    distance between a query and a key does not depend on the segment.
    """

    queries: Tensor  # (B * M,) int64, tokens; past the end of a segment its last token is repeated
    keys: Tensor  # (B * (P + M),) int64, tokens
    bias: Tensor  # (B or 1, 1, M, P + M) float32: 0 or -inf
    shape: tuple[int, int, int]  # B, M, P
    is_causal: bool  # the bias is torch's causal mask, so torch need not read it


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`packed_attention` in plain torch, on any device."""
    batches, back = segments.keep(("batches", window), lambda: _batches(segments, window))
    out = []
    for batch in batches:
        size, queries, _ = batch.shape
        q = query.index_select(0, batch.queries).view(size, queries, *query.shape[1:]).transpose(1, 2)
        k = key.index_select(0, batch.keys).view(size, -1, *key.shape[1:]).transpose(1, 2)
        v = value.index_select(0, batch.keys).view(size, -1, *value.shape[1:]).transpose(1, 2)
        if softcap is not None or sinks is not None:
            attended = _by_scores(q, k, v, batch.bias, scale, softcap, sinks)
        elif batch.is_causal:
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            bias = batch.bias.to(q.dtype)
            attended = functional.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)
        out.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(out).index_select(0, back)


def _by_scores(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """(B, H, M, D) over (B, Hkv, L, D) and (B, Hkv, L, Dv), with all scores in memory: (B, H, M, Dv)."""
    (size, heads, queries, _), kv_heads = query.shape, key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    # Query heads that share a key head are treated as several queries of one head, so that no key is repeated.
    grouped = query.reshape(size, kv_heads, -1, query.shape[3]).to(wide)
    scores = (grouped @ key.to(wide).transpose(-1, -2) * scale).view(size, heads, queries, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + bias
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.to(wide).view(1, -1, 1, 1).expand(size, -1, queries, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    mixed = weights.reshape(size, kv_heads, -1, key.shape[2]) @ value.to(wide)
    return mixed.view(size, heads, queries, -1).to(query.dtype)


def _batches(segments: Segments, window: int | None) -> tuple[list[Batch], Tensor]:
    """All segments in batches, and the index (N,) of each token's result in the concatenated batch results."""
    batches, back, done = [], torch.empty(segments.tokens, dtype=torch.int64), 0
    for spans in _alike(segments.spans):
        batch = _batch(spans, window, segments.bounds.device)
        for i, span in enumerate(spans):
            first = done + i * batch.shape[1]
            back[span.start : span.start + span.length] = torch.arange(first, first + span.length)
        done += len(batch.queries)
        batches.append(batch)
    return batches, back.to(segments.bounds.device, non_blocking=True)


def _alike(spans: Sequence[Span]) -> list[list[Span]]:
    """Group spans of similar sizes, so that padding adds at most a tenth of their scores, or few in total."""
    lists: list[list[Span]] = []
    cells = longest = before = 0
    for span in sorted(spans, key=lambda span: (span.before > 0, span.length, span.before), reverse=True):
        cells += span.length * (span.before + span.length)
        longest, before = max(longest, span.length), max(before, span.before)
        if not lists or (len(lists[-1]) + 1) * longest * (before + longest) > 1.1 * cells + _CELLS_PER_CALL:
            lists.append([])
            _, longest, _, before = span
            cells = longest * (before + longest)
        lists[-1].append(span)
    return lists


def _batch(spans: Sequence[Span], window: int | None, device: torch.device) -> Batch:
    starts, lengths, parents, befores = (column[:, None] for column in torch.tensor(spans).T)
    most, before = int(lengths.max()), int(befores.max())
    own = starts + torch.arange(most).minimum(lengths - 1)
    slot = torch.arange(before + most)
    missing = before - befores
    shared = parents + (slot[:before] - missing).clamp(min=0)
    back = slot[before:, None] - slot
    hidden = back < 0
    if window is not None:
        hidden |= back >= window
    if bool(missing.any()):
        hidden = hidden | (slot < missing)[:, None]
    else:
        hidden = hidden[None]
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
    queries, keys = own.flatten(), torch.cat([shared, own], dim=1).flatten()
    shape = (len(spans), most, before)
    queries, keys, bias = (tensor.to(device, non_blocking=True) for tensor in (queries, keys, bias))
    return Batch(queries, keys, bias, shape, before == 0 and window is None)
