"""Rewards of steps, from the reward function to the update. Two processes: test_packed_update.py."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.algo.steps import normalize_steps, step_advantages
from gruppo.errors import RewardError
from gruppo.trainer.collect.supervision import StepTable
from tests.helpers import length_reward
from tests.trainer.scripted import G, make_trainer, relative_difference, update_of

NAN = math.nan


def thirds(completion_ids: list[list[int]], **kwargs: Any) -> list[Any]:
    """A step at a third of the completion and one at its end, worth what the tokens there say."""
    return [
        sorted({len(ids) // 3: float(ids[len(ids) // 3] % 5), len(ids) - 1: float(ids[-1] % 3)}.items())
        for ids in completion_ids
    ]


def collected(trainer: Any) -> Any:
    """The tensors of the trainer's first generation."""
    return trainer.collect([trainer.train_dataset[i // G] for i in range(trainer.args.generation_batch_size)])


def test_advantages_of_tokens_follow_the_definition(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, reward=thirds)
    batch = collected(trainer)
    ids = [row[mask.bool()].tolist() for row, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)]
    steps = [(row, end, value) for row, found in enumerate(thirds(ids)) for end, value in found]
    rows, ends, values = (torch.tensor(column) for column in zip(*steps, strict=True))
    normal = normalize_steps(values, rows, rows=len(ids), group_size=G, scale="group")
    expected = step_advantages(normal.value_S, rows, ends, rows=len(ids), tokens=batch.completion_ids.shape[1])
    torch.testing.assert_close(batch.advantages, expected.to(batch.advantages))
    assert len(set(batch.advantages[0].tolist())) > 1, "tokens before and after a step differ"


def test_what_is_logged_is_the_sum_of_the_steps(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, reward=[thirds, length_reward], reward_weights=[2.0, 0.5])
    trainer.train()
    logged = trainer.state.log_history[0]
    table = trainer.completion_logs["train"]
    sums = torch.tensor(list(table.columns["rewards"]["thirds"]))
    assert logged["rewards/thirds/mean"] == pytest.approx(sums.mean().item(), rel=1e-5)
    assert logged["reward"] == pytest.approx(
        2 * logged["rewards/thirds/mean"] + 0.5 * logged["rewards/length_reward/mean"], rel=1e-5
    )
    assert logged["frac_reward_zero_std"] == 0


def test_outcomes_and_steps_add_up(tmp_path: Path) -> None:
    weights = [2.0, 0.5]
    both = collected(make_trainer("grpo", tmp_path, reward=[thirds, length_reward], reward_weights=weights)).advantages
    steps = collected(make_trainer("grpo", tmp_path, reward=thirds)).advantages
    # The outcome alone, with its weight: the 1e-4 beside the deviation is not scaled with it.
    outcome = collected(make_trainer("grpo", tmp_path, reward=length_reward, reward_weights=[0.5])).advantages
    torch.testing.assert_close(both, 2 * steps + outcome[:, None])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_single_step_at_the_end_makes_the_same_update_as_the_outcome(scale: str, tmp_path: Path) -> None:
    def at_the_end(completion_ids: list[list[int]], **kwargs: Any) -> list[Any]:
        return [[(len(ids) - 1, float(len(ids)))] for ids in completion_ids]

    outcome = update_of(make_trainer("grpo", tmp_path, scale_rewards=scale, reward=length_of))
    steps = update_of(make_trainer("grpo", tmp_path, scale_rewards=scale, reward=at_the_end))
    assert relative_difference(outcome, steps) < 1e-6


def length_of(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "gspo", "cispo", "sapo", "kl"])
def test_packed_and_padded_rows_agree(recipe: str, tmp_path: Path) -> None:
    packed = update_of(make_trainer(recipe, tmp_path, reward=thirds, max_tokens_per_micro_batch=24))
    padded = update_of(make_trainer(recipe, tmp_path, reward=thirds, packed_update=False))
    assert relative_difference(packed, padded) < 1e-9


def test_rloo_sums_the_steps(tmp_path: Path) -> None:
    def summed(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(value for _, value in found) for found in thirds(completion_ids)]

    steps, sums = (update_of(make_trainer("rloo", tmp_path, reward=reward)) for reward in (thirds, summed))
    assert relative_difference(sums, steps) == 0


def test_steps_and_a_formula_that_has_no_place_for_them(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, reward=thirds, multi_objective_aggregation="normalize_then_sum")
    with pytest.raises(RewardError, match=r"thirds.*normalize_then_sum"):
        trainer.train()


# ---- which steps count


def test_a_number_among_steps_is_a_step_at_the_end() -> None:
    values = torch.tensor([[1.5], [2.0], [NAN], [3.0]])
    table = StepTable.gather([[[(0, 1.0), (2, 0.5)]], [None], [None], [None]], values, [3, 5, 4, 0])
    assert table is not None
    rows, ends, given = table.by_reward[0]
    # The third row abstained or failed, the fourth has no token that could get an advantage.
    assert list(zip(rows.tolist(), ends.tolist(), given.tolist(), strict=True)) == [
        (0, 0, 1.0),
        (0, 2, 0.5),
        (1, 4, 2.0),
    ]


def test_without_steps_there_is_no_table() -> None:
    assert StepTable.gather(None, torch.ones(2, 1), [1, 1]) is None
    assert StepTable.gather([[None], [None]], torch.ones(2, 1), [1, 1]) is None


def test_groups_without_spread_are_those_whose_steps_are_equal_too() -> None:
    steps = [[[(0, 1.0), (1, 0.0)], None], [[(1, 1.0)], None]]  # equal sums, unequal steps
    steps += [[[(0, 1.0), (1, 1.0)], None], [[(1, 1.0)], None]]  # unequal sums, equal steps
    steps += [[[(0, 1.0)], None], [[(1, 1.0)], None]]  # equal steps, but the other reward differs
    steps += [[None, None], [None, None]]  # unscorable
    outcome = [1.0, 1.0, 2.0, 2.0, 0.0, 1.0, NAN, NAN]
    sums = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, NAN, NAN]
    values = torch.tensor([sums, outcome]).T
    table = StepTable.gather(steps, values, [2] * 8)
    assert table is not None
    assert table.groups_without_spread(values, torch.ones(2), 2) == [1]


def test_steps_of_no_weight_are_no_spread() -> None:
    values = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    table = StepTable.gather([[[(0, 1.0)], None], [[(0, 0.0)], None]], values, [2, 2])
    assert table is not None
    assert table.groups_without_spread(values, torch.tensor([0.0, 1.0]), 2) == [0]
    assert table.groups_without_spread(values, torch.tensor([-0.5, 1.0]), 2) == []
    assert table.spread_P([-2.0, 1.0], 2).tolist() == pytest.approx([2 * 0.5**0.5])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_steps_are_finite_whatever_their_values(scale: str) -> None:
    values, rows = torch.tensor([3e38, -3e38, 1.0, 1e20]), torch.tensor([0, 1, 1, 2])
    assert normalize_steps(values, rows, rows=4, group_size=2, scale=scale).value_S.isfinite().all()
