"""Temporary changes to the training module, and how all of them are undone."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_ABSENT = object()


@dataclass(frozen=True)
class Swap:
    """A temporary value of an attribute. Owners are instances and Python modules only: no class is changed."""

    owner: Any
    name: str
    value: Any


@contextmanager
def swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """Set attributes, and restore the previous values at the end, even if interrupted half-way."""
    previous = [(swap, vars(swap.owner).get(swap.name, _ABSENT)) for swap in swaps]
    try:
        for swap in swaps:
            setattr(swap.owner, swap.name, swap.value)
        yield
    finally:
        for swap, value in previous:
            if value is not _ABSENT:
                setattr(swap.owner, swap.name, value)
            elif swap.name in vars(swap.owner):
                delattr(swap.owner, swap.name)


def attention_swaps(model: nn.Module, name: str) -> list[Swap]:
    """Swaps that select the attention registered under this name, in every config that a submodule reads.

    They also bypass compiled code, which was compiled for another attention.
    """
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    attention = [
        Swap(config, "_attn_implementation_internal", name)
        for config in configs.values()
        if hasattr(config, "_attn_implementation_internal")
    ]
    return attention + [Swap(module, "_compiled_call_impl", None) for module in compiled_modules(model)]


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that were compiled in place (`module.compile()`)."""
    return [module for module in model.modules() if getattr(module, "_compiled_call_impl", None) is not None]


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """The trainer's mixed precision, without caching casts: a captured graph would keep using stale ones."""
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
        yield


@contextmanager
def finite_masks() -> Iterator[None]:
    """Context in which transformers' eager attention gives padding that sees no key a result, not NaN.

    That is padding on the left, or beyond a sliding window on the right. Eager attention adds the smallest number of
    the dtype where a key is hidden. In float64 its softmax, in float32, reads that as -inf; in float16 it becomes -inf
    with a score below -16. The softmax of a query without keys is then NaN, and as keys and values of the next layer
    its NaN reach every token of the row. Half of that number, within float32, hides a key just as well.
    """
    masks = ALL_MASK_ATTENTION_FUNCTIONS
    finite = partial(_finite_mask, masks["eager"])
    with swapped([Swap(masks, "_local_mapping", {**masks._local_mapping, "eager": finite})]):
        yield


def _finite_mask(make: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    mask = make(*args, **kwargs)
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.clamp(min=max(torch.finfo(mask.dtype).min, torch.finfo(torch.float32).min) / 2)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection temporarily.

    While a graph is captured, memory must not be freed by chance, and traversing every object of a process takes
    longer than a layer.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
