"""How many tokens of an update run at once, and what happens when that was too many."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gruppo.plan import ModelShape, Passes, UpdatePlan, free_memory, plan_update, training_bytes
from gruppo.policy.adapters import adapted_projections
from gruppo.policy.checkpoints import enable_checkpointing
from gruppo.policy.modes import has_checkpoints
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.unwrap import inner_model
from gruppo.types import TrainBatch

logger = logging.getLogger(__name__)


class UpdatePlanner:
    """Makes the plan with the first rows and keeps it; turns gradient checkpointing on if the plan says so.

    `policy` returns the bare model, `packed` is how it runs packed rows, `autocast_dtype` is what accelerate computes
    in, `release` frees what sampling holds between rollouts, and `agree` makes one plan of those of all processes,
    where they must run their passes in step.
    """

    def __init__(
        self,
        args: Any,
        policy: Callable[[], nn.Module],
        packed: PackedPolicy | None,
        release: Callable[[], None],
        agree: Callable[[UpdatePlan], UpdatePlan] | None = None,
        *,
        autocast_dtype: torch.dtype | None = None,
    ):
        self.args = args
        self.policy = policy
        self.packed = packed
        self.release = release
        self.agree = agree
        self.autocast_dtype = autocast_dtype
        self.in_force: UpdatePlan | None = None
        self._longest: int | None = None  # tokens of the longest row that may come

    def plan(self, batch: TrainBatch) -> UpdatePlan:
        if self._longest is None:
            self._longest = self._longest_row(batch)
        if self.in_force is None:
            plan = self._make(self._longest)
            self._apply(plan if self.agree is None else self.agree(plan))
        assert self.in_force is not None
        return self.in_force

    def _longest_row(self, batch: TrainBatch) -> int:
        longest = int(batch.prompt_mask.sum(1).max()) + int(self.args.max_completion_length)
        if self.packed is None:
            longest *= self.args.per_device_train_batch_size  # padded rows are run a micro-batch at a time
        return longest

    def _make(self, longest_row: int) -> UpdatePlan:
        args, model = self.args, inner_model(self.policy())
        weights = [p for p in model.parameters() if p.is_floating_point()]
        stream = weights[0].element_size()
        passes = Passes(
            stream=stream,
            product=stream if self.autocast_dtype is None else min(stream, self.autocast_dtype.itemsize),
            fused=self.packed is not None and self.packed.fused_layers,
            device=weights[0].device.type,
            adapted=adapted_projections(self.policy()),
        )
        return plan_update(
            ModelShape.from_config(model.config),
            passes,
            longest_row=longest_row,
            free_bytes=free_memory(weights[0].device) - training_bytes(weights),
            checkpointing=args.gradient_checkpointing,
            tokens=args.max_tokens_per_micro_batch,
        )

    def _apply(self, plan: UpdatePlan) -> None:
        self.in_force = plan
        model: Any = self.policy()
        if not plan.checkpointing or has_checkpoints(model):
            return
        if self.args.gradient_checkpointing is None:
            logger.warning("Memory is short: gradient checkpointing is on. gradient_checkpointing=False forbids it.")
        enable_checkpointing(model, self.args)

    def free(self) -> None:
        """After a failed allocation: give back what sampling holds, and what torch keeps for later.

        Not to be called where the error is handled: its traceback keeps what must be freed.
        """
        self.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def shrink(self) -> None:
        """`free`, and half the tokens at once from now on."""
        plan = self.in_force
        assert plan is not None
        self.free()
        smaller = plan.halved()
        may_checkpoint = self.args.gradient_checkpointing is None and not plan.checkpointing
        if may_checkpoint and smaller.group_tokens < (self._longest or 1):
            smaller = replace(plan, checkpointing=True)  # smaller packs would be single rows
        elif plan.group_tokens == 1:
            if not may_checkpoint:
                raise torch.OutOfMemoryError(
                    "The device has no memory for the forward and backward pass of a single row. Lower "
                    "max_completion_length or max_prompt_length, or train an adapter (peft_config)."
                )
            smaller = replace(smaller, checkpointing=True)
        self._apply(smaller)
        logger.warning(f"Out of memory in the update: going on with {smaller}. No rows are lost.")

    @property
    def _asked(self) -> list[Any]:
        return [self.args.max_tokens_per_micro_batch, self.args.gradient_checkpointing]

    def state_dict(self) -> dict[str, Any] | None:
        """The plan in force: a resumed run cuts its updates as the straight one would, also if memory is short."""
        if self.in_force is None:
            return None
        return {"plan": self.in_force.to_dict(), "asked": self._asked, "longest": self._longest}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None or state.get("asked") != self._asked:
            return  # other settings now: another plan
        self._longest = state.get("longest")  # older checkpoints have none: that of the next rows
        try:
            self._apply(UpdatePlan(**state["plan"]))
        except TypeError:  # of another version
            logger.warning(f"The checkpoint's plan of updates {state} is not known here: it is made anew.")
