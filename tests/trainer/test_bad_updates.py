"""Updates whose loss or gradient is not finite: the weights never see them, their rows are kept, five are enough."""

import copy
import errno
import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.errors import AuditError
from gruppo.runs.checkpoints import problems
from gruppo.runs.read import Run
from gruppo.trainer import auditing
from tests.trainer.failures import by_place, change_loss
from tests.trainer.runs import Weights, logs, make

Spoil = Callable[[Any, Collection[int], pytest.MonkeyPatch], None]


def spoil_loss(trainer: Any, updates: Collection[int], patch: pytest.MonkeyPatch) -> None:
    """NaN in the loss of these updates, counted from 0."""
    change_loss(patch, lambda loss: loss * (math.nan if trainer.state.global_step in updates else 1.0))


def spoil_gradient(trainer: Any, updates: Collection[int], patch: pytest.MonkeyPatch) -> None:
    """Infinity in one element of one gradient."""

    def spoil(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        spoiled[0] = math.inf if trainer.state.global_step in updates else spoiled[0]
        return spoiled

    trainer.model.model.norm.weight.register_hook(spoil)


def spoiled(folder: Path, patch: pytest.MonkeyPatch, updates: Collection[int], spoil: Spoil, **settings: Any) -> Any:
    trainer = make(
        folder, settings.pop("trainer_class", GRPOTrainer), rewards=by_place, parity_check="off", **settings
    )
    spoil(trainer, updates, patch)
    return trainer


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in Run(folder).events() if event["event"] == kind]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Optimizer(Weights):
    """Keeps copies of the optimizer's state, too, as it is when each update begins."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        self.states.append(copy.deepcopy(optimizer.state_dict()["state"]))


EACH_WAY = pytest.mark.parametrize("spoil", [spoil_loss, spoil_gradient])


@EACH_WAY
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"trainer_class": RLOOTrainer, "beta": 0.1},
        {"packed_update": False, "gradient_accumulation_steps": 2},
        {"optim": "adamw_torch", "weight_decay": 0.1},
        {"max_grad_norm": 0.0},
    ],
    ids=["GRPO", "RLOO", "padded", "not fused", "not clipped"],
)
def test_a_broken_update_touches_neither_weights_nor_optimizer(
    settings: dict[str, Any], spoil: Spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Optimizer()
    trainer = spoiled(tmp_path, monkeypatch, {2}, spoil, callbacks=[seen], max_steps=4, **settings)
    trainer.train()
    assert not same(seen.before[1], seen.before[2]), "the update before it"
    assert same(seen.before[2], seen.before[3]), "the broken one"
    assert not same(seen.before[3], trainer.model.state_dict()), "the update after it"
    before, after = seen.states[2], seen.states[3]
    assert before.keys() == after.keys()
    assert before
    for number, values in before.items():
        assert same(values, after[number])


@EACH_WAY
def test_the_rows_of_a_broken_update_are_kept(
    spoil: Spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = spoiled(
        tmp_path, monkeypatch, {1}, spoil, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    trainer.train()
    (event,) = events(tmp_path, "update_skipped")
    assert (event["update"], event["rows"]) == (1, f"bad_updates/update-{trainer._run_id}-00000001-0000.safetensors")
    rows = load_file(tmp_path / event["rows"])
    recorded = Run(tmp_path).rollouts(["completion_tokens", "advantage"], updates=[1]).to_pylist()
    kept = [
        (ids[mask.bool()].tolist(), advantage.item())
        for part in ("0", "1")
        for ids, mask, advantage in zip(
            rows[f"{part}/completion_ids"], rows[f"{part}/completion_mask"], rows[f"{part}/advantages"], strict=True
        )
    ]
    assert sorted(kept) == sorted((row["completion_tokens"], row["advantage"]) for row in recorded)
    with safe_open(str(tmp_path / event["rows"]), "pt") as file:
        facts = json.loads(file.metadata()["gruppo"])
    assert facts["update"] == 1
    assert not all(math.isfinite(float(facts[name])) for name in ("loss", "grad_norm"))
    assert [line.get("audit/skipped_updates", 0) for line in logs(trainer)] == [0, 1, 1]
    assert [record for record in caplog.records if "is skipped" in record.getMessage()]


def test_few_of_many_broken_updates_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = spoiled(tmp_path, monkeypatch, range(24), spoil_loss, max_steps=24, max_bad_updates=25)
    trainer.train()
    assert len(list((tmp_path / "bad_updates").iterdir())) == 20
    assert [event["rows"] is None for event in events(tmp_path, "update_skipped")] == [False] * 20 + [True] * 4


def test_every_run_in_a_folder_keeps_rows_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "MOST_KEPT", 2)
    for runs in (1, 2):
        with monkeypatch.context() as patch:
            spoiled(tmp_path, patch, {0, 1, 2}, spoil_loss, max_steps=4).train()
        assert [event["rows"] is None for event in events(tmp_path, "update_skipped")] == [False, False, True]
        assert len(list((tmp_path / "bad_updates").iterdir())) == 2 * runs


def test_without_a_record_rows_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(tmp_path, monkeypatch, {1}, spoil_loss, max_steps=2, record="off").train()
    (path,) = (tmp_path / "bad_updates").iterdir()
    assert path.name.endswith("-00000001-0000.safetensors")


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_without_room_for_the_rows_the_run_goes_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(tensors: Any, path: Path, **kwargs: Any) -> None:
        path.write_bytes(b"the beginning")
        raise error

    monkeypatch.setattr(auditing, "save_file", refuse)
    trainer = spoiled(tmp_path, monkeypatch, {1}, spoil_loss, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert [event["rows"] for event in events(tmp_path, "update_skipped")] == [None]
    assert not list((tmp_path / "bad_updates").iterdir())
    assert "No disk space for the rows of update 1" in caplog.text


def test_rows_that_cannot_be_written_for_another_reason_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_updates").write_text("a file in the place of the folder")
    with pytest.raises(FileExistsError):
        spoiled(tmp_path, monkeypatch, {1}, spoil_loss, max_steps=3).train()


# ---- steps that are not ours to prevent


def pretend(trainer: Any, patch: pytest.MonkeyPatch, **attributes: tuple[Any, Any]) -> None:
    """While the trainer looks at an update, and only then: attributes of objects, by name."""
    look = trainer._get_grad_norm

    def pretending(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as for_now:
            for name, (place, value) in attributes.items():
                for_now.setattr(place, name, value)
            return look(*args, **kwargs)

    patch.setattr(trainer, "_get_grad_norm", pretending)


def pretend_deepspeed(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """It has made its step by then, and may not know a norm."""
    pretend(
        trainer,
        patch,
        distributed_type=(Accelerator, property(lambda accelerator: DistributedType.DEEPSPEED)),
        _get_grad_norm=(transformers.Trainer, lambda *args, **kwargs: None),
    )


@pytest.mark.parametrize("spoil", [None, spoil_gradient])
def test_deepspeed_looks_at_its_gradients_itself(
    spoil: Spoil | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = spoiled(tmp_path, monkeypatch, {1}, spoil or (lambda *args: None), max_steps=2, audit="error")
    pretend_deepspeed(trainer, monkeypatch)
    trainer.train()
    assert not events(tmp_path, "audit")


def test_a_broken_loss_under_deepspeed_is_said_to_have_reached_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = spoiled(tmp_path, monkeypatch, {1}, spoil_loss, max_steps=2)
    pretend_deepspeed(trainer, monkeypatch)
    trainer.train()
    (finding,) = events(tmp_path, "audit")
    assert finding["check"] == "nonfinite_loss"
    assert "Its step was taken before it could be skipped" in finding["message"]
    assert [event["prevented"] for event in events(tmp_path, "update_skipped")] == [False]


@EACH_WAY
def test_a_scaler_of_float16_finds_the_gradients_as_they_were(
    spoil: Spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = spoiled(tmp_path, monkeypatch, {1}, spoil, max_steps=2)
    pretend(trainer, monkeypatch, scaler=(trainer.accelerator, object()))
    trainer.train()
    assert trainer.model.model.norm.weight.isnan().any(), "no scaler was there to leave the step out"
    assert [event["check"] for event in events(tmp_path, "audit")] == ["nonfinite_loss"] * (spoil is spoil_loss)


@EACH_WAY
def test_five_in_a_row_end_the_run_with_a_checkpoint(
    spoil: Spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Weights()
    trainer = spoiled(tmp_path, monkeypatch, range(2, 99), spoil, callbacks=[seen], max_steps=20)
    checkpoint = tmp_path / "checkpoint-7"
    with pytest.raises(AuditError, match="5 updates in a row") as error:
        trainer.train()
    assert str(checkpoint) in str(error.value)
    assert trainer.state.global_step == 7
    assert problems(checkpoint) == []
    assert same(seen.before[2], trainer.model.state_dict()), "the weights of the last good update"
    assert all(
        torch.equal(weight, seen.before[2][name])
        for name, weight in load_file(checkpoint / "model.safetensors").items()
    )
    assert [event["bad_updates"] for event in events(tmp_path, "stopped")] == [5]
    assert len(events(tmp_path, "update_skipped")) == 5


def test_four_in_a_row_and_a_good_one_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {1, 2, 3, 4, 6, 7, 8, 9}
    trainer = spoiled(tmp_path, monkeypatch, bad, spoil_gradient, max_steps=11)
    trainer.train()
    assert trainer.state.global_step == 11
    assert not events(tmp_path, "stopped")
    assert [event["update"] for event in events(tmp_path, "update_skipped")] == sorted(bad)
    assert logs(trainer)[-1]["audit/skipped_updates"] == len(bad)


def test_a_run_that_was_stopped_goes_on_once_it_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_bad_updates": 2, "max_steps": 6}
    with pytest.raises(AuditError), monkeypatch.context() as patch:
        spoiled(tmp_path, patch, range(2, 99), spoil_loss, **settings).train()
    trainer = make(tmp_path, GRPOTrainer, rewards=by_place, parity_check="off", **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    assert trainer.audits.bad_updates.total == 2
    assert not trainer.audits.bad_updates.should_stop


def test_with_error_the_first_one_ends_the_run_and_the_weights_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Weights()
    trainer = spoiled(tmp_path, monkeypatch, {1}, spoil_gradient, callbacks=[seen], audit="error", max_steps=3)
    with pytest.raises(AuditError, match="nonfinite_gradient: The gradient of the update is"):
        trainer.train()
    assert same(seen.before[1], trainer.model.state_dict())
    assert len(events(tmp_path, "update_skipped")) == 1


@EACH_WAY
def test_with_off_too_no_broken_update_reaches_the_weights(
    spoil: Spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Weights()
    trainer = spoiled(tmp_path, monkeypatch, {1, 2}, spoil, callbacks=[seen], audit="off", max_steps=4)
    trainer.train()
    assert same(seen.before[1], seen.before[3]), "the broken ones"
    assert not same(seen.before[3], trainer.model.state_dict()), "the update after them"
    assert len(events(tmp_path, "update_skipped")) == 2
    assert not events(tmp_path, "audit"), "what is left out is said, but no check reports"
    assert [line.get("audit/skipped_updates", 0) for line in logs(trainer)] == [0, 1, 2, 2]
    assert caplog.text.count("The update is skipped") == 1


def test_with_off_too_the_limit_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = spoiled(tmp_path, monkeypatch, range(2, 99), spoil_gradient, audit="off", max_bad_updates=3, max_steps=9)
    with pytest.raises(AuditError, match="3 updates in a row"):
        trainer.train()
    assert problems(tmp_path / "checkpoint-5") == []
    assert all(weight.isfinite().all() for weight in load_file(tmp_path / "checkpoint-5/model.safetensors").values())
