"""The model inside its wrappers, and some of its properties."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions of the tokens in each row: padding on the left does not count."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def makes_positions(inputs: Mapping[str, Any]) -> bool:
    """Whether the model computes its own positions from these inputs: those of an image form a grid, not a line."""
    return "image_grid_thw" in inputs


def inner_model(model: Any) -> Any:
    """The transformers model inside wrappers: DDP, torch.compile, adapters."""
    while hasattr(model, "module") or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def bare_model(accelerator: Any, model: Any) -> Any:
    """The model without what accelerate wrapped around it: the exchange between processes, and compilation.

    accelerate compiles around DDP, and `unwrap_model` keeps that wrapper by default. Its forward would still be that
    of DDP, which waits for the other processes.
    """
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def forward_arguments(model: Any) -> set[str]:
    """The argument names that the model's forward accepts, whatever wraps it."""
    return set(inspect.signature(type(inner_model(model)).forward).parameters)


def dropouts(model: nn.Module) -> list[Any]:
    """Modules that drop something with probability p in training: torch's, and those that adapters bring."""
    named = [module for module in model.modules() if "Dropout" in type(module).__name__]
    return [module for module in named if isinstance(getattr(module, "p", None), int | float)]


def functional_dropouts(model: nn.Module) -> dict[str, float]:
    """Dropout probabilities that submodules pass to functions instead of a dropout module, by class and name."""
    return {
        f"{type(module).__name__}.{name}": value
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name and isinstance(value, float) and value > 0
    }


def is_noisy(model: Any, inner: Any) -> bool:
    """Whether training draws noise, which rows that share a prompt would share as well.

    Dropout, NEFTune, the jitter of a router.
    """
    heads = ("classifier_", "summary_")  # of models for other tasks, which share the config
    functional = any(
        value > 0
        for name, value in vars(inner.config).items()
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and not name.startswith(heads)
    )
    return (
        functional
        or hasattr(inner.get_input_embeddings(), "neftune_noise_alpha")
        or any(module.p > 0 for module in dropouts(model))
    )
