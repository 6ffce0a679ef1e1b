"""Prompts that several rows share, encoded once.

The keys and values of each distinct prompt are computed in one forward pass and handed to the rows that continue it.
Gradients flow back through them, so that the result is that of full rows at a fraction of the tokens.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Sharing pays when it saves at least this part of the prompt tokens.
_WORTHWHILE = 0.4


class SharedPrompts:
    """Keys and values of the distinct prompts of a batch, all but each prompt's last token."""

    def __init__(self, config: Any, layers: list[tuple[Tensor, Tensor]], prompt_of_row: Tensor):
        self.config = config
        self.layers = layers
        self.prompt_of_row = prompt_of_row

    @classmethod
    def encode(
        cls, model: Any, prompt_ids: Tensor, prompt_mask: Tensor, batch_size: int | None = None
    ) -> "SharedPrompts | None":
        """Encode the distinct prompts among left-padded rows, `batch_size` at a time.

        None where sharing does not pay or cannot be done.
        """
        rows, width = prompt_ids.shape
        if width < 2 or not can_continue_from_cache(model) or not keeps_everything(model):
            return None
        both = torch.cat([prompt_ids, prompt_mask], 1)
        distinct, prompt_of_row = torch.unique(both, dim=0, return_inverse=True)
        if len(distinct) > (1 - _WORTHWHILE) * rows:
            return None
        caches = [
            read_prompts(model, part[:, : width - 1], part[:, width : 2 * width - 1])
            for part in distinct.split(batch_size or len(distinct))
        ]
        layers = [
            (torch.cat([layer.keys for layer in parts]), torch.cat([layer.values for layer in parts]))
            for parts in zip(*(cache.layers for cache in caches), strict=True)
        ]
        return cls(inner_model(model).config, layers, prompt_of_row)

    def for_rows(self, rows: Tensor) -> DynamicCache:
        """A cache in which each of these rows has read its prompt."""
        cache = DynamicCache(config=self.config)
        prompts = self.prompt_of_row[rows]
        for i, (keys, values) in enumerate(self.layers):
            cache.update(keys[prompts], values[prompts], i)
        return cache


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


def keeps_everything(model: Any) -> bool:
    """Whether every layer's cache keeps all tokens; one with a window drops what a row's copy would need."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=inner_model(model).config).layers)


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
