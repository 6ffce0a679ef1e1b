"""Counter-based sampling noise: the same integers for a completion whatever else is in its batch, on every device.

Philox4x32-10 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405) turns a counter and a key into four 32-bit
words. A completion has a 64-bit key; the counter of a draw is made of its position and its vocabulary index i:

    block, rest = divmod(i, 4 W)    lane, j = divmod(rest, W)
    word = philox(counter=(W · block + j, position, 0, 0), key)[lane]

so that a GPU program draws for 4 W neighbouring entries with one call per W counters, each lane a coalesced run. The
width W is 1024, less for vocabularies that have not so many entries in four lanes.
"""

import hashlib

import torch
from torch import Tensor

__all__ = ["derive_key", "gumbel", "lane_width", "philox", "uniform_words"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

LANES = 4


def lane_width(vocabulary: int) -> int:
    """W for a vocabulary of this size, a power of two from 16 to 1024."""
    return min(1024, max(16, 1 << (-(-vocabulary // LANES) - 1).bit_length()))


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
    rounds = torch.arange(_ROUNDS, device=k0.device).view(-1, *(1,) * k0.dim())
    keys = zip((k0 + rounds * _KEY_STEPS[0]) & _MASK, (k1 + rounds * _KEY_STEPS[1]) & _MASK, strict=True)
    for key0, key1 in keys:
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((right >> 32) ^ (c1 ^ key0)).bitwise_and_(_MASK)
        c2 = ((left >> 32) ^ (c3 ^ key1)).bitwise_and_(_MASK)
        c1, c3 = right, left
    return c0, c1 & _MASK, c2, c3 & _MASK


def uniform_words(noise_keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """The 32-bit word of every vocabulary entry: noise_keys and positions int64 [B], result int64 [B, V]."""
    width = lane_width(vocabulary)
    lanes = min(LANES, -(-vocabulary // width))
    blocks = -(-vocabulary // (LANES * width))
    c0 = torch.arange(width * blocks, device=noise_keys.device)[None]
    c1 = positions[:, None] & _MASK
    zero = torch.zeros((1, 1), dtype=torch.int64, device=noise_keys.device)
    key = noise_keys[:, None]
    words = philox(c0, c1, zero, zero, key & _MASK, key >> 32 & _MASK)[:lanes]
    by_lane = [word.unflatten(1, (blocks, width)) for word in words]
    return torch.stack(by_lane, dim=2).flatten(1)[:, :vocabulary]


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise of 32-bit words, float32 and finite: -log(E), E = -log(1 - v), v = (word + ½) / 2³².

    Small v, where the winning draws come from, goes through the series of -log(1 - v); 1 - v would round it away.
    """
    v = words.to(torch.float32).add_(0.5).mul_(2.0**-32)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4))))
    exponential = torch.where(v < 2.0**-6, series, (1 - v).clamp_(min=2.0**-33).log_().neg_())
    return exponential.log_().neg_()
