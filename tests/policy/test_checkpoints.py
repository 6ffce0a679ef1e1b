"""Gradient checkpointing: every way of turning it on gives gradients to all weights that are trained."""

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from gruppo.errors import ConfigError
from gruppo.policy.checkpoints import enable_checkpointing, require_input_gradients
from gruppo.policy.modes import has_reentrant_checkpoints
from gruppo.trainer.construct.preparing import recompute_by_default, reject_other_noise
from tests.helpers import tiny_gpt2, tiny_model
from tests.vision.families import FAMILIES


def asked(**kwargs: Any) -> Any:
    return SimpleNamespace(gradient_checkpointing=None, gradient_checkpointing_kwargs=kwargs or None)


def tower_of(model: Any) -> Any:
    return model.get_base_model().model.visual


def adapted() -> Any:
    """A model whose tower has adapters, and no embeddings that transformers would find."""
    model, _ = FAMILIES["qwen3_vl"].make()
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "qkv"], init_lora_weights=False)).train()


def hooks(module: nn.Module) -> int:
    return len(next(module.children())._forward_hooks)


def test_by_deepspeed() -> None:
    model = adapted()
    accelerator = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    recompute_by_default(SimpleNamespace(args=asked(use_reentrant=True), model=model, accelerator=accelerator))
    assert model.get_base_model().is_gradient_checkpointing
    assert hooks(tower_of(model)) == 1


@pytest.mark.parametrize("options", [{"early_stop": False}, {"use_reentrant": None}, {"use_reentrant": True}])
def test_a_model_says_which_variant_its_creator_chose(options: dict[str, Any]) -> None:
    model = tiny_model()
    assert not has_reentrant_checkpoints(model)
    model.gradient_checkpointing_enable(options)
    assert has_reentrant_checkpoints(model), "torch takes it for the older one"
    model.gradient_checkpointing_enable(options | {"use_reentrant": False})
    assert not has_reentrant_checkpoints(model)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layers_that_drop_something_else_when_recomputed(dropout: float) -> None:
    model = tiny_gpt2(embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=dropout).train()
    args = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs={"preserve_rng_state": False})
    with pytest.raises(ConfigError, match="set disable_dropout=True") if dropout else nullcontext():
        reject_other_noise(model, args)
    args.gradient_checkpointing = False
    reject_other_noise(model, args)


def test_towers_are_listened_to_once_and_only_if_that_is_needed() -> None:
    model = adapted()
    enable_checkpointing(model, asked())
    assert hooks(tower_of(model)) == 0, "what is not reentrant needs no gradient of its inputs"
    for _ in range(2):
        enable_checkpointing(model, asked(use_reentrant=True))
    assert hooks(tower_of(model)) == 1
    frozen, _ = FAMILIES["qwen3_vl"].make()
    frozen.model.visual.requires_grad_(False)
    enable_checkpointing(frozen, asked(use_reentrant=True))
    assert hooks(frozen.model.visual) == 0, "a tower that is not trained needs no backward pass"


class Lone(PreTrainedModel):
    """A model of one weight and no parts."""

    config_class = LlamaConfig

    def __init__(self) -> None:
        super().__init__(LlamaConfig())
        self.weight = nn.Parameter(torch.ones(1))


def test_a_model_without_parts() -> None:
    require_input_gradients(Lone(), asked(use_reentrant=True))


@pytest.mark.skipif(
    "every_n_layers" not in inspect.signature(PreTrainedModel.gradient_checkpointing_enable).parameters,
    reason="an option of later releases of transformers",
)
@pytest.mark.parametrize("adapter", [False, True])
def test_options_of_transformers_are_not_torchs(adapter: bool) -> None:
    model = tiny_model()
    policy = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if adapter else model
    enable_checkpointing(policy, asked(every_n_layers=2))
    layers = [layer.gradient_checkpointing for layer in model.model.layers]
    assert sum(layers) == -(-len(layers) // 2)
