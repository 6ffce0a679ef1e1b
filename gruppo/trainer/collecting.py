"""From prompts to scored tensors: the first half of a training step."""

import copy
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
from gruppo.rollout.builtin import BuiltinBackend
from gruppo.rollout.custom import CustomRollout
from gruppo.trainer.metrics import gather_rows, length_metrics, own_rows, reward_metrics, rollout_metrics
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
    _own_rows = range(0)  # … from a row's place in the batch of all processes, …
    _requests_made = 0  # … and, where a hook asks several times, from which time it is
    _updates_since_sampling = 0

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
        rollouts = self.rollout(rows)
        if self.mode == "train":
            self._updates_since_sampling = 0
        self._log_lengths(rollouts)
        batch = self.to_tensors(rollouts)
        kl_penalty_N = self.add_logps(batch)
        rewards_NR = self.reward(rollouts)
        advantages = self.estimate_advantages(rewards_NR, self.group_size, kl_penalty_N)
        batch.advantages = own_rows(self.accelerator, advantages.advantages_B, len(batch)).float()
        self._log_rewards(rollouts, rewards_NR, advantages)
        return batch

    # ---- sampling

    def rollout(self, rows: Sequence[Row]) -> list[Rollout]:
        """One rollout per row: by the user's function if there is one, else by the backend."""
        for row in rows:
            reject_images(row)
        extras: Sequence[Mapping[str, Any]] = [{}] * len(rows)
        if self.custom_rollout is not None:
            prompt_ids, completions, extras = self.custom_rollout([row["prompt"] for row in rows])
            completions = [replace(completion, stop=self._stop(completion.ids)) for completion in completions]
            prompts = [Prompt(row=row, text=row["prompt"], ids=ids) for row, ids in zip(rows, prompt_ids, strict=True)]
        else:
            prompts = self.prompt_encoder(rows, tokenize=lambda texts: self._tokenize_prompts(texts)[0])
            self._own_rows, self._requests_made = self._rows_in_batch(len(rows)), 0
            self._asked_elsewhere += self._place is None
            completions = self._sample([list(prompt.ids) for prompt in prompts])
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
        key = [self.args.seed, self.mode == "eval", self._requests_made, *place]
        first_row = self._own_rows.start
        if len(prompt_ids) != len(self._own_rows):  # a hook asks for rows of its own choice
            key, first_row = [*key, self.accelerator.process_index], 0
        self._requests_made += 1
        requests = group_requests(prompt_ids, group_size=self.group_size, first_row=first_row, key=key)
        with self.timer(getattr(self.backend, "timer", f"{self.backend.name}.generate")):
            completions = self.backend.sample(requests)
        if isinstance(self.backend, BuiltinBackend):
            self.metrics.add(self.mode, rollout_metrics(self.backend.counters))
        # Log-probs of rollout functions and hooks become part of the loss; those of a backend are its `plain_logps`.
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
        if self.args.mask_truncated_completions:
            truncated = [not rollout.completion.stop.ended for rollout in rollouts]
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

    def _log_lengths(self, rollouts: Sequence[Rollout]) -> None:
        counts = [
            [
                sum(r.completion.model_mask or [1] * len(r.completion.ids)),
                len(r.prompt.ids),
                not r.completion.stop.ended,
                r.prompt.truncated,
            ]
            for r in rollouts
        ]
        local = torch.tensor(counts, dtype=torch.long, device=self.accelerator.device)
        lengths, prompt_lengths, unfinished, cut = gather_rows(self.accelerator, local).cpu().unbind(1)
        self.metrics.add(self.mode, length_metrics(lengths, unfinished))
        if self.args.max_prompt_length is not None:
            self.metrics.add(self.mode, {"prompts/truncated_ratio": cut.float().mean().item()})
        if self.mode == "train" and not self._sampling_anew:
            self.state.num_input_tokens_seen += int(lengths.sum() + prompt_lengths.sum())
        self.metrics.values[self.mode]["num_tokens"] = [self.state.num_input_tokens_seen]

    def _log_rewards(self, rollouts: Sequence[Rollout], rewards_NR: Tensor, advantages: Advantages) -> None:
        names = self.reward_func_names
        zero_std = frac_zero_std(advantages.std_B)
        self.metrics.add(self.mode, reward_metrics(names, rewards_NR, advantages.rewards_B, zero_std))
        metrics, columns = self._gather_user_logs(len(rollouts))
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

    def _gather_user_logs(self, count: int) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """`log_metric` means and `log_extra` columns of all processes; a process without a column gives None."""
        local = [(self._extra_metrics, self._extra_columns, count)]
        parts = gather_object(local) if self.accelerator.num_processes > 1 else local
        values: dict[str, list[float]] = {}
        for metrics, _, _ in parts:
            for name, numbers in metrics.items():
                values.setdefault(name, []).extend(numbers)
        names = sorted({name for _, columns, _ in parts for name in columns})
        columns = {name: [v for _, cols, n in parts for v in cols.get(name, [None] * n)] for name in names}
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}, columns
