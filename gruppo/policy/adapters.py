"""LoRA and other adapters through peft, which is optional: which can be trained, and what their reference is."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import is_peft_available

from gruppo.errors import ConfigError

REFERENCE_ADAPTER = "ref"


def is_peft_model(model: Any) -> bool:
    """Whether the model carries adapters."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def adapted_projections(model: Any) -> frozenset[str] | None:
    """The last parts of the names of layers that have an adapter; None where all weights are trained.

    Example:
        adapted_projections(get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) == {"q_proj"}
    """
    if not is_peft_model(model):
        return None
    return frozenset(name.rpartition(".")[2] for name, part in model.named_modules() if hasattr(part, "base_layer"))


def add_adapter(model: nn.Module, peft_config: Any) -> nn.Module:
    """Wrap the policy in the adapter that `peft_config` describes."""
    if not is_peft_available():
        raise ImportError("peft_config needs the peft package: pip install 'gruppo[peft]'.")
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig, not {type(peft_config).__name__}.")
    if is_peft_model(model):
        raise ConfigError(
            "peft_config was given, but the model has adapters already. Pass a plain model with peft_config, or the "
            "PeftModel alone."
        )
    reject_method(peft_config)
    return get_peft_model(model, peft_config)


def reject_method(peft_config: Any) -> None:
    """Raise for methods that would train to something else than they promise."""
    if getattr(peft_config, "is_prompt_learning", False):
        raise ConfigError(
            f"{type(peft_config).__name__} learns virtual tokens in front of the prompt, whose distance to it would "
            "depend on the padding of a row. Use LoRA or another adapter on the weights."
        )
    if str(getattr(peft_config, "peft_type", "")).endswith("ADALORA"):
        raise ConfigError(
            f"{type(peft_config).__name__} moves rank between layers by a schedule and a term of the loss, which this "
            "trainer does not run: it would be a plain adapter of rank init_r. Use LoraConfig."
        )


def prepare_adapters(model: Any, *, is_new: bool, has_reference: bool) -> None:
    """Check the adapter that is to be trained, and make sure that there is a reference if one is needed.

    The reference of a new adapter is the model without it; that of one with a past is a frozen copy. So it is for one
    whose initial values were taken out of the base model's weights (PiSSA, OLoRA, LoftQ …).
    """
    active = model.active_adapter
    if not isinstance(active, str):
        raise ConfigError(f"The model has several active adapters ({active}); activate the one to train.")
    reject_method(model.peft_config[active])
    if not has_reference:
        return
    shared = [name for name, weight in model.named_parameters() if weight.requires_grad and active not in _path(name)]
    if shared:
        raise ConfigError(
            f"{len(shared)} weights of the base model are trained beside the adapter ({shared[0]} …), so that the "
            "reference, which is the base model with another adapter or none, would move with the policy. Set beta=0, "
            "or freeze them (bias='none' in the adapter's config; modules_to_save for whole modules)."
        )
    if not is_new or _takes_from_the_base(model.peft_config[active]):
        add_reference_adapter(model)


def _path(name: str) -> list[str]:
    return name.split(".")


def _takes_from_the_base(peft_config: Any) -> bool:
    """Whether the base model's weights were changed when the adapter was made."""
    how = getattr(peft_config, "init_lora_weights", True)
    return isinstance(how, str) and how not in ("gaussian", "orthogonal", "eva")


def add_reference_adapter(model: Any) -> None:
    """Keep a frozen copy of the active adapter as it is now, to score the reference with."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    active = model.active_adapter
    if REFERENCE_ADAPTER in model.peft_config:
        model.delete_adapter(REFERENCE_ADAPTER)  # an earlier trainer's
    config = copy.deepcopy(model.peft_config[active])
    config.inference_mode = True  # some methods have room for one trainable adapter only
    if _takes_from_the_base(config):
        config.init_lora_weights = True  # what the first one took from the base model must not be taken twice
    with torch.random.fork_rng([]):
        model.add_adapter(REFERENCE_ADAPTER, config)
    # Both adapters stand on the same embeddings; whether to save those peft would ask the hub.
    weights = get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
    set_peft_model_state_dict(model, weights, REFERENCE_ADAPTER)
    model.set_adapter(active)
    _check_copy(model, active)
    for name, weight in model.named_parameters():
        if REFERENCE_ADAPTER in _path(name):
            weight.requires_grad_(False)


def _check_copy(model: Any, active: str) -> None:
    """Every weight and buffer of the copy must be that of the adapter, in the same type; and no trained one lacks one.

    A reference that is not the policy as it was would go unnoticed.
    """
    # With duplicates: some methods share random projections between layers.
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    # From the copy to the original: an adapter's own name may be that of a module, too.
    copies = [name for name in tensors if REFERENCE_ADAPTER in _path(name)]
    copied = {".".join(active if part == REFERENCE_ADAPTER else part for part in _path(name)): name for name in copies}
    missing = [name for name in tensors if tensors[name].requires_grad and name not in {*copies, *copied}]
    for original, name in copied.items():
        tensors[name].data = tensors[name].data.to(tensors[original].dtype)  # peft makes adapters in float32
        if not torch.equal(tensors[name], tensors[original]):
            missing.append(original)
    if missing:
        raise ConfigError(
            f"No exact copy of the adapter can be made for the reference: {missing[0]} of a "
            f"{type(model.peft_config[active]).__name__} has none. Set beta=0, or merge the adapter and train "
            "a new one with peft_config."
        )


@contextmanager
def use_adapter(model: Any, adapter_name: str | None) -> Iterator[None]:
    """Activate an adapter for a while; None switches all adapters off."""
    if not is_peft_model(model):
        raise ValueError(f"use_adapter needs a PeftModel, not {type(model).__name__}.")
    if adapter_name is None:
        with model.disable_adapter():
            yield
        return
    previous = model.active_adapter
    trainable = {name: weight.requires_grad for name, weight in model.named_parameters()}
    model.set_adapter(adapter_name)
    try:
        yield
    finally:
        model.set_adapter(previous)
        # set_adapter makes what it activates trainable; a frozen adapter must come back frozen.
        for name, weight in model.named_parameters():
            weight.requires_grad_(trainable[name])


def adapter_states(model: nn.Module) -> list[Any]:
    """Which adapters each layer applies, and how strongly. Two equal lists run the same operations."""

    def state(layer: Any) -> tuple[Any, ...]:
        scales = dict(getattr(layer, "scaling", {}))
        return layer.disable_adapters, getattr(layer, "merged", False), tuple(layer.active_adapters), scales

    # A transformers model has methods of these names; adapter layers have values.
    return [state(module) for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]


@contextmanager
def same_dtypes(model: nn.Module) -> Iterator[None]:
    """Every weight in the type that it had: peft loads adapters in float32."""
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    yield
    for name, weight in model.named_parameters():
        if dtypes.get(name, weight.dtype) is not weight.dtype:
            weight.data = weight.data.to(dtypes[name])


def reload_trained_adapter(model: Any, checkpoint: str) -> None:
    """Load the trained adapter from a checkpoint that also holds others, such as the reference's.

    peft keeps the adapter called `default` in the folder itself and every other one in a folder of its own; resuming
    reads only the latter as soon as there is one.
    """
    if len(model.peft_config) > 1 and model.active_adapter == "default":
        model.load_adapter(checkpoint, "default", is_trainable=True)


@contextmanager
def reference_policy(model: Any) -> Iterator[None]:
    """The reference of a policy with adapters: its frozen copy if there is one, else the bare base model."""
    has_copy = REFERENCE_ADAPTER in model.peft_config
    with use_adapter(model, REFERENCE_ADAPTER if has_copy else None):
        yield
