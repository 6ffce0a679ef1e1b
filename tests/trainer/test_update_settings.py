"""Settings, patches and callbacks around the update: each works, or is refused by name."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from gruppo import GRPOTrainer
from gruppo.errors import ConfigError, ParityError
from gruppo.policy import packed as packed_policy
from gruppo.policy.packing import cut_rows
from gruppo.policy.unwrap import is_noisy
from gruppo.trainer.construct import packing
from tests.engine.models import build
from tests.helpers import prompts, tiny_model
from tests.trainer.runs import RecordedGRPO, logs, make, run

# ---- what the sampler knows, and when it is of no use


@pytest.mark.parametrize("steps", [1, 2])
def test_a_sampler_of_another_temperature_gives_no_log_probs(steps: int, tmp_path: Path) -> None:
    settings = {"generation_kwargs": {"temperature": 0.5}, "num_iterations": steps, "max_steps": 2}
    trainer = run(tmp_path, GRPOTrainer, **settings)
    assert trainer.state.global_step == 2
    assert not trainer.parity.reuses_engine_logps
    assert "sampling/sampling_logp_difference/mean" not in logs(trainer)[0]


class Cool(TrainerCallback):
    """Lowers the temperature of sampling, and not that of the loss, after the first generation."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.trainer.generation_config.temperature = 0.5


def test_log_probs_are_not_reused_once_the_sampler_is_cooled(tmp_path: Path) -> None:
    runs = []
    for reuse in (True, False):
        callback = Cool()
        settings = {"num_iterations": 2, "max_steps": 4, "reuse_sampling_logps": reuse}
        trainer = make(tmp_path, GRPOTrainer, callbacks=[callback], **settings)
        callback.trainer = trainer
        trainer.train()
        runs.append(trainer)
    assert runs[0].parity.reuses_engine_logps
    for a, b in zip(*(trainer.model.parameters() for trainer in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---- who sees padded rows


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"neftune_noise_alpha": 5.0}, "NEFTune"),
        ({"pad_to_multiple_of": 8}, "requests padding"),
        ({"debug": "underflow_overflow"}, "hooks every layer"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_needs_padded_rows_gets_them(
    settings: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert make(tmp_path, GRPOTrainer, **settings).packed is None
    assert reason in caplog.text
    with pytest.raises(ConfigError, match="max_tokens_per_micro_batch=50 needs packed rows"):
        make(tmp_path, GRPOTrainer, max_tokens_per_micro_batch=50, **settings)


def test_optimizers_that_step_in_the_backward_pass_get_one(tmp_path: Path) -> None:
    trainer = make(tmp_path, GRPOTrainer)
    trainer.args.optim = "lomo"
    assert packing.packed_policy(trainer) is None


def test_a_patched_method_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    original = GRPOTrainer._compute_loss

    def patched(self: Any, model: Any, inputs: Any) -> Tensor:
        called.append(1)
        return original(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched)
    trainer = run(tmp_path, GRPOTrainer, max_steps=1)
    assert trainer.packed is None
    assert called


def test_a_hook_on_the_head_is_not_passed_by(tmp_path: Path) -> None:
    model, seen = tiny_model(), []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    trainer = run(tmp_path, GRPOTrainer, model=model, max_steps=1)
    assert trainer.packed is None
    assert max(seen) > 1


def test_a_classifier_is_no_noise() -> None:
    model = build("gpt-neox").train()
    model.config.classifier_dropout = 0.1
    assert not is_noisy(model, model)
    model.config.hidden_dropout = 0.1
    assert is_noisy(model, model)


# ---- plans and guards over several runs


def test_a_resumed_run_follows_its_own_settings(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    first = {"max_tokens_per_micro_batch": 100, "gradient_checkpointing": True}
    make(tmp_path, GRPOTrainer, max_steps=1, **saving, **first).train()
    settings = {"max_tokens_per_micro_batch": 20, "gradient_checkpointing": False}
    settings["resume_allow_changes"] = [*settings, "max_steps"]
    resumed = make(tmp_path, GRPOTrainer, max_steps=2, **saving, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert (resumed.planner.in_force.tokens, resumed.planner.in_force.checkpointing) == (20, False)
    assert not resumed.model.is_gradient_checkpointing


def test_a_run_that_was_stopped_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, GRPOTrainer, max_steps=1)
    attention = packed_policy.packed_attention
    monkeypatch.setattr(
        packed_policy, "packed_attention", lambda *args, scale, **kw: attention(*args, scale=1.2 * scale, **kw)
    )
    for _ in range(2):
        with pytest.raises(ParityError):
            trainer.train()
    assert trainer.state.global_step == 0


def test_a_generation_without_loss_tokens_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the first completions are cut off and masked: what is broken is found with the second ones."""

    class Lengthen(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *arguments: Any, **kwargs: Any) -> None:
            trainer.generation_config.max_new_tokens = 8

    trainer = make(tmp_path, GRPOTrainer, mask_truncated_completions=True, max_completion_length=8, max_steps=3)
    trainer.generation_config.max_new_tokens = 1
    trainer.add_callback(Lengthen())
    score = packed_policy.PackedPolicy.score

    def broken(*arguments: Any, **kwargs: Any) -> Any:
        scores = score(*arguments, **kwargs)
        return scores._replace(logps=scores.logps * 1.5)

    monkeypatch.setattr(packed_policy.PackedPolicy, "score", broken)
    with pytest.raises(ParityError):
        trainer.train()
    assert trainer.state.global_step > 0, "there was nothing to compare before the first update"


def test_rows_are_stale_one_by_one(tmp_path: Path) -> None:
    """Three slices to a generation, two to an update: half of the second update's rows are of older weights."""
    settings = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    trainer = run(tmp_path, RecordedGRPO, max_steps=3, num_generations=4, logging_steps=1, **settings)
    first, second, third = (log["ledger/tokens/stale"] for log in logs(trainer)[:3])
    assert first == 0
    assert 0 < second < third


class Averaging(torch.optim.SGD):
    """As optimizers without a schedule: the model has other weights in evaluation."""

    averaged = False

    def train(self) -> None:
        self.averaged = False

    def eval(self) -> None:
        self.averaged = True


def test_rollouts_are_made_with_the_weights_that_are_trained(tmp_path: Path) -> None:
    class Watching(RecordedGRPO):
        averaged: list[bool] = []  # noqa: RUF012

        def collect(self, rows: Any) -> Any:
            if self.mode == "train":
                self.averaged.append(self.optimizer.optimizer.averaged)
            return super().collect(rows)

    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(2)}
    trainer = make(tmp_path, Watching, max_steps=3, **settings)
    trainer.optimizer = Averaging(trainer.model.parameters(), lr=0.1)
    trainer.train()
    assert trainer.averaged == [False] * 3


def test_many_long_rows_of_one_prompt_are_cut_at_once() -> None:
    tails = [4500 + i % 7 for i in range(1024)]
    cut = cut_rows("a" * 1024, [100] * 1024, tails, 8192)
    assert sorted(i for part in cut for i in part) == list(range(1024))
    assert {len(part) for part in cut} == {1}
    assert len(cut_rows("a" * 1024, [100] * 1024, [tail // 10 for tail in tails], 8192)) == -(-1024 // 17)


def test_a_run_that_looks_for_overflows_comes_to_its_end(tmp_path: Path) -> None:
    trainer = run(tmp_path, GRPOTrainer, debug="underflow_overflow", max_steps=2)
    assert trainer.state.global_step == 2
