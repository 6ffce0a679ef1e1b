"""The trainers with the built-in engine as their backend."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.rollout.builtin import BuiltinBackend
from tests.helpers import base_args, length_reward, prompts, tiny_gpt2, tiny_model, tiny_tokenizer

SETTINGS = dict(
    max_steps=3, per_device_train_batch_size=8, num_generations=4, max_completion_length=6, logging_steps=1
)


class Seen:
    """Mixin for a trainer: remembers what was sampled."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.sampled: list[list[list[int]]] = []
        super().__init__(*args, **kwargs)

    def _ask_backend(self, prompt_ids: list[list[int]], *more: Any) -> Any:
        completions = super()._ask_backend(prompt_ids, *more)  # type: ignore[misc]
        self.sampled.append([list(completion.ids) for completion in completions])
        return completions


class SeenGRPO(Seen, GRPOTrainer):
    pass


class SeenRLOO(Seen, RLOOTrainer):
    pass


def train(folder: Path, cls: Any = SeenGRPO, model: Any = None, resume: bool = False, **settings: Any) -> Any:
    arguments = {name: settings.pop(name) for name in ("peft_config",) if name in settings}
    config = RLOOConfig if issubclass(cls, RLOOTrainer) else GRPOConfig
    trainer = cls(
        model=tiny_model() if model is None else model,
        reward_funcs=length_reward,
        args=config(**base_args(folder, **(SETTINGS | settings))),
        train_dataset=prompts(16),
        processing_class=tiny_tokenizer(),
        **arguments,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "rloo": lambda: {"cls": SeenRLOO},
    "learned positions": lambda: {"model": tiny_gpt2()},
    "adapter": lambda: {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])},
    "bfloat16 weights": lambda: {"model": tiny_model().bfloat16()},
    "bfloat16 autocast": lambda: {"bf16": True},
    "checkpointing": lambda: {"gradient_checkpointing": True},
    "several updates": lambda: {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_default(tmp_path: Path, name: str) -> None:
    trainer = train(tmp_path, **MODELS[name]())
    assert isinstance(trainer.backend, BuiltinBackend)
    assert trainer.sampled
    assert all(len(completions) == len(trainer.sampled[0]) for completions in trainer.sampled)
    assert len({tuple(ids) for ids in trainer.sampled[0]}) > 4
    log = trainer.state.log_history[0]
    assert log["rollout/tokens_per_second"] > 0
    assert 0 < log["rollout/kv_used_ratio"] <= 1
    assert 0 <= log["rollout/wasted_ratio"] < 1


def test_runs_of_one_seed_are_equal_and_of_another_are_not(tmp_path: Path) -> None:
    first, again, other = (train(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2)))
    assert first.sampled == again.sampled
    assert first.sampled != other.sampled
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_is_sampled_does_not_depend_on_other_random_numbers(tmp_path: Path) -> None:
    """Counter-based noise: a reward that draws random numbers changes nothing."""

    class Drawing(SeenGRPO):
        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            torch.rand(17)
            return super()._calculate_rewards(*args, **kwargs)

    settings = dict(steps_per_generation=1, learning_rate=0.0)
    assert train(tmp_path / "a", **settings).sampled == train(tmp_path / "b", Drawing, **settings).sampled


def test_the_plan_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", max_steps=4, save_steps=2, save_strategy="steps")
    folder = tmp_path / "straight" / "checkpoint-2"
    path = folder / "run_state-00000.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    state = saved["parts"]["rollout"]
    assert state == straight.backend.state_dict()
    assert state["plan"]["rows"] == 8

    state["plan"]["rows"], state["plan"]["kv_tokens"] = 6, state["plan"]["kv_tokens"] + 7
    path.write_text(json.dumps(saved), encoding="utf-8")
    (folder / "manifest.json").unlink()
    resumed = train(tmp_path / "straight", max_steps=4, save_strategy="no", resume=str(folder))
    assert resumed.backend.state_dict() == state
    assert resumed.sampled == straight.sampled[2:]


def test_changing_the_temperature_changes_the_engine_s(tmp_path: Path) -> None:
    trainer = train(tmp_path, learning_rate=0.0)
    trainer.temperature = 1e-3
    rows = [{"prompt": "abc"}] * 8
    cold = [list(rollout.completion.ids) for rollout in trainer.rollout(rows)]
    assert all(ids == cold[0] for ids in cold)


def test_a_callback_s_rollouts_and_a_second_run_draw_numbers_of_their_own(tmp_path: Path) -> None:
    trainer = train(tmp_path, learning_rate=0.0)
    rows = [{"prompt": "abc"}] * 4
    first, second = ([list(r.completion.ids) for r in trainer.rollout(rows)] for _ in range(2))
    assert first != second
    before = list(trainer.sampled)
    trainer.sampled.clear()
    trainer.train()
    assert trainer.sampled[0] not in before


def test_the_precision_is_the_accelerator_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher sets it in the environment, where the config does not see it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = train(tmp_path, max_steps=1)
    assert trainer.accelerator.mixed_precision == "bf16"
    assert trainer.backend.engine.autocast_dtype is torch.bfloat16
