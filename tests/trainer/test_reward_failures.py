"""Runs whose rewards fail: what is trained on, what is logged, and when a run ends."""

import gc
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback

from gruppo.algo.advantages import leave_one_out, normalize_then_sum, sum_then_normalize
from gruppo.errors import RewardError
from gruppo.rewards.outcomes import Kind
from gruppo.trainer.books.metrics import MetricStore
from gruppo.trainer.collect.breaker import RewardBreaker, RewardCounts, kinds_from_values
from tests.helpers import chats, length_reward, prompts
from tests.processes import run_together
from tests.rewards.test_worker import gone
from tests.trainer.runs import RecordedGRPO, RecordedRLOO, logs, make, run

RANK = int(os.environ.get("RANK", "0"))


def fails_on(*texts: str) -> Any:
    """A reward that raises when it is shown one of these prompts."""

    def picky(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        for prompt in prompts:
            if prompt in texts:
                raise ValueError(f"I do not like {prompt}")
        return [float(sum(map(ord, completion))) for completion in completions]

    return picky


def count_keys(log: dict[str, Any]) -> dict[str, Any]:
    words = ("abstained", "timeouts", "failures", "unscorable")
    return {key: value for key, value in log.items() if key.endswith(words)}


# ---- metrics


@pytest.mark.parametrize("trainer_class", [RecordedGRPO, RecordedRLOO])
def test_a_healthy_run_logs_no_counts(trainer_class, tmp_path):
    trainer = run(tmp_path, trainer_class)
    assert [count_keys(log) for log in trainer.state.log_history] == [{}] * len(trainer.state.log_history)


@pytest.mark.parametrize("trainer_class", [RecordedGRPO, RecordedRLOO])
def test_failures_are_counted_from_when_they_first_occur(trainer_class, tmp_path):
    trainer = run(
        tmp_path, trainer_class, rewards=[fails_on("p2:"), length_reward], shuffle_dataset=False, max_steps=3
    )
    expected = [{}, {"rewards/picky/failures": 2.0, "rewards/unscorable": 2.0}]
    expected.append({"rewards/picky/failures": 0.0, "rewards/unscorable": 0.0})
    assert [count_keys(log) for log in logs(trainer)] == expected
    assert all(math.isfinite(log["loss"]) for log in logs(trainer))


def test_abstentions_are_no_failures(tmp_path):
    def sometimes(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float | None]:
        return [None if prompt == "p0:" else 1.0 for prompt in prompts]

    trainer = run(tmp_path, rewards=[sometimes, length_reward], shuffle_dataset=False, max_steps=1)
    assert count_keys(logs(trainer)[0]) == {"rewards/sometimes/abstained": 2.0}
    alone = run(tmp_path, rewards=sometimes, shuffle_dataset=False, max_steps=1)
    assert count_keys(logs(alone)[0]) == {"rewards/sometimes/abstained": 2.0, "rewards/unscorable": 2.0}


def test_time_outs_are_counted_apart_and_the_row_is_not_trained_on(tmp_path):
    def slow(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        if "p1:" in prompts:
            time.sleep(600)
        return [float(len(completion)) for completion in completions]

    seen: list[Tensor] = []

    class Watching(RecordedGRPO):
        def estimate_advantages(self, rewards_NR: Tensor, *args: Any) -> Any:
            seen.append(rewards_NR)
            return super().estimate_advantages(rewards_NR, *args)

    settings = dict(shuffle_dataset=False, max_steps=1, reward_timeout=1.0)
    trainer = run(tmp_path, Watching, rewards=[slow, length_reward], **settings)
    assert count_keys(logs(trainer)[0]) == {"rewards/slow/timeouts": 2.0, "rewards/unscorable": 2.0}
    assert seen[0].isnan().tolist() == [[False, False]] * 2 + [[True, True]] * 2, (
        "length_reward's numbers are left out"
    )


def test_evaluation_counts_too(tmp_path):
    trainer = make(
        tmp_path,
        rewards=fails_on("p1:"),
        eval_dataset=prompts(2),
        per_device_eval_batch_size=4,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/picky/failures"] == 2.0
    assert metrics["eval_rewards/unscorable"] == 2.0
    assert trainer.rewards.breaker._rows == 0, "it says nothing about the run"


def test_a_subclass_with_rewards_of_its_own(tmp_path):
    class Own(RecordedGRPO):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Tensor:
            return torch.tensor([[1.0], [math.nan], [2.0], [3.0]])

    trainer = run(tmp_path, Own, max_steps=1)
    expected = {"rewards/length_reward/abstained": 1.0, "rewards/unscorable": 1.0}
    assert count_keys(logs(trainer)[0]) == expected


def test_the_mathematics_of_counts():
    counts = RewardCounts(["a", "b"])
    assert counts.metrics(torch.zeros(3, 2, dtype=torch.int8)) == {}
    kinds = torch.tensor([[0, 1], [1, 1], [2, 0], [3, 0]], dtype=torch.int8)
    assert counts.metrics(kinds) == {
        "rewards/a/abstained": 1.0,
        "rewards/a/timeouts": 1.0,
        "rewards/a/failures": 1.0,
        "rewards/b/abstained": 2.0,
        "rewards/unscorable": 3.0,
    }
    assert set(counts.metrics(kinds[:0]).values()) == {0.0}
    assert kinds_from_values(torch.tensor([[1.0, math.nan]])).tolist() == [[Kind.SCORE, Kind.ABSTAIN]]


@pytest.mark.parametrize("failing", [0, 4, 9])
def test_a_count_is_a_mean_over_generations_whenever_failures_began(failing):
    counts, store = RewardCounts(["a"]), MetricStore(Accelerator(cpu=True))
    for generation in range(10):
        store.add("train", {"reward": 1.0})
        kinds = torch.full((8, 1), Kind.FAILURE if generation == failing else Kind.SCORE, dtype=torch.int8)
        store.count("train", counts.metrics(kinds), beside="reward")
    assert store.take("train") == {"reward": 1.0, "rewards/a/failures": 0.8, "rewards/unscorable": 0.8}
    store.add("train", {"reward": 1.0})
    store.count("train", counts.metrics(torch.zeros(8, 1, dtype=torch.int8)), beside="reward")
    assert store.take("train") == {"reward": 1.0, "rewards/a/failures": 0.0, "rewards/unscorable": 0.0}


def test_rewards_cannot_change_what_the_table_shows(tmp_path):
    def strips(completions: list[Any], **kwargs: Any) -> list[float]:
        for completion in completions:
            completion[0]["content"] = "changed"
        return [1.0] * len(completions)

    class Direct(RecordedGRPO):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Tensor:
            return torch.tensor([[value] for value in strips(completions)])

    for trainer_class in (RecordedGRPO, Direct):
        trainer = make(tmp_path, trainer_class, dataset=chats(4), rewards=strips)
        trainer.collect(trainer.train_dataset.select([0, 0, 1, 1]))
        shown = list(trainer.completion_logs["train"].columns["completion"])
        assert "changed" not in str(shown)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_finite_whatever_the_rewards(scale):
    rewards_BR = torch.tensor([[3e38], [-3e38], [0.0], [1.0], [3e38], [3e38], [math.inf], [math.nan]])
    for found in (
        sum_then_normalize(rewards_BR, torch.ones(1), 4, scale),
        sum_then_normalize(rewards_BR, torch.tensor([1e6]), 4, scale),
        normalize_then_sum(rewards_BR, torch.ones(1), 4),
        leave_one_out(rewards_BR, torch.ones(1), 4, normalize=scale == "batch"),
    ):
        assert found.advantages_B.isfinite().all()


def test_steps_are_told_beside_the_rewards(tmp_path):
    def steps(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[Any]:
        return [[(0, 1.0), (len(ids) - 1, 0.5)] for ids in completion_ids]

    trainer = make(tmp_path, rewards=[length_reward, steps])
    found = trainer.reward(trainer.rollout(trainer.train_dataset.select([0, 0, 1, 1])))
    assert [row[0] for row in found.notes.steps] == [None] * 4
    assert all(row[1][0] == (0, 1.0) for row in found.notes.steps)
    assert found.kinds_NR.tolist() == [[0, 0]] * 4


# ---- policy


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_failure_stops_the_run_if_asked_to(timeout, tmp_path):
    with pytest.raises(RewardError, match=r"(?s)'picky' failed on 2 of 4 completions.*I do not like p1:"):
        run(tmp_path, rewards=fails_on("p1:"), shuffle_dataset=False, reward_on_error="raise", reward_timeout=timeout)


def test_a_crash_in_every_batch_does_not_end_a_run(tmp_path):
    def crashes(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        if len(completions) > 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return [float(len(completions[0]))]

    trainer = run(tmp_path, rewards=crashes, reward_timeout=60.0, max_steps=2, reward_workers=1)
    assert trainer.state.global_step == 2
    assert [count_keys(log) for log in logs(trainer)] == [{}, {}], "all samples were scored one by one"


# ---- the breaker


class StepsTaken(TrainerCallback):
    def __init__(self) -> None:
        self.saved: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)


def always(completions: list[str], **kwargs: Any) -> list[float]:
    raise ValueError("the judge is down")


def later(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    """Works in the first generation only."""
    if trainer_state.global_step:
        raise ValueError("the judge is down")
    return length_reward(completions)


def test_the_breaker_saves_and_stops(tmp_path):
    watching = StepsTaken()
    trainer = make(tmp_path, rewards=[later, length_reward], callbacks=[watching], max_steps=60)
    with pytest.raises(RewardError, match=r"failed on 95% .* last 20 updates.*=0.5.*checkpoint-20") as caught:
        trainer.train()
    assert trainer.state.global_step == 20
    assert watching.saved == [20]
    assert str(tmp_path / "checkpoint-20") in str(caught.value)
    assert {"model.safetensors", "trainer_state.json", "optimizer.pt"} <= set(os.listdir(tmp_path / "checkpoint-20"))
    mended = make(tmp_path / "mended", max_steps=22, resume_allow_changes=["rewards", "max_steps"])
    mended.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert mended.state.global_step == 22


@pytest.mark.parametrize("settings", [{"max_reward_failure_rate": None}, {"max_reward_failure_rate": 1.0}])
def test_the_breaker_can_be_turned_off(tmp_path, settings):
    trainer = run(tmp_path, rewards=always, max_steps=22, **settings)
    assert trainer.state.global_step == 22


def as_messages(completions: list[Any], **kwargs: Any) -> list[float]:
    """Written for conversations."""
    return [float(len(completion[0]["content"])) for completion in completions]


def as_text(completions: list[Any], **kwargs: Any) -> list[float]:
    """Written for plain prompts."""
    return [float(len(completion.strip())) for completion in completions]


@pytest.mark.parametrize(
    ("reward", "dataset", "said"),
    [
        (as_messages, prompts(), r"string indices must be integers.*of these prompts are strings\."),
        (as_text, chats(), r"no attribute 'strip'.*are lists of messages, whose text is completion\[0\]\['content'\]"),
    ],
    ids=["plain", "conversations"],
)
@pytest.mark.parametrize("trainer_class", [RecordedGRPO, RecordedRLOO])
def test_a_reward_that_fails_on_the_whole_first_generation_ends_the_run(
    trainer_class, reward, dataset, said, tmp_path
):
    trainer = make(tmp_path, trainer_class, dataset=dataset, rewards=[length_reward, reward], max_steps=10)
    message = rf"(?s)'{reward.__name__}' failed on all 4 completions of the first generation.*{said}.*check_reward"
    with pytest.raises(RewardError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


SCORE, ABSTAIN, TIMEOUT, FAILURE = Kind.SCORE, Kind.ABSTAIN, Kind.TIMEOUT, Kind.FAILURE


@pytest.mark.parametrize(
    ("max_rate", "kinds_NR", "reward"),
    [
        (0.5, [[FAILURE], [TIMEOUT]], 0),
        (0.9, [[SCORE, FAILURE], [ABSTAIN, FAILURE]], 1),
        (0.5, [[FAILURE], [SCORE]], None),
        (0.5, [[ABSTAIN], [ABSTAIN]], None),
        (0.5, [[SCORE, FAILURE], [FAILURE, SCORE]], None),
        (1.0, [[FAILURE], [FAILURE]], None),
        (None, [[FAILURE], [FAILURE]], None),
    ],
)
def test_what_a_hopeless_reward_is(max_rate, kinds_NR, reward):
    assert RewardBreaker(max_rate).hopeless(torch.tensor(kinds_NR)) == reward


def test_only_the_first_generation_of_a_run_is_hopeless():
    failed = torch.tensor([[FAILURE]])
    breaker = RewardBreaker(0.5)
    assert breaker.hopeless(torch.tensor([[SCORE]])) is None
    assert breaker.hopeless(failed) is None
    resumed = RewardBreaker(0.5)
    resumed.load_state_dict({"updates": [[0, 4]], "since": [0, 0]})
    assert resumed.hopeless(failed) is None, "the first one was before the checkpoint"
    resumed.reset()
    assert resumed.hopeless(failed) == 0


def test_a_short_run_is_judged_by_what_it_has(tmp_path):
    watching = StepsTaken()
    trainer = make(tmp_path, rewards=later, callbacks=[watching], max_steps=5)
    with pytest.raises(RewardError, match=r"failed on 80% .* last 5 updates.*checkpoint-5"):
        trainer.train()
    assert watching.saved == [5]
    mended = make(tmp_path / "mended", max_steps=6, resume_allow_changes=["rewards", "max_steps"])
    mended.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert mended.state.global_step == 6, "the failures of before do not count against the mended reward"
    assert run(tmp_path / "two", rewards=later, max_steps=2).state.global_step == 2, "half is not more than half"


class StopsWhenLogged(TrainerCallback):
    """Ends a run after the breaker has looked at the update."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 4


def test_a_run_that_something_else_ends_is_judged_too(tmp_path):
    with pytest.raises(RewardError, match=r"failed on 75% .* last 4 updates.*Fix the reward and start again"):
        run(tmp_path, rewards=later, callbacks=[StopsWhenLogged()], max_steps=10)


def test_what_trips_the_breaker():
    breaker = RewardBreaker(0.5)
    control, state = type("Control", (), {"should_training_stop": False})(), type("State", (), {"global_step": 7})()
    kinds = torch.tensor([[Kind.SCORE, Kind.FAILURE], [Kind.TIMEOUT, Kind.SCORE], [Kind.ABSTAIN, Kind.ABSTAIN]])

    def update(rows: Tensor) -> bool:
        breaker.note(rows)
        breaker.on_step_end(None, state, control)
        return control.should_training_stop

    assert not any(update(kinds) for _ in range(19)), "not before 20 updates"
    assert update(kinds[:0]), "an update that uses an earlier generation adds nothing"
    assert breaker.stopped_at == 7
    assert breaker.rate == pytest.approx(2 / 3)
    breaker.reset()
    control.should_training_stop = False
    half = kinds[[0, 2]]
    assert not any(update(half) for _ in range(40)), "half is not more than half"
    assert breaker.stopped_at is None


def test_one_generation_used_many_times_does_not_trip_the_breaker():
    breaker = RewardBreaker(0.5)
    control = type("Control", (), {"should_training_stop": False})()
    failed = torch.full((8, 1), Kind.FAILURE, dtype=torch.int8)
    for step in range(1, 200):
        if (step - 1) % 32 == 0:
            breaker.note(failed * 0 if step == 1 else failed)
        breaker.on_step_end(None, type("State", (), {"global_step": step})(), control)
        if breaker.stopped_at is not None:
            break
    assert breaker.stopped_at == 129, "the first update with five generations behind it, of which four failed"
    assert "failed on 80% of the completions of the last 129 updates" in breaker.message("here")


# ---- the end of a trainer


def test_workers_end_with_the_trainer(tmp_path):
    trainer = run(tmp_path, reward_timeout=30.0)
    pids = [worker.process.pid for pool in trainer.rewards.runner._pools.values() for worker in pool._workers]
    assert len(pids) == 1
    del trainer
    gc.collect()
    assert all(gone(pid) for pid in pids)


# ---- two processes


def on_one_process(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    if RANK == 1 and kwargs["trainer_state"].global_step >= 1:
        raise ValueError("only here")
    return length_reward(completions)


def main(folder: Path) -> None:
    trainer = make(
        folder,
        RecordedGRPO,
        rewards=[on_one_process, length_reward],
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=25,
        max_reward_failure_rate=0.4,
    )
    try:
        trainer.train()
        error = None
    except RewardError as raised:
        error = str(raised)
    seen = {"logs": [count_keys(log) for log in logs(trainer)], "error": error, "steps": trainer.state.global_step}
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))


@pytest.mark.medium
def test_a_reward_that_fails_on_one_process_only(tmp_path: Path) -> None:
    run_together(2, __name__, tmp_path)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert zero == one
    assert zero["logs"][0] == {}
    assert zero["logs"][1] == {"rewards/on_one_process/failures": 2.0, "rewards/unscorable": 2.0}
    assert zero["steps"] == 20, "half of the rows of all processes failed"
    assert "failed on 48% of the completions" in zero["error"]
    assert (tmp_path / "checkpoint-20" / "model.safetensors").exists()


@pytest.mark.medium
def test_what_ends_one_process_ends_all_of_them_for_the_same_reason(tmp_path: Path) -> None:
    run_together(2, "tests.trainer.rewards_two_processes", tmp_path, seconds=120)
    zero, one = ((tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert one.startswith("The reward 'reward' failed on 4 of 4 completions")
    assert "KeyError" in one
    assert zero == f"On process 1: RewardError: {one}"
