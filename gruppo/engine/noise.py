"""Counter-based sampling noise: the same integers for a completion whatever else is in its batch, on every device.

Philox4x32-10 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405) turns a counter and a key into four 32-bit
words. A completion has a 64-bit key; the counter of a draw is made of its position and its vocabulary index i:

    block = i >> 12, lane = i >> 10 & 3, counter = (block * 1024 + (i & 1023), position, 0, 0), word = philox[lane]

so that a GPU program draws for 4096 neighbouring entries with one call per 1024 counters, each lane a coalesced run.
"""

import hashlib

import torch
from torch import Tensor

__all__ = ["derive_key", "gumbel", "philox", "uniform_words"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

LANE_WIDTH = 1024
LANES = 4


def derive_key(*words: int) -> int:
    """A well-mixed key of non-negative integers, all of 64 bits, the same in every process and on every platform."""
    packed = b"".join(word.to_bytes(8, "little") for word in words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of four counter words and two key words, all int64 holding 32 bits and broadcast together.

    A product of two 32-bit words wraps in int64, which leaves all of its 64 bits right: only the sign is wrong, and
    masking after the shift drops it. c1 and c3 keep high bits through the rounds; they are only ever xored into what
    is masked next.
    """
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((right >> 32) ^ (c1 ^ k0)).bitwise_and_(_MASK)
        c2 = ((left >> 32) ^ (c3 ^ k1)).bitwise_and_(_MASK)
        c1, c3 = right, left
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def uniform_words(noise_keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """The 32-bit word of every vocabulary entry: noise_keys and positions int64 [B], result int64 [B, V]."""
    lanes = min(LANES, -(-vocabulary // LANE_WIDTH))
    blocks = -(-vocabulary // (LANES * LANE_WIDTH))
    # A vocabulary below one lane needs no more counters than it has entries.
    c0 = torch.arange(min(vocabulary, LANE_WIDTH * blocks), device=noise_keys.device)[None]
    c1 = positions[:, None] & _MASK
    zero = torch.zeros((1, 1), dtype=torch.int64, device=noise_keys.device)
    key = noise_keys[:, None]
    words = philox(c0, c1, zero, zero, key & _MASK, key >> 32 & _MASK)[:lanes]
    if lanes == 1:
        return words[0]
    by_lane = [word.unflatten(1, (blocks, LANE_WIDTH)) for word in words]
    return torch.stack(by_lane, dim=2).flatten(1)[:, :vocabulary]


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise of 32-bit words, float32 and finite: -log(E), E = -log(1 - v), v = (word + ½) / 2³².

    Small v, where the winning draws come from, goes through the series of -log(1 - v); 1 - v would round it away.
    """
    v = words.to(torch.float32).add_(0.5).mul_(2.0**-32)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4))))
    exponential = torch.where(v < 2.0**-6, series, (1 - v).clamp_(min=2.0**-33).log_().neg_())
    return exponential.log_().neg_()
