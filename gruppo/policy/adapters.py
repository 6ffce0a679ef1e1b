"""LoRA and other adapters through peft, which is optional."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    return get_peft_model(model, peft_config)


def add_reference_adapter(model: Any) -> None:
    """Keep a frozen copy of the active adapter as it is now, to score the reference with."""
    active = model.active_adapter
    if not isinstance(active, str):
        raise ConfigError(f"The model has several active adapters ({active}); activate the one to train.")
    if REFERENCE_ADAPTER in model.peft_config:
        model.delete_adapter(REFERENCE_ADAPTER)  # an earlier trainer's
    model.add_adapter(REFERENCE_ADAPTER, model.peft_config[active])
    model.set_adapter(active)
    weights = dict(model.named_parameters())
    originals = {name: _renamed(name, REFERENCE_ADAPTER, active) for name in weights}
    copies = {name: original for name, original in originals.items() if original != name}
    for name, original in copies.items():
        weights[name].data.copy_(weights[original].data)
        weights[name].requires_grad_(False)
    shared = {name for name, weight in weights.items() if weight.requires_grad} - set(copies.values())
    if shared:
        raise ConfigError(
            f"The reference would move with the policy: {', '.join(sorted(shared)[:3])} is trained, but is no part of "
            f"the adapter {active!r}, which the reference has a copy of. Freeze it, or set beta=0."
        )


def _renamed(path: str, old: str, new: str) -> str:
    """The path of a parameter with one of its parts renamed; an adapter's name may be its last part, too.

    Example:
        _renamed("q_proj.lora_A.ref.weight", "ref", "default") == "q_proj.lora_A.default.weight"
        _renamed("embed_tokens.lora_embedding_A.ref", "ref", "default") == "embed_tokens.lora_embedding_A.default"
    """
    return ".".join(new if part == old else part for part in path.split("."))


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


def reload_trained_adapter(model: Any, checkpoint: str) -> None:
    """Load the trained adapter from a checkpoint that also holds the reference's.

    peft keeps the adapter called `default` in the folder itself and every other one in a folder of its own; resuming
    reads only the latter as soon as there is one.
    """
    if REFERENCE_ADAPTER in model.peft_config and model.active_adapter == "default":
        model.load_adapter(checkpoint, "default", is_trainable=True)


@contextmanager
def reference_policy(model: Any) -> Iterator[None]:
    """The reference of a policy with adapters: its frozen copy if there is one, else the bare base model."""
    has_copy = REFERENCE_ADAPTER in model.peft_config
    with use_adapter(model, REFERENCE_ADAPTER if has_copy else None):
        yield
