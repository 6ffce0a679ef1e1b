"""From rollouts to rewards of all processes."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo.data.copying import copy_of
from gruppo.errors import RewardError
from gruppo.rewards.outcomes import Steps
from gruppo.rewards.resolve import function_name, is_reward_model, unique_names
from gruppo.rewards.runner import RewardInputs, RewardRunner, RewardSettings, Scores
from gruppo.trainer.breaker import RewardBreaker, RewardCounts, kinds_from_values
from gruppo.trainer.logprobs import LogProbs
from gruppo.trainer.metrics import gather_rows, raised_together
from gruppo.trainer.spreading import prepare_reward_model
from gruppo.types import Rollout


@dataclass
class Notes:
    """What rewards say beside their numbers, which are all that TRL's hook `_calculate_rewards` can return."""

    completions: int = 0  # that they are asked about, on this process
    kinds_NR: Tensor | None = None  # of all processes; codes of `Kind`
    steps: list[list[Steps | None]] | None = None  # per completion and reward
    columns: dict[str, list[Any]] = field(default_factory=dict)  # `log_extra`
    metrics: dict[str, list[float]] = field(default_factory=dict)  # `log_metric`


@dataclass(frozen=True)
class Rewarded:
    """Rewards of all processes, in group order (N, R), and what was said beside them."""

    values_NR: Tensor  # NaN where a reward abstained or failed
    kinds_NR: Tensor
    notes: Notes


class Rewarding(LogProbs):
    """The part of the trainer that asks the rewards."""

    reward_processing_classes: list[Any]
    reward_runner: RewardRunner
    reward_func_names: list[str]
    reward_weights: Tensor
    reward_counts: RewardCounts
    reward_breaker: RewardBreaker
    _notes: Notes  # of the call of `reward` under way

    def _make_rewards(self, rewards: tuple[list[Any], list[Any], Tensor]) -> None:
        """The runner, and what watches it."""
        args = self.args
        functions, self.reward_processing_classes, weights = rewards
        self._notes = Notes()
        self.reward_func_names = unique_names([function_name(f) for f in functions])
        self.reward_weights = weights.to(self.accelerator.device)
        self.reward_runner = RewardRunner(
            [
                prepare_reward_model(self.accelerator, self.sharding, f.eval()) if is_reward_model(f) else f
                for f in functions
            ],
            self.reward_func_names,
            self.reward_processing_classes,
            device=self.accelerator.device,
            settings=RewardSettings(
                timeout=args.reward_timeout,
                sample_timeout=args.reward_sample_timeout,
                workers=args.reward_workers,
                memory_gb=args.reward_memory_gb,
                concurrency=args.reward_concurrency,
                retries=args.reward_retries,
                on_error=args.reward_on_error,
                worker_env=args.worker_env,
            ),
            chat_template_kwargs=args.chat_template_kwargs,
            timer=self.timer,
        )
        self.reward_counts = RewardCounts(self.reward_func_names)
        self.reward_breaker = RewardBreaker(args.max_reward_failure_rate)
        self.add_callback(self.reward_breaker)

    def reward(self, rollouts: Sequence[Rollout]) -> Rewarded:
        """What the rewards say of rollouts."""
        notes = self._notes = Notes(len(rollouts))
        rewards_NR = self._calculate_rewards(
            # Copies: rows of a group share theirs, and a reward may change what it gets.
            [{**copy_of(dict(rollout.prompt.row)), **rollout.extra} for rollout in rollouts],
            [copy_of(rollout.prompt.text) for rollout in rollouts],
            [copy_of(rollout.output) for rollout in rollouts],
            [list(rollout.completion.ids) for rollout in rollouts],
        )
        kinds_NR = notes.kinds_NR
        if kinds_NR is None or kinds_NR.shape != rewards_NR.shape:
            kinds_NR = kinds_from_values(rewards_NR)  # a subclass has rewards of its own
        if self.mode == "train":
            self._raise_if_hopeless(kinds_NR, rollouts)
        return Rewarded(rewards_NR, kinds_NR, notes)

    def _raise_if_hopeless(self, kinds_NR: Tensor, rollouts: Sequence[Rollout]) -> None:
        """The end of a run in whose first generation a reward failed everywhere; all processes know, and agree."""
        reward = self.reward_breaker.hopeless(kinds_NR)
        if reward is None:
            return
        name, conversation = self.reward_func_names[reward], bool(rollouts) and not isinstance(rollouts[0].output, str)
        form = "lists of messages, whose text is completion[0]['content']" if conversation else "strings"
        raise RewardError(
            f"There is nothing to learn from: the reward '{name}' failed on all {len(kinds_NR)} completions of the "
            f"first generation. {self.reward_runner.latest_failures.get(name, '')}\n"
            f"Completions of these prompts are {form}. Fix the reward: gruppo.check_reward(fn, rows) tries one "
            "without a run. max_reward_failure_rate=None goes on whatever rewards do."
        )

    # ---- a hook of TRL's trainers: name and shapes are theirs

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """Hook: rewards (N, R) gathered from all processes, NaN where a function abstained or failed."""
        none = torch.zeros(0, len(self.reward_func_names), device=self.accelerator.device)
        scores = Scores(none, none.to(torch.int8), None)
        together = nullcontext() if self.reward_runner.in_step else raised_together(self.accelerator, RewardError)
        with together, self.timer("_calculate_rewards"), self.presence.during("asking the rewards"):
            if prompts:  # else all replacements of this round are on other processes
                scores = self.reward_runner.score(
                    RewardInputs(inputs, prompts, completions, completion_ids_list),
                    trainer_state=self.state,
                    log_extra=self._log_completion_extra,
                    log_metric=self._log_metric,
                )
            else:
                self.reward_runner.keep_up()
        self._notes.steps = scores.steps
        # No process tells another that a reward failed: it is part of what all of them gather.
        self._notes.kinds_NR = gather_rows(self.accelerator, scores.kinds_BR)
        return gather_rows(self.accelerator, scores.values_BR)

    # ---- what rewards may call

    def _log_completion_extra(self, column: str, values: Sequence[Any]) -> None:
        """Given to reward functions as `log_extra`: a further column of the completions table."""
        values = list(values)
        if column in ("step", "prompt", "completion", "advantage", *self.reward_func_names):
            raise RewardError(f"log_extra({column!r}): the table of completions has a column of that name already.")
        if len(values) != self._notes.completions:
            raise RewardError(
                f"log_extra({column!r}) got {len(values)} values for {self._notes.completions} completions; pass one "
                "each."
            )
        self._notes.columns[column] = values

    def _log_metric(self, name: str, value: float) -> None:
        """Given to reward functions as `log_metric`: a further metric, averaged over processes."""
        self._notes.metrics.setdefault(name, []).append(float(value))

    # ---- the end

    def _raise_if_rewards_failed(self) -> None:
        """The end of a run that the breaker stopped, or would have."""
        breaker = self.reward_breaker
        if breaker.stopped_at is not None:
            folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{breaker.stopped_at}"
            raise RewardError(breaker.message(str(folder)))
        if breaker.exceeded(ended=True):  # ended by what spoke up after the breaker: an evaluation, say
            raise RewardError(breaker.message(None))
