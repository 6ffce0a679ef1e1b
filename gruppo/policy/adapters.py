"""LoRA and other adapters through the optional peft package: which can be trained, and what their reference is."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import is_peft_available

from gruppo.errors import ConfigError, install_line

REFERENCE_ADAPTER = "ref"


def is_peft_model(model: Any) -> bool:
    """Whether the model carries adapters."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def adapted_projections(model: Any) -> frozenset[str] | None:
    """The last name components of the layers that have an adapter; None if the model has no adapters.

    Example:
        adapted_projections(get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) == {"q_proj"}
    """
    if not is_peft_model(model):
        return None
    return frozenset(name.rpartition(".")[2] for name, part in model.named_modules() if hasattr(part, "base_layer"))


def add_adapter(model: nn.Module, peft_config: Any) -> nn.Module:
    """Wrap the policy in the adapter that `peft_config` describes."""
    if not is_peft_available():
        raise ImportError(f"peft_config needs the package peft: {install_line('peft')}")
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
    """Raise for methods that this trainer would not train as intended."""
    if getattr(peft_config, "is_prompt_learning", False):
        raise ConfigError(
            f"{type(peft_config).__name__} learns virtual tokens in front of the prompt, whose distance to it would "
            "depend on the padding of a row. Use LoRA or another adapter on the weights."
        )
    if str(getattr(peft_config, "peft_type", "")).endswith("ADALORA"):
        raise ConfigError(
            f"{type(peft_config).__name__} moves rank between layers with a schedule and a loss term, which this "
            "trainer does not implement: it would act as a plain adapter of rank init_r. Use LoraConfig."
        )


def prepare_adapters(model: Any, *, is_new: bool, has_reference: bool) -> None:
    """Check the adapter to train, and add a reference adapter if one is needed.

    The reference of a new adapter is the model without it. If the adapter is not new, or if its initial values were
    taken out of the base model's weights (PiSSA, OLoRA, LoftQ …), the reference is a frozen copy of it.
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
    """Whether creating the adapter changed the base model's weights."""
    how = getattr(peft_config, "init_lora_weights", True)
    return isinstance(how, str) and how not in ("gaussian", "orthogonal", "eva")


def add_reference_adapter(model: Any) -> None:
    """Add a frozen copy of the active adapter in its current state, for scoring the reference."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    active = model.active_adapter
    if REFERENCE_ADAPTER in model.peft_config:
        model.delete_adapter(REFERENCE_ADAPTER)  # left by an earlier trainer
    config = copy.deepcopy(model.peft_config[active])
    config.inference_mode = True  # some methods allow only one trainable adapter
    if _takes_from_the_base(config):
        config.init_lora_weights = True  # the base weights must not be changed a second time
    with torch.random.fork_rng([]):
        model.add_adapter(REFERENCE_ADAPTER, config)
    # Both adapters share the embeddings. False, because peft would ask the hub to decide whether to save them.
    weights = get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
    set_peft_model_state_dict(model, weights, REFERENCE_ADAPTER)
    model.set_adapter(active)
    _check_copy(model, active)
    for name, weight in model.named_parameters():
        if REFERENCE_ADAPTER in _path(name):
            weight.requires_grad_(False)


def _check_copy(model: Any, active: str) -> None:
    """Cast the copy to the adapter's dtypes; raise unless it is exact and every trained weight has a copy.

    A reference that differs from the initial policy would otherwise go unnoticed.
    """
    # With duplicates: some methods share random projections between layers.
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    # Map names from the copy to the original, because the name of the adapter may also be that of a module.
    copies = [name for name in tensors if REFERENCE_ADAPTER in _path(name)]
    copied = {".".join(active if part == REFERENCE_ADAPTER else part for part in _path(name)): name for name in copies}
    missing = [name for name in tensors if tensors[name].requires_grad and name not in {*copies, *copied}]
    for original, name in copied.items():
        tensors[name].data = tensors[name].data.to(tensors[original].dtype)  # peft creates adapters in float32
        if not torch.equal(tensors[name], tensors[original]):
            missing.append(original)
    if missing:
        raise ConfigError(
            f"No exact copy of the adapter can be made for the reference: {missing[0]} of a "
            f"{type(model.peft_config[active]).__name__} has no exact copy. Set beta=0, or merge the adapter and "
            "train a new one with peft_config."
        )


@contextmanager
def use_adapter(model: Any, adapter_name: str | None) -> Iterator[None]:
    """Activate an adapter temporarily; None disables all adapters."""
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
        # set_adapter makes the adapter that it activates trainable; a frozen adapter must be frozen again.
        for name, weight in model.named_parameters():
            weight.requires_grad_(trainable[name])


def adapter_states(model: nn.Module) -> list[Any]:
    """Which adapters each layer applies, and with which scale. With equal lists a model runs the same operations."""

    def state(layer: Any) -> tuple[Any, ...]:
        scales = dict(getattr(layer, "scaling", {}))
        return layer.disable_adapters, getattr(layer, "merged", False), tuple(layer.active_adapters), scales

    # A transformers model has a method of this name; adapter layers have a bool.
    return [state(module) for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]


@contextmanager
def same_dtypes(model: nn.Module) -> Iterator[None]:
    """Restore the dtype of every weight at the end: peft loads adapters in float32."""
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    yield
    for name, weight in model.named_parameters():
        if dtypes.get(name, weight.dtype) is not weight.dtype:
            weight.data = weight.data.to(dtypes[name])


def reload_trained_adapter(model: Any, checkpoint: str) -> None:
    """Load the trained adapter from a checkpoint that also contains others, such as the reference's.

    peft saves the adapter called `default` in the folder itself and every other one in a subfolder; if there are
    subfolders, resuming reads only those.
    """
    if len(model.peft_config) > 1 and model.active_adapter == "default":
        model.load_adapter(checkpoint, "default", is_trainable=True)


@contextmanager
def reference_policy(model: Any) -> Iterator[None]:
    """Run a policy with adapters as its reference: with the frozen copy if there is one, else without adapters."""
    has_copy = REFERENCE_ADAPTER in model.peft_config
    with use_adapter(model, REFERENCE_ADAPTER if has_copy else None):
        yield
