"""Failures that say nothing are injected into real runs and seen; healthy runs have nothing to be seen."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.errors import AuditError
from gruppo.runs.read import Run
from gruppo.trainer import stepping
from gruppo.types import TrainBatch
from tests.helpers import prompts, tiny_gpt2, tiny_model
from tests.processes import run_together
from tests.tools.scripted import random_caller
from tests.trainer import audits_two_processes
from tests.trainer.failures import FAILURES, After, Failure, by_place, second_instead_of_first, spread_out
from tests.trainer.runs import SaveAt, logs, make
from tests.trainer.test_dynamic_sampling import dynamic

EACH_FAILURE = pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)


def findings(folder: Path) -> Counter[str]:
    """How often each check was violated, by the record of the run."""
    return Counter(event["check"] for event in Run(folder).events() if event["event"] == "audit")


def warned(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The checks that the log speaks of."""
    lines = [record.getMessage() for record in caplog.records if record.name == "gruppo.audit.findings"]
    return {line.removeprefix("Audit, ").partition(":")[0] for line in lines if "so far" not in line}


def counted(trainer: Any) -> Counter[str]:
    """How often each check was violated, by the metrics."""
    apart = {"audit/seconds", "audit/skipped_updates"}
    totals: Counter[str] = Counter()
    for line in logs(trainer):
        totals.update(
            {
                key.removeprefix("audit/"): value
                for key, value in line.items()
                if key.startswith("audit/") and key not in apart
            }
        )
    return totals


@pytest.mark.sampled(6)
@EACH_FAILURE
def test_a_failure_is_in_the_log_the_record_and_the_metrics(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = failure.trainer(tmp_path, monkeypatch)
    if failure.ends_with is None:
        trainer.train()
        assert counted(trainer) == findings(tmp_path)
    else:
        with pytest.raises(failure.ends_with):
            trainer.train()
    assert set(findings(tmp_path)) == warned(caplog) == failure.checks


@pytest.mark.sampled(15)
@EACH_FAILURE
def test_a_failure_ends_the_run_with_audit_error(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = failure.trainer(tmp_path, monkeypatch, audit="error")
    with pytest.raises(AuditError) as error:
        trainer.train()
    named = {line.partition(":")[0] for line in str(error.value).splitlines()}
    assert named
    assert named == set(findings(tmp_path)) <= failure.checks
    assert Run(tmp_path).events()[-1]["error"] == "AuditError"


@pytest.mark.sampled(15)
@pytest.mark.medium
@EACH_FAILURE
def test_nothing_is_said_with_audit_off(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = failure.trainer(tmp_path, monkeypatch, audit="off")
    if failure.ends_with is None:
        trainer.train()
    else:
        with pytest.raises(failure.ends_with):
            trainer.train()
    assert not warned(caplog)
    left_out = any(check.startswith("nonfinite") for check in failure.checks)  # no check decides about these
    told = {"started", "finished", "failed"} | ({"update_skipped"} if left_out else set())
    assert {event["event"] for event in Run(tmp_path).events()} <= told
    keys = {key for line in logs(trainer) for key in line if key.startswith(("audit/", "prompts/"))}
    assert keys == ({"audit/skipped_updates"} if left_out else set())
    assert (tmp_path / "bad_updates").exists() == left_out


def test_findings_between_two_logs_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = FAILURES["one_gradient_is_1000_times_the_usual"]
    trainer = failure.trainer(tmp_path, monkeypatch, max_steps=24, logging_steps=4)
    trainer.train()
    assert findings(tmp_path) == {"exploding_gradient": 1}
    assert [line.get("audit/exploding_gradient") for line in logs(trainer)] == [None] * 5 + [1]


# ---- tokens and rows between the rollout and the loss: there is no going on, also where findings are warnings


def lose_a_token(tensors: dict[str, Any]) -> dict[str, Any]:
    mask = tensors["completion_mask"].clone()
    mask[0, 0] = 0
    return tensors | {"completion_mask": mask}


def lose_a_row(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value if value.dim() == 0 else value[1:] for name, value in tensors.items()}


def repeat_a_row(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value if value.dim() == 0 else torch.cat([value, value[:1]]) for name, value in tensors.items()}


@pytest.mark.parametrize("change", [lose_a_token, lose_a_row, repeat_a_row])
@pytest.mark.parametrize("place", ["shuffle_sequence_dict", "trim", "split_tensor_dict"])
def test_what_is_lost_on_the_way_to_the_update_raises(
    place: str, change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(stepping, place)

    def changed(*args: Any) -> Any:
        result = function(*args)
        return [change(result[0]), *result[1:]] if isinstance(result, list) else change(result)

    monkeypatch.setattr(stepping, place, changed)
    trainer = make(tmp_path, GRPOTrainer, parity_check="off")
    with pytest.raises(AuditError, match="token_books: The token counts of the micro-batches of a generation"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert findings(tmp_path) == {"token_books": 1}


@pytest.mark.parametrize("change", [lose_a_token, lose_a_row, repeat_a_row])
@pytest.mark.parametrize("settings", [{"num_iterations": 2}, {"steps_per_generation": 2}], ids=lambda s: next(iter(s)))
def test_a_batch_that_changes_while_it_waits_raises(settings: dict[str, Any], change: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path, GRPOTrainer, parity_check="off", **settings)
    trainer.add_callback(After(1, lambda: trainer._queue.append(change(trainer._queue.pop()))))
    with pytest.raises(AuditError, match="token_books: The token counts of an update"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert findings(tmp_path) == {"token_books": 1}


# ---- the books of prompts


@pytest.mark.parametrize("dataset_size", [8, 7], ids=["even", "ragged"])
def test_the_books_balance_at_the_end_of_each_epoch(dataset_size: int, tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        GRPOTrainer,
        dataset=prompts(dataset_size),
        parity_check="off",
        audit="error",
        max_steps=-1,
        num_train_epochs=3,
    )
    trainer.train()
    left_over = dataset_size % 2
    assert trainer.audits.books.close(before=3) == []
    assert trainer.audits.books.metrics() == {
        "prompts/seen": 3 * (dataset_size - left_over),
        "prompts/skipped": 3 * left_over,
        "prompts/repeated": 0,
    }
    last = logs(trainer, "prompts/seen")[-1]
    assert (last["prompts/seen"], last["prompts/skipped"]) == (3 * (dataset_size - left_over), 2 * left_over)
    assert not findings(tmp_path)


def test_the_books_balance_with_prompts_that_dynamic_sampling_replaces(tmp_path: Path) -> None:
    trainer = dynamic(tmp_path, [1, 4], dataset=prompts(7), audit="error", max_steps=7, parity_check="off")
    trainer.train()
    books = trainer.audits.books
    assert books.seen == trainer.prompt_cursor.consumed == 3 * 6 + 3, "14 that have spread, of four in six"
    assert (books.repeated, books.skipped) == (0, 3), "the seventh prompt of each of the epochs that are over"
    assert not findings(tmp_path)


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}, {"dynamic_sampling": True}], ids=str)
def test_the_books_of_a_resumed_run_are_those_of_a_straight_one(settings: dict[str, Any], tmp_path: Path) -> None:
    def trainer(folder: str, **more: Any) -> Any:
        usual = {"dataset": prompts(7), "parity_check": "off", "audit": "error", "max_steps": 11}
        return make(tmp_path / folder, GRPOTrainer, **(usual | settings | more))

    straight, resumed = trainer("straight"), trainer("resumed")
    straight.train()
    trainer("resumed", callbacks=[SaveAt(5)]).train()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 11
    assert resumed.audits.books.metrics() == straight.audits.books.metrics()
    assert resumed.audits.books.skipped
    assert not findings(tmp_path / "resumed")


def test_every_run_of_a_trainer_keeps_books_of_its_own(tmp_path: Path) -> None:
    trainer = make(tmp_path, GRPOTrainer, parity_check="off", audit="error", max_steps=3)
    for _ in range(2):
        trainer.train()
        assert trainer.audits.books.metrics() == {"prompts/seen": 6, "prompts/skipped": 0, "prompts/repeated": 0}


def test_a_prompt_left_out_of_a_ragged_epoch_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second_instead_of_first(monkeypatch)
    trainer = make(tmp_path, GRPOTrainer, dataset=prompts(7), parity_check="off", max_steps=4)
    trainer.train()
    skipped = next(event for event in Run(tmp_path).events() if event.get("check") == "prompt_skipped")
    assert skipped["values"] == {"epoch": 0.0, "skipped": 2.0, "expected": 1.0}


# ---- what looks like a failure and was asked for


def resumed_after(update: int, folder: Path, first: dict[str, Any], then: dict[str, Any]) -> Any:
    """A run over two epochs of four updates that is gone on with after an update, under other settings."""
    usual = {"parity_check": "off", "max_steps": 8, "resume_allow_changes": ["*"]}
    make(folder, GRPOTrainer, callbacks=[SaveAt(update)], **(usual | first)).train()
    trainer = make(folder, GRPOTrainer, **(usual | {"audit": "error"} | then))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{update}"))
    assert trainer.state.global_step == 8
    return trainer


def test_books_that_were_not_kept_are_not_gone_on_with(tmp_path: Path) -> None:
    trainer = resumed_after(2, tmp_path, {"audit": "off"}, {})
    assert trainer.audits.books.metrics() == {"prompts/seen": 12, "prompts/skipped": 0, "prompts/repeated": 0}


def test_a_run_that_sees_the_epoch_again_on_purpose_has_no_books(tmp_path: Path) -> None:
    trainer = resumed_after(2, tmp_path, *[{"ignore_data_skip": True}] * 2)
    assert trainer.audits.books.prompts is None
    assert trainer.audits.books.seen == 4 + 12


def test_a_resumed_run_without_audits_needs_no_books(tmp_path: Path) -> None:
    assert resumed_after(2, tmp_path, {}, {"audit": "off"}).audits.books.prompts == 8


@pytest.mark.parametrize("settings", [{}, {"dynamic_sampling": True}], ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_epoch_that_is_stopped_on_purpose_is_no_finding(
    accumulation: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    trainer = make(
        tmp_path,
        GRPOTrainer,
        parity_check="off",
        audit="error",
        max_steps=8,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        **settings,
    )
    trainer.add_callback(After(1, lambda: setattr(trainer.control, "should_epoch_stop", True)))
    trainer.train()
    # It is counted, though. Dynamic sampling goes on with the prompts that were left.
    assert trainer.audits.books.skipped == (0 if settings else 6)
    assert not findings(tmp_path)


def test_the_epoch_after_one_that_was_stopped_is_looked_at_again(tmp_path: Path) -> None:
    trainer = make(tmp_path, GRPOTrainer, parity_check="off", max_steps=9)
    trainer.add_callback(After(1, lambda: setattr(trainer.control, "should_epoch_stop", True)))
    trainer.add_callback(After(2, lambda: next(trainer._epoch_iterator)))
    trainer.train()
    assert [event["values"]["epoch"] for event in Run(tmp_path).events() if "check" in event] == [1]


OFTEN = {"rewards": by_place, "num_iterations": 3, "max_completion_length": 2, "lr_scheduler_type": "constant"}
LONG = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 20}
GREEDY = {"generation_kwargs": {"do_sample": False}}

AS_ASKED: dict[str, dict[str, Any]] = {
    "clipped": {**OFTEN, "optim": "sgd", "learning_rate": 0.3},
    "certain": {**OFTEN, "num_iterations": 1, "learning_rate": 10.0},
    "top_entropy_quantile": {"top_entropy_quantile": 0.05},
    "greedy": {**LONG, **GREEDY},
    "greedy, transformers": {**LONG, **GREEDY, "rollout_backend": "transformers"},
    "top_k 1": {**LONG, "top_k": 1},
}


@pytest.mark.parametrize("settings", AS_ASKED.values(), ids=AS_ASKED)
def test_what_the_settings_explain_is_no_finding(settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = make(tmp_path, GRPOTrainer, parity_check="off", max_steps=9, **settings)
    trainer.train()
    assert not {"zero_gradient", "duplicates", "entropy"} & set(findings(tmp_path))


@pytest.mark.parametrize(
    ("settings", "moving"),
    [
        ({}, [True, True, False, False]),
        ({"top_entropy_quantile": 0.5}, [False] * 4),
        ({"off_policy_mask_threshold": 0.5}, [False] * 4),
    ],
    ids=str,
)
def test_rows_that_must_have_a_gradient(settings: dict[str, Any], moving: list[bool], tmp_path: Path) -> None:
    """Of four rows, the third has no advantage and the fourth was sampled before."""
    trainer = make(tmp_path, GRPOTrainer, **settings)
    trainer.state.global_step = 6
    ids = torch.ones(4, 3, dtype=torch.long)
    batch = TrainBatch(
        ids, ids, ids, ids, advantages=torch.tensor([1.0, -1.0, 0.0, 1.0]), sampled_at=torch.tensor([5, 5, 5, 4])
    )
    assert trainer._must_move(batch).tolist() == moving
    batch.importance_sampling_ratio = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    assert trainer._must_move(batch).tolist() == [moving[0], False, False, False]
    batch.sampled_at = None
    assert not trainer._must_move(batch).any(), "nobody knows"


# ---- going on


def test_a_resumed_run_finds_frozen_weights_where_the_straight_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = FAILURES["steps_are_rounded_away"]
    straight = frozen.trainer(tmp_path / "straight", monkeypatch, max_steps=7)
    straight.train()
    frozen.trainer(tmp_path / "resumed", monkeypatch, max_steps=7, callbacks=[SaveAt(2)]).train()
    resumed = frozen.trainer(tmp_path / "resumed", monkeypatch, max_steps=7)
    resumed.train(resume_from_checkpoint=True)
    expected = [None, None, None, 1, 1, 1, 0]  # the last one has a learning rate of 0
    for trainer in (straight, resumed):
        assert [line.get("audit/frozen_weights") for line in logs(trainer)] == expected


# ---- several processes


@pytest.mark.medium
def test_what_another_process_finds_is_recorded_and_counted(tmp_path: Path) -> None:
    run_together(2, audits_two_processes.__name__, tmp_path)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert zero == one, "every process knows the same"
    assert zero["counts"] == {"empty": 1, "nonfinite_loss": 1, "nonfinite_gradient": 1}
    assert zero["logged"] == [{}, {"audit/empty": 1}, {"audit/empty": 0}]
    assert zero["skipped"] == 1
    assert all(map(math.isfinite, zero["weights"]))
    seen = [event for event in Run(tmp_path).events() if event["event"] == "audit"]
    assert [(event["check"], event.get("process")) for event in seen] == [
        ("empty", 1),
        ("nonfinite_loss", None),  # all processes know it
        ("nonfinite_gradient", None),
    ]
    assert len(list((tmp_path / "bad_updates").iterdir())) == 2, "the rows of both"


# ---- nothing to be seen


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def adapter() -> Any:
    return pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


HEALTHY: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "dynamic sampling": lambda: {"dynamic_sampling": True},
    "num_iterations": lambda: {"num_iterations": 2},
    "steps_per_generation": lambda: {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "LoRA": lambda: {"peft_config": adapter()},
    "top_k": lambda: {"top_k": 5},
    "temperature": lambda: {"temperature": 0.7, "model": spread_out()},
    "bf16": lambda: {"bf16": True},
    "beta": lambda: {"beta": 0.1},
    "transformers": lambda: {"rollout_backend": "transformers"},
    "padded": lambda: {"packed_update": False},
    "dropout": lambda: {"model": tiny_gpt2()},
    "bfloat16 weights": lambda: {"model": tiny_model().bfloat16()},
    "updates without a loss token": lambda: {"mask_truncated_completions": True},
    "a stream": lambda: {"dataset": prompts(8).to_iterable_dataset()},
    "evaluation": lambda: {"eval_dataset": prompts(4), "eval_strategy": "steps", "eval_steps": 3},
}


@pytest.mark.sampled(5)
@pytest.mark.medium
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("settings", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_has_no_finding(
    settings: Callable[[], dict[str, Any]], trainer_class: Any, tmp_path: Path
) -> None:
    usual = {"parity_check": "off", "max_steps": 10, "audit": "error"}
    trainer = make(tmp_path, trainer_class, **(usual | settings()))
    trainer.train()
    assert trainer.state.global_step == 10
    assert not findings(tmp_path)
    assert not counted(trainer)
    assert all(line["audit/seconds"] >= 0 for line in logs(trainer))


@pytest.mark.medium
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_a_healthy_run_with_tools_has_no_finding(trainer_class: Any, tmp_path: Path) -> None:
    trainer = random_caller(
        tmp_path,
        "add",
        {"a": 1, "b": 2},
        trainer_class=trainer_class,
        arguments={"tools": [add]},
        audit="error",
        max_steps=10,
    )
    trainer.train()
    assert sum(line["tools/call_frequency"] for line in logs(trainer, "tools/call_frequency"))
    assert not findings(tmp_path)
    assert not counted(trainer)
