"""From prompts to scored tensors: the first half of a training step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.algo.advantages import Advantages, combine_rewards
from gruppo.algo.masks import drop_rows
from gruppo.config.recipe import estimate_advantages
from gruppo.data.collate import collate
from gruppo.data.copying import copy_of
from gruppo.errors import RewardError
from gruppo.rewards.outcomes import Kind
from gruppo.rewards.runner import RewardInputs
from gruppo.trainer.accounting import Accounting
from gruppo.trainer.collect.generation import Generation
from gruppo.trainer.collect.resampling import groups_without_spread, resampling_metrics
from gruppo.trainer.collect.rewarding import Rewarded
from gruppo.trainer.collect.supervision import StepTable, with_steps
from gruppo.trainer.collect.tool_turns import failed_resets
from gruppo.trainer.processes.collectives import gather_rows, rows_in_batch
from gruppo.types import Rollout, Row, TrainBatch


class Collecting(Accounting):
    """The part of the trainer that collects scored batches."""

    def estimate_advantages(self, rewards_NR: Tensor, group_size: int, kl_penalty_N: Tensor | None) -> Advantages:
        """Advantages from the rewards of whole groups of all processes, as configured; subclasses may override it."""
        return estimate_advantages(self.args, self.recipe, rewards_NR, self.rewards.weights, group_size, kl_penalty_N)

    @torch.no_grad()
    def collect(self, rows: Sequence[Row]) -> TrainBatch:
        """Sample a completion for each row, score it, and compare it with its group."""
        with self.backend.ready():
            self._refresh_sampler()
            return self._collect(rows)

    def _collect(self, rows: Sequence[Row]) -> TrainBatch:
        generation = self._sample_and_score(rows)
        if self.mode == "train" and self.args.dynamic_sampling:
            self._replace_groups_without_spread(generation)
            self._ask_ahead()  # the next prompts are known only now
        self._log_sampling(generation)
        batch = self.to_tensors(generation.rollouts)
        self._check_parity(batch)
        kl_penalty_N = self.add_logps(batch)
        advantages, batch.advantages = self._compare(generation, kl_penalty_N, batch.completion_mask)
        self._account(generation, batch, advantages)
        return batch

    def _sample_and_score(
        self, rows: Sequence[Row], places: Sequence[int] | None = None, attempt: int = 0
    ) -> Generation:
        """Rollouts and rewards of a generation or, with `places`, of replacements for some of its rows."""
        # A process with nothing to replace samples nothing, but takes part if tools or the backend need all processes.
        together = self.toolset is not None or self.backend.needs_every_process
        rollouts = self.rollout(rows, places, attempt) if rows or together else []
        if not self.args.dynamic_sampling:
            self._ask_ahead()
        self.stopper.check()
        self._audit_sampling(rollouts)
        lengths_N4 = self._count_tokens(rollouts)
        found, tools = self.reward(rollouts), dict(self._under_way.tool_counts)
        rewards_NR, kinds_NR, notes = found.values_NR, found.kinds_NR, found.notes
        if (failed_N := failed_resets(self, rollouts)) is not None:  # overrides the scores of such rows
            rewards_NR = rewards_NR.masked_fill(failed_N, torch.nan)
            kinds_NR = kinds_NR.masked_fill(failed_N, Kind.FAILURE)
            tools |= {"resets": len(failed_N), "failed_resets": int(failed_N.sum())}
        own = rows_in_batch(self.accelerator, len(rollouts))
        return Generation(
            rollouts,
            rewards_NR,
            lengths_N4,
            notes.columns,
            notes.metrics,
            kinds_NR,
            notes.steps,
            tools,
            places=own if places is None else places,
            own_N=own,
            indices=[getattr(row, "index", None) for row in rows],
            rounds=[attempt] * len(rows),
        )

    def reward(self, rollouts: Sequence[Rollout]) -> Rewarded:
        """Score rollouts with the rewards."""
        notes = self.rewards.begin(len(rollouts))
        values_NR = self._calculate_rewards(
            # Copies: rows of a group share these objects, and a reward may modify its arguments.
            [{**copy_of(dict(rollout.prompt.row)), **rollout.extra} for rollout in rollouts],
            [copy_of(rollout.prompt.text) for rollout in rollouts],
            [copy_of(rollout.output) for rollout in rollouts],
            [list(rollout.completion.ids) for rollout in rollouts],
        )
        kinds_NR = notes.kinds_of(values_NR)
        if self.mode == "train":
            self.rewards.raise_if_hopeless(kinds_NR, rollouts)
        return Rewarded(values_NR, kinds_NR, notes)

    # ---- hooks of TRL's trainers: names and shapes are theirs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Hook: rows to the dict of tensors that the loss reads."""
        return self.collect(inputs).to_dict()

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """Hook: rewards (N, R) gathered from all processes, NaN where a function abstained or failed."""
        return self.rewards.ask(RewardInputs(inputs, prompts, completions, completion_ids_list), self.state)

    # ---- groups without spread

    def _replace_groups_without_spread(self, generation: Generation) -> None:
        """Replace groups without reward spread by the next prompts; all processes have all rewards and so agree."""
        size = self.group_size
        assert self.prompt_cursor is not None  # the property raises if there is none
        own = range(generation.places[0], generation.places[-1] + 1) if generation.places else range(0)
        groups = self._groups_without_spread(generation)
        for attempt in range(1, self.args.max_resample_rounds + 1):
            if not groups:
                break
            places = [place for place in own if place // size in groups]
            self._note_rows([generation.rollouts[place - own.start] for place in places], [True] * len(places))
            fresh = self._sample_and_score(self.take_prompts(groups, places), places, attempt)
            generation.replace(groups, [place - own.start for place in places], fresh, size)
            groups = self._groups_without_spread(generation)
        self.metrics.add("train", resampling_metrics(generation, len(groups), self.rewards.weights, size))
        if self.epochs_consumed is not None:
            self.metrics.set("train", {"dynamic_sampling/epoch": self.epochs_consumed})

    def compared_rewards(self, rewards_NR: Tensor, group_size: int) -> Tensor:
        """The values by which rows of a group are compared: the weighted sum of rewards, or one derived from it."""
        found = self.estimate_advantages(rewards_NR, group_size, None)
        return found.rewards_B if found.compared_B is None else found.compared_B

    def _groups_without_spread(self, generation: Generation) -> list[int]:
        steps, size = self._step_table(generation), self.group_size
        if steps is None:
            return groups_without_spread(self.compared_rewards(generation.rewards_NR, size), size)
        return steps.groups_without_spread(generation.rewards_NR, self.rewards.weights, size)

    # ---- advantages

    def _compare(
        self, generation: Generation, kl_penalty_N: Tensor | None, mask_BT: Tensor
    ) -> tuple[Advantages, Tensor]:
        """Advantages of all rows, for the logs, and of this process's rows, for the loss.

        The latter are (B,), or (B, T) if a reward scored steps.
        """
        steps = self._step_table(generation)
        rewards_NR, size = generation.rewards_NR, self.group_size
        advantages = self.estimate_advantages(
            rewards_NR if steps is None else steps.outcomes(rewards_NR), size, kl_penalty_N
        )
        own_B = advantages.advantages_B[generation.own].float()
        if steps is None:
            return advantages, own_B
        weights_R = self.rewards.weights.tolist()
        own_BT = steps.advantages(weights_R, size, self.recipe.scale, generation.own, mask_BT.shape[1]).to(own_B)
        own_BT += own_B[:, None]
        mean_N = gather_rows(self.accelerator, (own_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1))
        rewards_N = combine_rewards(rewards_NR, self.rewards.weights)
        return with_steps(advantages, rewards_N, mean_N, steps.spread_P(weights_R, size)), own_BT

    def _step_table(self, generation: Generation) -> StepTable | None:
        """The steps that rewards scored; None if there are none, or if the recipe supports outcomes only."""
        if self.recipe.advantage != "group":  # then the steps of a completion are summed into an outcome
            return None
        values_BR = generation.rewards_NR[generation.own]
        lengths = [len(rollout.completion.ids) for rollout in generation.rollouts]
        steps = StepTable.gather(generation.steps, values_BR, lengths)
        if steps is not None and self.args.multi_objective_aggregation == "normalize_then_sum":
            names = ", ".join(self.rewards.names[reward] for reward in steps.by_reward)
            raise RewardError(
                f"{names} returned rewards of steps, for which multi_objective_aggregation='normalize_then_sum' is "
                "not defined. Use 'sum_then_normalize', or return their sum."
            )
        return steps

    # ---- tensors

    def to_tensors(self, rollouts: Sequence[Rollout]) -> TrainBatch:
        """Padded tensors; rows that did not end by themselves are masked if the config asks for it."""
        batch = collate(rollouts, self._tokenizer.pad_token_id, self.accelerator.device, self.args.pad_to_multiple_of)
        truncated = [not rollout.completion.stop.ended for rollout in rollouts]
        batch.truncated = torch.tensor(truncated, dtype=torch.bool, device=self.accelerator.device)
        self._set_age(batch, [rollout.completion.sampled_at for rollout in rollouts])
        if self.args.mask_truncated_completions:
            batch.completion_mask = drop_rows(batch.completion_mask, truncated)
            if batch.tool_mask is not None:
                batch.tool_mask = drop_rows(batch.tool_mask, truncated)
        # Not read here: subclasses that compute their own loss look for it in the dict.
        batch.num_items_in_batch = self.accelerator.reduce(batch.loss_mask_BT.sum(), reduction="sum")
        return batch

    def _set_age(self, batch: TrainBatch, sampled_at: Sequence[int | None]) -> None:
        """Set after how many updates the rows were sampled and, with async rollouts in training, scored."""
        now, device = self.state.global_step, self.accelerator.device
        batch.sampled_at = torch.tensor([now if at is None else at for at in sampled_at], device=device).long()
        if self.args.async_rollouts and self.mode == "train":
            batch.scored_at = torch.full_like(batch.sampled_at, now)
            ages_N = gather_rows(self.accelerator, batch.scored_at - batch.sampled_at)
            self.metrics.add("train", {"sampling/staleness": ages_N.float().mean().item()})
