"""Models besides the policy, which are not trained: the reference model and reward models."""

from typing import Any

import torch
from torch import nn

from gruppo.policy import adapters, loading
from gruppo.policy.sharding import Sharding, is_sharded, shard_reference
from gruppo.trainer.callbacks import SyncRefModelCallback


def make_reference(trainer: Any) -> Any:
    """A frozen copy of the current policy; None without KL, and None with adapters (see policy/adapters)."""
    args = trainer.args
    if args.beta == 0 or adapters.is_peft_model(trainer.model):
        return None
    if args.sync_ref_model and trainer.sharding.is_sharded:
        raise NotImplementedError(
            f"sync_ref_model=True is not available with weights that are sharded over processes "
            f"({trainer.sharding.value}); set it to False."
        )
    if is_sharded(trainer.model):  # ZeRO-3 shards a model while loading it, so there are no full weights to copy
        reference: Any = loading.load_again(trainer.model, args)
    else:
        reference = loading.copy_as_reference(trainer.model)
    if trainer.packed is not None:
        trainer.packed.learn(reference)
    reference = shard_reference(trainer.accelerator, trainer.sharding, reference)
    if args.sync_ref_model:
        trainer.add_callback(SyncRefModelCallback(ref_model=reference, accelerator=trainer.accelerator))
    return reference


def prepare_reward_model(accelerator: Any, sharding: Sharding, model: Any) -> Any:
    """Put a full reward model on the device; under ZeRO-3, which shards models while loading them, an `InStep`."""
    if sharding is not Sharding.ZERO3:
        return accelerator.prepare_model(model, evaluation_mode=True)
    return InStep(shard_reference(accelerator, sharding, model), accelerator)


class InStep(nn.Module):
    """A model with sharded weights that each process may call a different number of times, with its own rows.

    Before each pass, all processes report whether they have one to run. A process that has none left runs idle passes
    (`keep_up`) until all processes are done.
    """

    def __init__(self, model: nn.Module, accelerator: Any):
        super().__init__()
        self.model, self.accelerator = model, accelerator

    def forward(self, **inputs: Any) -> Any:
        self._busy(1)
        return self.model(**inputs)

    @torch.no_grad()
    def keep_up(self) -> None:
        one = torch.ones((1, 1), dtype=torch.long, device=self.accelerator.device)
        while self._busy(0):
            self.model(input_ids=one, attention_mask=one)

    def _busy(self, own: int) -> int:
        """The number of processes that have a pass to run."""
        return int(self.accelerator.reduce(torch.tensor(own, device=self.accelerator.device), reduction="sum"))
