"""A model that computes in float32 for a moment, without a second copy of all its weights.

Rounding in half precision hides differences of a few hundredths in log-probs, which is as much as a state that leaks
from one row into the next may make.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gruppo.policy.inplace import Swap, attention_swaps, compiled_modules, swapped
from gruppo.policy.modes import arithmetic_dtype
from gruppo.policy.sharding import is_sharded
from gruppo.policy.unwrap import inner_model

T = TypeVar("T")
_HALF = (torch.bfloat16, torch.float16)
# Exceptions of layers that cannot run in float32, as their kernels are made for half precision or memory is short.
NOT_IN_FLOAT32: tuple[type[Exception], ...] = (
    RuntimeError,
    TypeError,
    ValueError,
    NotImplementedError,
    AssertionError,
)


def can_widen(model: nn.Module) -> bool:
    """Whether the weights are whole, on a device, and numbers that can be converted."""
    quantised = getattr(inner_model(model), "hf_quantizer", None) is not None
    parameters = list(model.parameters())
    return not (quantised or is_sharded(model)) and all(p.is_floating_point() and not p.is_meta for p in parameters)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, forward passes compute in float32, without autocast; weights of a layer are widened while it runs."""
    layers = _layers(model)
    of_layers = {id(tensor) for layer in layers for tensor in _half_tensors(layer)}
    wide = _Widened()
    handles = []
    try:
        wide.enter(model, [tensor for tensor in _half_tensors(model) if id(tensor) not in of_layers])
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(lambda layer, _: wide.enter(layer, _half_tensors(layer))))
            handles.append(layer.register_forward_hook(lambda layer, *_: wide.leave(layer), always_call=True))
        device = next(model.parameters()).device
        with swapped(_swaps(model)), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for handle in handles:
            handle.remove()
        wide.leave_all()


def in_float32_if_half(
    model: nn.Module, run: Callable[[], T], autocast_dtype: torch.dtype | None = None
) -> tuple[T, torch.dtype]:
    """What `run` returns, computed in float32 instead of half precision where that is possible; and the dtype."""
    dtype = arithmetic_dtype(inner_model(model), autocast_dtype)
    if dtype in _HALF and can_widen(model):
        try:
            with in_float32(model):
                return run(), torch.float32
        except NOT_IN_FLOAT32:  # kernels for half precision only, or no memory
            pass
    return run(), dtype


class _Widened:
    """Tensors that are float32 for now, and what they were before, by the module for which they were widened."""

    def __init__(self) -> None:
        self.before: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def enter(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.before.setdefault(module, []).append((tensor, tensor.data))
            tensor.data = tensor.data.float()

    def leave(self, module: nn.Module) -> None:
        for tensor, narrow in self.before.pop(module, []):
            tensor.data = narrow

    def leave_all(self) -> None:
        for module in list(self.before):
            self.leave(module)


def _half_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.dtype in _HALF]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The members of lists of modules that are in no other list: the layers of a decoder and of towers."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _layers(child)
    return found


def _swaps(model: nn.Module) -> list[Swap]:
    """Without the wrapper that accelerate uses for autocast, compiled code, and kernels for half precision only."""
    inner = inner_model(model)
    text: Any = inner.config.get_text_config()
    swaps = [Swap(module, "_compiled_call_impl", None) for module in compiled_modules(model)]
    if getattr(text, "_attn_implementation", None) not in ("eager", "sdpa", None):
        swaps += attention_swaps(inner, "sdpa")
    swaps.append(Swap(text, "_experts_implementation_internal", "eager"))
    return [*swaps, Swap(model, "forward", vars(model).get("_original_forward", model.forward))]
