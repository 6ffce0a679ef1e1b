"""What a model is inside its wrappers, and prompts that are read before a row is continued from them."""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache


def read_prompts(model: Any, ids: Tensor, mask: Tensor) -> DynamicCache:
    """A cache after one forward pass over left-padded prompts."""
    cache = DynamicCache(config=inner_model(model).config)
    model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position_ids(mask),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions as if each row stood alone: padding on the left does not count."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def inner_model(model: Any) -> Any:
    """The transformers model inside wrappers: DDP, torch.compile, adapters."""
    while hasattr(model, "module") or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def forward_arguments(model: Any) -> set[str]:
    """The names that the model's forward accepts, whatever wraps it."""
    return set(inspect.signature(type(inner_model(model)).forward).parameters)


def can_continue_from_cache(model: Any) -> bool:
    """Whether rows can start from keys and values computed before: standard attention, nothing recomputed."""
    inner = inner_model(model)
    known = {"past_key_values", "position_ids", "logits_to_keep"} <= forward_arguments(model)
    virtual = any(
        getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()
    )
    if not known or virtual or getattr(inner, "_is_stateful", False):
        return False
    # With checkpointing on, transformers drops the cache in training.
    return not (model.training and (getattr(inner, "is_gradient_checkpointing", False) or is_noisy(model, inner)))


def is_noisy(model: Any, inner: Any) -> bool:
    """Whether training draws noise (dropout, NEFTune), which rows that share a prompt would share as well."""
    config = inner.config
    functional = any(
        value for name, value in vars(config).items() if "drop" in name and isinstance(value, float) and value > 0
    )
    return (
        functional
        or hasattr(inner.get_input_embeddings(), "neftune_noise_alpha")
        or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    )
