"""The mode and the precision in which the policy runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients: no dropout, no checkpointing. Every module's mode is restored."""
    with _mode(model, training=False), torch.no_grad():
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode that leaves gradients as they are."""
    with _mode(model, training=False):
        yield


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Training mode, as in an update, whatever the mode was before: loaded models start in evaluation mode."""
    with _mode(model, training=True):
        yield


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


def autocast_dtype(mixed_precision: str) -> torch.dtype | None:
    """The half-precision dtype of mixed-precision training, or None; independent of the dtype of the weights."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)


def weights_version(model: nn.Module) -> int:
    """A number that changes whenever a weight is written: torch counts the writes of every tensor."""
    return sum(parameter._version for parameter in model.parameters())


def has_checkpoints(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on; transformers 5.23 renamed its own property for this."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def has_reentrant_checkpoints(model: nn.Module) -> bool:
    """Whether reentrant gradient checkpointing, the older variant, is on."""
    on = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    options = [getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", None) for module in on]
    return any(option is not None and option.get("use_reentrant") is not False for option in options)


def may_recompute_reentrantly(model: nn.Module, args: Any) -> bool:
    """Whether reentrant gradient checkpointing is on, or these training arguments let it be turned on."""
    asked = args.gradient_checkpointing is not False and (args.gradient_checkpointing_kwargs or {}).get(
        "use_reentrant"
    )
    return bool(asked) or has_reentrant_checkpoints(model)


def looks_for_unused_weights(model: nn.Module, args: Any) -> bool:
    """Whether DDP looks for weights that an update leaves out.

    It must where a process whose rows have no images does not use the vision weights. transformers' default is not to
    with any checkpointing, but only with the reentrant one it must not.
    """
    asked = args.ddp_find_unused_parameters
    return not may_recompute_reentrantly(model, args) if asked is None else bool(asked)


def arithmetic_dtype(model: nn.Module, autocast_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype that determines a model's rounding: autocast's, or the narrowest of its weights.

    The head or adapters may be wider. Quantised weights count as bfloat16: they are multiplied in half precision.
    """
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        kinds.add(torch.bfloat16)
    return autocast_dtype or min(kinds, key=lambda dtype: (dtype.itemsize, str(dtype)))
