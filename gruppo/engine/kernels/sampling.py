"""Triton sampling: noise, arg-max, log-prob and entropy in a single read of the logits.

The first kernel reduces each chunk of up to 4096 entries to a few numbers; the second reduces a row's chunks to its
token. The random integers are exactly those of `gruppo.engine.noise`. The maximum of x + Gumbel noise = x - log E is
computed as the maximum of e^x / E: the log-prob needs the exponentials anyway, and a second logarithm per entry would
cost a third of the time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.engine.noise import LANES, lane_width

__all__ = ["sample_tokens"]

_INF = tl.constexpr(float("inf"))


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 counter and key words; returns four uint32."""
    for _ in tl.static_range(10):
        left, right = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = right.to(tl.uint32), left.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def draw_words(noise_keys, positions, row, chunk, LANE: tl.constexpr):
    """Random words for a row's 4 * LANE vocabulary entries starting at chunk * 4 * LANE, as four uint32 [LANE]."""
    key = tl.load(noise_keys + row).to(tl.uint64, bitcast=True)
    c0 = (chunk * LANE + tl.arange(0, LANE)).to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = zero + tl.load(positions + row).to(tl.uint32)
    return philox(c0, c1, zero, zero, (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32))


@triton.jit
def exponential(words):
    """E of `gruppo.engine.noise.gumbel`: positive standard exponential noise from uint32 words."""
    v = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 0.015625, series, -tl.log(tl.maximum(1 - v, 1.1641532182693481e-10)))


@triton.jit
def _scaled(logits, index, vocabulary, inverse_temperature):
    loaded = tl.load(logits + index, mask=index < vocabulary, other=-_INF)
    return loaded.to(tl.float32) * inverse_temperature


@triton.jit
def _mass(x, highest):
    """e^(x - highest), and its product with x - highest; both are 0 where x is -inf."""
    below = x - highest
    mass = tl.exp(below)
    return mass, tl.where(below > -_INF, below, 0.0) * mass


@triton.jit
def _better(best, index, other, other_index):
    """The larger of two entries; on a tie the first, which has the lower index."""
    wins = other > best
    return tl.where(wins, other, best), tl.where(wins, other_index, index)


@triton.jit
def _chunk_kernel(
    logits, noise_keys, positions, inverse_temperature, part_float, part_index, vocabulary, stride,
    LANE: tl.constexpr, GREEDY: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """One chunk of one row: its maximum, mass, mean under that mass, and best entry, each to a [B, chunks] plane."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    chunks, plane = tl.num_programs(1), tl.num_programs(0) * tl.num_programs(1)
    inverse = tl.load(inverse_temperature)
    logits += row.to(tl.int64) * stride
    i0 = chunk * 4 * LANE + tl.arange(0, LANE)
    x0 = _scaled(logits, i0, vocabulary, inverse)
    x1 = _scaled(logits, i0 + LANE, vocabulary, inverse)
    x2 = _scaled(logits, i0 + 2 * LANE, vocabulary, inverse)
    x3 = _scaled(logits, i0 + 3 * LANE, vocabulary, inverse)

    highest = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
    anchor = tl.where(highest > -_INF, highest, 0.0)
    mass0, mean0 = _mass(x0, anchor)
    mass1, mean1 = _mass(x1, anchor)
    mass2, mean2 = _mass(x2, anchor)
    mass3, mean3 = _mass(x3, anchor)
    at = row * chunks + chunk
    tl.store(part_float + at, highest)
    # NaN if any logit is NaN or +inf (inf - inf): the second kernel needs no other flag for a bad row.
    tl.store(part_float + plane + at, tl.sum((mass0 + mass1) + (mass2 + mass3), 0))
    if ENTROPY:
        tl.store(part_float + 2 * plane + at, tl.sum((mean0 + mean1) + (mean2 + mean3), 0))

    if not GREEDY:
        w0, w1, w2, w3 = draw_words(noise_keys, positions, row, chunk, LANE)
        x0, x1 = mass0 / exponential(w0), mass1 / exponential(w1)
        x2, x3 = mass2 / exponential(w2), mass3 / exponential(w3)
    best, index = _better(x0, i0, x1, i0 + LANE)
    best, index = _better(best, index, x2, i0 + 2 * LANE)
    best, index = _better(best, index, x3, i0 + 3 * LANE)
    top = tl.max(best, 0)
    tl.store(part_float + 3 * plane + at, top if GREEDY else highest + tl.log(top))
    tl.store(part_index + at, tl.min(tl.where(best == top, index, 2147483647), 0))


@triton.jit
def _row_kernel(
    logits, inverse_temperature, part_float, part_index, tokens, logps, entropies, chunks, stride,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """One row: the best of its chunks' best, and the log-prob and entropy from their masses."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, BLOCK)
    there, at, plane = c < chunks, row * chunks + c, rows * chunks
    highest = tl.load(part_float + at, mask=there, other=-_INF)
    mass = tl.load(part_float + plane + at, mask=there, other=0.0)
    best = tl.load(part_float + 3 * plane + at, mask=there, other=-_INF)
    index = tl.load(part_index + at, mask=there, other=2147483647)

    top = tl.max(highest, 0)
    # Clamped: a chunk masked entirely with the dtype's lowest value has share 0, and 0 times an overflow is NaN.
    below = tl.maximum(tl.where(highest > -_INF, highest - top, 0.0), -1e4)
    share = tl.where(highest > -_INF, tl.exp(below), 0.0)
    total = tl.sum(share * mass, 0)
    valid = total > 0  # false for NaN and for a row of only -inf
    token = tl.min(tl.where(best == tl.max(best, 0), index, 2147483647), 0)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=valid, other=0.0).to(tl.float32)
    x = x * tl.load(inverse_temperature)
    log_total = tl.log(total)
    tl.store(tokens + row, tl.where(valid, token, -1).to(tl.int64))
    tl.store(logps + row, tl.where(valid, x - top - log_total, float("nan")))
    if ENTROPY:
        mean = tl.load(part_float + 2 * plane + at, mask=there, other=0.0)
        weighted = tl.sum(share * (mean + below * mass), 0)
        tl.store(entropies + row, tl.where(valid, log_total - weighted / total, float("nan")))


def sample_tokens(
    logits: Tensor,
    noise_keys: Tensor,
    positions: Tensor,
    inverse_temperature: Tensor,
    *,
    greedy: bool,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`gruppo.engine.reference.sample_tokens` on a GPU, in two kernels. The last dimension must be contiguous."""
    batch, vocabulary = logits.shape
    lane = lane_width(vocabulary)
    chunks = triton.cdiv(vocabulary, LANES * lane)
    part_float = logits.new_empty(4, batch, chunks, dtype=torch.float32)
    part_index = logits.new_empty(batch, chunks, dtype=torch.int32)
    tokens = logits.new_empty(batch, dtype=torch.int64)
    logps = logits.new_empty(batch, dtype=torch.float32)
    entropies = torch.empty_like(logps) if entropy else None
    _chunk_kernel[(batch, chunks)](
        logits, noise_keys, positions, inverse_temperature, part_float, part_index, vocabulary, logits.stride(0),
        LANE=lane, GREEDY=greedy, ENTROPY=entropy, num_warps=max(1, lane // 256),
    )  # fmt: skip
    _row_kernel[(batch,)](
        logits, inverse_temperature, part_float, part_index, tokens, logps, entropies, chunks, logits.stride(0),
        BLOCK=triton.next_power_of_2(chunks), ENTROPY=entropy, num_warps=1,
    )  # fmt: skip
    return tokens, logps, entropies
