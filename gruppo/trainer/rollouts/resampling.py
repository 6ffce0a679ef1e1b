"""Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476): which groups of a generation are replaced, and by what.

A group whose rewards are all equal has advantages of 0: nothing can be learned from it, and its place in the batch is
lost. The next prompts of the stream are sampled in its place, in rounds, until every group has spread or the config's
number of rounds is used up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gruppo.algo.advantages import combine_rewards
from gruppo.algo.stats import nanstd
from gruppo.types import Rollout


@dataclass
class Generation:
    """Rollouts and their rewards: those of a generation, or of one round of replacements.

    Rows of all processes (N) are in group order. A process knows the rollouts and columns of its own rows only, which
    lie one after the other in a generation and here and there in it in a round of replacements.
    """

    rollouts: list[Rollout]  # of this process
    rewards_NR: Tensor
    lengths_NC: Tensor  # completion tokens, prompt tokens, unfinished, prompt cut
    columns: dict[str, list[Any]]  # `log_extra`, one entry per rollout
    metrics: dict[str, list[float]]  # `log_metric`
    kinds_NR: Tensor  # codes of `Kind`
    steps: list[list[Any]] | None = None  # of rewards that return steps, one entry per rollout
    tools: Mapping[str, float] = field(default_factory=dict)  # what tools did, of all processes
    places: Sequence[int] = ()  # of these rollouts in the batch of all processes
    own_N: Sequence[int] = ()  # where they are among the rows
    indices: Sequence[int | None] = ()  # of their prompts in the dataset
    rounds: Sequence[int] = ()  # of replacements that put them there
    replaced: list["Generation"] = field(default_factory=list)  # what was replaced, by round

    @property
    def counted_kinds_NR(self) -> Tensor:
        """Kinds of all rows, replaced ones too: they were asked for."""
        return torch.cat([self.kinds_NR, *(earlier.kinds_NR for earlier in self.replaced)])

    def replace(self, groups: Sequence[int], own_rows: Sequence[int], by: "Generation", group_size: int) -> None:
        """Put another round in the place of these groups, of which this process has these of its rows.

        What says something about rows (rewards, columns) is replaced; what counts the work done is added.
        """
        device = self.rewards_NR.device
        rows_N = torch.tensor([group * group_size + i for group in groups for i in range(group_size)], device=device)
        self.replaced.append(self._part(rows_N, own_rows))
        self.rewards_NR = self.rewards_NR.index_copy(0, rows_N, by.rewards_NR)
        self.kinds_NR = self.kinds_NR.index_copy(0, rows_N, by.kinds_NR)
        self.indices = put(self.indices, own_rows, by.indices)
        self.rounds = put(self.rounds, own_rows, by.rounds)
        self.rollouts = put(self.rollouts, own_rows, by.rollouts)
        self.lengths_NC = torch.cat([self.lengths_NC, by.lengths_NC])
        if self.steps is not None or by.steps is not None:
            none = [None] * self.rewards_NR.shape[1]
            steps = self.steps or [none] * len(self.rollouts)
            self.steps = put(steps, own_rows, by.steps or [none] * len(own_rows))
        for name in {**self.columns, **by.columns}:
            column = self.columns.get(name, [None] * len(self.rollouts))
            self.columns[name] = put(column, own_rows, by.columns.get(name, [None] * len(own_rows)))
        self.tools = {name: self.tools.get(name, 0) + by.tools.get(name, 0) for name in {**self.tools, **by.tools}}
        for name, values in by.metrics.items():
            self.metrics[name] = [*self.metrics.get(name, []), *values]

    def _part(self, rows_N: Tensor, own_rows: Sequence[int]) -> "Generation":
        """What is known of some rows, before others take their places."""

        def own(values: Sequence[Any]) -> list[Any]:
            return [values[row] for row in own_rows] if values else []

        where = {place: i for i, place in enumerate(rows_N.tolist())}

        return Generation(
            rollouts=own(self.rollouts),
            rewards_NR=self.rewards_NR[rows_N],
            lengths_NC=self.lengths_NC[:0],
            columns={name: own(column) for name, column in self.columns.items()},
            metrics={},
            kinds_NR=self.kinds_NR[rows_N],
            places=own(self.places),
            own_N=[where[place] for place in own(self.places)],
            indices=own(self.indices),
            rounds=own(self.rounds),
        )


def put(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values with others at these places: put("abcd", [1, 3], "xy") == ["a", "x", "c", "y"]."""
    changed = dict(zip(places, others, strict=True))
    return [changed.get(place, value) for place, value in enumerate(values)]


def groups_without_spread(rewards_N: Tensor, group_size: int) -> list[int]:
    """The groups whose rewards, as the recipe compares them, have a deviation of 0.

    Unscorable rows are left out; a group with fewer than two scorable ones has no deviation and is not among them, as
    in `frac_reward_zero_std`.
    """
    std_P = nanstd(rewards_N.view(-1, group_size), dim=1)
    return [int(group) for group in std_P.isclose(torch.zeros_like(std_P)).nonzero()[:, 0].tolist()]


def resampling_metrics(generation: Generation, left: int, weights_R: Tensor, group_size: int) -> dict[str, float]:
    """What the replacements of a generation came to; `left` groups without spread were kept."""
    groups, sampled = len(generation.rewards_NR) // group_size, len(generation.lengths_NC) // group_size
    metrics = {
        "dynamic_sampling/rounds": float(len(generation.replaced)),
        "dynamic_sampling/prompts_sampled": float(sampled),
        "dynamic_sampling/prompts_replaced": float(sampled - groups),
        "dynamic_sampling/left_without_spread": left / groups,
    }
    if generation.replaced:
        rewards_M = combine_rewards(torch.cat([part.rewards_NR for part in generation.replaced]), weights_R)
        metrics["dynamic_sampling/reward_of_replaced"] = rewards_M.nanmean().item()
    return metrics


def runs(places: Sequence[int]) -> list[slice]:
    """Where the places follow each other: runs([2, 3, 6, 7, 8]) == [slice(0, 2), slice(2, 5)]."""
    breaks = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    return [slice(start, stop) for start, stop in pairwise([0, *breaks, len(places)])] if places else []
