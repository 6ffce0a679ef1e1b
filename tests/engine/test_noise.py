"""The sampling noise: published Philox answers, addresses of single draws, and the distribution that comes out."""

import math

import pytest
import torch
from torch import Tensor

from gruppo.engine import reference
from gruppo.engine.noise import derive_key, gumbel, lane_width, philox, uniform_words

# Random123's kat_vectors, philox4x32-10: counter, key, answer.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox_of_integers(counter: list[int], key: list[int]) -> list[int]:
    """The same rounds in Python's own integers, which never wrap."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = philox(*(torch.tensor([word]) for word in counter + key))  # type: ignore[call-arg]
    assert [word.item() for word in words] == answer
    assert philox_of_integers(counter, key) == answer


@pytest.mark.parametrize("vocabulary", [1, 7, 64, 65, 154, 1023, 1024, 1025, 2048, 4096, 4097, 9000])
def test_every_entry_has_its_address(vocabulary: int) -> None:
    keys = torch.tensor([5, -3, 0x0123456789ABCDEF])  # the second has its top bit set
    positions = torch.tensor([0, 12345, 2**31 + 1])
    words = uniform_words(keys, positions, vocabulary)
    assert words.shape == (3, vocabulary)
    assert words.dtype == torch.int64
    width = next(w for w in (16, 32, 64, 128, 256, 512, 1024) if 4 * w >= vocabulary or w == 1024)
    assert lane_width(vocabulary) == width
    for i in {0, 1, 1000, 1023, 1024, 2047, 3072, 4095, 4096, 5119, 5120, 8191, 8192, vocabulary - 1}:
        if i >= vocabulary:
            continue
        for row, (key, position) in enumerate(zip(keys.tolist(), positions.tolist(), strict=True)):
            counter = [i // (4 * width) * width + i % width, position, 0, 0]
            expected = philox_of_integers(counter, [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF])[i // width % 4]
            assert words[row, i] == expected, (row, i)


def test_noise_does_not_depend_on_the_batch() -> None:
    keys, positions = torch.arange(6) * 7919, torch.arange(6) % 3
    together = uniform_words(keys, positions, 5000)
    assert torch.equal(uniform_words(keys[2:3], positions[2:3], 5000), together[2:3])
    assert torch.equal(uniform_words(keys, positions, 4097), together[:, :4097])


def test_gumbel_is_accurate_and_finite_over_the_whole_range() -> None:
    edges = torch.tensor([0, 1, 2, 2**26 - 1, 2**26, 2**31, 2**32 - 2**8, 2**32 - 1])
    words = torch.cat([edges, torch.randint(0, 2**32, (20000,), generator=torch.Generator().manual_seed(0))])
    noise = gumbel(words)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    v = (words.double() + 0.5) / 2**32
    exact = -(-torch.log1p(-v)).log()
    # Near one, 1 - v has few float32 bits left; the noise there is the lowest, which never decides.
    inside = v < 1 - 2.0**-12
    assert (noise - exact)[inside].abs().max() < 5e-5
    assert (noise - exact)[v < 0.5].abs().max() < 3e-6
    assert noise[len(edges) :].double().mean().item() == pytest.approx(0.57722, abs=0.03)


def test_keys_are_stable_and_tell_their_words_apart() -> None:
    assert derive_key(1, 2, 3) == 0xB4FB5A8DE61ABA77  # must never change: saved runs resume with it
    keys = {derive_key(*words) for words in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (2**64 - 1,), (256,)]}
    assert len(keys) == 8
    assert all(0 <= key < 2**64 for key in keys)
    assert derive_key(derive_key(7), 1) != derive_key(7, 1)
    with pytest.raises(OverflowError):
        derive_key(-1)


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """The chance of a chi-square this large or larger if the counts came from the probabilities."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


@pytest.mark.parametrize("varied", ["key", "position"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_follow_the_softmax(varied: str, temperature: float) -> None:
    draws = 20000
    logits = torch.linspace(-2, 2.5, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(3))]
    running, fixed = torch.arange(draws), torch.full((draws,), 77)
    keys, positions = (running, fixed) if varied == "key" else (fixed, running)
    tokens, _, _ = reference.sample_tokens(
        logits.expand(draws, -1), keys, positions, torch.tensor([1 / temperature]), greedy=False, entropy=False
    )
    counts = tokens.bincount(minlength=24)
    assert p_value(counts, (logits / temperature).softmax(0)) > 1e-3
    # The test has teeth: the same counts do not pass for another temperature's.
    assert p_value(counts, (logits / (temperature * 1.15)).softmax(0)) < 1e-6


def test_entries_of_all_lanes_and_blocks_are_drawn_independently() -> None:
    draws = 2000
    where = torch.tensor([0, 1, 1024, 2048, 3072, 4095, 4096, 4999])
    logits = torch.full((5000,), -math.inf)
    logits[where] = torch.tensor([0.0, 0.5, 1.0, 0.2, -0.5, 0.0, 0.7, 0.1])
    tokens, _, _ = reference.sample_tokens(
        logits.expand(draws, -1), torch.arange(draws), torch.arange(draws), torch.ones(1), greedy=False, entropy=False
    )
    counts = tokens.bincount(minlength=5000)
    assert counts.sum() == counts[where].sum()
    assert p_value(counts[where], logits.softmax(0)[where]) > 1e-3
