"""The Triton kernels behind `gruppo.kernels.gpu.attention`: forward pass, gradients, and the sum of partial gradients.

The forward pass keeps a running softmax over blocks of keys and stores the logarithm of its sum, from which the
backward pass recomputes the weights (Dao et al. 2022, https://arxiv.org/abs/2205.14135). The gradient of the queries
iterates over the keys that they see; that of keys and values iterates over the queries that see them. A parent's keys
are read by all its children. That is too much work for one program, so several programs write partial sums in float32,
which a last kernel adds up in a fixed order: there are no atomic additions, and the result is bitwise reproducible.

A table of tiles assigns the work to programs (`Segments.query_tiles`, `Segments.key_tiles`), longest first. A score in
units of log 2 is a product times `unit`, or with a softcap tanh(product times `inner`) times `unit`. Token indices are
int64: a tensor can have more than 2³¹ elements.
"""

import triton
import triton.language as tl

from gruppo.kernels.gpu.softmax import INF, accumulate, start_of, tanh

__all__ = ["add_up_kernel", "forward_kernel", "key_gradient_kernel", "query_gradient_kernel"]


@triton.jit
def _rows(at, stride, left, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of a head starting at `at`, [ROWS, BLOCK]: zero from row `left` on and past the head's size."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    where = at + row[:, None] * stride + column[None, :]
    return tl.load(where, mask=(row < left)[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _write_rows(at, stride, left, rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    where = at + row[:, None] * stride + column[None, :]
    tl.store(where, rows, mask=(row < left)[:, None] & (column < SIZE)[None, :])


@triton.jit
def _scores(a, b, inner, HAS_SOFTCAP: tl.constexpr):
    """Products of rows a [A, D] and b [B, D], or with a softcap their tanh; [A, B], still to be scaled by `unit`."""
    products = tl.dot(a, tl.trans(b), input_precision="ieee")
    if HAS_SOFTCAP:
        return tanh(products * inner)
    return products


@triton.jit
def _key_blocks(
    before, queries, m_first, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """The blocks of keys that a block of queries sees: first key and number of blocks, for the parent and itself."""
    end = tl.minimum(m_first + BLOCK_M, queries)
    parent_first, own_first = m_first * 0, m_first * 0
    if HAS_WINDOW:
        parent_first = tl.minimum(tl.maximum(before + m_first - window + 1, 0), before)
        own_first = tl.maximum(m_first - window + 1, 0)
    return parent_first, tl.cdiv(before - parent_first, BLOCK_N), own_first, tl.cdiv(end - own_first, BLOCK_N)


@triton.jit
def _key_block(
    i, parent_first, parent_blocks, own_first, start, parent, before, queries, m_first, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Block i of `_key_blocks`: its first token, the number of keys left from there, its position, whether to mask it.

    A position is the index of a key among all keys that the segment sees. No mask is needed if every query sees all
    keys of the block.
    """
    own = i >= parent_blocks
    number = tl.where(own, own_first + (i - parent_blocks) * BLOCK_N, parent_first + i * BLOCK_N)
    token = tl.where(own, start, parent) + number
    position = tl.where(own, before, 0) + number
    cut = number + BLOCK_N > tl.where(own, m_first + 1, before)
    if HAS_WINDOW:
        cut |= before + m_first + BLOCK_M - position > window
    return token, tl.where(own, queries, before) - number, position, cut


@triton.jit
def _seen(q_position, position, left, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The visibility mask [M, N] of a block of keys for queries at these positions [M]."""
    n = tl.arange(0, BLOCK_N)
    back = q_position[:, None] - (position + n)[None, :]
    seen = (back >= 0) & (n < left)[None, :]
    if HAS_WINDOW:
        seen &= back < window
    return seen


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    query, key, value, sinks, tiles, out, lse, tokens, inner, unit, window,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    D: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One block of a segment's queries, one head, over the parent's keys and then the segment's own."""
    tile = tiles + tl.program_id(0) // HEADS * 5
    head = tl.program_id(0) % HEADS
    start, parent = tl.load(tile).to(tl.int64), tl.load(tile + 2).to(tl.int64)
    queries, before, m_first = tl.load(tile + 1), tl.load(tile + 3), tl.load(tile + 4)
    token, there = start + m_first, queries - m_first
    query += head.to(tl.int64) * stride_qh + token * stride_qn
    key += (head // GROUP).to(tl.int64) * stride_kh
    value += (head // GROUP).to(tl.int64) * stride_vh
    q = _rows(query, stride_qn, there, D, BLOCK_M, BLOCK_D)
    row = tl.arange(0, BLOCK_M)
    highest, total, mixed = start_of(sinks, row * 0 + head, row < there, row < there, BLOCK_DV, HAS_SINKS)

    parent_first, parent_blocks, own_first, own_blocks = _key_blocks(
        before, queries, m_first, window, BLOCK_M, BLOCK_N, HAS_WINDOW
    )
    for i in range(parent_blocks + own_blocks):
        at, left, position, cut = _key_block(
            i, parent_first, parent_blocks, own_first, start, parent, before, queries, m_first, window,
            BLOCK_M, BLOCK_N, HAS_WINDOW,
        )  # fmt: skip
        keys = _rows(key + at * stride_kn, stride_kn, left, D, BLOCK_N, BLOCK_D)
        values = _rows(value + at * stride_vn, stride_vn, left, DV, BLOCK_N, BLOCK_DV)
        scores = _scores(q, keys, inner, HAS_SOFTCAP)
        if cut:
            seen = _seen(before + m_first + row, position, left, window, BLOCK_N, HAS_WINDOW)
            scores = tl.where(seen, scores, -INF)
        highest, total, mixed = accumulate(scores, values, highest, total, mixed, unit)

    # Every query sees itself, so its sum is not zero. Rows past the last query are not written.
    lse += head.to(tl.int64) * tokens + token
    tl.store(lse + row, highest + tl.log2(total), mask=row < there)
    out += (token * HEADS + head) * DV
    _write_rows(out, HEADS * DV, there, mixed / total[:, None], DV, BLOCK_M, BLOCK_DV)


@triton.jit(do_not_specialize=["tokens"])
def query_gradient_kernel(
    query, key, value, out, grad_out, tiles, lse, delta, grad_query, tokens, scale, inner, unit, window,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_gn, stride_gh,
    D: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Work is divided as in the forward pass. Stores `delta`, output times its gradient, for the keys' gradient."""
    tile = tiles + tl.program_id(0) // HEADS * 5
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    start, parent = tl.load(tile).to(tl.int64), tl.load(tile + 2).to(tl.int64)
    queries, before, m_first = tl.load(tile + 1), tl.load(tile + 3), tl.load(tile + 4)
    token, there = start + m_first, queries - m_first
    key += head // GROUP * stride_kh
    value += head // GROUP * stride_vh
    q = _rows(query + head * stride_qh + token * stride_qn, stride_qn, there, D, BLOCK_M, BLOCK_D)
    g = _rows(grad_out + head * stride_gh + token * stride_gn, stride_gn, there, DV, BLOCK_M, BLOCK_DV)
    o = _rows(out + (token * HEADS + head) * DV, HEADS * DV, there, DV, BLOCK_M, BLOCK_DV)
    row = tl.arange(0, BLOCK_M)
    of_query = head * tokens + token + row
    lse_m = tl.load(lse + of_query, mask=row < there, other=0.0)
    delta_m = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + of_query, delta_m, mask=row < there)
    grad_q = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    parent_first, parent_blocks, own_first, own_blocks = _key_blocks(
        before, queries, m_first, window, BLOCK_M, BLOCK_N, HAS_WINDOW
    )
    for i in range(parent_blocks + own_blocks):
        at, left, position, cut = _key_block(
            i, parent_first, parent_blocks, own_first, start, parent, before, queries, m_first, window,
            BLOCK_M, BLOCK_N, HAS_WINDOW,
        )  # fmt: skip
        keys = _rows(key + at * stride_kn, stride_kn, left, D, BLOCK_N, BLOCK_D)
        values = _rows(value + at * stride_vn, stride_vn, left, DV, BLOCK_N, BLOCK_DV)
        scores = _scores(q, keys, inner, HAS_SOFTCAP)
        weights = tl.exp2(scores * unit - lse_m[:, None])
        if cut:
            seen = _seen(before + m_first + row, position, left, window, BLOCK_N, HAS_WINDOW)
            weights = tl.where(seen, weights, 0.0)
        slope = weights * (tl.dot(g, tl.trans(values), input_precision="ieee") - delta_m[:, None])
        if HAS_SOFTCAP:
            slope *= 1 - scores * scores
        grad_q = tl.dot(slope.to(keys.dtype), keys, grad_q, input_precision="ieee")
    _write_rows(grad_query + (token * HEADS + head) * D, HEADS * D, there, grad_q * scale, D, BLOCK_M, BLOCK_D)


@triton.jit
def _query_blocks(
    keys, queries, causal, n_first, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """The blocks of a reading's queries that see a block of its keys: the first query and the number of blocks."""
    first = causal * (n_first // BLOCK_M * BLOCK_M)
    end = queries
    if HAS_WINDOW:
        # The nearest query is the key's own token or, if children read a parent's key, the first token of a child.
        last = tl.minimum(n_first + BLOCK_N, keys) - 1
        of_children = tl.where(last + window > keys, queries, 0)
        end = tl.where(causal == 1, tl.minimum(last + window, queries), of_children)
    return first, tl.cdiv(end - first, BLOCK_M)


@triton.jit
def _only_seen(
    weights, delta, number, base, m_first, queries, positions, window, BLOCK_M: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Weights [N, M], zero where a query does not see a key or is out of range; delta [M], zero if out of range."""
    m = m_first + tl.arange(0, BLOCK_M)
    there = m < queries
    if HAS_WINDOW:
        position = tl.load(positions + base + m, mask=there, other=0).to(tl.int32)
        back = position[None, :] - number[:, None]
        seen = (back >= 0) & (back < window)
    else:
        seen = number[:, None] <= m[None, :]
    return tl.where(seen & there[None, :], weights, 0.0), tl.where(there, delta, 0.0)


@triton.jit(do_not_specialize=["tokens"])
def key_gradient_kernel(
    query, key, value, grad_out, lse, delta, positions, tiles, grad_key, grad_value, sums_k, sums_v,
    tokens, scale, inner, unit, window,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_gn, stride_gh,
    D: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One block of a reading's keys, one key head, over the reading's queries and the query heads of the group."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    tile = tiles + tl.program_id(0) // KV_HEADS * 7
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    start, base, sum_row = tl.load(tile).to(tl.int64), tl.load(tile + 2).to(tl.int64), tl.load(tile + 5).to(tl.int64)
    keys, queries, causal, n_first = tl.load(tile + 1), tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 6)
    token, there = start + n_first, keys - n_first
    k = _rows(key + kv_head * stride_kh + token * stride_kn, stride_kn, there, D, BLOCK_N, BLOCK_D)
    v = _rows(value + kv_head * stride_vh + token * stride_vn, stride_vn, there, DV, BLOCK_N, BLOCK_DV)
    n, row = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    number = tl.where(causal == 1, n_first + n, 0)
    if HAS_WINDOW:
        number = tl.load(positions + token + n, mask=n < there, other=0).to(tl.int32)
    grad_k, grad_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)

    first, blocks = _query_blocks(keys, queries, causal, n_first, window, BLOCK_M, BLOCK_N, HAS_WINDOW)
    per_head = tl.maximum(blocks, 1)  # prefetching divides by this before the loop, even if the loop does not run
    # One loop over heads and blocks: nested loops would drain the prefetched loads at the end of each head.
    for i in range(GROUP * blocks):
        head = kv_head * GROUP + i // per_head
        m_first = first + i % per_head * BLOCK_M
        at, left = base + m_first, queries - m_first
        q = _rows(query + head * stride_qh + at * stride_qn, stride_qn, left, D, BLOCK_M, BLOCK_D)
        g = _rows(grad_out + head * stride_gh + at * stride_gn, stride_gn, left, DV, BLOCK_M, BLOCK_DV)
        # Memory past the last query is allocated, with arbitrary content. Masking these loads would be expensive.
        lse_m = tl.load(lse + head * tokens + at + row)
        delta_m = tl.load(delta + head * tokens + at + row)
        scores = _scores(k, q, inner, HAS_SOFTCAP)
        weights = tl.exp2(scores * unit - lse_m[None, :])
        if HAS_WINDOW | (m_first < causal * (n_first + BLOCK_N - 1)) | (left < BLOCK_M):
            weights, delta_m = _only_seen(
                weights, delta_m, number, base, m_first, queries, positions, window, BLOCK_M, HAS_WINDOW
            )
        grad_v = tl.dot(weights.to(g.dtype), g, grad_v, input_precision="ieee")
        slope = weights * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta_m[None, :])
        if HAS_SOFTCAP:
            slope *= 1 - scores * scores
        grad_k = tl.dot(slope.to(q.dtype), q, grad_k, input_precision="ieee")

    grad_k *= scale
    if sum_row < 0:
        at = token * KV_HEADS + kv_head
        _write_rows(grad_key + at * D, KV_HEADS * D, there, grad_k, D, BLOCK_N, BLOCK_D)
        _write_rows(grad_value + at * DV, KV_HEADS * DV, there, grad_v, DV, BLOCK_N, BLOCK_DV)
    else:
        at = (sum_row + n_first) * KV_HEADS + kv_head
        _write_rows(sums_k + at * D, KV_HEADS * D, there, grad_k, D, BLOCK_N, BLOCK_D)
        _write_rows(sums_v + at * DV, KV_HEADS * DV, there, grad_v, DV, BLOCK_N, BLOCK_DV)


@triton.jit
def add_up_kernel(sums, out, shared, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the partial sums of a parent's tokens, WIDTH numbers each, in order: BLOCK numbers per program."""
    row = shared + tl.program_id(0) * 4
    start, length, first_row = tl.load(row).to(tl.int64), tl.load(row + 1).to(tl.int64), tl.load(row + 2).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length * WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in range(tl.load(row + 3)):
        total += tl.load(sums + (first_row + piece * length) * WIDTH + at, mask=inside, other=0.0)
    tl.store(out + start * WIDTH + at, total, mask=inside)
