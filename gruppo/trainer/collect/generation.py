"""The rows of a generation with all their data, before they become the tensors of a training batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gruppo.types import Rollout


@dataclass
class Generation:
    """Rollouts and their rewards, of a whole generation or of one round of replacements.

    Rows of all processes (N) are in group order. A process has the rollouts and columns of its own rows only. These
    rows are contiguous in a whole generation, and scattered in a round of replacements.
    """

    rollouts: list[Rollout]  # of this process
    rewards_NR: Tensor
    lengths_N4: Tensor  # completion tokens, prompt tokens, unfinished, prompt cut
    columns: dict[str, list[Any]]  # `log_extra`, one entry per rollout
    metrics: dict[str, list[float]]  # `log_metric`
    kinds_NR: Tensor  # codes of `Kind`
    steps: list[list[Any]] | None = None  # of rewards that return steps, one entry per rollout
    tools: Mapping[str, float] = field(default_factory=dict)  # counts of tool use, over all processes
    places: Sequence[int] = ()  # position of each rollout in the batch of all processes
    own_N: Sequence[int] = ()  # position of each rollout among the N rows of this object
    indices: Sequence[int | None] = ()  # index of each rollout's prompt in the dataset
    rounds: Sequence[int] = ()  # the replacement round that each rollout comes from
    replaced: list["Generation"] = field(default_factory=list)  # the replaced rows, by round

    @property
    def own(self) -> slice:
        """This process's rows among those of a whole generation."""
        first = self.own_N[0] if self.own_N else 0
        return slice(first, first + len(self.own_N))

    @property
    def counted_kinds_NR(self) -> Tensor:
        """Kinds of all rows, including replaced ones, since the rewards scored them as well."""
        return torch.cat([self.kinds_NR, *(earlier.kinds_NR for earlier in self.replaced)])

    def replace(self, groups: Sequence[int], own_rows: Sequence[int], by: "Generation", group_size: int) -> None:
        """Replace these groups by another round; `own_rows` are the affected rows among this process's rollouts.

        Data about rows (rewards, columns) is replaced; counts of the work done are added up.
        """
        device = self.rewards_NR.device
        rows_N = torch.tensor([group * group_size + i for group in groups for i in range(group_size)], device=device)
        self.replaced.append(self._part(rows_N, own_rows))
        self.rewards_NR = self.rewards_NR.index_copy(0, rows_N, by.rewards_NR)
        self.kinds_NR = self.kinds_NR.index_copy(0, rows_N, by.kinds_NR)
        self.indices = put(self.indices, own_rows, by.indices)
        self.rounds = put(self.rounds, own_rows, by.rounds)
        self.rollouts = put(self.rollouts, own_rows, by.rollouts)
        self.lengths_N4 = torch.cat([self.lengths_N4, by.lengths_N4])
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
        """The data of some rows, taken before other rows replace them."""

        def own(values: Sequence[Any]) -> list[Any]:
            return [values[row] for row in own_rows] if values else []

        where = {place: i for i, place in enumerate(rows_N.tolist())}

        return Generation(
            rollouts=own(self.rollouts),
            rewards_NR=self.rewards_NR[rows_N],
            lengths_N4=self.lengths_N4[:0],
            columns={name: own(column) for name, column in self.columns.items()},
            metrics={},
            kinds_NR=self.kinds_NR[rows_N],
            places=own(self.places),
            own_N=[where[place] for place in own(self.places)],
            indices=own(self.indices),
            rounds=own(self.rounds),
        )


def put(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values with `others` at these positions: put("abcd", [1, 3], "xy") == ["a", "x", "c", "y"]."""
    changed = dict(zip(places, others, strict=True))
    return [changed.get(place, value) for place, value in enumerate(values)]
