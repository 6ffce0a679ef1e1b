"""From scored tensors to a loss: the second half of a training step."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from gruppo.algo.loss import LossInputs, LossOutput, LossSettings, Max, Mean, Stat, UpdateSize, policy_loss
from gruppo.algo.masks import entropy_threshold
from gruppo.trainer.collecting import Collecting
from gruppo.trainer.metrics import gather_rows, value_stat
from gruppo.types import TrainBatch

# Every process holds the whole model, so that a forward pass of one process needs no other.
_REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


class Updating(Collecting):
    """The part of the trainer that computes the loss."""

    loss_settings: LossSettings
    skip_zero_advantage = True  # run rows that cannot change the update without a graph; False is the slow twin
    _size: UpdateSize  # of the update under way
    _update_seconds: float

    def update_size(self, batches: Sequence[dict[str, Any]]) -> UpdateSize:
        """Rows, loss tokens and micro-batches over all processes."""
        parsed = [TrainBatch.from_dict(batch) for batch in batches]
        local = torch.stack(
            [
                torch.tensor(float(sum(len(batch) for batch in parsed)), device=self.accelerator.device),
                torch.stack([batch.loss_mask_BT.sum() for batch in parsed]).sum().float(),
                torch.tensor(float(len(parsed)), device=self.accelerator.device),
            ]
        )
        rows, tokens, micro_batches = self.accelerator.reduce(local.double(), reduction="sum").tolist()
        return UpdateSize(rows=rows, tokens=tokens, micro_batches=micro_batches)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The micro-batch's share of the update's loss."""
        if return_outputs:
            raise ValueError("return_outputs=True is not supported: the loss comes from sampled completions.")
        self._size = num_items_in_batch if isinstance(num_items_in_batch, UpdateSize) else self.update_size([inputs])
        with self.timer("compute_loss"):
            return self._compute_loss(model, inputs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Hook: the loss of one micro-batch, from the dict of tensors that scoring returned."""
        batch = TrainBatch.from_dict(inputs)
        logps_BT, entropy_BT = self._score_for_loss(model, batch)
        output = policy_loss(
            LossInputs(
                logps_BT=logps_BT,
                mask_BT=batch.loss_mask_BT,
                advantages=_required(batch.advantages),
                old_logps_BT=batch.old_logps if batch.old_per_token_logps is None else batch.old_per_token_logps,
                ref_logps_BT=batch.ref_per_token_logps,
                sampler_logps_BT=batch.sampling_per_token_logps,
                importance_weights=batch.importance_sampling_ratio,
                entropy_BT=entropy_BT,
                entropy_threshold=self._entropy_threshold(entropy_BT, batch.loss_mask_BT),
                entropy_coef=self.entropy_control.active_coef,
            ),
            self.loss_settings,
            self._size,
        )
        self.metrics.defer(output.stats | self._entropy_stats(output) | self._sampler_drift(batch, logps_BT))
        # The size is that of all processes, but DDP averages their gradients.
        return output.loss * self.accelerator.num_processes

    def _score_for_loss(self, model: nn.Module, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the micro-batch; rows that cannot move the update are run without a graph."""
        moving_B = self._rows_that_move(batch)
        if moving_B.all():
            logps_BT, entropy_BT = self._score(model, batch, compute_entropy=True)
            return logps_BT, _required(entropy_BT)
        moving = self._score(model, batch.rows(moving_B), compute_entropy=True)
        with torch.no_grad():
            # Not through the wrapper: its forward may communicate, and not every process has such rows.
            bare = self.accelerator.unwrap_model(model)
            still = self._score(bare, batch.rows(~moving_B), compute_entropy=True)
        back = torch.cat([moving_B.nonzero()[:, 0], (~moving_B).nonzero()[:, 0]]).argsort()
        logps_BT, entropy_BT = (
            torch.cat([_required(a), _required(b)])[back] for a, b in zip(moving, still, strict=True)
        )
        return logps_BT, entropy_BT

    def _rows_that_move(self, batch: TrainBatch) -> Tensor:
        """The rows whose gradient can be other than 0, and at least one, so that every process has a backward pass."""
        advantages = _required(batch.advantages)
        everything_counts = (
            self.loss_settings.beta != 0
            or self.entropy_control.enabled
            or not torch.is_grad_enabled()
            or self.accelerator.distributed_type not in _REPLICATED
        )
        if everything_counts or not self.skip_zero_advantage:
            return torch.ones(len(batch), dtype=torch.bool, device=advantages.device)
        moving_B = (advantages != 0).reshape(len(batch), -1).any(1) & batch.loss_mask_BT.any(1)
        moving_B[0] |= ~moving_B.any()
        return moving_B

    def _entropy_threshold(self, entropy_BT: Tensor, mask_BT: Tensor) -> Tensor | None:
        """The entropy above which tokens of this micro-batch, over all processes, carry policy loss."""
        share = getattr(self.args, "top_entropy_quantile", 1.0)
        if share >= 1:
            return None
        entropies = gather_rows(self.accelerator, entropy_BT.detach()[mask_BT.bool()])
        return entropy_threshold(entropies, share)

    def _entropy_stats(self, output: LossOutput) -> dict[str, Stat]:
        """With an entropy bonus: the loss without it, and what its controller steers by."""
        if not self.entropy_control.enabled or output.chosen_entropy is None:
            return {}
        per_tokens = self.recipe.reduction == "tokens"
        scale = self.accelerator.num_processes if per_tokens else self._size.micro_batches
        return {"policy_loss": value_stat(output.policy_loss * scale), "_chosen_entropy": output.chosen_entropy}

    def _sampler_drift(self, batch: TrainBatch, logps_BT: Tensor) -> dict[str, Stat]:
        """How far the sampler's own log-probs are from the trainer's at the same weights."""
        sampled_BT = batch.sampling_per_token_logps
        if sampled_BT is None:
            return {}
        trained_BT = logps_BT.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
        drift_BT = (trained_BT - sampled_BT).abs()
        drift = drift_BT[batch.loss_mask_BT.bool() & ~drift_BT.isnan()]
        return {
            "sampling/sampling_logp_difference/mean": Mean(drift.sum(), drift.new_tensor(float(len(drift)))),
            "sampling/sampling_logp_difference/max": Max(drift if len(drift) else drift.new_tensor([torch.nan])),
        }

    def _end_of_update(self) -> None:
        """Agree on the metrics of the update, and let the entropy controller act on them."""
        means = self.metrics.flush("train")
        self.metrics.add("train", {"step_time": self._update_seconds})
        self._update_seconds = 0.0
        if self.entropy_control.enabled:
            self.entropy_control.update(means.get("_chosen_entropy", []))
            self.metrics.add("train", {"entropy_coef": self.entropy_control.coef})
