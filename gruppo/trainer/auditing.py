"""Audits of every update: one that is not finite does not reach the weights, and a suspicious one is reported."""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from gruppo.algo.reduce import UpdateSize
from gruppo.audit.findings import heard
from gruppo.runs import checkpoints
from gruppo.runs.links import no_link
from gruppo.runs.updates import UpdateRows
from gruppo.trainer.processes.collectives import any_process, mean_of_processes
from gruppo.trainer.update.drift import Sums, drift_of_update, mean_of
from gruppo.trainer.updating import Updating
from gruppo.types import LOSS_TOKENS, TrainBatch

logger = logging.getLogger(__name__)

MOST_KEPT = 20  # the number of broken updates per run whose rows are kept


class Auditing(Updating):
    """The part of the trainer that audits updates."""

    # ---- counts of tokens

    def _count_slices(self, whole: dict[str, Any], slices: list[dict[str, Any]]) -> None:
        """Store in each micro-batch its number of loss tokens; check that they add up to the generation's."""
        if not self.audits.on or not all("completion_mask" in part for part in (whole, *slices)):
            return
        with self.audits.timed():
            rows = [len(part["completion_mask"]) for part in (whole, *slices)]
            tokens = torch.stack([_loss_tokens(part) for part in (whole, *slices)]).tolist()
            self.audits.balance(
                {"rows": rows[0], "tokens": tokens[0]},
                {"rows": sum(rows[1:]), "tokens": sum(tokens[1:])},
                "the micro-batches of a generation",
            )
            for part, count in zip(slices, tokens[1:], strict=True):
                part[LOSS_TOKENS] = torch.tensor(count)

    def _balance_update(self, batches: Sequence[dict[str, Any]], size: UpdateSize) -> None:
        """Check that the loss is divided by the numbers of rows and tokens that were collected."""
        if not self.audits.on or not all(LOSS_TOKENS in batch for batch in batches):
            return
        with self.audits.timed():
            rows = sum(len(batch["completion_mask"]) for batch in batches)
            tokens = sum(int(batch[LOSS_TOKENS]) for batch in batches)
            expected = dict(zip(("rows", "tokens"), self._summed([rows, tokens]), strict=True))
            self.audits.balance(expected, {"rows": int(size.rows), "tokens": int(size.tokens)}, "an update")

    # ---- updates that must not happen

    def _audit_gradient(self, model: nn.Module, grad_norm: Any) -> None:
        """Drop the gradients of an update whose loss or gradient is not finite, so that the optimizer skips it."""
        with self.audits.timed():
            deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
            # A float16 gradient scaler checks the gradients and skips the step itself, and needs them unchanged.
            # DeepSpeed has already made or skipped its step in the backward pass, and may not know the norm.
            scaled = self.accelerator.scaler is not None or (deepspeed and self.accelerator.mixed_precision == "fp16")
            made = deepspeed and not self.accelerator.optimizer_step_was_skipped
            self._this_update.grad_norm = math.nan if grad_norm is None else float(grad_norm)
            judged = 0.0 if scaled or grad_norm is None else self._this_update.grad_norm
            loss, norm = mean_of_processes(self.accelerator, [float(self._this_update.loss), judged])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._keep_broken_update(loss, **({"prevented": False} if made else {}))
                if not deepspeed and not scaled:
                    model.zero_grad(set_to_none=True)  # optimizers skip weights that have no gradient
            self.audits.is_finite(loss, norm, left_out=not made)

    def _keep_broken_update(self, loss: float, **more: Any) -> None:
        """Write the rows of an update whose loss or gradient is not finite, so that it can be investigated."""
        facts = {"loss": str(loss), "grad_norm": str(self._this_update.grad_norm)}
        folder = Path(self.args.output_dir) / "bad_updates"
        run, rank = (f"-{self._run_id}" if self._run_id else ""), f"{self.accelerator.process_index:04d}"
        path = folder / f"update{run}-{self.state.global_step:08d}-{rank}.safetensors"
        kept = len(list(folder.glob(f"update{run}-{'[0-9]' * 8}-{rank}.safetensors"))) < MOST_KEPT
        kept = kept and self._write_rows(path, {"update": self.state.global_step, **facts})
        self.record_event("update_skipped", **facts, rows=f"bad_updates/{path.name}" if kept else None, **more)

    def _write_rows(self, path: Path, facts: dict[str, Any]) -> bool:
        """Write the micro-batches of the current update; returns False if the disk is full."""
        tensors = {
            f"{i}/{key}": value.detach().cpu().clone()
            for i, batch in enumerate(self._this_update.batches)
            for key, value in batch.items()
            if isinstance(value, Tensor)
        }
        try:
            no_link(path.parent).mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"gruppo": json.dumps(facts)})
        except (OSError, SafetensorError) as error:
            if not checkpoints.is_disk_full(error, path.parent):
                raise
            path.unlink(missing_ok=True)
            logger.warning(f"No disk space for the rows of update {facts['update']}, which was not finite: {error}")
            return False
        return True

    # ---- updates that happened

    def _audited_means(self, sums: Sums) -> dict[str, float | None]:
        """Entropy of the update's loss tokens, and how far the sampler's log-probs are from the trainer's."""
        shaped = self.backend.has_own_weights and self.backend.filters(self.temperature)
        if shaped or self._holds_older_rows():
            # The sampler's log-probs include top-k and the like, or are those of older weights: they differ by more
            # than rounding.
            drift: dict[str, float | None] = dict.fromkeys(("drift_mean", "drift_max", "drift_ratio"))
        else:
            drift = drift_of_update(sums, self.metrics.values["train"])
        return {"entropy": mean_of(sums, "entropy"), **drift}

    def _holds_older_rows(self) -> bool:
        """Whether rows of the update were sampled from older weights than those that scored them."""
        if not self._ahead.enabled:
            return False
        rows = self._this_update.micro_batches()
        older = [b.sampled_at < b.scored_at for b in rows if b.sampled_at is not None and b.scored_at is not None]
        return any_process(self.accelerator, any(bool(part.any()) for part in older))

    def _record_update(self) -> None:
        """Write the rows of the update to the record."""
        if self.recorder is None or not self._records_rows:
            return
        with self._recording():
            self.recorder.update(self.state.global_step + 1, self._recorded_rows())

    def _recorded_rows(self) -> UpdateRows | None:
        """The rows of the update with their results; None without rows of our own making."""
        batches = self._this_update.micro_batches()
        if not batches:
            return None
        settings, size = self.loss_settings, self._size
        facts = {
            "update_rows": int(size.rows),
            "update_tokens": int(size.tokens),
            "update_micro_batches": int(size.micro_batches),
            "beta": self.beta,
            "epsilon_low": settings.epsilon_low,
            "epsilon_high": settings.epsilon_high,
        }
        samplers = self.corrects_sampler or settings.off_policy_mask_threshold is not None
        return self._update_buffer.take(batches, facts, samplers=samplers)

    def _share_findings(self) -> None:
        """Share findings, once per update: the main process records what the others found, and all count it."""
        own = self.audits.auditor.take_unshared()
        if not self.audits.on or not any_process(self.accelerator, bool(own)) or self.accelerator.num_processes == 1:
            return
        for process, finding in heard(gather_object([own]), self.accelerator.process_index):
            self.audits.auditor.hear(finding)
            self.record_event(
                "audit", check=finding.check, message=finding.message, values=finding.values, process=process
            )

    def _audit_update(self) -> None:
        """Audit the update after the optimizer's step, and add what was found to the metrics."""
        self.metrics.add("train", self._audited() | {"record/seconds": self._record_seconds})
        self._record_seconds = 0.0
        self._share_findings()
        self.metrics.raise_by("train", self.audits.found())
        self.metrics.set("train", self.audits.totals())

    def _audited(self) -> dict[str, float]:
        update = self._this_update
        if not self.audits.on:
            update.batches = ()
            return {}
        with self.audits.timed():
            facts = {
                "grad_norm": update.grad_norm if math.isfinite(update.grad_norm) else None,
                "learning_rate": self._get_learning_rate(),
                "mean_length": self.metrics.last("train", "completions/mean_length"),
                "allowed_age": self._allowed_age,
                **update.means,
                **self._moving_and_oldest_rows(),
            }
        update.batches = ()
        return self.audits.updated(list(self.model.parameters()), **facts)

    def _moving_and_oldest_rows(self) -> dict[str, Any]:
        """How many rows of the update must have a gradient, and the age of the oldest rows in updates."""
        batches = self._this_update.micro_batches()
        moving = sum(self._must_move(batch).sum() for batch in batches)
        sampled = [batch.sampled_at.min() for batch in batches if batch.sampled_at is not None]
        oldest = int(torch.stack(sampled).min()) if sampled else self.state.global_step - 1
        return {"moving_rows": int(moving), "oldest_rows": self.state.global_step - 1 - oldest}

    def _must_move(self, batch: TrainBatch) -> Tensor:
        """Bool (B,): rows that must have a gradient.

        Their advantage is not 0. They were sampled, or their old log-probs computed, with the weights that this update
        started from, so that the ratio is 1 and nothing is clipped. Nothing drops their tokens.
        """
        tokens_BT = batch.loss_mask_BT.bool()
        drops_tokens = self.entropy_share < 1
        drops_rows = self.args.off_policy_mask_threshold is not None
        if drops_tokens or drops_rows or batch.advantages is None or batch.sampled_at is None:
            return torch.zeros_like(tokens_BT.any(1))
        if batch.importance_sampling_ratio is not None:
            tokens_BT = tokens_BT & (batch.importance_sampling_ratio != 0)
        at_B = batch.sampled_at if batch.scored_at is None else batch.scored_at
        return (at_B == self.state.global_step - 1) & ~batch.zero_advantage_B & tokens_BT.any(1)

    @property
    def _allowed_age(self) -> int:
        """The maximum age of rows: updates that one generation serves, plus those it may be sampled ahead of them."""
        served = math.ceil(self.args.micro_steps_per_generation / self.args.gradient_accumulation_steps)
        return served + self._ahead.most_updates


def _loss_tokens(tensors: dict[str, Any]) -> Tensor:
    return TrainBatch.from_dict(tensors).loss_mask_BT.sum()
