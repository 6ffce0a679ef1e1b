"""Runs that are stopped, resumed, resumed with other settings, or begun anew in the folder of another."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from gruppo import GRPOTrainer
from gruppo.errors import CheckpointError, ConfigError
from gruppo.runs import Run, checkpoints
from tests.helpers import length_reward, prompts
from tests.trainer.runs import logs, make
from tests.trainer.test_batching import as_plain


class At(TrainerCallback):
    """Do something after an update."""

    def __init__(self, step: int, what: Any):
        self.step, self.what = step, what

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.what()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise RuntimeError("killed")


def run(folder: Path, *, resume: Any = None, **settings: Any) -> Any:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = make(folder, GRPOTrainer, **(saving | settings))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def stopped(folder: Path, step: int, **settings: Any) -> Any:
    with pytest.raises(SystemExit) as caught:
        run(folder, callbacks=[At(step, terminate)], **settings)
    return caught.value.code


def killed(folder: Path, step: int, **settings: Any) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        run(folder, callbacks=[At(step, fail)], **settings)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


def equal(a: Any, b: Any) -> bool:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


EVALUATED: dict[str, Any] = {"eval_dataset": prompts(2), "per_device_eval_batch_size": 2}


# ---- stopped


def test_what_was_saved_for_a_signal_stays(tmp_path: Path) -> None:
    """Trainer removes all but the best at the end of a run; this one has not ended."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    code = stopped(tmp_path, 3, max_steps=6, metric_for_best_model="eval_reward", **best, **EVALUATED)
    assert code == 75
    assert "checkpoint-3" in names(tmp_path)
    assert checkpoints.problems(tmp_path / "checkpoint-3") == []


@pytest.mark.parametrize("strategy", ["eval_strategy", "logging_strategy"])
@pytest.mark.parametrize("step", [2, 4], ids=["in an epoch", "at its end"])
def test_what_belongs_to_the_end_of_an_epoch_happens_there(strategy: str, step: int, tmp_path: Path) -> None:
    settings = {"max_steps": 6, "dataset": prompts(8), strategy: "epoch", **EVALUATED}  # four updates an epoch
    straight = run(tmp_path / "straight", **settings)
    assert stopped(tmp_path / "stopped", step, **settings) == 75
    events = [e["name"] for e in Run(tmp_path / "stopped").events() if e["event"] == "checkpoint"]
    assert events.count(f"checkpoint-{step}") == len(events) - len(set(events)) + 1
    resumed = run(tmp_path / "stopped", resume=True, **settings)
    assert equal(straight, resumed)
    lines = [
        [(line["update"], line["kind"], line.get("reward"), line.get("eval_reward")) for line in Run(f).metrics()]
        for f in (tmp_path / "straight", tmp_path / "stopped")
    ]
    assert lines[0] == lines[1]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = run(tmp_path, callbacks=[At(1, lambda: os.kill(os.getpid(), signal.SIGINT))])
        assert trainer.state.global_step == 4
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_in_the_last_update_does_not_end_the_program(tmp_path: Path) -> None:
    assert run(tmp_path, callbacks=[At(4, terminate)]).state.global_step == 4


def full_disk(trainer: Any) -> None:
    def save(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer._save_optimizer_and_scheduler = save


def test_a_stop_that_could_not_be_saved_says_so(tmp_path: Path) -> None:
    trainer = make(tmp_path, GRPOTrainer, max_steps=4, callbacks=[At(2, terminate)])
    full_disk(trainer)
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 74
    assert not names(tmp_path)


def test_a_last_checkpoint_that_could_not_be_written_is_an_error(tmp_path: Path) -> None:
    trainer = make(tmp_path, GRPOTrainer, max_steps=2, save_strategy="steps", save_steps=2)
    full_disk(trainer)
    with pytest.raises(CheckpointError, match="the last one, could not be written"):
        trainer.train()


# ---- whose checkpoints


def test_a_run_without_a_record_is_the_same_run(tmp_path: Path) -> None:
    killed(tmp_path, 3)
    killed(tmp_path, 5, resume=True, record="off", max_steps=4 + 2, resume_allow_changes=["max_steps"])
    resumed = run(tmp_path, resume=True, max_steps=6, resume_allow_changes=["max_steps"])
    assert Path(resumed._resumed_from).name == "checkpoint-4"


def test_a_new_run_does_not_go_on_from_an_old_one(tmp_path: Path) -> None:
    run(tmp_path)
    killed(tmp_path, 1, record="off")
    with pytest.raises(CheckpointError, match="another run"):
        run(tmp_path, resume=True)


def test_a_plain_checkpoint_is_gone_on_from_again(tmp_path: Path) -> None:
    killed(tmp_path, 3)
    as_plain(tmp_path / "checkpoint-2")
    (tmp_path / "run.json").unlink()
    killed(tmp_path, 3, resume=True)  # before a checkpoint of its own
    assert run(tmp_path, resume=True).state.global_step == 4


def test_going_back_loses_nothing(tmp_path: Path) -> None:
    run(tmp_path, max_steps=6)
    before = Run(tmp_path).metrics()
    killed(tmp_path, 4, max_steps=6, resume=str(tmp_path / "checkpoint-2"))
    kept = sorted(tmp_path.glob("earlier/*"))[-1]
    assert names(kept) == {"checkpoint-4", "checkpoint-6"}
    tail = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert tail == [line for line in before if line["update"] > 2]
    assert len(list(kept.glob("rollouts/*.parquet"))) == 4
    assert sorted(path.name[:8] for path in kept.glob("updates/*.parquet")) == [f"0000000{n}" for n in (3, 4, 5, 6)]
    resumed = run(tmp_path, max_steps=6, resume=True)
    assert resumed.state.global_step == 6
    assert [line["update"] for line in Run(tmp_path).metrics("train")] == [1, 2, 3, 4, 5, 6]
    assert Run(tmp_path).updates == [1, 2, 3, 4, 5, 6]


def test_checkpoints_of_an_old_run_stay(tmp_path: Path) -> None:
    run(tmp_path, max_steps=6)
    old = {name: (tmp_path / name / "manifest.json").read_bytes() for name in names(tmp_path)}
    run(tmp_path, max_steps=6, save_total_limit=1, seed=7)
    kept = {path.parent.name: path.read_bytes() for path in tmp_path.rglob("checkpoint-*/manifest.json")}
    contents = [path.read_bytes() for path in tmp_path.rglob("checkpoint-*/manifest.json")]
    assert all(content in contents for content in old.values()), kept.keys()


# ---- what is remembered


def test_the_mean_loss_is_that_of_the_updates_of_the_call(tmp_path: Path) -> None:
    settings = {"max_steps": 5, "logging_steps": 1, "save_steps": 3, "steps_per_generation": 5, "dataset": prompts(16)}
    straight = run(tmp_path / "straight", **settings)
    killed(tmp_path / "killed", 4, **(settings | {"logging_steps": 5}))
    resumed = run(tmp_path / "killed", resume=True, **(settings | {"logging_steps": 5}))
    (end,) = logs(resumed, "train_loss")
    losses = [log["loss"] for log in logs(straight)]
    updates = 2 if hasattr(resumed, "_initial_global_step") else 5  # transformers before 5.19 divides by all
    assert end["train_loss"] == pytest.approx(sum(losses[3:]) / updates, rel=1e-4)
    assert logs(resumed)[-1]["loss"] == pytest.approx(sum(losses) / 5, rel=1e-4)


def test_a_resumed_run_is_not_evaluated_at_its_start_again(tmp_path: Path) -> None:
    settings = {"eval_on_start": True, "eval_strategy": "no", **EVALUATED}
    killed(tmp_path, 3, **settings)
    resumed = run(tmp_path, resume=True, **settings)
    assert resumed.args.eval_on_start
    assert [line["kind"] for line in Run(tmp_path).metrics()].count("eval") == 1


def test_the_config_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "metric_for_best_model": "eval_reward",
    }
    settings = {"load_best_model_at_end": True, "save_total_limit": 1, "eval_on_start": True, "max_steps": 4, **best}
    killed(tmp_path, 3, **settings, **EVALUATED)
    written: list[tuple[int, str]] = []

    def note(config: Any, name: str, value: Any) -> None:
        written.append((id(config), name))
        object.__setattr__(config, name, value)

    trainer = make(tmp_path, **settings, **EVALUATED)
    own = trainer.args
    monkeypatch.setattr(type(own), "__setattr__", note)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.args is own
    assert not {name for config, name in written if config == id(own)} & {"eval_on_start", "save_total_limit"}
    assert "checkpoint-4" in names(tmp_path), "Trainer would have removed it"


def test_what_callbacks_changed_is_remembered(tmp_path: Path) -> None:
    class Changing(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.trainer.reward_weights = self.trainer.reward_weights * 3
                self.trainer.generation_config.top_k = 7
                self.trainer.temperature = 0.5
                self.trainer.args.max_completion_length = 9

    def one(folder: Path, resume: Any = None, **settings: Any) -> Any:
        callback = Changing()
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "scale_rewards": "none"}
        trainer = make(folder, GRPOTrainer, callbacks=[callback, *settings.pop("more", [])], **saving)
        callback.trainer = trainer
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = one(tmp_path / "straight")
    with pytest.raises(RuntimeError, match="killed"):
        one(tmp_path / "killed", more=[At(3, fail)])
    resumed = one(tmp_path / "killed", resume=True)
    assert equal(straight, resumed)
    assert resumed.generation_config.top_k == 7


# ---- other settings


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": prompts(12)},
        {"beta": 0.1},
        {"num_generations": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"temperature": 0.7},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_allowed_changes_take_effect(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = {"steps_per_generation": 2, "max_steps": 6, "save_steps": 3, "audit": "error", "dataset": prompts(8)}
    killed(tmp_path, 4, **settings)
    with pytest.raises(CheckpointError, match=r"resume_allow_changes=\["):
        run(tmp_path, resume=True, **(settings | changes))
    resumed = run(tmp_path, resume=True, resume_allow_changes=["*"], **(settings | changes))
    assert resumed.state.global_step == 6
    if "temperature" in changes:
        assert resumed.temperature == resumed.backend.config.temperature == 0.7


def test_a_longer_run_goes_on_with_the_generation_under_way(tmp_path: Path) -> None:
    settings = {"steps_per_generation": 2, "save_steps": 3, "lr_scheduler_type": "constant"}
    straight = run(tmp_path / "straight", max_steps=6, **settings)
    run(tmp_path / "short", max_steps=3, **settings)
    assert equal(straight, run(tmp_path / "short", max_steps=6, resume=True, **settings))


def test_no_checkpoint_is_the_error_it_is_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        run(tmp_path, resume=True)


def test_settings_that_are_no_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume_allow_changes names 'learning_rat'"):
        make(tmp_path, GRPOTrainer, resume_allow_changes=["learning_rat"])


def test_any_setting_can_be_saved(tmp_path: Path) -> None:
    kwargs = {"sequence_bias": {(5,): 5.0}}
    assert run(tmp_path, rollout_backend="transformers", generation_kwargs=kwargs).state.global_step == 4
    assert run(tmp_path, rollout_backend="transformers", generation_kwargs=kwargs, resume=True).state.global_step == 4


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--hub_token", "hf_" + "a" * 34, "--api-key=zzz"])
    run(tmp_path, rewards=length_reward, chat_template_kwargs={"api_key": "topsecret123"})
    for path in [*tmp_path.rglob("*.json*"), tmp_path / "config.yaml"]:
        text = path.read_text(encoding="utf-8")
        assert not any(secret in text for secret in ("hf_aaa", "zzz", "topsecret123")), path


def test_the_plan_is_in_the_record(tmp_path: Path) -> None:
    trainer = run(tmp_path)
    plan = Run(tmp_path).environment["starts"][-1]["plan"]
    assert plan["update"]["plan"] == trainer.planner.in_force.to_dict()
    assert plan["rollout"]["plan"]["rows"] > 0


def test_whether_there_is_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    trainer = make(tmp_path, GRPOTrainer, max_steps=2, save_strategy="steps", save_steps=2)
    assert not trainer.has_checkpoint
    trainer.train()
    assert trainer.has_checkpoint
    again = make(tmp_path, GRPOTrainer, max_steps=2, save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert again.has_checkpoint


def test_a_second_run_of_a_trainer_starts_with_empty_books(tmp_path: Path) -> None:
    once = iter([fail, int])  # the second run is not ended
    at = At(3, lambda: next(once)())
    trainer = make(tmp_path, GRPOTrainer, max_steps=4, logging_steps=2, callbacks=[at])
    with pytest.raises(RuntimeError, match="killed"):
        trainer.train()  # with an update that is not logged
    averaged: list[int] = []
    take = trainer.metrics.take
    trainer.metrics.take = lambda mode: averaged.append(len(trainer.metrics.values[mode]["reward"])) or take(mode)
    trainer.train()
    assert averaged[:2] == [2, 2]
    assert "plan" in Run(tmp_path).environment["starts"][-1]


@pytest.mark.parametrize(
    ("record", "written"),
    [
        ("all", {"config.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "rollouts", "updates"}),
        ("metrics", {"config.yaml", "environment.json", "metrics.jsonl", "events.jsonl"}),
        ("off", set()),
    ],
)
def test_what_is_recorded_is_what_was_asked_for(record: str, written: set[str], tmp_path: Path) -> None:
    run(tmp_path, record=record, max_steps=2)
    found = {path.name for path in tmp_path.iterdir()}
    parts = {"config.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "rollouts", "updates"}
    assert found & parts == written
    assert {"run.json", "checkpoint-2"} <= found
