import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.algo.masks import SLACK, drop_rows, entropy_threshold, is_truncated, off_policy_mask, top_entropy_mask

ENTROPY = torch.tensor([[1.0, 2.0, 0.5], [1.5, 0.2, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_is_truncated():
    assert is_truncated([[5, 2], [5, 6], [0], [], [2, 5]], {2, 0}) == [False, True, False, True, True]
    assert is_truncated([], {2}) == []
    assert is_truncated([[5, 2], [5, 6]], [2]) == [False, True]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_drop_rows(dtype):
    mask = MASK.to(dtype)
    for rows in ([False, True], torch.tensor([False, True])):
        out = drop_rows(mask, rows)
        assert out.tolist() == [[1, 1, 1], [0, 0, 0]]
        assert out.dtype == dtype
    assert mask.tolist() == MASK.tolist()  # the input is left alone


def test_entropy_threshold_by_hand():
    # Sorted 0.2, 0.5, 1, 1.5, 2; the top 0.4 starts at rank 0.6 · 4 = 2.4: 1 + 0.4 · 0.5.
    x = torch.tensor([1.0, 2.0, 0.5, 1.5, 0.2])
    assert entropy_threshold(x, 0.4).item() == pytest.approx(1.2, rel=1e-4)
    assert entropy_threshold(x, 0.0).item() == pytest.approx(2.0, rel=1e-4)
    assert entropy_threshold(x, 1.0).item() == pytest.approx(0.2, rel=1e-4)
    assert entropy_threshold(x[:1], 0.3).item() == pytest.approx(1.0, rel=1e-4)
    assert entropy_threshold(torch.tensor([]), 0.4).item() == math.inf


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 20, width=32), min_size=1, max_size=40), st.floats(0, 1))
def test_entropy_threshold_is_torch_quantile_less_rounding(values, share):
    x = torch.tensor(values, dtype=torch.float64)
    quantile, threshold = torch.quantile(x, 1 - share), entropy_threshold(x, share)
    expected = quantile * (1 - SLACK[0]) - min(SLACK[1], quantile / 2)
    torch.testing.assert_close(threshold, expected, rtol=1e-9, atol=1e-12)


def test_the_slack_does_not_let_everything_pass_where_entropies_are_tiny():
    x = torch.tensor([0.0, 1e-9, 2e-9, 1e-8, 5e-7, 6e-7, 9e-7])
    assert (x >= entropy_threshold(x, 0.4)).tolist() == [False] * 4 + [True] * 3
    assert entropy_threshold(torch.tensor([-1e-8, 0.0, 0.0]), 1.0).item() == pytest.approx(-1e-8)


def test_entropy_threshold_beyond_the_limit_of_torch_quantile():
    # torch.quantile before 2.14 refuses more than 2^24 values.
    n = 2**24 + 1
    x = torch.arange(n, dtype=torch.float32)
    assert entropy_threshold(x, 0.25).item() == pytest.approx(0.75 * (n - 1), rel=1e-4)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6])
@pytest.mark.parametrize("level", [1e-4, 0.01, 3.0])
def test_equal_entropies_are_decided_together_whatever_their_rounding(share, level):
    """The first tokens of a group are predicted from the same tokens; padded rows round each of them differently."""
    rounding = torch.tensor([0.0, 3.0, -3.0, 1.0, -1.0, 2.0]) * (1e-6 * level + 1e-7)
    x = torch.cat([level + rounding, level * torch.tensor([0.2, 0.5, 0.7, 0.9, 1.5])])
    kept = x >= entropy_threshold(x, share)
    assert kept.tolist() == [True] * 6 + [False] * 4 + [True]


def test_a_rank_that_is_an_integer_up_to_rounding():
    x = torch.arange(1, 12, dtype=torch.float64)  # (1 - 0.7) * 10 is 3.0000000000000004
    assert (x >= entropy_threshold(x, 0.7)).sum() == 8


def test_top_entropy_mask():
    assert top_entropy_mask(ENTROPY, MASK, torch.tensor(1.2)).tolist() == [[False, True, False], [True, False, False]]
    # At the threshold counts; a masked token never does, whatever it holds.
    assert top_entropy_mask(ENTROPY, MASK, 0.5).tolist() == [[True, True, True], [True, False, False]]
    full = torch.full((2, 3), math.inf)
    assert top_entropy_mask(full, MASK, -1.0).tolist() == MASK.bool().tolist()
    assert not top_entropy_mask(ENTROPY, MASK, entropy_threshold(torch.tensor([]), 0.4)).any()


LOGPS = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])
OLD = torch.tensor([[-1.1, -0.9, -1.5], [-0.7, -1.6, 0.0]])


@pytest.mark.parametrize(
    ("advantages", "threshold", "expected"),
    [
        # Mean drift ℓ_old − ℓ: (−0.1 − 0.4 + 0.5) / 3 = 0 and (0 − 0.4) / 2 = −0.2.
        ([-1.0, -1.0], -0.3, [False, False]),
        ([-1.0, -1.0], -0.1, [False, True]),
        ([-1.0, -1.0], 0.1, [True, True]),
        ([1.0, 0.0], -0.3, [True, True]),
    ],
)
def test_off_policy_mask(advantages, threshold, expected):
    out = off_policy_mask(torch.tensor(advantages).view(2, 1), LOGPS, OLD, MASK, threshold)
    assert out.shape == (2, 1)
    assert out.flatten().tolist() == expected


def test_off_policy_mask_counts_unknown_drift_as_zero_and_ignores_padding():
    sampler = OLD.clone()
    sampler[1, 1] = math.nan
    sampler[1, 2] = math.inf
    negative = torch.tensor([[-1.0], [-1.0]])
    # Row 2: (0 + 0) / 2 = 0 instead of −0.2.
    assert off_policy_mask(negative, LOGPS, sampler, MASK, -0.1).flatten().tolist() == [False, False]
    assert off_policy_mask(negative, LOGPS, sampler, MASK, 0.0)[1].item()
    assert off_policy_mask(negative, LOGPS, sampler, torch.zeros(2, 3), 0.0).all()


def test_off_policy_mask_per_token_advantages():
    advantages = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 1.0]])
    out = off_policy_mask(advantages, LOGPS, OLD, MASK, -0.3)
    assert out.tolist() == [[True, False, True], [False, True, True]]
