"""How the policy is run when it is not being updated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients: no dropout, no checkpointing. Every module's mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
