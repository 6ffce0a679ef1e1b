"""Gradient checkpointing: how it is enabled, and what its older, reentrant variant needs."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from gruppo.policy.adapters import is_peft_model
from gruppo.policy.modes import has_reentrant_checkpoints

# Keys of gradient_checkpointing_kwargs that transformers reads itself; the others are torch's.
_OF_TRANSFORMERS = ("every_n_layers", "offload")


def enable_checkpointing(policy: Any, args: Any) -> None:
    """Enable gradient checkpointing as configured; non-reentrant unless the config asks for reentrant."""
    options = dict(args.gradient_checkpointing_kwargs or {})
    further = {name: options.pop(name) for name in _OF_TRANSFORMERS if name in options}
    # The first is the name in transformers 5.23 and later.
    enable = getattr(policy, "activation_checkpointing_enable", None) or policy.gradient_checkpointing_enable
    enable({"use_reentrant": False} | options, **further)
    require_input_gradients(policy, args)


def require_input_gradients(policy: Any, args: Any) -> None:
    """Make the inputs of checkpointed layers require a gradient: without it, reentrant layers get no weight gradients.

    transformers does this for embeddings. Where it knows none, as in the towers of Qwen3-VL and Gemma 4, the output of
    the first submodule is used instead.
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
