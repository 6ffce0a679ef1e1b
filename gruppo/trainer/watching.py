"""Every update is watched: a broken one does not reach the weights, and a strange one is said to be so."""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gruppo.algo.loss import UpdateSize
from gruppo.trainer.metrics import any_process
from gruppo.trainer.updating import Updating
from gruppo.types import TrainBatch

logger = logging.getLogger(__name__)

MOST_KEPT = 20  # broken updates whose rows are kept
LOSS_TOKENS = "loss_tokens"  # of a micro-batch when it was cut, to be compared with when it is used


class Watching(Updating):
    """The part of the trainer that audits updates."""

    _batches_at_hand: Sequence[dict[str, Any]] = ()
    _loss_at_hand: Tensor | float = 0.0
    _grad_norm = math.nan
    _update_ended = False

    # ---- the books of tokens

    def _count_slices(self, whole: dict[str, Any], slices: list[dict[str, Any]]) -> None:
        """Write each micro-batch's loss tokens into it; together they are the generation's."""
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
        """The tokens that the loss is divided by are those that were collected."""
        if not self.audits.on or not all(LOSS_TOKENS in batch for batch in batches):
            return
        with self.audits.timed():
            rows = sum(len(batch["completion_mask"]) for batch in batches)
            tokens = sum(int(batch[LOSS_TOKENS]) for batch in batches)
            expected = dict(zip(("rows", "tokens"), self._summed([rows, tokens]), strict=True))
            self.audits.balance(expected, {"rows": int(size.rows), "tokens": int(size.tokens)}, "an update")

    # ---- updates that must not happen

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Trainer's, which it calls right before the optimizer's step: the last moment to prevent it."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not self.audits.on:
            return grad_norm
        with self.audits.timed():
            self._grad_norm, loss = float(grad_norm), float(self._loss_at_hand)
            if self.accelerator.scaler is not None:  # float16: it looks for itself, and leaves the step out
                known = (loss, 0.0)
            else:
                known = (loss, self._grad_norm)
            healthy = all(map(math.isfinite, known))
            if any_process(self.accelerator, not healthy):
                self._keep_broken_update(loss)
                if self.accelerator.distributed_type != DistributedType.DEEPSPEED:
                    model.zero_grad(set_to_none=True)  # an optimizer leaves weights without a gradient as they are
                if healthy:
                    known = (math.nan, self._grad_norm)  # it was another process's
            self.audits.is_finite(*known)
        return grad_norm

    def _keep_broken_update(self, loss: float) -> None:
        """Write the rows of an update whose loss or gradient is not finite, so that it can be looked into."""
        folder = Path(self.args.output_dir) / "bad_updates"
        name = f"update-{self.state.global_step:08d}-{self.accelerator.process_index:04d}"
        kept = None
        if not folder.is_dir() or len(list(folder.glob("*.safetensors"))) < MOST_KEPT:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {
                f"{i}/{key}": value.detach().cpu().clone()
                for i, batch in enumerate(self._batches_at_hand)
                for key, value in batch.items()
                if isinstance(value, Tensor)
            }
            facts = {"update": self.state.global_step, "loss": str(loss), "grad_norm": str(self._grad_norm)}
            save_file(tensors, folder / f"{name}.safetensors", metadata={"gruppo": json.dumps(facts)})
            kept = f"bad_updates/{name}.safetensors"
        self.record_event("update_skipped", loss=str(loss), grad_norm=str(self._grad_norm), rows=kept)

    # ---- updates that happened

    def _end_of_update(self) -> None:
        super()._end_of_update()
        self._update_ended = True

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._update_ended:  # it is called at the end of an epoch, too
            self._update_ended = False
            self.metrics.add("train", self._audit_update() | {"record/seconds": self._record_seconds})
            self._record_seconds = 0.0
            values = self.metrics.values["train"]
            values.update({name: [sum(values[name]) + count] for name, count in self.audits.found().items()})
            values.update({name: [total] for name, total in self.audits.totals().items()})
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _audit_update(self) -> dict[str, float]:
        """After the optimizer's step: what is to be averaged in the log."""
        if not self.audits.on:
            return {}
        values = self.metrics.values["train"]
        with self.audits.timed():
            rows = self._rows_at_hand()
            facts = {
                "grad_norm": self._grad_norm if math.isfinite(self._grad_norm) else None,
                "learning_rate": self._get_learning_rate(),
                "mean_length": _last(values.get("completions/mean_length")),
                "allowed_age": self._allowed_age,
                **self._means_at_hand,
                **rows,
            }
        self._batches_at_hand = ()
        parameters = list(self.model.parameters())
        # Fused optimizers write weights without a note in their versions, by which a sampler is seen to be behind.
        increment_version([parameter for parameter in parameters if parameter.requires_grad])
        return self.audits.updated(parameters, **facts)

    def _rows_at_hand(self) -> dict[str, Any]:
        """How many rows of the update have an advantage, and how old the oldest are."""
        batches = [TrainBatch.from_dict(batch) for batch in self._batches_at_hand if "completion_mask" in batch]
        known = [batch for batch in batches if batch.advantages is not None]
        moving = sum((~batch.zero_advantage_B & batch.loss_mask_BT.any(1)).sum() for batch in known)
        sampled = [batch.sampled_at.min() for batch in batches if batch.sampled_at is not None]
        oldest = int(torch.stack(sampled).min()) if sampled else self.state.global_step - 1
        return {"moving_rows": int(moving), "oldest_rows": self.state.global_step - 1 - oldest}

    @property
    def _allowed_age(self) -> int:
        """Updates that one generation reaches into, at most."""
        return math.ceil(self.args.micro_steps_per_generation / self.args.gradient_accumulation_steps)


def _loss_tokens(tensors: dict[str, Any]) -> Tensor:
    return TrainBatch.from_dict(tensors).loss_mask_BT.sum()


def _last(values: Sequence[float] | None) -> float | None:
    return values[-1] if values else None
