"""How many tokens of an update run at once, and what happens if memory is not sufficient for them."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gruppo.plan import ModelShape, Passes, UpdatePlan, free_memory, plan_update, training_bytes
from gruppo.policy.adapters import adapted_projections
from gruppo.policy.checkpoints import enable_checkpointing
from gruppo.policy.measuring import measured_shape
from gruppo.policy.modes import has_checkpoints
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.unwrap import inner_model
from gruppo.types import TrainBatch

logger = logging.getLogger(__name__)


class UpdatePlanner:
    """Makes a plan from the first rows and keeps it; turns on gradient checkpointing if the plan requires it.

    `policy` returns the bare model, `packed` runs packed rows, `autocast_dtype` is the dtype that accelerate computes
    in, `release` frees the memory that sampling holds between rollouts, and `agree` combines the plans of all
    processes into one if they must run their passes in lockstep.
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
        self._longest: int | None = None  # tokens of the longest row to expect

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
        shape, unknown = ModelShape.read(model.config)
        if shape is None:
            logger.info(f"{unknown}: the memory of a token is measured.")
        return plan_update(
            shape or measured_shape(self.policy(), self.autocast_dtype),
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
            logger.warning(
                "Memory is short: gradient checkpointing is turned on. Set gradient_checkpointing=False to prevent "
                "this."
            )
        enable_checkpointing(model, self.args)

    def free(self) -> None:
        """After a failed allocation, free the memory that sampling holds and the cache of torch's allocator.

        Do not call this inside the `except` block: the traceback keeps references to the tensors that must be freed.
        """
        self.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def shrink(self) -> None:
        """Call `free`, and from now on run half as many tokens at once or turn on gradient checkpointing."""
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
        logger.warning(f"Out of memory in the update: continuing with {smaller}; no rows are lost.")

    @property
    def _asked(self) -> list[Any]:
        return [self.args.max_tokens_per_micro_batch, self.args.gradient_checkpointing]

    def state_dict(self) -> dict[str, Any] | None:
        """The current plan, so that a resumed run splits its updates as an uninterrupted one would."""
        if self.in_force is None:
            return None
        return {"plan": self.in_force.to_dict(), "asked": self._asked, "longest": self._longest}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None or state.get("asked") != self._asked:
            return  # the settings have changed, so a new plan is made
        self._longest = state.get("longest")  # missing in older checkpoints: then computed from the next rows
        try:
            self._apply(UpdatePlan(**state["plan"]))
        except TypeError:  # a plan of another version
            logger.warning(f"The checkpoint's update plan {state} has an unknown format; a new plan is made.")
