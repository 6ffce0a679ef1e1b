"""Updates of models that see: adapters on their towers, checkpoints, and autocast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.vision.families import FAMILIES
from tests.vision.runs import make


def alternating(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_that_see_are_trained_under_checkpointing(tmp_path: Path, name: str, reentrant: bool) -> None:
    targets = ["q_proj.linear"] if name == "gemma4" else ["q_proj", "qkv"]
    adapter = LoraConfig(r=2, target_modules=targets, lora_alpha=8)
    checkpoints = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    settings = {"max_steps": 2, "learning_rate": 1e-2, "arguments": {"peft_config": adapter}}
    trainer = make(tmp_path, name, rewards=alternating, **checkpoints, **settings)
    weights = {key: weight for key, weight in trainer.model.named_parameters() if "vis" in key and "lora" in key}
    before = {key: weight.detach().clone() for key, weight in weights.items()}
    trainer.train()
    assert before
    assert [key for key, weight in weights.items() if torch.equal(before[key], weight)] == []


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
