"""From prompts to scored tensors: the first half of a training step."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from gruppo.algo.advantages import Advantages, frac_zero_std
from gruppo.algo.masks import drop_rows, is_truncated
from gruppo.data.collate import collate
from gruppo.data.prompts import PromptEncoder, reject_images
from gruppo.data.responses import decode
from gruppo.errors import RewardError, RolloutError
from gruppo.rewards.runner import RewardInputs, RewardRunner
from gruppo.rollout.base import RolloutBackend, group_requests, stop_strings
from gruppo.rollout.custom import CustomRollout
from gruppo.trainer.ledger import Ledger
from gruppo.trainer.metrics import gather_rows, length_metrics, own_rows, reward_metrics
from gruppo.trainer.resampling import Scored, groups_without_spread, resampling_metrics, runs
from gruppo.trainer.scoring import Scoring
from gruppo.types import Completion, Prompt, Rollout, StopReason, TrainBatch

Row = Mapping[str, Any]


class Collecting(Scoring):
    """The part of the trainer that collects.

    Methods with a leading underscore keep names and shapes that subclasses of other trainers of this kind override.
    """

    prompt_encoder: PromptEncoder
    backend: RolloutBackend
    custom_rollout: CustomRollout | None
    reward_runner: RewardRunner
    reward_func_names: list[str]
    reward_weights: Tensor
    eos_token_ids: list[int]
    _sampling_anew = False  # a generation that was counted before the run was resumed inside it
    # The random numbers of a generation follow from its place in the run, which a resumed run knows as well, …
    _place: tuple[int, ...] | None = None  # run, epoch and generation; evaluation: update, set and batch
    _asked_elsewhere = 0  # rollouts outside of both, a callback's, say
    _own_rows: Sequence[int] = ()  # … from a row's place in the batch of all processes, …
    _attempt = 0  # … from the round of replacements that put it there, …
    _requests_made = 0  # … and, where a hook asks several times, from which time it is
    ledger: Ledger

    def estimate_advantages(self, rewards_NR: Tensor, group_size: int, kl_penalty_N: Tensor | None) -> Advantages:
        """Rewards of whole groups, of all processes, to advantages; the two trainers differ here."""
        raise NotImplementedError

    @property
    def group_size(self) -> int:
        """G in the current mode."""
        return int(self.args.num_generations if self.mode == "train" else self.args.eval_group_size)

    @torch.no_grad()
    def collect(self, rows: Sequence[Row]) -> TrainBatch:
        """Sample a completion for each row, score it, and compare it with its group."""
        generation = self._sample_and_score(rows)
        if self.mode == "train" and self.args.dynamic_sampling:
            self._replace_groups_without_spread(generation)
        self._log_lengths(generation.lengths_NC)
        batch = self.to_tensors(generation.rollouts)
        if self.mode == "train":
            self._check_parity(batch)
        kl_penalty_N = self.add_logps(batch)
        advantages = self.estimate_advantages(generation.rewards_NR, self.group_size, kl_penalty_N)
        batch.advantages = own_rows(self.accelerator, advantages.advantages_B, len(batch)).float()
        self._log_rewards(generation, advantages)
        self._note_rows(generation.rollouts, batch.zero_advantage_B.tolist())
        return batch

    def _sample_and_score(self, rows: Sequence[Row], places: Sequence[int] | None = None, attempt: int = 0) -> Scored:
        """Rollouts and rewards of a generation or, given their places, of the replacements of some of its rows."""
        # A process that has nothing to replace asks for nothing, and waits for the others' rewards.
        rollouts = self.rollout(rows, places, attempt) if rows else []
        lengths_NC = self._count_tokens(rollouts)
        rewards_NR = self.reward(rollouts)
        return Scored(rollouts, rewards_NR, lengths_NC, self._extra_columns, self._extra_metrics)

    def _replace_groups_without_spread(self, generation: Scored) -> None:
        """Sample the next prompts in their place. All processes know all rewards, and so agree on the groups."""
        cursor, size = self.prompt_cursor, self.group_size
        own = self._rows_in_batch(len(generation.rollouts))
        groups = self._groups_without_spread(generation)
        for attempt in range(1, self.args.max_resample_rounds + 1):
            if not groups:
                break
            places = [place for place in own if place // size in groups]
            self._note_rows([generation.rollouts[place - own.start] for place in places], [True] * len(places))
            fresh = self._sample_and_score(cursor.take(groups, places), places, attempt)
            generation.replace(groups, [place - own.start for place in places], fresh, size)
            groups = self._groups_without_spread(generation)
        self.metrics.add("train", resampling_metrics(generation, len(groups), self.reward_weights, size))
        if self.epochs_consumed is not None:
            self.metrics.values["train"]["dynamic_sampling/epoch"] = [self.epochs_consumed]

    def _groups_without_spread(self, generation: Scored) -> list[int]:
        clip_range = getattr(self.args, "reward_clip_range", None)  # RLOO compares what is left after it
        return groups_without_spread(generation.rewards_NR, self.reward_weights, self.group_size, clip_range)

    # ---- sampling

    def rollout(self, rows: Sequence[Row], places: Sequence[int] | None = None, attempt: int = 0) -> list[Rollout]:
        """One rollout per row: by the user's function if there is one, else by the backend.

        `places` are those of the rows in the batch of all processes; without them, all rows of a process are meant.
        """
        for row in rows:
            reject_images(row)
        extras: Sequence[Mapping[str, Any]] = [{}] * len(rows)
        start = time.perf_counter()
        if self.custom_rollout is not None:
            prompt_ids, completions, extras = self.custom_rollout([row["prompt"] for row in rows])
            completions = [replace(completion, stop=self._stop(completion.ids)) for completion in completions]
            prompts = [Prompt(row=row, text=row["prompt"], ids=ids) for row, ids in zip(rows, prompt_ids, strict=True)]
        else:
            prompts = self.prompt_encoder(rows, tokenize=lambda texts: self._tokenize_prompts(texts)[0])
            self._own_rows = self._rows_in_batch(len(rows)) if places is None else places
            self._attempt, self._requests_made = attempt, 0
            self._asked_elsewhere += self._place is None
            completions = self._sample([list(prompt.ids) for prompt in prompts])
        self._note_sampling(prompts, completions, time.perf_counter() - start)
        outputs = decode(self.processing_class, prompts, [completion.ids for completion in completions])
        return [
            Rollout(prompt=prompt, completion=completion, output=output, extra=extra)
            for prompt, completion, output, extra in zip(prompts, completions, outputs, extras, strict=True)
        ]

    def _sample(self, prompt_ids: list[list[int]]) -> list[Completion]:
        """One completion per prompt, from the backend, or from the hook of a subclass that overrides it."""
        if type(self)._generate_single_turn is Collecting._generate_single_turn:
            return self._ask_backend(prompt_ids)
        ids, logps = self._generate_single_turn(prompt_ids)
        if len(ids) != len(prompt_ids):
            raise RolloutError(f"{len(ids)} completions came back for {len(prompt_ids)} prompts.")
        return [Completion(row, self._stop(row), None if logps is None else logps[i]) for i, row in enumerate(ids)]

    @contextmanager
    def _at(self, place: tuple[int, ...]) -> Iterator[None]:
        """Rollouts in here draw the random numbers of this place."""
        self._place = place
        try:
            yield
        finally:
            self._place = None

    def _rows_in_batch(self, count: int) -> range:
        """The place of this process's rows in the batch of all processes."""
        counts = self.accelerator.gather(torch.tensor([count], device=self.accelerator.device)).tolist()
        first = sum(counts[: self.accelerator.process_index])
        return range(first, first + count)

    def _ask_backend(self, prompt_ids: list[list[int]]) -> list[Completion]:
        place = self._place or (2**63, self._asked_elsewhere)
        kind = (self.mode == "eval") + 2 * self._attempt
        key, own_rows = [self.args.seed, kind, self._requests_made, *place], self._own_rows
        if len(prompt_ids) != len(own_rows):  # a hook asks for rows of its own choice
            key, own_rows = [*key, self.accelerator.process_index], range(len(prompt_ids))
        self._requests_made += 1
        requests = [
            request
            for run in runs(own_rows)
            for request in group_requests(
                prompt_ids[run], group_size=self.group_size, first_row=own_rows[run.start], key=key
            )
        ]
        with self.timer(self.backend.timer):
            completions = self.backend.sample(requests)
        self.metrics.add(self.mode, self.backend.metrics())
        # Log-probs of rollout functions and hooks become part of the loss; those of a backend are its `plain_logps`,
        # which are of no use if it samples at another temperature than the loss knows.
        if self.backend.config.temperature != self.temperature:
            completions = [replace(completion, plain_logps=None, entropies=None) for completion in completions]
        return [replace(completion, logps=None) for completion in completions]

    def _stop(self, completion_ids: Sequence[int]) -> StopReason:
        """Why completions ended whose maker did not say."""
        ended = {*self.eos_token_ids, self.processing_class.pad_token_id}
        if not is_truncated([completion_ids], ended)[0]:
            return StopReason.EOS
        if strings := stop_strings(self.backend.config):
            text = self.processing_class.decode(completion_ids)
            return StopReason.STOP_STRING if any(string in text for string in strings) else StopReason.LENGTH
        return StopReason.LENGTH

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Hook: token ids of prompts, images (None) and multimodal fields (none)."""
        return self.prompt_encoder.token_ids(prompts), None, {}

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any = None,
        multimodal_fields: Any = None,
        num_generations: int | None = None,
    ) -> tuple[list[list[int]], list[list[float | None]] | None]:
        """Hook: completion ids and sampling log-probs or None, one per prompt; log-probs become part of the loss."""
        return [list(completion.ids) for completion in self._ask_backend(prompt_ids)], None

    # ---- tensors

    def to_tensors(self, rollouts: Sequence[Rollout]) -> TrainBatch:
        """Padded tensors; rows that did not end by themselves are masked if the config asks for it."""
        batch = collate(
            rollouts, self.processing_class.pad_token_id, self.accelerator.device, self.args.pad_to_multiple_of
        )
        truncated = [not rollout.completion.stop.ended for rollout in rollouts]
        batch.truncated = torch.tensor(truncated, dtype=torch.bool, device=self.accelerator.device)
        batch.sampled_at = torch.full_like(batch.truncated, self.state.global_step, dtype=torch.long)
        if self.args.mask_truncated_completions:
            batch.completion_mask = drop_rows(batch.completion_mask, truncated)
            if batch.tool_mask is not None:
                batch.tool_mask = drop_rows(batch.tool_mask, truncated)
        # Not read here: subclasses that compute their own loss look for it in the dict.
        batch.num_items_in_batch = self.accelerator.reduce(batch.loss_mask_BT.sum(), reduction="sum")
        return batch

    # ---- rewards

    def reward(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Rewards (N, R) of all processes, in group order."""
        self._extra_columns: dict[str, list[Any]] = {}
        self._extra_metrics: dict[str, list[float]] = {}
        self._rows_scored = len(rollouts)
        return self._calculate_rewards(
            # Copies: rows of a group share theirs, and a reward may change what it gets.
            [{**copy.deepcopy(dict(rollout.prompt.row)), **rollout.extra} for rollout in rollouts],
            [copy.deepcopy(rollout.prompt.text) for rollout in rollouts],
            [rollout.output for rollout in rollouts],
            [list(rollout.completion.ids) for rollout in rollouts],
        )

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """Hook: rewards (N, R) gathered from all processes, NaN where a function abstained."""
        rewards_BR = torch.zeros(0, len(self.reward_func_names), device=self.accelerator.device)
        if prompts:  # else all replacements of this round are on other processes
            with self.timer("_calculate_rewards"):
                rewards_BR = self.reward_runner.score(
                    RewardInputs(inputs, prompts, completions, completion_ids_list),
                    trainer_state=self.state,
                    log_extra=self._log_completion_extra,
                    log_metric=self._log_metric,
                )
        return gather_rows(self.accelerator, rewards_BR)

    def _log_completion_extra(self, column: str, values: Sequence[Any]) -> None:
        """Given to reward functions as `log_extra`: a further column of the completions table."""
        values = list(values)
        if column in ("step", "prompt", "completion", "advantage", *self.reward_func_names):
            raise RewardError(f"log_extra({column!r}): the table of completions has a column of that name already.")
        if len(values) != self._rows_scored:
            raise RewardError(
                f"log_extra({column!r}) got {len(values)} values for {self._rows_scored} completions; pass one each."
            )
        self._extra_columns[column] = values

    def _log_metric(self, name: str, value: float) -> None:
        """Given to reward functions as `log_metric`: a further metric, averaged over processes."""
        self._extra_metrics.setdefault(name, []).append(float(value))

    # ---- what is logged about a generation

    def _note_sampling(self, prompts: Sequence[Prompt], completions: Sequence[Completion], seconds: float) -> None:
        """Enter a rollout in the ledger."""
        if self.mode != "train":
            return
        prompt_tokens, lengths = [len(prompt.ids) for prompt in prompts], [len(c.ids) for c in completions]
        known = {} if self.custom_rollout is not None else self.backend.work(prompt_tokens, lengths)
        self.ledger.sampled(prompts=prompt_tokens, completions=lengths, seconds=seconds, **known)

    def _note_rows(self, rollouts: Sequence[Rollout], zero_advantage: Sequence[bool]) -> None:
        """Enter in the ledger what the rewards said about sampled rows."""
        if self.mode == "train":
            self.ledger.scored_rows(
                [len(rollout.completion.ids) for rollout in rollouts],
                zero_advantage=zero_advantage,
                truncated=[not rollout.completion.stop.ended for rollout in rollouts],
            )

    def _count_tokens(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Completion tokens, prompt tokens, unfinished and prompt cut (N, 4), of all processes."""
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
        lengths_NC = gather_rows(self.accelerator, local).cpu()
        if self.mode == "train" and not self._sampling_anew:
            self.state.num_input_tokens_seen += int(lengths_NC[:, :2].sum())
        return lengths_NC

    def _log_lengths(self, lengths_NC: Tensor) -> None:
        lengths, _, unfinished, cut = lengths_NC.unbind(1)
        self.metrics.add(self.mode, length_metrics(lengths, unfinished))
        if self.args.max_prompt_length is not None:
            self.metrics.add(self.mode, {"prompts/truncated_ratio": cut.float().mean().item()})
        self.metrics.values[self.mode]["num_tokens"] = [self.state.num_input_tokens_seen]

    def _log_rewards(self, generation: Scored, advantages: Advantages) -> None:
        names, rollouts, rewards_NR = self.reward_func_names, generation.rollouts, generation.rewards_NR
        zero_std = frac_zero_std(advantages.std_B)
        self.metrics.add(self.mode, reward_metrics(names, rewards_NR, advantages.rewards_B, zero_std))
        metrics, columns = self._gather_user_logs(generation)
        self.metrics.add(self.mode, metrics)
        texts = [(rollout.prompt.text, rollout.output) for rollout in rollouts]
        texts = gather_object(texts) if self.accelerator.num_processes > 1 else texts
        self.completion_logs[self.mode].extend(
            [prompt for prompt, _ in texts],
            [output for _, output in texts],
            {name: rewards_NR[:, i].tolist() for i, name in enumerate(names)},
            advantages.advantages_B.tolist(),
            columns,
        )

    def _gather_user_logs(self, generation: Scored) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """`log_metric` means and `log_extra` columns of all processes; a process without a column gives None."""
        local = [(generation.metrics, generation.columns, len(generation.rollouts))]
        parts = gather_object(local) if self.accelerator.num_processes > 1 else local
        values: dict[str, list[float]] = {}
        for metrics, _, _ in parts:
            for name, numbers in metrics.items():
                values.setdefault(name, []).extend(numbers)
        names = sorted({name for _, columns, _ in parts for name in columns})
        columns = {name: [v for _, cols, n in parts for v in cols.get(name, [None] * n)] for name in names}
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}, columns
