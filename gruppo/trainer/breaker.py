"""What a run does about rewards that fail: it counts them, and stops when nothing else comes back."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from gruppo.rewards.outcomes import Kind
from gruppo.rewards.runner import failed_rows
from gruppo.trainer.metrics import MetricStore

WINDOW = 20  # updates, or more, if so many
GENERATIONS = 5  # are not among them

COUNTED = {Kind.ABSTAIN: "abstained", Kind.TIMEOUT: "timeouts", Kind.FAILURE: "failures"}


def kinds_from_values(rewards_NR: Tensor) -> Tensor:
    """What a subclass's own rewards (N, R) say: a score, or NaN for none."""
    return torch.where(rewards_NR.isnan(), Kind.ABSTAIN, Kind.SCORE).to(torch.int8)


class RewardCounts:
    """Counts of outcomes that are no score. A count is logged from when it first is above 0.

    Runs in which no reward ever abstains or fails so log what they log elsewhere. All processes know all outcomes, and
    agree.
    """

    def __init__(self, names: list[str]):
        self.names = names
        self._seen: set[str] = set()

    def state_dict(self) -> list[str]:
        return sorted(self._seen)

    def load_state_dict(self, state: Sequence[str]) -> None:
        self._seen = set(state)

    def metrics(self, kinds_NR: Tensor) -> dict[str, float]:
        counts = {
            f"rewards/{name}/{word}": int((kinds_NR[:, i] == kind).sum())
            for i, name in enumerate(self.names)
            for kind, word in COUNTED.items()
        }
        unscorable = failed_rows(kinds_NR) | (kinds_NR == Kind.ABSTAIN).all(dim=1)
        counts["rewards/unscorable"] = int(unscorable.sum())
        self._seen |= {key for key, count in counts.items() if count}
        return {key: float(count) for key, count in counts.items() if key in self._seen}

    def add(self, store: MetricStore, mode: str, kinds_NR: Tensor) -> None:
        """Count a generation whose mean reward is in the store already.

        What is logged is a mean over generations, so a new count gets zeros for those since the last log.
        """
        values = store.values[mode]
        for key, count in self.metrics(kinds_NR).items():
            values[key] += [0.0] * (len(values["reward"]) - 1 - len(values[key])) + [count]


class RewardBreaker(TrainerCallback):
    """Stops a run, with a checkpoint, when rewards failed on too large a share of the last updates' completions."""

    def __init__(self, max_rate: float | None):
        self.max_rate = max_rate
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._updates: deque[tuple[int, int]] = deque()  # failed and all completions of each
        self._failed, self._rows = 0, 0  # since the last update
        self.stopped_at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"updates": [list(update) for update in self._updates], "since": [self._failed, self._rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = deque((failed, rows) for failed, rows in state["updates"])
        self._failed, self._rows = state["since"]
        if self.max_rate is not None and self.rate > self.max_rate:
            self.reset()  # it stopped the run, and whoever goes on with it has mended something

    def note(self, kinds_NR: Tensor) -> None:
        """Count the completions of a generation, those of all processes."""
        self._failed += int(failed_rows(kinds_NR).sum())
        self._rows += len(kinds_NR)

    @property
    def rate(self) -> float:
        """The share of failures over the window; 0 before it is full."""
        if len(self._updates) < WINDOW or self._generations < GENERATIONS:
            return 0.0
        failed, rows = (sum(column) for column in zip(*self._updates, strict=True))
        return failed / rows

    @property
    def _generations(self) -> int:
        """Updates of the window that had completions of their own; the others used those of an earlier one."""
        return sum(rows > 0 for _, rows in self._updates)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._updates.append((self._failed, self._rows))
        self._failed, self._rows = 0, 0
        while len(self._updates) > WINDOW and self._generations - (self._updates[0][1] > 0) >= GENERATIONS:
            self._updates.popleft()
        if self.max_rate is not None and self.rate > self.max_rate:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True

    def message(self, folder: str) -> str:
        """Why the run ended, and how to go on."""
        return (
            f"Rewards timed out or failed on {self.rate:.0%} of the completions of the last {len(self._updates)} "
            f"updates, which is above max_reward_failure_rate={self.max_rate}. The run was saved in {folder} and "
            "stopped; the log has the first traceback of each reward. Mend the reward and resume from there, or raise "
            "the limit."
        )
