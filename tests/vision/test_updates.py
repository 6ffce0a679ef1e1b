"""Updates of models that see: adapters on their towers, checkpoints, and autocast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from gruppo.policy.unwrap import inner_model
from gruppo.trainer.update import planning
from tests.vision.families import FAMILIES
from tests.vision.runs import make, rows, weights


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


def only_without_images(completions: list[Any], images: list[Any], **kwargs: Any) -> list[float]:
    """From the second generation on, groups of prompts with images have no spread."""
    only_without_images.calls += 1  # type: ignore[attr-defined]
    first = only_without_images.calls == 1  # type: ignore[attr-defined]
    return [float(i % 2) if first or not shown else 1.0 for i, shown in enumerate(images)]


@pytest.mark.parametrize("counts", [(1, 1, 0, 0, 1, 0, 0, 2), (0, 1, 1, 0)])
def test_vision_weights_move_as_if_every_row_were_run(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """Where no image matters, their gradient is 0, with which Adam moves them, and not missing."""
    ended = []
    for skips in (True, False):
        only_without_images.calls = 0  # type: ignore[attr-defined]
        model, processor = FAMILIES["qwen2_vl"].make()
        trainer = make(
            tmp_path / str(skips),
            model=model.double(),
            processor=processor,
            dataset=Dataset.from_list(rows(counts)),
            rewards=only_without_images,
            skip_zero_advantage=skips,
            shuffle_dataset=False,
            learning_rate=1e-2,
            max_steps=len(counts) // 2,
        )
        start = weights(trainer)
        trainer.train()
        assert trainer.state.global_step == len(counts) // 2
        ended.append(weights(trainer))
        assert any("visual" in key and not torch.equal(weight, start[key]) for key, weight in ended[-1].items())
    skipping, running = ended
    assert all((skipping[key] - weight).abs().max() < 1e-9 for key, weight in running.items())


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
