"""Marks the weights as written after every optimizer step."""

from typing import Any

from torch import nn
from torch.autograd.graph import increment_version
from transformers import TrainerCallback


class WeightsWritten(TrainerCallback):
    """Increments the version counters of the trained weights, by which a stale copy of them is detected.

    Fused optimizers and DeepSpeed write weights without doing so. This must be the first callback: a later one may
    sample from the new weights.
    """

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        increment_version([parameter for parameter in model.parameters() if parameter.requires_grad])
