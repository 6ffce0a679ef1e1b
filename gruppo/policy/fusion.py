"""Fused layers: norms, gated MLPs and rotary embeddings of a model in fewer kernels, for sampling and training.

A layer is recognised by what it does, not by its name alone: the fused version must agree with the layer's own forward
on random input, otherwise the layer is left as it is.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gruppo.kernels import layers
from gruppo.policy.inplace import Swap

# Bounds of ‖ours − theirs‖ / ‖theirs‖: single elements of a long sum may differ by more. In float64 only the order of
# additions may differ: a norm that computes in float64 throughout is not replaced.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def fused_swaps(model: nn.Module, dtypes: set[torch.dtype], *, everything: bool | None = None) -> list[Swap]:
    """Replacements for the layers of a model on its device, for inputs of these dtypes, with and without gradients.

    `everything` also replaces MLPs and rotary embeddings; None does so on CUDA only.
    """
    # Fused norms pay off on every device: forward and backward of 2000 rows of 64, 128 and 256 in float32 on one CPU
    # core take 0.3, 0.6 and 0.9 ms; a module's own forward and autograd take 0.9, 2.4 and 4.9 ms.
    swaps = [swap for module in model.modules() for swap in _norm(module, dtypes)]
    if everything is None:  # on other devices separate operations cost no more
        everything = next(model.parameters()).device.type == "cuda"
    if everything:
        swaps += [swap for module in model.modules() for swap in _gated_mlp(module)]
        swaps += _rotary(model, dtypes)
    return swaps


def _agree(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool((a.double() - b.double()).norm() <= _TOLERANCE[a.dtype] * b.double().norm())


# ---- norms

# How the weight is applied: to x̂ in the input dtype (Llama), in float32 (OLMo-2), or in float32 as 1 + weight (Gemma).
_CONVENTIONS = (
    {"plus_one": False, "in_float32_weight": False},
    {"plus_one": False, "in_float32_weight": True},
    {"plus_one": True, "in_float32_weight": True},
)


def _norm(module: nn.Module, dtypes: set[torch.dtype]) -> list[Swap]:
    forward = fused_norm(module, dtypes)
    return [] if forward is None or "forward" in vars(module) else [Swap(module, "forward", forward)]


def fused_norm(module: nn.Module, dtypes: set[torch.dtype]) -> Callable[[Tensor], Tensor] | None:
    """A fused forward of a norm for inputs of these dtypes; None if the module is not a known kind of norm."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith("RMSNorm")
    if not named or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    conventions = {dtype: found for dtype in dtypes if (found := _convention(module, weight, eps, dtype)) is not None}
    if not conventions:
        return None
    original: Callable[[Tensor], Tensor] = module.forward

    def forward(x: Tensor) -> Tensor:
        convention = conventions.get(x.dtype)
        if convention is None:
            return original(x)
        # The weight is looked up at each call: sharding replaces parameters around every forward pass.
        return layers.rms_norm(x, cast(Tensor, module.weight), eps, out_dtype=x.dtype, **convention)

    return forward


@torch.no_grad()
def _convention(module: nn.Module, weight: Tensor, eps: float, dtype: torch.dtype) -> dict[str, bool] | None:
    """The convention under which `layers.rms_norm` matches this norm for inputs of this dtype, or None."""
    probe: Any = copy.deepcopy(module)
    generator = torch.Generator(weight.device).manual_seed(0)
    probe.weight.copy_(torch.randn(weight.shape, generator=generator, device=weight.device))
    x = torch.randn(3, len(weight), generator=generator, device=weight.device).to(dtype)
    expected = probe(x)
    ours = [layers.rms_norm(x, probe.weight, eps, out_dtype=dtype, **convention) for convention in _CONVENTIONS]
    # Two of the conventions differ only in rounding, so take the closest.
    nearest = min(range(len(ours)), key=lambda i: (ours[i].float() - expected.float()).abs().sum().item())
    return _CONVENTIONS[nearest] if _agree(ours[nearest], expected) else None


# ---- gated MLPs

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def _activation(module: nn.Module) -> str | None:
    x = torch.linspace(-4, 4, 64)
    return next((name for name, known in _ACTIVATIONS.items() if _agree(module(x), known(x))), None)


def known_activation(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The function that an activation module computes, if it is one of `_ACTIVATIONS`."""
    kind = _activation(module)
    return None if kind is None else _ACTIVATIONS[kind]


def _gated_mlp(module: nn.Module) -> list[Swap]:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]
    if not all(isinstance(part, nn.Module) for part in parts) or "forward" in vars(module):
        return []
    gate, up, down, act = (part for part in parts if part is not None)
    kind, width = _activation(act), getattr(gate, "in_features", None)
    if kind is None or width is None or not next(module.parameters()).is_floating_point():  # packed by a quantiser
        return []

    def forward(x: Tensor) -> Tensor:
        gates, ups = gate(x), up(x)
        if torch.is_grad_enabled() and _is_plain_linear(down) and down.weight.dtype == gates.dtype:
            return layers.gated_linear(gates, ups, down.weight, activation=kind, bias=down.bias)
        return down(layers.gated(gates, ups, activation=kind))

    return [Swap(module, "forward", forward)] if _does_the_same(module, forward, width) else []


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether calling this module only applies its weight and bias. Not cached: hooks and adapters come and go."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is nn.Linear and "forward" not in vars(module) and not any(hooks)


@torch.no_grad()
def _does_the_same(module: nn.Module, forward: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether both agree, in evaluation and in training mode.

    Dropout gets the same noise in both runs, and the global random state is not advanced.
    """
    weight = next(module.parameters())
    sample = torch.randn(2, width, generator=torch.Generator(weight.device).manual_seed(0), device=weight.device)
    sample = sample.to(weight.dtype)
    modes = [(part, part.training) for part in module.modules()]
    outputs = []
    try:
        for training in (False, True):
            for part, _ in modes:
                part.training = training
            for run in (forward, module):
                with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
                    outputs.append(run(sample))
    finally:
        for part, training in modes:
            part.training = training
    return _agree(*outputs[:2]) and _agree(*outputs[2:])


# ---- rotary embeddings


def _rotary(model: nn.Module, dtypes: set[torch.dtype]) -> list[Swap]:
    """Swaps for `apply_rotary_pos_emb`, a function in the Python module that defines the model's classes."""
    homes = {type(module).__module__ for module in model.modules() if hasattr(module, "layer_idx")}
    device = next(model.parameters()).device
    swaps = []
    for name in sorted(homes):
        home = sys.modules[name]
        original = getattr(home, "apply_rotary_pos_emb", None)
        if original is not None and _is_standard_rotary(original, dtypes, device):
            swaps.append(Swap(home, "apply_rotary_pos_emb", _fused_rotary(original)))
    return swaps


def _fused_rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = q.shape[0] == 1 and q.dim() == 4 and cos.dim() == 3
        constant = not cos.requires_grad and not sin.requires_grad
        if packed and constant and not args and not kwargs:
            return layers.rotary(q, k, cos, sin)
        return original(q, k, cos, sin, *args, **kwargs)

    return rotary


@torch.no_grad()
def _is_standard_rotary(original: Callable[..., Any], dtypes: set[torch.dtype], device: torch.device) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    for dtype in dtypes:
        q = torch.randn(1, 4, 3, 64, generator=generator, device=device).to(dtype)
        k = torch.randn(1, 2, 3, 64, generator=generator, device=device).to(dtype)
        angles = torch.randn(1, 3, 64, generator=generator, device=device).to(dtype)
        try:
            expected = original(q, k, angles.cos(), angles.sin())
        except (TypeError, ValueError, RuntimeError):
            return False  # another signature
        ours = layers.rotary(q, k, angles.cos(), angles.sin())
        if not all(_agree(a, b) for a, b in zip(ours, expected, strict=True)):
            return False
    return True
