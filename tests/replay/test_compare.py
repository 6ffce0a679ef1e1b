"""How alike gradients and rewards are: numbers worked out by hand."""

import math
from itertools import combinations

import pytest
import torch

from gruppo.replay.compare import cosine, length_shares, likeness, rank_correlation, spread_changes

NAN = math.nan


def test_two_gradients() -> None:
    first, second = torch.tensor([3.0, 4.0, 0.0, 1.0]), torch.tensor([3.0, -4.0, 2.0, 0.0])
    found = likeness(first, second)
    assert found.cosine == pytest.approx((9 - 16) / math.sqrt(26 * 29))
    assert found.norm_ratio == pytest.approx(math.sqrt(29 / 26))
    assert found.sign_disagreement == 0.5, "of the two places where both have something"


def test_a_gradient_of_nothing() -> None:
    none, some = torch.zeros(3), torch.ones(3)
    assert math.isnan(cosine(none, some))
    assert math.isnan(likeness(none, some).norm_ratio)
    assert likeness(some, none).norm_ratio == 0
    assert likeness(some, none).sign_disagreement == 0


def test_who_has_the_gradient() -> None:
    gradients = [torch.full((6,), -1.0), torch.ones(2), torch.ones(6), torch.ones(2)]
    assert length_shares(gradients, parts=2) == [0.25, 0.75]
    assert length_shares(gradients) == [0.125, 0.125, 0.375, 0.375]
    assert length_shares([torch.zeros(3)]) == [0.0, 0.0, 0.0, 0.0]


def test_rank_correlation() -> None:
    first = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [0.0, 1.0, NAN]])
    second = torch.tensor([[2.0, 1.0, 3.0], [1.0, 2.0, 3.0], [1.0, 0.0, 5.0]])
    assert rank_correlation(first, second) == pytest.approx([1 / 3, -1.0]), "the second group has nothing to compare"


def test_rank_correlation_with_ties_follows_the_definition() -> None:
    """τ-b = (concordant − discordant) / √(pairs that differ in the first × pairs that differ in the second)."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, 4, (20, 8), generator=generator).float() for _ in range(2))
    expected = []
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        pairs = [(a[i] - a[j], b[i] - b[j]) for i, j in combinations(range(8), 2)]
        agree = sum(x * y > 0 for x, y in pairs) - sum(x * y < 0 for x, y in pairs)
        expected.append(agree / math.sqrt(sum(x != 0 for x, _ in pairs) * sum(y != 0 for _, y in pairs)))
    assert rank_correlation(first, second) == pytest.approx(expected)


def test_spread_that_comes_and_goes() -> None:
    before = torch.tensor([[1.0, 1.0], [0.0, 1.0], [NAN, 1.0], [0.0, 2.0]])
    after = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [2.0, 0.0]])
    assert spread_changes(before, after) == ([0, 2], [1])
