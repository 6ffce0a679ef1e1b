"""Updates of models that see: adapters on their towers, checkpoints, and autocast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from gruppo.policy.unwrap import inner_model
from gruppo.trainer.update import planning
from tests.vision.families import FAMILIES
from tests.vision.runs import make


def alternating(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def assert_sees_and_is_trained(trainer: Any) -> None:
    """After a run every adapter of the tower is another one."""
    weights = {key: weight for key, weight in trainer.model.named_parameters() if "vis" in key and "lora" in key}
    before = {key: weight.detach().clone() for key, weight in weights.items()}
    trainer.train()
    assert before
    assert inner_model(trainer.model).is_gradient_checkpointing
    assert [key for key, weight in weights.items() if torch.equal(before[key], weight)] == []


def adapter_of(name: str) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj.linear"] if name == "gemma4" else ["q_proj", "qkv"], lora_alpha=8)


# gradient_checkpointing (None: by memory, which is short) and use_reentrant
WAYS = {"asked": (True, False), "asked, reentrant": (True, True), "by memory, reentrant": (None, True)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_that_see_are_trained_under_checkpointing(
    tmp_path: Path, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "free_memory", lambda device: 0)
    checkpointing, reentrant = WAYS[way]
    checkpoints = {
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    settings = {"max_steps": 2, "learning_rate": 1e-2, "arguments": {"peft_config": adapter_of(name)}}
    assert_sees_and_is_trained(make(tmp_path, name, rewards=alternating, **checkpoints, **settings))


def test_a_model_that_comes_with_checkpoints(tmp_path: Path) -> None:
    model, processor = FAMILIES["qwen3_vl"].make()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    settings = {"max_steps": 2, "learning_rate": 1e-2, "arguments": {"peft_config": adapter_of("qwen3_vl")}}
    assert_sees_and_is_trained(make(tmp_path, model=model, processor=processor, rewards=alternating, **settings))


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_weights_under_autocast(tmp_path: Path, name: str) -> None:
    model, processor = FAMILIES[name].make()
    settings = {"bf16": True, "max_steps": 1, "learning_rate": 1e-2}
    trainer = make(tmp_path, name, model=model, processor=processor, rewards=alternating, **settings)
    before = {key: weight.clone() for key, weight in model.named_parameters()}
    trainer.train()
    moved = {key for key, weight in model.named_parameters() if not torch.equal(weight, before[key])}
    assert any("visual" in key or "vision" in key for key in moved)
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in model.parameters())
