"""Counter-based sampling noise: a completion gets the same integers on every device and in every batch.

Philox4x32-10 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405) turns a counter and a key into four 32-bit
words. A completion has a 64-bit key; the counter of a draw consists of its position and its vocabulary index i:

    block, rest = divmod(i, 4 W)    lane, j = divmod(rest, W)
    word = philox(counter=(W · block + j, position, 0, 0), key)[lane]

Thus a GPU program draws for 4 W neighbouring entries with one call on W counters, and each lane is a contiguous range.
The width W is 1024, or less if four narrower lanes cover the vocabulary (`lane_width`).
"""

import hashlib
import math
from functools import cache

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
    """Hash non-negative 64-bit integers to a 64-bit key, the same in every process and on every platform."""
    packed = b"".join(word.to_bytes(8, "little") for word in words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The multipliers (1, 2), and the sum added to the two key words by each round (10, 2)."""
    with torch.inference_mode(False):
        rounds = torch.arange(_ROUNDS)[:, None] * torch.tensor(_KEY_STEPS)
        return torch.tensor([_MULTIPLIERS]).to(device), rounds.to(device)


def philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of four counter words and two key words, all int64 holding 32 bits and broadcast together.

    A product of two 32-bit words may wrap in int64, but its 64 bits are all correct: only the sign is wrong, and
    masking after the shift drops it. c1 and c3 keep high bits through the rounds; they are only xored into values that
    are masked next. Pairs of words are computed together, since the number of operations matters for small batches.
    """
    words = torch.broadcast_tensors(c0, c1, c2, c3)
    even, odd = torch.stack(words[::2]), torch.stack(words[1::2])
    multipliers, key_steps = (constant.view(-1, 2, *(1,) * k0.dim()) for constant in _constants(k0.device))
    for keys in ((torch.stack((k0, k1)) + key_steps) & _MASK).unbind():
        products = (even * multipliers[0]).flip(0)
        even = (products >> 32).bitwise_xor_(odd).bitwise_xor_(keys).bitwise_and_(_MASK)
        odd = products
    odd = odd & _MASK
    return even[0], odd[0], even[1], odd[1]


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

    log1p is accurate for small v, where the winning draws come from; 1 - v would round them away. Words that round to
    v = 1 count as 1 - v = 2⁻³³.
    """
    minus_v = words.to(torch.float32).add_(0.5).mul_(-(2.0**-32))
    return minus_v.log1p_().clamp_(min=-33 * math.log(2)).neg_().log_().neg_()
