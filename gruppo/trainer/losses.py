"""From log-probs and advantages to the loss of one micro-batch, and its statistics.

Packed updates (updating.py) compute the same loss from their own log-probs. Padded rows come through `compute_loss`,
which transformers calls, and `_compute_loss`, a hook of TRL's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.algo.loss import LossInputs, LossOutput, Stat, policy_loss
from gruppo.algo.masks import entropy_threshold
from gruppo.algo.reduce import UpdateSize
from gruppo.policy.unwrap import bare_model
from gruppo.trainer.books.metrics import value_stat
from gruppo.trainer.collecting import Collecting
from gruppo.trainer.logprobs import LogpsAndLoss
from gruppo.trainer.processes.collectives import gather_rows
from gruppo.trainer.update.buffer import MicroBatchResult
from gruppo.trainer.update.drift import drift_stats
from gruppo.trainer.update.routing import share_of_micro_batch
from gruppo.types import TrainBatch, required


class Losses(Collecting):
    """The part of the trainer that computes the loss."""

    @property
    def aux_loss_enabled(self) -> bool:
        return self.router_aux_loss_coef != 0

    @property
    def entropy_share(self) -> float:
        """The share of tokens, those of the highest entropy, that the loss keeps; RLOO keeps all."""
        return float(self.args.top_entropy_quantile)

    def _can_move(self, batch: TrainBatch) -> Tensor:
        """Bool (B,): the rows whose gradient can be nonzero."""
        has_loss_B = batch.loss_mask_BT.any(1)
        counts = self.loss_settings.beta != 0 or self.entropy_control.enabled or self.entropy_share < 1
        if counts or self.aux_loss_enabled or not self.args.skip_zero_advantage:
            return has_loss_B
        return has_loss_B & ~batch.zero_advantage_B

    def update_size(self, batches: Sequence[TrainBatch]) -> UpdateSize:
        """Rows, loss tokens and micro-batches over all processes."""
        local = torch.stack(
            [
                torch.tensor(float(sum(len(batch) for batch in batches)), device=self.accelerator.device),
                torch.stack([batch.loss_mask_BT.sum() for batch in batches]).sum().float(),
                torch.tensor(float(len(batches)), device=self.accelerator.device),
            ]
        )
        rows, tokens, micro_batches = self.accelerator.reduce(local.double(), reduction="sum").tolist()
        return UpdateSize(rows=rows, tokens=tokens, micro_batches=micro_batches)

    # ---- padded rows

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's method, which under DeepSpeed would round log-probs and advantages to the dtype of the weights."""
        return data.to(self.args.device) if isinstance(data, Tensor) else super()._prepare_input(data)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The micro-batch's share of the update's loss."""
        if return_outputs:
            raise ValueError("return_outputs=True is not supported: the loss comes from sampled completions.")
        known = isinstance(num_items_in_batch, UpdateSize)
        self._size = num_items_in_batch if known else self.update_size([TrainBatch.from_dict(inputs)])
        with self.timer("compute_loss"), self.presence.during("updating"):
            return self._compute_loss(model, inputs)

    def _logps_for_loss(self, model: nn.Module, batch: TrainBatch) -> LogpsAndLoss:
        """Log-probs and entropies of the micro-batch; rows whose gradient is 0 are run without an autograd graph."""
        if self.packed is not None and not torch.is_grad_enabled():
            bare = bare_model(self.accelerator, model)
            pack = self._whole_packs if self.aux_loss_enabled else self._packs
            return self._retry_smaller(lambda: self._logps_of_packs(bare, batch, pack(batch) or [], entropy=True))
        if self.aux_loss_enabled:
            return self._logps_of(model, batch, compute_entropy=True, compute_aux_loss=True)
        moving_B = self._rows_with_gradient(batch)
        if moving_B.all() or not torch.is_grad_enabled() or self.sharding.is_sharded:
            return self._logps_of(model, batch, compute_entropy=True)
        moving = self._logps_of(model, batch.rows(moving_B), compute_entropy=True)
        with torch.no_grad():
            # Not through the wrapper: its forward may communicate, and not every process has such rows.
            bare = bare_model(self.accelerator, model)
            still = self._logps_of(bare, batch.rows(~moving_B), compute_entropy=True)
        back = torch.cat([moving_B.nonzero()[:, 0], (~moving_B).nonzero()[:, 0]]).argsort()
        logps_BT, entropy_BT = (
            torch.cat([required(a), required(b)])[back] for a, b in zip(moving[:2], still[:2], strict=True)
        )
        return logps_BT, entropy_BT, None

    def _rows_with_gradient(self, batch: TrainBatch) -> Tensor:
        """Bool (B,): the rows that can move and, of all rows and of those with images, at least one.

        So every process has a backward pass, and the vision weights have a gradient, even if it is 0, in every update
        that has images: an optimizer leaves out weights without a gradient, but not those whose gradient is 0.
        """
        moving_B = self._can_move(batch)
        everything_B = torch.ones_like(moving_B)
        for rows_B in (everything_B, batch.has_images_B):
            if rows_B.any() and not (moving_B & rows_B).any():
                moving_B[rows_B.nonzero()[0]] = True
        return moving_B

    # ---- a hook of TRL's trainers: name and shapes are theirs

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Hook: the loss of one micro-batch, from the dict of tensors that collecting returned."""
        batch = TrainBatch.from_dict(inputs)
        logps_BT, entropy_BT, router_loss = self._logps_for_loss(model, batch)
        entropy_BT = required(entropy_BT)
        threshold = self._entropy_threshold(entropy_BT, batch.loss_mask_BT)
        output = self._policy_loss(batch, logps_BT, entropy_BT, threshold, self._size)
        self._defer_stats(batch, logps_BT, output)
        if self.mode == "train":
            self._this_update.padded.append(batch)
            self._remember(output.loss, logps_BT, entropy_BT, threshold)
        # DDP averages over the processes; Trainer divides by this process's micro-batches if that is left to it.
        divisor = self.accelerator.num_processes if self.loss_is_scaled_for_ga else self._size.micro_batches
        return self._with_router_loss(output.loss, router_loss) * divisor

    # ---- the loss and its statistics

    def _policy_loss(
        self, batch: TrainBatch, logps_BT: Tensor, entropy_BT: Tensor, threshold: Tensor | None, size: UpdateSize
    ) -> LossOutput:
        return policy_loss(
            LossInputs(
                logps_BT=logps_BT,
                mask_BT=batch.loss_mask_BT,
                advantages=required(batch.advantages),
                old_logps_BT=batch.old_logps if batch.old_per_token_logps is None else batch.old_per_token_logps,
                ref_logps_BT=batch.ref_per_token_logps,
                sampler_logps_BT=batch.sampling_per_token_logps,
                importance_weights=batch.importance_sampling_ratio,
                entropy_BT=entropy_BT,
                entropy_threshold=threshold,
                entropy_coef=self.entropy_control.active_coef,
            ),
            self.loss_settings,
            size,
        )

    def _with_router_loss(self, loss: Tensor, router_loss: Tensor | None) -> Tensor:
        """The loss of a micro-batch plus its load-balancing loss, which is also logged."""
        if router_loss is None:
            return loss
        self.metrics.defer({"aux_loss": value_stat(router_loss)})
        return loss + share_of_micro_batch(router_loss, self.router_aux_loss_coef, self._size)

    def _entropy_threshold(self, entropy_BT: Tensor, mask_BT: Tensor) -> Tensor | None:
        """The entropy above which tokens of this micro-batch, over all processes, carry policy loss."""
        share = self.entropy_share
        if share >= 1:
            return None
        local = entropy_BT.detach()[mask_BT.bool()]
        with self.presence.waiting(), self._stopwatch.paused():
            entropies = gather_rows(self.accelerator, local)
        return entropy_threshold(entropies, share)

    def _defer_stats(
        self, batch: TrainBatch, logps_BT: Tensor, output: LossOutput, ran_B: Tensor | None = None
    ) -> None:
        old_BT = None if self.parity.reuses_engine_logps else batch.old_per_token_logps
        drift = drift_stats(batch, logps_BT, old_BT, ran_B, self.state.global_step)
        self.metrics.defer(output.stats | self._entropy_stats(output) | drift)

    def _entropy_stats(self, output: LossOutput) -> dict[str, Stat]:
        """With an entropy bonus: the loss without it, and the entropy that its controller acts on."""
        if not self.entropy_control.enabled or output.chosen_entropy is None:
            return {}
        per_tokens = self.recipe.reduction == "tokens"
        scale = self.accelerator.num_processes if per_tokens else self._size.micro_batches
        return {"policy_loss": value_stat(output.policy_loss * scale), "_chosen_entropy": output.chosen_entropy}

    def _remember(
        self, loss: Tensor, logps_BT: Tensor, entropy_BT: Tensor, threshold: Tensor | None, ran_B: Tensor | None = None
    ) -> None:
        """Keep the results of the next micro-batch for the record; `threshold` is the entropy threshold."""
        if not self._records_rows:
            return
        counts = self.entropy_control.enabled or threshold is not None
        entropies = entropy_BT.detach() if counts else None
        coef = self.entropy_control.active_coef
        self._update_buffer.keep(MicroBatchResult(loss.detach(), logps_BT.detach(), entropies, coef, ran_B))
