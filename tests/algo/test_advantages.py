import math

import pytest
import torch

from gruppo.algo.advantages import (
    combine_rewards,
    frac_zero_std,
    leave_one_out,
    normalize_then_sum,
    sum_of_normalized,
    sum_then_normalize,
)
from gruppo.algo.stats import nanstd

NAN = math.nan
R = torch.tensor([[1, 0], [0, 0], [0, 1], [1, 1], [2, 0], [2, 0], [2, 0], [2, NAN]])
R2 = torch.tensor([[1, 0], [0, 0], [0, 1], [NAN, NAN], [2, 0], [NAN, NAN], [NAN, NAN], [NAN, NAN]])
ONES = torch.ones(2)
KL = 0.5 * 0.2 * torch.arange(8.0)

# (function, advantages of rows 0–3, advantages of rows 4–7, frac_reward_zero_std), to the printed four digits.
GOLDEN = {
    # Group 1 sums to 1, 0, 1, 2: mean 1, σ = √(2/3) = 0.81650; ±1 / 0.81660 = ±1.2246.
    "group": (lambda: sum_then_normalize(R, ONES, 4, "group"), [0, -1.2246, 0, 1.2246], [0] * 4, 0.5),
    # All eight: 1, 0, 1, 2, 2, 2, 2, 2: mean 1.5, σ = √(4/7) = 0.75593; ±1 / 0.75603 = ±1.3227.
    "batch": (lambda: sum_then_normalize(R, ONES, 4, "batch"), [0, -1.3227, 0, 1.3227], [0] * 4, 0.0),
    "none": (lambda: sum_then_normalize(R, ONES, 4, "none"), [0, -1, 0, 1], [0] * 4, 0.5),
    # Both columns have σ = 1/√3, z = ±0.5 / 0.57745 = ±0.86587; sums 0, −1.73175, 0, 1.73175 and four zeros;
    # σ of those = √(2·1.73175² / 7) = 0.92566; 1.73175 / 0.92576 = 1.8706.
    "normalize_then_sum": (lambda: normalize_then_sum(R, ONES, 4), [0, -1.8706, 0, 1.8706], [0] * 4, 0.0),
    # 2, 0, 1, 3: mean 1.5, σ = √(5/3) = 1.29099; 0.5 / 1.29109 = 0.3873, 1.5 / 1.29109 = 1.1618.
    "weights": (
        lambda: sum_then_normalize(R, torch.tensor([2.0, 1.0]), 4, "group"),
        [0.3873, -1.1618, -0.3873, 1.1618],
        [0] * 4,
        0.5,
    ),
    # Mean of the others: 3/3, 4/3, 3/3, 2/3.
    "rloo": (lambda: leave_one_out(R, ONES, 4), [0, -1.3333, 0, 1.3333], [0] * 4, 0.5),
    # Clamped: 1, 0.5, 1, 1.5; others 3/3, 3.5/3, 3/3, 2.5/3.
    "rloo clip": (lambda: leave_one_out(R, ONES, 4, clip_range=(0.5, 1.5)), [0, -0.6667, 0, 0.6667], [0] * 4, 0.5),
    # ±4/3 and six zeros: σ = √(2·(16/9) / 7) = 0.71270; 1.33333 / 0.71280 = 1.8706.
    "rloo normalize": (lambda: leave_one_out(R, ONES, 4, normalize=True), [0, -1.8706, 0, 1.8706], [0] * 4, 0.5),
    # Penalties 0, 0.1, …, 0.7. Group 1: 1, −0.1, 0.8, 1.7 (sum 3.4): 1 − 2.4/3 = 0.2, −0.1 − 3.5/3 = −1.2667, …
    # Group 2: 1.6, 1.5, 1.4, 1.3 (sum 5.8): 1.6 − 4.2/3 = 0.2, 1.5 − 4.3/3 = 0.0667, …
    "rloo KL": (
        lambda: leave_one_out(R, ONES, 4, kl_penalty_B=KL),
        [0.2, -1.2667, -0.0667, 1.1333],
        [0.2, 0.0667, -0.0667, -0.2],
        0.0,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    make, first, second, zero_std = GOLDEN[name]
    out = make()
    torch.testing.assert_close(
        out.advantages_B, torch.tensor([*first, *second], dtype=torch.float32), rtol=0, atol=5e-5
    )
    assert frac_zero_std(out.std_B).item() == zero_std


def test_rewards_are_the_raw_weighted_sum():
    for out in (sum_then_normalize(R, ONES, 4, "group"), normalize_then_sum(R, ONES, 4)):
        assert out.rewards_B.tolist() == [1, 0, 1, 2, 2, 2, 2, 2]
        assert out.rewards_B.mean().item() == 1.5
        assert round(nanstd(out.rewards_B).item(), 4) == 0.7559
    # Clip and KL change the advantages, not what is reported as the reward.
    assert leave_one_out(R, ONES, 4, clip_range=(0.5, 1.5), kl_penalty_B=KL).rewards_B.tolist() == [
        1,
        0,
        1,
        2,
        2,
        2,
        2,
        2,
    ]
    # Second column: 0, 0, 1, 1, 0, 0, 0: mean 2/7, σ = √((2 − 4/7) / 6) = 0.4880.
    assert round(R[:, 1].nanmean().item(), 4) == 0.2857
    assert nanstd(R[:, 1]).item() == pytest.approx(0.4880, abs=1e-4)


@pytest.mark.parametrize(
    ("make", "first"),
    [
        # Scorable 1, 0, 1: mean 2/3, σ = 1/√3; (1/3) / 0.57745 = 0.5773.
        (lambda: sum_then_normalize(R2, ONES, 4, "group"), [0.5773, -1.1545, 0.5773]),
        # z sums 0.5773, −1.1545, 0.5773, and 0 for the scorable row 4: σ = √(1.9993 / 3) = 0.8164; 0.5773 / 0.8165.
        (lambda: normalize_then_sum(R2, ONES, 4), [0.7070, -1.4140, 0.7070]),
        # 1 − (0 + 1)/2, 0 − (1 + 1)/2, …
        (lambda: leave_one_out(R2, ONES, 4), [0.5, -1.0, 0.5]),
    ],
    ids=["sum_then_normalize", "normalize_then_sum", "leave_one_out"],
)
def test_unscorable_rows_and_a_group_with_one_scorable_row(make, first):
    out = make()
    torch.testing.assert_close(out.advantages_B, torch.tensor([*first, 0, 0, 0, 0, 0]), rtol=0, atol=6e-5)
    assert out.rewards_B.isnan().tolist() == [False, False, False, True, False, True, True, True]


def test_what_rows_were_compared_by_is_known_before_the_kl_is_charged():
    assert sum_then_normalize(R, ONES, 4, "group").compared_B is None, "by the raw sum"
    clipped = leave_one_out(R, ONES, 4, clip_range=(0.5, 1.5), kl_penalty_B=KL).compared_B
    assert clipped.tolist() == [1, 0.5, 1, 1.5, 1.5, 1.5, 1.5, 1.5]
    assert normalize_then_sum(R, ONES, 4).compared_B.equal(sum_of_normalized(R, ONES, 4))


def test_combine_rewards():
    rewards = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    out = combine_rewards(rewards, torch.tensor([10.0, 0.5]))
    assert out[:2].tolist() == [11.0, 1.0]
    assert out[2].isnan()


def test_a_group_of_one_has_no_advantage():
    rewards = torch.tensor([[1.0], [5.0], [NAN]])
    for scale in ("group", "none"):
        out = sum_then_normalize(rewards, torch.ones(1), 1, scale)
        assert out.advantages_B.tolist() == [0, 0, 0]
        assert out.std_B.tolist() == [0, 0, 0]
    assert sum_then_normalize(rewards, torch.ones(1), 1, "batch").advantages_B.tolist() == [0, 0, 0]
    assert sum_then_normalize(rewards[:1], torch.ones(1), 1, "batch").std_B.tolist() == [0]
    assert normalize_then_sum(rewards, torch.ones(1), 1).advantages_B.tolist() == [0, 0, 0]
    assert leave_one_out(rewards, torch.ones(1), 1, normalize=True).advantages_B.tolist() == [0, 0, 0]


def test_a_group_of_two():
    rewards = torch.tensor([[3.0], [1.0]])
    # σ = √2; ±1 / (√2 + 1e-4)
    torch.testing.assert_close(
        sum_then_normalize(rewards, torch.ones(1), 2, "group").advantages_B,
        torch.tensor([1, -1]) / (math.sqrt(2) + 1e-4),
    )
    assert leave_one_out(rewards, torch.ones(1), 2).advantages_B.tolist() == [2, -2]


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(value):
    for group_size in (2, 3, 6, 7, 16):
        rewards, one = torch.full((2 * group_size, 1), value), torch.ones(1)
        for out in (
            *(sum_then_normalize(rewards, one, group_size, s) for s in ("group", "batch", "none")),
            normalize_then_sum(rewards, one, group_size),
            leave_one_out(rewards, one, group_size),
            leave_one_out(rewards, one, group_size, normalize=True),
        ):
            assert torch.equal(out.advantages_B, torch.zeros(2 * group_size))
            assert frac_zero_std(out.std_B) == 1.0


def test_an_infinite_reward_never_becomes_an_infinite_advantage():
    rewards = torch.tensor([[math.inf], [1.0], [2.0], [0.0]])
    for scale in ("group", "none"):
        out = sum_then_normalize(rewards, torch.ones(1), 2, scale).advantages_B
        assert out[:2].tolist() == [0, 0]
        assert out[2] > 0 > out[3]
    assert leave_one_out(rewards, torch.ones(1), 2).advantages_B.tolist() == [0, 0, 2, -2]


def test_adding_a_constant_changes_nothing():
    rewards = torch.randn(8, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    for make in (
        lambda r: sum_then_normalize(r, one, 4, "group"),
        lambda r: sum_then_normalize(r, one, 4, "none"),
        lambda r: normalize_then_sum(r, one, 4),
        lambda r: leave_one_out(r, one, 4),
    ):
        torch.testing.assert_close(make(rewards).advantages_B, make(rewards + 7).advantages_B)


def test_half_precision_rewards_are_computed_in_float32():
    out = sum_then_normalize(R.to(torch.bfloat16), ONES, 4, "group")
    assert out.advantages_B.dtype == torch.float32
    assert torch.equal(out.advantages_B, sum_then_normalize(R, ONES, 4, "group").advantages_B)


def test_frac_zero_std_does_not_count_unknown_spread():
    assert frac_zero_std(torch.tensor([0.0, NAN, 1.0, 1e-9])).item() == 0.5


def test_unknown_scale():
    with pytest.raises(ValueError, match="'group', 'batch' or 'none', not 'grupo'"):
        sum_then_normalize(R, ONES, 4, "grupo")
