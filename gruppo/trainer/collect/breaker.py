"""Counts reward failures and ends the run with an error if there are too many.

the first generation         ends the run at once if a reward failed on every completion of it
the window of updates        ends the run with a checkpoint if rewards failed on too large a share of completions
the end of a shorter run     applies the same rule to the updates so far
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from gruppo.rewards.outcomes import Kind
from gruppo.rewards.runner import failed_rows

WINDOW = 20  # updates; more if they contain fewer than GENERATIONS generations
GENERATIONS = 5

COUNTED = {Kind.ABSTAIN: "abstained", Kind.TIMEOUT: "timeouts", Kind.FAILURE: "failures"}


def kinds_from_values(rewards_NR: Tensor) -> Tensor:
    """The kinds of a subclass's own rewards (N, R): a score, or an abstention where the value is NaN."""
    return torch.where(rewards_NR.isnan(), Kind.ABSTAIN, Kind.SCORE).to(torch.int8)


class RewardCounts:
    """Counts of outcomes that are not a score. A count is logged once it has been above 0.

    A run in which no reward ever abstains or fails thus logs no additional metrics. All processes have all outcomes,
    so their counts agree.
    """

    def __init__(self, names: list[str]):
        self.names = names
        self._seen: set[str] = set()

    def state_dict(self) -> list[str]:
        return sorted(self._seen)

    def load_state_dict(self, state: Sequence[str]) -> None:
        self._seen = set(state)

    def metrics(self, kinds_NR: Tensor) -> dict[str, float]:
        """The counts of a generation."""
        counts = {
            f"rewards/{name}/{word}": int((kinds_NR[:, i] == kind).sum())
            for i, name in enumerate(self.names)
            for kind, word in COUNTED.items()
        }
        unscorable = failed_rows(kinds_NR) | (kinds_NR == Kind.ABSTAIN).all(dim=1)
        counts["rewards/unscorable"] = int(unscorable.sum())
        self._seen |= {key for key, count in counts.items() if count}
        return {key: float(count) for key, count in counts.items() if key in self._seen}


class RewardBreaker(TrainerCallback):
    """Stops a run, with a checkpoint, when rewards failed on too large a share of the last updates' completions.

    A run that ends before the window is full is judged by the updates so far. A `max_rate` of None or 1 never stops a
    run.

    Example:
        breaker.note(kinds_NR)              after each generation
        breaker.on_step_end(…)              stops the run if it has to, and remembers in `stopped_at` that it did
        breaker.message("run/checkpoint-20")
    """

    def __init__(self, max_rate: float | None):
        self.max_rate = max_rate
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._updates: deque[tuple[int, int]] = deque()  # number of failed and of all completions of each update
        self._failed, self._rows = 0, 0  # since the last update
        self._begun = False  # whether the first generation was checked
        self.stopped_at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": [list(update) for update in self._updates],
            "since": [self._failed, self._rows],
            "stopped": self.stopped_at is not None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = deque((failed, rows) for failed, rows in state["updates"])
        self._failed, self._rows = state["since"]
        self._begun = bool(self._updates or self._rows)
        if state.get("stopped") or self.exceeded():
            self.reset()  # the breaker stopped this run; resuming it implies that the reward was fixed

    def hopeless(self, kinds_NR: Tensor) -> int | None:
        """The index of the reward, if any, that failed on every completion of a run's first generation.

        Such a reward is most likely broken, which is better reported now than after hours of training. In a resumed
        run the first generation is already past.
        """
        begun, self._begun = self._begun, True
        if begun or not len(kinds_NR) or self.max_rate is None or self.max_rate >= 1:
            return None
        failed = (kinds_NR >= Kind.TIMEOUT).all(dim=0).nonzero()
        return int(failed[0]) if len(failed) else None

    def note(self, kinds_NR: Tensor) -> None:
        """Count the completions of a generation, over all processes."""
        self._failed += int(failed_rows(kinds_NR).sum())
        self._rows += len(kinds_NR)

    @property
    def rate(self) -> float:
        """The share of failures over the window, or over the updates so far."""
        return sum(failed for failed, _ in self._updates) / max(1, sum(rows for _, rows in self._updates))

    def exceeded(self, *, ended: bool = False) -> bool:
        """Whether the failure rate is too high; False before the window is full, unless the run has ended."""
        full = len(self._updates) >= WINDOW and self._generations >= GENERATIONS
        return self.max_rate is not None and (full or ended) and self.rate > self.max_rate

    @property
    def _generations(self) -> int:
        """The number of updates in the window that had new completions; the others reused an earlier generation."""
        return sum(rows > 0 for _, rows in self._updates)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._updates.append((self._failed, self._rows))
        self._failed, self._rows = 0, 0
        while len(self._updates) > WINDOW and self._generations - (self._updates[0][1] > 0) >= GENERATIONS:
            self._updates.popleft()
        if self.exceeded(ended=control.should_training_stop):  # set by the last update, and by other callbacks
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True

    def message(self, folder: str | None) -> str:
        """Why the run ended, and how to continue, from the checkpoint if there is one."""
        then = "Fix the reward and start again"
        if folder is not None:
            then = f"The run was saved in {folder} and stopped. Fix the reward and resume from there"
        return (
            f"Rewards timed out or failed on {self.rate:.0%} of the completions of the last {len(self._updates)} "
            f"updates, which is above max_reward_failure_rate={self.max_rate}. The log has the first traceback of "
            f"each reward. {then}, or raise the limit (None: no limit)."
        )
