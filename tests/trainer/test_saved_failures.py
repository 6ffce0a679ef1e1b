"""An exception ends a run, but costs nothing that was finished: it is saved, and the exception says where."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from transformers import TrainerCallback

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.errors import AuditError, DataError
from gruppo.runs.checkpoints import problems
from gruppo.runs.read import Run
from tests.helpers import prompts, timeless
from tests.trainer.failures import change_loss
from tests.trainer.runs import RecordedGRPO, logs, make, token_ids

MAX_STEPS = 6


class GoneError(ConnectionError):
    """What a server that is away raises."""


class FailsOnce:
    """A reward, rollout or callback that raises at its n-th call, if it is to fail at all."""

    def __init__(self, at: int):
        self.at, self.calls = at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise GoneError("the server is away")


def in_rollout(fail: Callable[[], None]) -> dict[str, Any]:
    def rollout(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
        fail()
        ids = [token_ids("abcdef"[: 1 + (i + len(prompt)) % 4] + "<eos>") for i, prompt in enumerate(prompt_list)]
        tokens = trainer.processing_class(prompt_list)["input_ids"]
        return {"prompt_ids": tokens, "completion_ids": ids, "logprobs": None}

    return {"rollout_func": rollout, "trainer_class": GRPOTrainer}


def in_forward(fail: Callable[[], None]) -> dict[str, Any]:
    class Fails(GRPOTrainer):
        def _pack_loss(self, *args: Any) -> Any:
            fail()
            return super()._pack_loss(*args)

    return {"trainer_class": Fails}


def in_evaluation(fail: Callable[[], None]) -> dict[str, Any]:
    class Fails(GRPOTrainer):
        def collect(self, rows: Any) -> Any:
            if self.mode == "eval":
                fail()
            return super().collect(rows)

    return {
        "trainer_class": Fails,
        "eval_dataset": prompts(4),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
    }


def result(trainer: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    return [timeless(line) for line in logs(trainer)], trainer.model.state_dict()


def started(folder: Path, fails: Callable[..., dict[str, Any]], at: int, **more: Any) -> Any:
    settings = {"max_steps": MAX_STEPS, "parity_check": "off", "learning_rate": 1e-2, **fails(FailsOnce(at)), **more}
    return make(folder, settings.pop("trainer_class"), **settings)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fails", "at"), [(in_rollout, 3), (in_forward, 4), (in_evaluation, 3)], ids=["rollout", "pass", "evaluation"]
)
@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "beta": 0.1}], ids=["GRPO", "iterations"])
def test_a_run_that_failed_goes_on_as_if_it_had_not(
    fails: Any, at: int, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = started(tmp_path / "straight", fails, 0, **settings)
    straight.train()
    failed = started(tmp_path / "failed", fails, at, **settings)
    with pytest.raises(GoneError, match="the server is away") as raised:
        failed.train()
    assert str(raised.value) == "the server is away", "it is raised as it was"
    step = failed.state.global_step
    assert step >= 2, "there was something to lose"
    checkpoint = tmp_path / f"failed/checkpoint-{step}"
    assert problems(checkpoint) == []
    (note,) = raised.value.__notes__
    assert str(checkpoint) in note
    assert note in caplog.text
    assert Run(tmp_path / "failed").events()[-1]["error"] == "GoneError"
    resumed = started(tmp_path / "failed", fails, 0, **settings)
    resumed.train(resume_from_checkpoint=True)
    (lines, weights), (expected_lines, expected) = result(resumed), result(straight)
    assert lines == expected_lines
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_a_row_of_a_stream_that_is_too_long(tmp_path: Path) -> None:
    def stream() -> Iterator[dict[str, str]]:
        for i in range(40):
            yield {"prompt": "x" * 300 if i == 7 else f"p{i}:"}

    dataset = IterableDataset.from_generator(stream)
    with pytest.raises(DataError, match="A prompt has 300 tokens") as raised:
        make(tmp_path, GRPOTrainer, dataset=dataset, max_steps=9, shuffle_dataset=False, parity_check="off").train()
    assert problems(tmp_path / "checkpoint-3") == []
    assert "checkpoint-3" in raised.value.__notes__[0]


def test_where_nothing_was_finished_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(GoneError) as raised:
        started(tmp_path, in_rollout, 1).train()
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not hasattr(raised.value, "__notes__")


def test_with_save_on_signal_off_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(GoneError):
        started(tmp_path, in_rollout, 4, save_on_signal=False).train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_an_update_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    with pytest.raises(GoneError) as raised:
        started(tmp_path, in_rollout, 4, save_strategy="steps", save_steps=3).train()
    assert len([event for event in Run(tmp_path).events() if event["event"] == "checkpoint"]) == 1
    assert "checkpoint-3" in raised.value.__notes__[0]


def test_a_resumed_run_that_fails_at_once_names_where_it_began(tmp_path: Path) -> None:
    with pytest.raises(GoneError):
        started(tmp_path, in_rollout, 4).train()
    with pytest.raises(GoneError) as raised:
        started(tmp_path, in_rollout, 1).train(resume_from_checkpoint=True)
    assert str(tmp_path / "checkpoint-3") in raised.value.__notes__[0]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_failure_of_the_saving_does_not_hide_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = started(tmp_path, in_rollout, 4)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", refuse)
    with pytest.raises(GoneError, match="the server is away") as raised:
        trainer.train()
    assert "Update 3 could not be saved: PermissionError: not here" in caplog.text
    assert not hasattr(raised.value, "__notes__")
    assert not list(tmp_path.glob("checkpoint-*"))


class FailsInStep(TrainerCallback):
    """Right after the optimizer's step, before the update counts as one."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise GoneError("in the middle")


def test_weights_in_the_middle_of_an_update_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(GoneError, match="in the middle"):
        make(tmp_path, RecordedGRPO, callbacks=[FailsInStep()], max_steps=6).train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_an_audit_of_an_update_that_happened_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, RLOOTrainer, audit="error", max_steps=6, parity_check="off")
    change_loss(monkeypatch, lambda loss: loss * (0.0 if trainer.state.global_step == 3 else 1.0))
    with pytest.raises(AuditError, match="zero_gradient"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert not list(tmp_path.glob("checkpoint-*"))
