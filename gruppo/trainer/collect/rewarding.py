"""The rewards of a run: functions and models, weights, logged columns and metrics, and when failures end the run."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from gruppo.errors import RewardError
from gruppo.policy.sharding import Sharding
from gruppo.rewards.outcomes import Steps
from gruppo.rewards.resolve import function_name, is_reward_model, unique_names
from gruppo.rewards.runner import RewardInputs, RewardRunner, RewardScores, RewardSettings
from gruppo.trainer.collect.breaker import RewardBreaker, RewardCounts, kinds_from_values
from gruppo.trainer.construct.frozen import prepare_reward_model
from gruppo.trainer.processes.collectives import gather_rows, raised_together
from gruppo.trainer.processes.presence import Presence
from gruppo.types import Rollout


@dataclass
class Notes:
    """What rewards return besides numbers, because TRL's hook `_calculate_rewards` can only return the numbers."""

    completions: int = 0  # number of completions to score, on this process
    kinds_NR: Tensor | None = None  # of all processes; codes of `Kind`
    steps: list[list[Steps | None]] | None = None  # per completion and reward
    columns: dict[str, list[Any]] = field(default_factory=dict)  # `log_extra`
    metrics: dict[str, list[float]] = field(default_factory=dict)  # `log_metric`

    def kinds_of(self, values_NR: Tensor) -> Tensor:
        """The kind of each value; if a subclass computes its own rewards, inferred from the values alone."""
        if self.kinds_NR is None or self.kinds_NR.shape != values_NR.shape:
            return kinds_from_values(values_NR)
        return self.kinds_NR


@dataclass(frozen=True)
class Rewarded:
    """Rewards of all processes, in group order (N, R), and what the rewards returned besides."""

    values_NR: Tensor  # NaN where a reward abstained or failed
    kinds_NR: Tensor
    notes: Notes


def reward_settings(args: Any) -> RewardSettings:
    return RewardSettings(
        timeout=args.reward_timeout,
        sample_timeout=args.reward_sample_timeout,
        workers=args.reward_workers,
        memory_gb=args.reward_memory_gb,
        concurrency=args.reward_concurrency,
        retries=args.reward_retries,
        on_error=args.reward_on_error,
        worker_env=args.worker_env,
    )


class Rewards:
    """The reward functions and models of a run, with their weights and counts.

    `runner` calls them, `counts` counts the outcomes for the logs, and `breaker` is the callback that stops a run
    whose rewards fail.

    Example, as the trainer asks them:
        notes = rewards.begin(len(rollouts))
        values_NR = rewards.ask(RewardInputs(rows, prompts, completions, ids), state)
    """

    def __init__(
        self,
        functions: Sequence[Any],
        processing_classes: list[Any],
        weights: Tensor,
        *,
        args: Any,
        accelerator: Accelerator,
        sharding: Sharding,
        presence: Presence,
        timer: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.accelerator, self.presence, self.timer = accelerator, presence, timer
        self.processing_classes = processing_classes
        self.names = unique_names([function_name(function) for function in functions])
        self.weights = weights.to(accelerator.device)
        self.runner = RewardRunner(
            [prepare_reward_model(accelerator, sharding, f.eval()) if is_reward_model(f) else f for f in functions],
            self.names,
            processing_classes,
            device=accelerator.device,
            settings=reward_settings(args),
            chat_template_kwargs=args.chat_template_kwargs,
            timer=timer,
        )
        self.counts = RewardCounts(self.names)
        self.breaker = RewardBreaker(args.max_reward_failure_rate)
        self._notes = Notes()

    def begin(self, completions: int) -> Notes:
        """Start scoring this many completions on this process; returns the notes that `ask` will fill."""
        self._notes = Notes(completions)
        return self._notes

    def ask(self, inputs: RewardInputs, state: Any) -> Tensor:
        """Rewards (N, R) gathered from all processes, NaN where a function abstained or failed."""
        none = torch.zeros(0, len(self.names), device=self.accelerator.device)
        scores = RewardScores(none, none.to(torch.int8), None)
        together = nullcontext() if self.runner.in_step else raised_together(self.accelerator, RewardError)
        with together, self.timer("_calculate_rewards"), self.presence.during("asking the rewards"):
            if inputs.prompts:  # otherwise all replacements of this round are on other processes
                scores = self.runner.score(
                    inputs, trainer_state=state, log_extra=self._log_extra, log_metric=self._log_metric
                )
            else:
                self.runner.keep_up()
        self._notes.steps = scores.steps
        # Failures need no separate message between processes: the gathered kinds include them.
        self._notes.kinds_NR = gather_rows(self.accelerator, scores.kinds_BR)
        return gather_rows(self.accelerator, scores.values_BR)

    # ---- what rewards may call

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completions table."""
        values = list(values)
        if column in ("step", "prompt", "completion", "advantage", *self.names):
            raise RewardError(f"log_extra({column!r}): the table of completions already has a column of that name.")
        if len(values) != self._notes.completions:
            raise RewardError(
                f"log_extra({column!r}) got {len(values)} values for {self._notes.completions} completions; pass one "
                "per completion."
            )
        self._notes.columns[column] = values

    def _log_metric(self, name: str, value: float) -> None:
        """Add a metric, averaged over processes."""
        self._notes.metrics.setdefault(name, []).append(float(value))

    # ---- the end

    def raise_if_hopeless(self, kinds_NR: Tensor, rollouts: Sequence[Rollout]) -> None:
        """Raise if a reward failed on the whole first generation; all processes have the same kinds and agree."""
        reward = self.breaker.hopeless(kinds_NR)
        if reward is None:
            return
        name, conversation = self.names[reward], bool(rollouts) and not isinstance(rollouts[0].output, str)
        form = "lists of messages, whose text is completion[0]['content']" if conversation else "strings"
        raise RewardError(
            f"There is nothing to learn from: the reward '{name}' failed on all {len(kinds_NR)} completions of the "
            f"first generation. {self.runner.latest_failures.get(name, '')}\n"
            f"Completions of these prompts are {form}. Fix the reward: gruppo.check_reward(fn, rows) tests one "
            "without a run. With max_reward_failure_rate=None the run continues even if rewards fail."
        )

    def raise_if_failed(self, run: Path) -> None:
        """Raise at the end of a run, in this folder, that the breaker stopped or would have stopped."""
        if self.breaker.stopped_at is not None:
            raise RewardError(self.breaker.message(str(run / f"checkpoint-{self.breaker.stopped_at}")))
        if self.breaker.exceeded(ended=True):  # something else ended the run after the breaker, such as an evaluation
            raise RewardError(self.breaker.message(None))
