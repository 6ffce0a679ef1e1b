"""What is counted, logged, recorded and audited about a generation."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from gruppo.algo.advantages import Advantages, frac_zero_std
from gruppo.policy.loading import vocabulary_size
from gruppo.policy.modes import weights_version
from gruppo.policy.unwrap import bare_model
from gruppo.trainer.books.metrics import length_metrics, reward_metrics, rows_scored
from gruppo.trainer.collect.generation import Generation
from gruppo.trainer.collect.recording import recorded_rows
from gruppo.trainer.collect.tool_turns import tool_metrics
from gruppo.trainer.processes.collectives import gather_rows
from gruppo.trainer.sampling import Sampling
from gruppo.types import Rollout, TrainBatch


class Accounting(Sampling):
    """The part of the trainer that keeps the books of generations."""

    # ---- of every round of samples

    def _count_tokens(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(N, 4), rows of all processes: completion tokens, prompt tokens, unfinished, prompt truncated."""
        counts = [
            [
                r.completion.written,
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

    def _audit_sampling(self, rollouts: Sequence[Rollout]) -> None:
        if self.mode != "train" or not rollouts:
            return
        policy = bare_model(self.accelerator, self.model)
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

    def _note_rows(self, rollouts: Sequence[Rollout], zero_advantage: Sequence[bool]) -> None:
        """Enter sampled rows in the ledger: their lengths, which have zero advantage, and which are truncated."""
        if self.mode == "train":
            self.ledger.scored_rows(
                [len(rollout.completion.ids) for rollout in rollouts],
                zero_advantage=zero_advantage,
                truncated=[not rollout.completion.stop.ended for rollout in rollouts],
            )

    # ---- of the whole generation

    def _account(self, generation: Generation, batch: TrainBatch, advantages: Advantages) -> None:
        """Log, record and audit a scored generation."""
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

    def _log_sampling(self, generation: Generation) -> None:
        """Log lengths and the use of tools."""
        lengths, _, unfinished, cut = generation.lengths_N4.unbind(1)
        metrics, rows = length_metrics(lengths, unfinished), len(lengths)
        ended = {"completions/mean_terminated_length": rows - int(unfinished.sum())}
        self.metrics.add(self.mode, metrics, dict.fromkeys(metrics, rows) | ended)
        if self.args.max_prompt_length is not None:
            self.metrics.add(self.mode, {"prompts/truncated_ratio": cut.float().mean().item()}, of=rows)
        self.metrics.set(self.mode, {"num_tokens": self.state.num_input_tokens_seen})
        self.metrics.add(self.mode, tool_metrics(generation.tools), of=rows)

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
        texts = gather_object(texts)
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
        parts = gather_object(local)
        values: dict[str, list[float]] = {}
        for metrics, _, _ in parts:
            for name, numbers in metrics.items():
                values.setdefault(name, []).extend(numbers)
        names = sorted({name for _, columns, _ in parts for name in columns})
        columns = {name: [v for _, cols, n in parts for v in cols.get(name, [None] * n)] for name in names}
        return values, columns

    def _record_rows(self, generation: Generation, batch: TrainBatch, rewards_N: Tensor) -> None:
        if self.recorder is None or not self._records_rows:
            return
        with self._recording():
            rows = recorded_rows(
                generation,
                batch,
                rewards_N,
                self.rewards.names,
                update=self.state.global_step,
                split="train" if self.mode == "train" else self._eval_prefix,
                group_size=self.group_size,
            )
            number = self.recorder.rollouts(rows)
        if self.mode == "train":
            batch.place = torch.tensor(generation.places, dtype=torch.long, device=batch.completion_ids.device)
            batch.generation = torch.full_like(batch.place, number)
