"""Rewards that judge steps: gathering the steps of all processes, and computing advantages from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor

from gruppo.algo.advantages import Advantages, combine_rewards
from gruppo.algo.stats import nanstd
from gruppo.algo.steps import NormalizedSteps, normalize_steps, step_advantages
from gruppo.rewards.outcomes import Steps


@dataclass(frozen=True)
class StepTable:
    """The steps of a generation, over all processes: for each reward that returned steps, rows, ends and values (S,).

    Example, reward 1 gave two steps to row 0 and one to row 3:
        StepTable({1: (tensor([0, 0, 3]), tensor([4, 9, 2]), tensor([1.0, 0.0, 1.0]))}, rows=4)
    """

    by_reward: dict[int, tuple[Tensor, Tensor, Tensor]]
    rows: int

    @classmethod
    def gather(
        cls,
        steps: Sequence[Sequence[Steps | None]] | None,
        values_BR: Tensor,
        lengths: Sequence[int],
    ) -> "StepTable | None":
        """Gather the steps of each process's own rows; None if no reward returned steps on any process.

        `values_BR` are the rewards of these rows (NaN: none) and `lengths` the lengths of their completions in tokens.
        If a reward returned steps for some rows and a number for others, the number counts as a single step that ends
        with the completion.
        """
        # First find the rewards that return steps: on some processes such a reward may have returned numbers only.
        stepping = sorted(set().union(*gather_object([_stepping(steps)])))
        if not stepping:
            return None
        parts = gather_object([(len(lengths), _listed(stepping, steps, values_BR.tolist(), lengths))])
        by_reward = {}
        for reward in stepping:
            entries, first = [], 0
            for count, listed in parts:
                entries += [(first + row, end, value) for column, row, end, value in listed if column == reward]
                first += count
            rows, ends, values = zip(*entries, strict=True) if entries else ((), (), ())
            by_reward[reward] = (
                torch.tensor(rows, dtype=torch.long),
                torch.tensor(ends, dtype=torch.long),
                torch.tensor(values, dtype=torch.float32),
            )
        return cls(by_reward, sum(count for count, _ in parts))

    def outcomes(self, rewards_NR: Tensor) -> Tensor:
        """The rewards with NaN in place of those that judge steps."""
        outcomes_NR = rewards_NR.clone()
        outcomes_NR[:, list(self.by_reward)] = torch.nan
        return outcomes_NR

    def normalized(self, group_size: int, scale: str) -> dict[int, NormalizedSteps]:
        return {
            reward: normalize_steps(values, rows, rows=self.rows, group_size=group_size, scale=scale)
            for reward, (rows, _, values) in self.by_reward.items()
        }

    def spread_P(self, weights_R: Sequence[float], group_size: int) -> Tensor:
        """The largest weighted standard deviation of any reward's steps, by group."""
        normal = self.normalized(group_size, "none")
        return torch.stack([abs(weights_R[reward]) * steps.std_P for reward, steps in normal.items()]).amax(0)

    def groups_without_spread(self, rewards_NR: Tensor, weights_R: Tensor, group_size: int) -> list[int]:
        """The groups in which neither steps nor other rewards differ, among those with two scorable rows."""
        outcomes_N = combine_rewards(self.outcomes(rewards_NR), weights_R)
        outcome_std_P = nanstd(outcomes_N.view(-1, group_size), dim=1).nan_to_num(0.0).cpu()
        comparable_P = (~rewards_NR.isnan().all(1)).view(-1, group_size).sum(1).cpu() > 1
        still_P = comparable_P & (self.spread_P(weights_R.tolist(), group_size) == 0)
        return [int(group) for group in (still_P & outcome_std_P.isclose(torch.zeros(()))).nonzero()[:, 0]]

    def advantages(self, weights_R: Sequence[float], group_size: int, scale: str, own: slice, tokens: int) -> Tensor:
        """Advantages (B, T) of this process's rows: the weighted sum over rewards of each token's step advantage."""
        count = own.stop - own.start
        total_BT = torch.zeros(count, tokens)
        for reward, normal in self.normalized(group_size, scale).items():
            rows, ends, _ = self.by_reward[reward]
            mine = (rows >= own.start) & (rows < own.stop)
            total_BT += weights_R[reward] * step_advantages(
                normal.value_S[mine], rows[mine] - own.start, ends[mine], rows=count, tokens=tokens
            )
        return total_BT


def _stepping(steps: Sequence[Sequence[Steps | None]] | None) -> set[int]:
    return {reward for row in steps or () for reward, found in enumerate(row) if found is not None}


def _listed(
    stepping: Sequence[int],
    steps: Sequence[Sequence[Steps | None]] | None,
    values: Sequence[Sequence[float]],
    lengths: Sequence[int],
) -> list[tuple[int, int, int, float]]:
    """(reward, row, end, value) of every step of a process's rows."""
    listed: list[tuple[int, int, int, float]] = []
    for row, value_R in enumerate(values):
        for reward in stepping:
            found, value = None if steps is None else steps[row][reward], value_R[reward]
            if value != value:  # NaN: the reward abstained, or the whole row is unscorable
                continue
            if found is None:
                found = [(lengths[row] - 1, value)] if lengths[row] else []
            listed += [(reward, row, end, step) for end, step in found]
    return listed


def with_steps(outcome: Advantages, rewards_N: Tensor, mean_advantages_N: Tensor, spread_P: Tensor) -> Advantages:
    """The logged advantages of rows with per-token advantages: their mean, and the larger of the two deviations."""
    group_size = len(rewards_N) // len(spread_P)
    spread_N = spread_P.to(outcome.std_B).repeat_interleave(group_size)
    std_N = torch.where(outcome.std_B.isnan(), spread_N, torch.maximum(outcome.std_B, spread_N))
    return Advantages(mean_advantages_N, rewards_N, std_N)
