"""Adapters: what the reference of a policy with LoRA is, and that it stays so."""

from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from gruppo.config.grpo import GRPOConfig
from gruppo.config.rloo import RLOOConfig
from gruppo.errors import ConfigError
from gruppo.policy.adapters import (
    REFERENCE_ADAPTER,
    add_adapter,
    add_reference_adapter,
    is_peft_model,
    prepare_adapters,
    reference_policy,
    use_adapter,
)
from gruppo.trainer.grpo import GRPOTrainer
from gruppo.trainer.rloo import RLOOTrainer
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer

IDS = torch.tensor([[9, 10, 11, 12]])


def lora(**kwargs: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **kwargs)


def adapted(**kwargs: Any) -> PeftModel:
    """A model whose adapter does something."""
    model = get_peft_model(tiny_model(), lora(**kwargs)).eval()
    shake(model)
    return model


def shake(model: Any, adapter: str = "default") -> None:
    """Change every weight of an adapter."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if f".{adapter}." in name:
                weight.add_(torch.randn_like(weight))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def trainable(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > 1e-3)


# ---- the reference


def test_with_a_new_adapter_the_reference_is_the_base_model():
    base = tiny_model().eval()
    model = add_adapter(tiny_model(), lora()).eval()
    shake(model)
    assert differ(logits(model), logits(base))
    with reference_policy(model):
        assert torch.equal(logits(model), logits(base))
    assert differ(logits(model), logits(base))


@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["lm_head"]}, {"bias": "none", "use_dora": True}], ids=repr)
def test_with_an_adapter_of_its_own_the_reference_is_a_frozen_copy(extra):
    model = adapted(**extra)
    before, names = logits(model), trainable(model)
    add_reference_adapter(model)
    assert torch.equal(logits(model), before)
    assert trainable(model) == names  # the copy is not trained, and what was trained still is
    shake(model)
    after = logits(model)
    assert differ(after, before)
    with reference_policy(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after)
    assert model.active_adapter == "default"
    assert trainable(model) == names


EMBEDDINGS = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
IA3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("name", ["default", "model", "weight"])
@pytest.mark.parametrize("config", [EMBEDDINGS, IA3], ids=["embeddings", "IA3"])
def test_adapters_that_are_bare_parameters_are_copied_too(config, name):
    """Their paths end with the name of the adapter, whatever that is."""
    model = get_peft_model(tiny_model(), config, adapter_name=name).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight))
    before = logits(model)
    add_reference_adapter(model)
    with reference_policy(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(1.0)
    assert differ(logits(model), before)
    with reference_policy(model):
        assert torch.equal(logits(model), before)


def test_a_trained_weight_that_the_reference_would_share_is_refused():
    model = adapted()
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"1 weights of the base model are trained.*embed_tokens.weight"):
        prepare_adapters(model, is_new=False, has_reference=True)


def test_an_optimizer_step_moves_the_adapter_and_nothing_else():
    model = adapted()
    add_reference_adapter(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with reference_policy(model), torch.no_grad():
        target = model(IDS).logits
    optimizer = torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=1.0)
    (model(IDS).logits - target - 1).square().mean().backward()
    optimizer.step()
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if ".default." in name}


# ---- switching


@pytest.mark.parametrize("adapter", [REFERENCE_ADAPTER, None])
def test_use_adapter_comes_back_after_an_error(adapter):
    model = adapted()
    add_reference_adapter(model)
    names, before = trainable(model), logits(model)
    shake(model, REFERENCE_ADAPTER)

    def fail_inside() -> None:
        with use_adapter(model, adapter):
            assert differ(logits(model), before)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert torch.equal(logits(model), before)
    assert model.active_adapter == "default"
    assert trainable(model) == names


def test_use_adapter_keeps_what_was_frozen_by_hand():
    model = adapted()
    add_reference_adapter(model)
    for name, weight in model.named_parameters():
        if "layers.0" in name:
            weight.requires_grad_(False)
    names = trainable(model)
    assert names
    assert not any("layers.0" in name for name in names)
    with use_adapter(model, REFERENCE_ADAPTER):
        pass
    assert trainable(model) == names


def test_a_model_without_adapters_cannot_switch():
    with pytest.raises(ValueError, match="needs a PeftModel, not LlamaForCausalLM"), use_adapter(tiny_model(), None):
        pass


def test_what_is_a_peft_model():
    assert is_peft_model(adapted())
    assert not is_peft_model(tiny_model())


def test_a_second_adapter_is_refused():
    with pytest.raises(ConfigError, match="has adapters already"):
        add_adapter(adapted(), lora())
    with pytest.raises(TypeError, match=r"must be a peft\.PeftConfig, not dict"):
        add_adapter(tiny_model(), {"r": 8})


# ---- in the trainers

TRAINERS = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}


def make(trainer: type, folder: Any, model: Any, **kwargs: Any) -> Any:
    settings = base_args(folder, max_steps=1, learning_rate=0.5, **{"beta": 0.1} | kwargs.pop("config", {}))
    return trainer(
        model, length_reward, TRAINERS[trainer](**settings), prompts(), processing_class=tiny_tokenizer(), **kwargs
    )


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_peft_config_keeps_the_base_model_as_reference(kind, tmp_path):
    trainer = make(kind, tmp_path, tiny_model(), peft_config=lora())
    assert trainer.ref_model is None
    assert list(trainer.model.peft_config) == ["default"]
    rows = [trainer.train_dataset[i] for i in (0, 0, 1, 1)]
    shake(trainer.model)
    batch = trainer.to_tensors(trainer.rollout(rows))
    packs = trainer._packs(batch)
    found = trainer._reference_logps(batch, packs)
    expected = trainer._frozen_logps(tiny_model(), batch, packs)
    torch.testing.assert_close(found, expected)
    assert differ(found, trainer._frozen_logps(trainer.model, batch, packs))


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_peft_model_keeps_its_adapter_as_reference(kind, tmp_path):
    model = adapted()
    original = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer = make(kind, tmp_path, model)
    assert trainer.ref_model is None
    trainer.train()
    weights = dict(trainer.model.named_parameters())
    moved = {name for name in original if not torch.equal(weights[name].cpu(), original[name])}
    assert moved
    assert all(".default." in name for name in moved)
    copies = [name for name in weights if f".{REFERENCE_ADAPTER}." in name]
    assert copies
    for name in copies:
        assert torch.equal(weights[name].cpu(), original[name.replace(f".{REFERENCE_ADAPTER}.", ".default.")])


def test_without_kl_no_copy_is_kept(tmp_path):
    trainer = make(GRPOTrainer, tmp_path, adapted(), config={"beta": 0.0})
    assert list(trainer.model.peft_config) == ["default"]
