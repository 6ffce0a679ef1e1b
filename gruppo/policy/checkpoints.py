"""Gradient checkpointing: how it is turned on, and what its older, reentrant kind needs."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from gruppo.policy.adapters import is_peft_model
from gruppo.policy.modes import has_reentrant_checkpoints

# Keys of gradient_checkpointing_kwargs that transformers reads itself; the others are torch's.
_OF_TRANSFORMERS = ("every_n_layers", "offload")


def enable_checkpointing(policy: Any, args: Any) -> None:
    """Have layers computed again in the backward pass, as the config asks for it; not reentrant unless it does."""
    options = dict(args.gradient_checkpointing_kwargs or {})
    further = {name: options.pop(name) for name in _OF_TRANSFORMERS if name in options}
    # The first is its name from transformers 5.23 on.
    enable = getattr(policy, "activation_checkpointing_enable", None) or policy.gradient_checkpointing_enable
    enable(options or {"use_reentrant": False}, **further)
    require_input_gradients(policy, args)


def require_input_gradients(policy: Any, args: Any) -> None:
    """Let what enters checkpointed layers have a gradient, without which reentrant ones give none to their weights.

    transformers does so for embeddings. Where it knows of none, as in the towers of Qwen3-VL and Gemma 4, the first
    part of a model stands for them.
    """
    if is_peft_model(policy):
        policy.enable_input_require_grads()
    asked = args.gradient_checkpointing_kwargs or {"use_reentrant": False}
    if asked.get("use_reentrant") is False and not has_reentrant_checkpoints(policy):
        return
    for module in policy.modules():
        first = next(module.children(), None)
        if isinstance(module, PreTrainedModel) and first is not None and not _knows_embeddings(module):
            is_trained = any(weight.requires_grad for weight in module.parameters())
            if is_trained and _require_gradient not in first._forward_hooks.values():
                first.register_forward_hook(_require_gradient)


def _knows_embeddings(model: PreTrainedModel) -> bool:
    try:
        return model.get_input_embeddings() is not None
    except NotImplementedError:
        return False


def _require_gradient(module: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.is_floating_point():
        output.requires_grad_(True)
