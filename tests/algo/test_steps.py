"""Process supervision against numbers worked out by hand, and a plain loop over the definition."""

import random
import statistics

import pytest
import torch

from gruppo.algo.steps import normalize_steps, step_advantages

# Two groups of two rows: (row, end, value).
STEPS = [(0, 1, 1.0), (0, 3, 0.0), (1, 2, 1.0), (2, 0, 2.0), (2, 1, 2.0), (3, 3, 2.0)]
# Group 1: 1, 0, 1: mean 2/3, σ = √(1/3) = 0.57735: (1/3) / 0.57745 = 0.57725, (−2/3) / 0.57745 = −1.15450.
# Group 2: three equal steps.
GOLDEN = {
    "group": [
        [0.57725 - 1.15450, 0.57725 - 1.15450, -1.15450, -1.15450],
        [0.57725, 0.57725, 0.57725, 0.0],
        [0.0] * 4,
        [0.0] * 4,
    ],
    # All six: mean 4/3, Σ(v − mean)² = 3·(2/3)² + 2·(1/3)² + (4/3)² = 30/9, σ = √(30/45) = 0.81650:
    # (1/3) / 0.81660 = 0.40820, (−2/3) / 0.81660 = −0.81640.
    "batch": [
        [0.40820 - 0.81640, 0.40820 - 0.81640, -0.81640, -0.81640],
        [0.40820, 0.40820, 0.40820, 0.0],
        [0.0] * 4,
        [0.0] * 4,
    ],
    "none": [[-1 / 3, -1 / 3, -2 / 3, -2 / 3], [1 / 3, 1 / 3, 1 / 3, 0.0], [0.0] * 4, [0.0] * 4],
}


def columns(steps):
    rows, ends, values = zip(*steps, strict=True) if steps else ((), (), ())
    return torch.tensor(rows, dtype=torch.long), torch.tensor(ends, dtype=torch.long), torch.tensor(values)


@pytest.mark.parametrize("scale", GOLDEN)
def test_golden(scale):
    row, end, value = columns(STEPS)
    normal = normalize_steps(value, row, rows=4, group_size=2, scale=scale)
    advantages = step_advantages(normal.value_S, row, end, rows=4, tokens=4)
    torch.testing.assert_close(advantages, torch.tensor(GOLDEN[scale]), rtol=0, atol=2e-5)
    assert (advantages[2:] == 0).all(), "equal steps: exactly 0, not rounding noise"


def test_one_step_at_the_end_of_each_row_is_the_outcome_itself():
    """Then process supervision is what GRPO does with the values as rewards."""
    from gruppo.algo.advantages import sum_then_normalize

    rewards = torch.tensor([0.3, 1.0, -2.0, 0.7, 0.1, 0.1])
    row, end = torch.arange(6), torch.tensor([4, 2, 0, 3, 4, 1])
    for scale in ("group", "batch", "none"):
        outcome = sum_then_normalize(rewards[:, None], torch.ones(1), 3, scale)
        normal = normalize_steps(rewards, row, rows=6, group_size=3, scale=scale)
        advantages = step_advantages(normal.value_S, row, end, rows=6, tokens=5)
        torch.testing.assert_close(advantages[:, 0], outcome.advantages_B)
        torch.testing.assert_close(normal.std_P.repeat_interleave(3), outcome.std_B)


@pytest.mark.parametrize("seed", range(5))
def test_against_the_definition(seed):
    """A loop over groups, steps and tokens with Python's own statistics, for ragged numbers of steps."""
    draw = random.Random(seed)
    steps = [
        (row, end, draw.gauss(0, 1)) for row in range(8) for end in sorted(draw.sample(range(7), draw.randrange(5)))
    ]
    row, end, _ = columns(steps)
    value = torch.tensor([v for *_, v in steps], dtype=torch.float64)
    normal = normalize_steps(value, row, rows=8, group_size=4, scale="group")
    advantages = step_advantages(normal.value_S, row, end, rows=8, tokens=7)
    for i in range(8):
        group = [v for r, _, v in steps if r // 4 == i // 4]
        for t in range(7):
            later = [v for r, e, v in steps if r == i and e >= t]
            spread = statistics.stdev(group) if len(group) > 1 else 0.0
            expected = sum((v - statistics.mean(group)) / (spread + 1e-4) for v in later)
            assert advantages[i, t].item() == pytest.approx(expected, abs=1e-9)


def test_groups_without_steps_and_no_steps_at_all():
    row, end, value = columns([(3, 0, 5.0)])
    normal = normalize_steps(value, row, rows=4, group_size=2, scale="group")
    assert normal.value_S.tolist() == [0.0]
    assert normal.std_P.tolist() == [0.0, 0.0]
    row, end, value = columns([])
    normal = normalize_steps(value.float(), row, rows=4, group_size=2, scale="batch")
    assert step_advantages(normal.value_S, row, end, rows=4, tokens=3).eq(0).all()


def test_an_unknown_scale_raises():
    with pytest.raises(ValueError, match="scale"):
        normalize_steps(torch.ones(1), torch.zeros(1, dtype=torch.long), rows=2, group_size=2, scale="row")
