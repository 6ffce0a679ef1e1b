"""From prompts to scored tensors: the first half of a training step."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from gruppo.algo.advantages import Advantages, combine_rewards, frac_zero_std
from gruppo.algo.masks import drop_rows
from gruppo.config.recipe import estimate_advantages
from gruppo.data.collate import collate
from gruppo.data.copying import copy_of
from gruppo.errors import RewardError
from gruppo.policy.loading import vocabulary_size
from gruppo.policy.modes import weights_version
from gruppo.rewards.outcomes import Kind
from gruppo.rewards.runner import RewardInputs
from gruppo.trainer.books.metrics import length_metrics, reward_metrics, rows_scored
from gruppo.trainer.collect.generation import Generation
from gruppo.trainer.collect.recording import recorded_rows
from gruppo.trainer.collect.resampling import groups_without_spread, resampling_metrics
from gruppo.trainer.collect.rewarding import Rewarded, Rewards
from gruppo.trainer.collect.supervision import StepTable, with_steps
from gruppo.trainer.collect.tool_turns import failed_resets, tool_metrics
from gruppo.trainer.processes.collectives import gather_rows, rows_in_batch
from gruppo.trainer.processes.stopping import Stopper
from gruppo.trainer.sampling import Sampling
from gruppo.types import Rollout, Row, TrainBatch


class Collecting(Sampling):
    """The part of the trainer that collects scored batches."""

    rewards: Rewards
    stopper: Stopper
    _sampling_anew = False  # the run was resumed inside this generation, which is counted already

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
        self._log_lengths(generation.lengths_N4)
        self.metrics.add(self.mode, tool_metrics(generation.tools), of=len(generation.rewards_NR))
        batch = self.to_tensors(generation.rollouts)
        if self.mode == "train":
            self.parity.check(
                self.accelerator.unwrap_model(self.model),
                batch,
                self.state.global_step,
                temperature=self.temperature,
                entropy_gradient=self.entropy_control.enabled,
            )
        kl_penalty_N = self.add_logps(batch)
        advantages, batch.advantages = self._compare(generation, kl_penalty_N, batch.completion_mask)
        self._log_rewards(generation, advantages)
        self._note_rows(generation.rollouts, batch.zero_advantage_B.tolist())
        self._record_rows(generation, batch, advantages.rewards_B)
        if self.mode == "train":
            # The std of a group with one scored row is NaN, and that of a batch may be > 0 where no group has spread.
            moved_share = (advantages.advantages_B != 0).float().mean().item()
            self.audits.scored(
                spread_share=min(1 - frac_zero_std(advantages.std_B).item(), moved_share),
                unscorable_share=advantages.rewards_B.isnan().float().mean().item(),
            )
        return batch

    def _audit_sampling(self, rollouts: Sequence[Rollout]) -> None:
        if self.mode != "train" or not rollouts:
            return
        policy = self.accelerator.unwrap_model(self.model)
        ahead = any(rollout.completion.sampled_at is not None for rollout in rollouts)
        asked = self._under_way.asked
        used = self.backend.weights_version if asked and not ahead else None
        self.audits.sampled(
            rollouts,
            temperature=self._drawn_temperature,
            shaped=not asked or bool(self.biased_sampling),
            vocabulary=vocabulary_size(policy),
            end_ids=self.eos_token_ids,
            weights=None if used is None else (used, weights_version(policy)),
        )

    @property
    def _drawn_temperature(self) -> float:
        """The sampling temperature: 0 for greedy decoding, where equal completions are expected; 1 if unknown."""
        if not self._under_way.asked:
            return 1.0
        config = self.backend.config
        return self.temperature if config.do_sample and config.top_k != 1 else 0.0

    def _record_rows(self, generation: Generation, batch: TrainBatch, rewards_N: Tensor) -> None:
        if self.recorder is None or self.args.record != "all":
            return
        start = time.perf_counter()
        number = self.recorder.rollouts(
            recorded_rows(
                generation,
                batch,
                rewards_N,
                self.rewards.names,
                update=self.state.global_step,
                split="train" if self.mode == "train" else self._eval_prefix,
                group_size=self.group_size,
            )
        )
        if self.mode == "train":
            batch.place = torch.tensor(generation.places, dtype=torch.long, device=batch.completion_ids.device)
            batch.generation = torch.full_like(batch.place, number)
        self._record_seconds += time.perf_counter() - start

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
        steps = StepTable.gather(self.accelerator, generation.steps, values_BR, lengths)
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

    # ---- what is logged about a generation

    def _note_rows(self, rollouts: Sequence[Rollout], zero_advantage: Sequence[bool]) -> None:
        """Enter sampled rows in the ledger: their lengths, which have zero advantage, and which are truncated."""
        if self.mode == "train":
            self.ledger.scored_rows(
                [len(rollout.completion.ids) for rollout in rollouts],
                zero_advantage=zero_advantage,
                truncated=[not rollout.completion.stop.ended for rollout in rollouts],
            )

    def _count_tokens(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(N, 4), rows of all processes: completion tokens, prompt tokens, unfinished, prompt truncated."""
        counts = [
            [
                sum(r.completion.model_mask or [1] * len(r.completion.ids)),
                len(r.prompt.ids),
                not r.completion.stop.ended,
                r.prompt.truncated,
            ]
            for r in rollouts
        ]
        local = torch.tensor(counts, dtype=torch.long, device=self.accelerator.device).view(-1, 4)
        lengths_N4 = gather_rows(self.accelerator, local).cpu()
        if self.mode == "train" and not self._sampling_anew:
            self.state.num_input_tokens_seen += int(lengths_N4[:, :2].sum())
        return lengths_N4

    def _log_lengths(self, lengths_N4: Tensor) -> None:
        lengths, _, unfinished, cut = lengths_N4.unbind(1)
        metrics, rows = length_metrics(lengths, unfinished), len(lengths)
        ended = {"completions/mean_terminated_length": rows - int(unfinished.sum())}
        self.metrics.add(self.mode, metrics, dict.fromkeys(metrics, rows) | ended)
        if self.args.max_prompt_length is not None:
            self.metrics.add(self.mode, {"prompts/truncated_ratio": cut.float().mean().item()}, of=rows)
        self.metrics.set(self.mode, {"num_tokens": self.state.num_input_tokens_seen})

    def _log_rewards(self, generation: Generation, advantages: Advantages) -> None:
        names, rollouts, rewards_NR = self.rewards.names, generation.rollouts, generation.rewards_NR
        metrics = reward_metrics(names, rewards_NR, advantages.rewards_B, frac_zero_std(advantages.std_B))
        self.metrics.add(self.mode, metrics, rows_scored(names, rewards_NR, advantages.rewards_B))
        counts = self.rewards.counts.metrics(generation.counted_kinds_NR)
        self.metrics.count(self.mode, counts, beside="reward")
        if self.mode == "train":
            self.rewards.breaker.note(generation.counted_kinds_NR)
        numbers, columns = self._gather_user_logs(generation)
        means = {name: sum(values) / len(values) for name, values in numbers.items()}
        self.metrics.add(self.mode, means, {name: len(values) for name, values in numbers.items()})
        keeps = self._tracks_images
        texts = [(r.prompt.shown, r.output, list(r.prompt.images) if keeps else []) for r in rollouts]
        texts = gather_object(texts) if self.accelerator.num_processes > 1 else texts
        self.completion_logs[self.mode].extend(
            [prompt for prompt, _, _ in texts],
            [output for _, output, _ in texts],
            {name: rewards_NR[:, i].tolist() for i, name in enumerate(names)},
            advantages.advantages_B.tolist(),
            columns,
            [images for _, _, images in texts],
        )

    def _gather_user_logs(self, generation: Generation) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
        """`log_metric` values and `log_extra` columns of all processes; None where a process has no such column."""
        local = [(generation.metrics, generation.columns, len(generation.rollouts))]
        parts = gather_object(local) if self.accelerator.num_processes > 1 else local
        values: dict[str, list[float]] = {}
        for metrics, _, _ in parts:
            for name, numbers in metrics.items():
                values.setdefault(name, []).extend(numbers)
        names = sorted({name for _, columns, _ in parts for name in columns})
        columns = {name: [v for _, cols, n in parts for v in cols.get(name, [None] * n)] for name in names}
        return values, columns
