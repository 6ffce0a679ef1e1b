"""What a callback or a subclass may change while a run goes on, and what it must not change by accident."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import TrainerCallback

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.errors import ConfigError
from tests.helpers import base_args, chats, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.trainer.scripted import make_trainer


def trainer(folder: Path, **kwargs: Any) -> GRPOTrainer:
    callbacks = kwargs.pop("callbacks", None)
    rewards = kwargs.pop("rewards", length_reward)
    dataset = kwargs.pop("dataset", prompts())
    return GRPOTrainer(
        model=tiny_model(),
        reward_funcs=rewards,
        args=GRPOConfig(**base_args(folder, **kwargs)),
        train_dataset=dataset,
        eval_dataset=prompts(2),
        processing_class=tiny_tokenizer(),
        callbacks=callbacks,
    )


class Schedule(TrainerCallback):
    """Sets an attribute of the trainer at the beginning of each step."""

    def __init__(self, name: str, values: list[float]):
        self.name, self.values, self.trainer = name, values, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        setattr(self.trainer, self.name, self.values[state.global_step])


def run_with(folder: Path, name: str, values: list[float], **kwargs: Any) -> GRPOTrainer:
    schedule = Schedule(name, values)
    schedule.trainer = run = trainer(folder, callbacks=[schedule], max_steps=len(values), **kwargs)
    run.train()
    return run


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_beta_may_be_scheduled(tmp_path: Path) -> None:
    """Within one generation: off, then on. The reference has scored it either way."""
    settings = {"beta": 0.1, "num_iterations": 3, "learning_rate": 0.1}
    off_then_on = run_with(tmp_path, "beta", [0.0, 0.0, 100.0], **settings)
    always_off = run_with(tmp_path, "beta", [0.0, 0.0, 0.0], **settings)
    assert losses(off_then_on)[:2] == losses(always_off)[:2]
    assert losses(off_then_on)[2] > losses(always_off)[2] + 1e-3
    assert off_then_on.args.beta == 0.1


def test_beta_needs_a_reference(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    with pytest.raises(ConfigError, match="has no reference model"):
        run.beta = 0.1


def test_clip_widths_and_temperature_may_be_scheduled(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.epsilon_high, run.epsilon_low, run.temperature = 0.5, 0.3, 0.25
    assert (run.loss_settings.epsilon_high, run.loss_settings.epsilon_low) == (0.5, 0.3)
    assert run.generation_config.temperature == 0.25
    ids = torch.tensor([[20, 21, 22]])
    scored, *_ = run._get_per_token_logps_and_entropies(run.model, ids, torch.ones_like(ids), 1)
    logits = run.model(ids).logits[0, 1] / 0.25
    assert scored.item() == pytest.approx(logits.log_softmax(-1)[22].item(), abs=1e-5)
    assert run.args.temperature == 1.0


def test_sampling_settings_and_rewards_may_be_replaced(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    run.generation_config.max_new_tokens = 2
    run.reward_funcs = [lambda completions, **kwargs: [7.0] * len(completions)]
    run.train()
    assert run.state.log_history[0]["completions/max_length"] <= 2
    assert run.state.log_history[0]["reward"] == 7.0
    with pytest.raises(ConfigError, match="2 reward functions cannot take the place of 1"):
        run.reward_funcs = [length_reward, length_reward]
    with pytest.raises(ConfigError, match="A reward model cannot be replaced"):
        run.reward_funcs = [torch.nn.Linear(1, 1)]


def test_evaluation_passes_through_prepare_inputs(tmp_path: Path) -> None:
    class Counting(GRPOTrainer):
        seen: ClassVar[list[str]] = []

        def _prepare_inputs(self, inputs: Any) -> Any:
            self.seen.append(self.mode)
            return super()._prepare_inputs(inputs)

    run = make_trainer("dapo", tmp_path, subclass=Counting, per_device_train_batch_size=4)
    run.train()
    run.evaluate(prompts(2))
    assert {"train", "eval"} <= set(run.seen)


def test_a_reward_that_changes_what_it_gets_changes_nothing_else(tmp_path: Path) -> None:
    seen: list[int] = []

    def meddles(prompts: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
        for prompt in prompts:
            prompt.append({"role": "user", "content": "more"})
        return [0.0] * len(prompts)

    def counts(prompts: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(len(prompt) for prompt in prompts)
        return [float(i) for i in range(len(prompts))]

    run = trainer(tmp_path, rewards=[meddles, counts], dataset=chats(), max_steps=1)
    run.train()
    assert set(seen) == {1}, "each reward has copies of its own"
    assert all(len(row["prompt"]) == 1 for row in run.train_dataset)


def test_statistics_of_an_interrupted_update_are_forgotten(tmp_path: Path) -> None:
    class Interrupted(GRPOTrainer):
        stops = True

        def _loss_of_update(self, *args: Any) -> Any:
            loss = super()._loss_of_update(*args)
            if self.stops:
                raise KeyboardInterrupt
            return loss

    run = make_trainer("dapo", tmp_path, subclass=Interrupted, per_device_train_batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.stops = False
    run.train()
    assert len([entry for entry in run.state.log_history if "entropy" in entry]) == 1
    straight = make_trainer("dapo", tmp_path, per_device_train_batch_size=4)
    straight.train()
    assert run.state.log_history[0]["entropy"] == pytest.approx(straight.state.log_history[0]["entropy"], abs=1e-9)


@pytest.mark.parametrize("name", ["get_off_policy_mask", "get_high_entropy_mask", "get_gamma_weights"])
def test_overriding_a_formula_that_is_not_called_is_refused(name: str, tmp_path: Path) -> None:
    subclass = type("Sub", (GRPOTrainer,), {name: lambda *args, **kwargs: None})
    with pytest.raises(NotImplementedError, match=f"overrides `{name}`"):
        make_trainer("dapo", tmp_path, subclass=subclass, per_device_train_batch_size=4)


@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_a_bfloat16_policy_starts_at_ratio_one(kind: Any, config: Any, tmp_path: Path) -> None:
    """Old and new log-probs of the same weights: rounded to bfloat16, their sums would differ by whole nats."""
    settings = base_args(tmp_path, num_iterations=2, max_steps=1, max_completion_length=60, epsilon=1e-3)
    run = kind(
        model=tiny_model().bfloat16(),
        reward_funcs=length_reward,
        args=config(**settings),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    batch = run.collect(run.train_dataset.select([0, 0, 1, 1]).to_list())
    old = batch.old_logps if batch.old_per_token_logps is None else batch.old_per_token_logps
    assert old.dtype == torch.float32
    run.train()
    assert run.state.log_history[0]["clip_ratio/region_mean"] == 0
