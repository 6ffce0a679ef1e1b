"""What other rewards change: how often they agree, which groups gain or lose spread, and which rows change most."""

import heapq
from typing import Any

import torch
from torch import Tensor

from gruppo.algo.advantages import combine_rewards
from gruppo.replay.compare import rank_correlation, spread_changes
from gruppo.replay.compute import advantages_of
from gruppo.replay.record import RecordedGeneration
from gruppo.replay.settings import Settings

__all__ = ["Rescored"]

MOST_CHANGED = 10
EQUAL = 1e-6  # rewards that differ by no more than this count as equal
LONGEST = 400  # characters of a prompt or completion that are shown


class Rescored:
    """Comparison of old and new rewards, accumulated over generations."""

    def __init__(self) -> None:
        self.rows = self.equal = self.unscored = self.groups = self.sign_flips = 0
        self.totals = [0.0, 0.0]
        self.advantage_change = 0.0
        self.correlations: list[float] = []
        self.appeared: list[tuple[int, int]] = []
        self.disappeared: list[tuple[int, int]] = []
        self.most: list[tuple[float, int, int, dict[str, Any]]] = []

    def add(self, generation: RecordedGeneration, rewards_NR: Tensor, weights_R: Tensor, settings: Settings) -> None:
        """Add a generation with its new rewards (N, R)."""
        before_N = combine_rewards(generation.rewards_NR, weights_R)
        after_N = combine_rewards(rewards_NR, weights_R)
        known_N = ~(before_N.isnan() | after_N.isnan())
        changes_N = (after_N - before_N).masked_fill(~known_N, 0.0)
        self.rows += len(generation)
        self.unscored += int((~known_N).sum())
        self.equal += int((known_N & (changes_N.abs() <= EQUAL)).sum())
        self.totals = [self.totals[0] + float(before_N[known_N].sum()), self.totals[1] + float(after_N[known_N].sum())]
        before_PG, after_PG = (x.view(-1, generation.group_size) for x in (before_N, after_N))
        self.groups += len(before_PG)
        self.correlations += rank_correlation(before_PG, after_PG)
        appeared, disappeared = spread_changes(before_PG, after_PG)
        self.appeared += [(generation.number, group) for group in appeared]
        self.disappeared += [(generation.number, group) for group in disappeared]
        if not generation.has_steps:
            pair = [advantages_of(generation, settings, x).advantages_B for x in (None, rewards_NR)]
            self.advantage_change += float((pair[1] - pair[0]).abs().sum())
            self.sign_flips += int((pair[0] * pair[1] < 0).sum())
        self._keep_most(generation, before_N, after_N, changes_N)

    def _keep_most(self, generation: RecordedGeneration, before_N: Tensor, after_N: Tensor, changes_N: Tensor) -> None:
        sizes, rows = changes_N.abs().topk(min(MOST_CHANGED, len(changes_N)))
        for size, row in zip(sizes.tolist(), rows.tolist(), strict=True):
            if size > EQUAL:
                shown = generation.table.slice(row, 1).select(["prompt", "completion"]).to_pylist()[0]
                entry = {
                    "generation": generation.number,
                    "row": row,
                    "before": float(before_N[row]),
                    "after": float(after_N[row]),
                    **{name: _shortened(text) for name, text in shown.items()},
                }
                self.most = heapq.nlargest(MOST_CHANGED, [*self.most, (size, -generation.number, -row, entry)])

    def summary(self) -> dict[str, Any]:
        """The comparison as plain values; means of rewards are over rows that have both an old and a new reward."""
        known = max(self.rows - self.unscored, 1)
        correlations = torch.tensor(self.correlations)
        return {
            "rows": self.rows,
            "rows_without_a_number": self.unscored,
            "mean_before": self.totals[0] / known,
            "mean_after": self.totals[1] / known,
            "agreement": self.equal / known,
            "groups": self.groups,
            "spread_appears": len(self.appeared),
            "spread_disappears": len(self.disappeared),
            "groups_with_new_spread": [list(place) for place in self.appeared],
            "groups_without_spread_now": [list(place) for place in self.disappeared],
            "rank_correlation": float(correlations.mean()) if self.correlations else None,
            "groups_correlated": len(self.correlations),
            "mean_advantage_change": self.advantage_change / max(self.rows, 1),
            "advantage_sign_flips": self.sign_flips,
            "most_changed": [entry for _, _, _, entry in self.most],
        }


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
