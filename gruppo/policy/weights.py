"""The weights of the policy under their checkpoint names, for a program that holds a copy of the model (vLLM).

Every process must iterate to the end: gathering a sharded tensor is a collective operation. A yielded tensor does not
change while the iteration continues; most are the training weights themselves, not copies.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ConfigError
from gruppo.policy.adapters import is_peft_model
from gruppo.policy.quantised import is_quantised
from gruppo.policy.sharding import full_value, is_sharded, plain_name, shape_of
from gruppo.policy.unwrap import inner_model

__all__ = ["check_copyable", "named_weights"]

Walk = Iterator[tuple[str, Tensor]]


def named_weights(model: Any) -> Walk:
    """Name and whole tensor of every weight and saved buffer, under the names that a saved checkpoint has.

    Tied weights come once. Adapters are merged layer by layer into a copy of the layer's weights; the policy is never
    changed.

    Example, a Llama with a LoRA adapter:
        dict(named_weights(policy)) ->
            {"model.embed_tokens.weight": …, "model.layers.0.self_attn.q_proj.weight": W + B·A·scale, …}
    """
    check_copyable(model)
    inner = inner_model(model)
    rename = _checkpoint_names(inner)
    walk = _adapted(inner) if is_peft_model(_bare(model)) else _tensors(inner)
    for name, tensor in walk:
        plain = plain_name(name)
        yield from ((plain, tensor),) if rename is None else rename(plain, tensor)


def check_copyable(model: Any) -> None:
    """Raise if the weights of the policy cannot be exported as those of a plain checkpoint."""
    inner, bare = inner_model(model), _bare(model)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "The policy is wrapped by FSDP version 1, whose weights cannot be sent to vLLM one by one. Set "
            "fsdp_version: 2 in the accelerate config."
        )
    if is_quantised(model):
        raise ConfigError(
            "The policy is quantised, and vLLM holds plain weights. Load it without a quantization_config, or sample "
            "with rollout_backend='transformers'."
        )
    if is_peft_model(bare):
        _check_adapters(bare, inner)
    _check_tied(inner)


def _bare(model: Any) -> Any:
    """The model without wrappers that distribute or compile it, but with its adapters."""
    while hasattr(model, "module") or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def _check_tied(inner: Any) -> None:
    """Raise if the head differs from the embedding although the config ties them: a copy has no place for it."""
    config = inner.config.get_text_config() if hasattr(inner.config, "get_text_config") else inner.config
    if not getattr(config, "tie_word_embeddings", False):
        return
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    adapted = any(_is_adapted(module) for module in (head, embedding))
    if head is None or (head.weight is embedding.weight and not adapted):
        return
    raise ConfigError(
        "The model's config ties the output head to the embedding (tie_word_embeddings=True), but the policy trains "
        "only one of them: vLLM would use the embedding for both. Leave embed_tokens and lm_head out of "
        "target_modules and modules_to_save, or save the model with tie_word_embeddings=False first."
    )


# ---- names


def _checkpoint_names(inner: Any) -> Callable[[str, Tensor], Walk] | None:
    """How transformers renames weights when it saves them (fused experts, say); None if the names are the same."""
    from transformers.core_model_loading import revert_weight_conversion

    if not hasattr(inner, "save_pretrained"):
        return None
    here = {plain_name(name): torch.empty(shape_of(p), device="meta") for name, p in inner.named_parameters()}
    here = {name: tensor for name, tensor in here.items() if ".base_layer." not in name}
    saved = revert_weight_conversion(inner, here)
    if saved.keys() == here.keys():
        return None

    def renamed(name: str, tensor: Tensor) -> Walk:
        yield from revert_weight_conversion(inner, {name: tensor}).items()

    return renamed


# ---- plain models


def _tensors(module: nn.Module, prefix: str = "") -> Walk:
    """Parameters, and buffers that are saved with them."""
    for name, parameter in module.named_parameters(prefix.removesuffix(".")):
        yield name, full_value(parameter)
    for path, owner in module.named_modules():
        for name, buffer in _saved_buffers(owner):
            yield f"{prefix}{path}{'.' if path else ''}{name}", full_value(buffer)


def _saved_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    skipped = module._non_persistent_buffers_set
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None and name not in skipped]


# ---- adapters


def _adapter_classes() -> tuple[Any, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    return BaseTunerLayer, ModulesToSaveWrapper


def _is_adapted(module: Any) -> bool:
    """Whether peft has replaced this module with a wrapper."""
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def _check_adapters(bare: Any, inner: Any) -> None:
    layer_class, saved_class = _adapter_classes()
    if bare.active_peft_config.is_prompt_learning:
        raise ConfigError(
            f"{bare.active_peft_config.peft_type.value} adapters add virtual tokens, which cannot be merged into the "
            "weights that vLLM holds. Use LoRA, or sample with rollout_backend='auto'."
        )
    for name, module in inner.named_modules():
        wrapper = hasattr(module, "original_module") and not isinstance(module, saved_class)
        if wrapper or type(module).__name__ in ("ParamWrapper", "TrainableTokensLayer"):
            raise ConfigError(
                f"{name} is adapted by a {type(module).__name__} (target_parameters or trainable_token_indices), "
                "which is not merged for vLLM. Use target_modules and modules_to_save, or rollout_backend='auto'."
            )
        if isinstance(module, layer_class) and not hasattr(module, "merge"):
            raise ConfigError(f"{name}: a {type(module).__name__} cannot be merged into the weights that vLLM holds.")
        if _adds_bias(module):
            raise ConfigError(
                f"{name} has no bias, and its adapter adds one (lora_bias=True), for which vLLM's weights have no "
                "place. Set lora_bias=False, or rollout_backend='auto'."
            )
    if is_sharded(inner):
        raise ConfigError(
            "Adapters on weights that are sharded over processes (FSDP, ZeRO-3) cannot be merged for vLLM. Keep the "
            "whole model on every process, or train all weights."
        )


def _adds_bias(layer: Any) -> bool:
    biased = getattr(layer, "lora_bias", {})
    is_added = bool(biased) and any(biased.get(name) for name in layer.active_adapters)
    return is_added and getattr(layer.get_base_layer(), "bias", None) is None


def _adapted(inner: nn.Module) -> Walk:
    """The weights with the active adapters merged, under the names that they have without adapters."""
    layer_class, saved_class = _adapter_classes()
    inside: list[str] = []  # prefixes of modules that are handled as a whole, with their submodules
    seen: set[int] = set()  # tied weights have several names
    for path, module in inner.named_modules():
        prefix = f"{path}." if path else ""
        if any(prefix.startswith(done) for done in inside):
            continue
        if isinstance(module, layer_class):
            inside.append(prefix)
            with merged(module):
                yield from list(_tensors(module.get_base_layer(), prefix))
        elif isinstance(module, saved_class):
            inside.append(prefix)
            yield from _tensors(_module_in_use(module), prefix)
        else:
            own = [*module._parameters.items(), *_saved_buffers(module)]
            for name, tensor in own:
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{prefix}{name}", full_value(tensor)


def _module_in_use(wrapper: Any) -> Any:
    """The module that peft runs for a `modules_to_save` wrapper: the active adapter's copy, else the original."""
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active or any(name not in wrapper.modules_to_save for name in active):
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


@contextmanager
def merged(layer: Any) -> Iterator[None]:
    """Merge a layer's active adapters into its base weights temporarily; the original tensors are restored at the end.

    Subtracting the adapter again would not restore the same bits.
    """
    base = layer.get_base_layer()
    merges = not layer.disable_adapters and not layer.merged
    aside = [(parameter, parameter.data) for parameter in base.parameters()]
    for parameter, data in aside:
        parameter.data = data.clone()
    try:
        if merges:
            with torch.no_grad():
                layer.merge()
        yield
    finally:
        if merges and layer.merged:  # a layer that was already merged stays merged
            for parameter, _ in aside:
                parameter.data = parameter.data.clone()  # the receiver may still read the merged tensors
            with torch.no_grad():
                layer.unmerge()  # resets the layer's own record of merged adapters
        for parameter, data in aside:
            parameter.data = data
