"""Sampling one generation ahead: it overlaps, is one generation old and no more, and is stored with a checkpoint."""

import gc
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from transformers import TrainerCallback

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.vllm import client as client_module
from gruppo.rollout.vllm import inflight as inflight_module
from gruppo.rollout.vllm import transfer
from gruppo.rollout.vllm.inflight import InFlight
from gruppo.rollout.vllm.requests import Answer
from gruppo.runs.checkpoints import problems
from gruppo.trainer.collect.ahead import most_updates_of, next_generation, pack_flight, unpack_flight
from gruppo.trainer.resume.state import RunState
from gruppo.types import Completion, SampleRequest, StopReason
from tests.helpers import base_args, length_reward, prompts, timeless
from tests.processes import run_together
from tests.rollout.vllm_doubles import Double, Sampler, saved_model, serving, share_bytes
from tests.trainer.runs import SaveAt, logs, slow_scores

COMPLETE, START = "/v1/completions", "/update_weights"
# What may differ between equal runs, or between a run that samples ahead and its slow twin.
OF_THE_WAY = ("sampling/staleness", "ledger/", "rollout/", "update/", "audit/", "prompts/", "train_")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "share", share_bytes)
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(inflight_module, "LOOK_SECONDS", 0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("async") / "model")


@pytest.fixture
def double(folder: Path) -> Iterator[Double]:
    with serving(folder) as double:
        yield double


def letters_of_some(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Every third prompt has a group without spread, which dynamic sampling replaces."""
    rewards = length_reward(completions)
    return [0.5 if int(prompt[1:-1]) % 3 == 0 else reward for prompt, reward in zip(prompts, rewards, strict=True)]


def trainer_of(folder: Path, output: Path, server: Double, **settings: Any) -> Any:
    """Four updates that move the policy a lot, one generation ahead."""
    kind = settings.pop("kind", GRPOTrainer)
    names = ("reward_funcs", "train_dataset", "eval_dataset", "callbacks", "rollout_func", "tools")
    more = {name: settings.pop(name) for name in names if name in settings}
    defaults = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_port": server.port,
        "async_rollouts": 1,
        "audit": "error",
        "max_steps": 4,
        "learning_rate": 1e-2,
    }
    args = GRPOConfig(**base_args(output, **(defaults | settings)))
    return kind(model=str(folder), args=args, **({"reward_funcs": length_reward, "train_dataset": prompts(16)} | more))


def weights(trainer: Any) -> dict[str, list[float]]:
    return {name: weight.tolist() for name, weight in trainer.model.state_dict().items()}


def history(trainer: Any) -> list[dict[str, Any]]:
    """What was logged about updates, but for what the way to them explains."""
    return [
        {key: value for key, value in timeless(log).items() if not key.startswith(OF_THE_WAY)} for log in logs(trainer)
    ]


def numbers(trainer: Any) -> list[dict[str, Any]]:
    """All that was logged but for what the clock says."""
    return [timeless(log) for log in trainer.state.log_history if "train_loss" not in log]


def no_thread_is_left(before: set[threading.Thread]) -> bool:
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        left = [t for t in set(threading.enumerate()) - before if "process_request" not in t.name]
        if not left:
            return True
        time.sleep(0.01)
    return False


# ---- the slow twin


def sampling_from_before(trainer: Any) -> Any:
    """The reference: no server, no threads. Each generation is sampled from a copy that the one before it made."""
    kept: list[dict[str, Any]] = []

    def sample(requests: Any) -> list[Completion]:
        now = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        is_replacement = trainer._under_way.attempt > 0
        used = kept[-1] if kept and not is_replacement else now
        if not is_replacement:
            kept.append(now)
        sampler = Sampler()
        sampler.load(used)
        asks, settings = trainer.backend._words(requests)
        answers = []
        for ask in asks:
            words = {**settings, "n": ask.n, "max_tokens": ask.max_tokens, "seed": ask.seed}
            found = sampler.complete(ask.prompt_ids, words)
            answers.append([Answer(one["ids"], one["logps"], one["finish"], one["stop"]) for one in found])
        return list(trainer.backend._completions(requests, asks, answers))

    trainer.backend.sample = sample
    return trainer


RUNS: dict[str, dict[str, Any]] = {
    "one update each": {},
    "several passes": {"num_iterations": 2, "max_steps": 6},
    "slices that straddle": {
        "steps_per_generation": 3,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 5,
    },
    "two generations each": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "second epoch": {"train_dataset": prompts(4), "max_steps": 5},
    "short last updates": {
        "steps_per_generation": 3,
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 2,
        "train_dataset": prompts(6),
        "max_steps": 5,
    },
    "groups replaced": {"dynamic_sampling": True, "reward_funcs": letters_of_some},
    "groups of a stream replaced": {
        "dynamic_sampling": True,
        "reward_funcs": letters_of_some,
        "train_dataset": IterableDataset.from_generator(lambda: iter([{"prompt": f"p{i}:"} for i in range(7)])),
    },
    "a stream": {"train_dataset": IterableDataset.from_generator(lambda: iter([{"prompt": "a:"}, {"prompt": "b:"}]))},
    "kl": {"beta": 0.1},
    "tokens truncated": {"vllm_importance_sampling_mode": "token_truncate"},
}


QUICK = ("one update each", "several passes", "groups replaced", "inside a generation")  # the others take a while


def listed(cases: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(settings, id=name, marks=() if name in QUICK else pytest.mark.medium)
        for name, settings in cases.items()
    ]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("settings", listed(RUNS))
def test_it_is_the_run_that_samples_each_generation_from_the_weights_before(
    folder: Path, tmp_path: Path, double: Double, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ahead = trainer_of(folder, tmp_path / "ahead", double, **settings)
    ahead.train()
    off = {"async_rollouts": 0, "audit": "off"}
    twin = sampling_from_before(trainer_of(folder, tmp_path / "twin", double, **settings, **off))
    twin.train()
    assert weights(ahead) == weights(twin)
    assert history(ahead) == history(twin)
    at_once = trainer_of(folder, tmp_path / "now", double, **settings, async_rollouts=0)
    at_once.train()
    assert weights(ahead) != weights(at_once), "or the samples would be those of now"
    assert "are discarded" not in caplog.text


def test_the_correction_is_the_ratio_of_the_weights_of_now_and_of_before(
    folder: Path, tmp_path: Path, double: Double
) -> None:
    bounds = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1e6}
    found = []

    class Keeps(GRPOTrainer):
        def collect(self, rows: Any) -> Any:
            batch = super().collect(rows)
            found.append((batch, {name: w.clone() for name, w in self.model.state_dict().items()}))
            return batch

    trainer_of(folder, tmp_path, double, kind=Keeps, max_steps=2, **bounds).train()
    (_, before), (batch, now) = found
    sampler = Sampler().model
    ratios = []
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()].tolist()
        ids = batch.completion_ids[row][batch.completion_mask[row].bool()].tolist()
        scores = []
        for state in (now, before):
            sampler.load_state_dict(state)
            scores.append(slow_scores(sampler, prompt, ids)[0])
        old, sampled = scores
        assert batch.sampling_per_token_logps[row][: len(ids)].tolist() == pytest.approx(sampled, abs=1e-4)
        expected = [math.exp(a - b) for a, b in zip(old, sampled, strict=True)]
        assert batch.importance_sampling_ratio[row][: len(ids)].tolist() == pytest.approx(expected, rel=1e-3)
        ratios += expected
    assert max(abs(ratio - 1) for ratio in ratios) > 0.05, "the weights have moved"
    assert batch.sampled_at.tolist() == [0] * len(batch)
    assert batch.scored_at.tolist() == [1] * len(batch)


# ---- order


class Marks(TrainerCallback):
    def __init__(self, log: list[tuple[str, Any]]):
        self.log = log

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.log.append(("update ended", state.global_step))


def watched(double: Double) -> Marks:
    """Write the answers into the server's log, too, and the ends of updates."""
    original = double.answer

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        reply = original(method, path, body)
        double.log.append((f"answered {path}", body))
        return reply

    double.answer = answer  # type: ignore[method-assign]
    return Marks(double.log)


def events(double: Double) -> list[str]:
    kept = (COMPLETE, f"answered {COMPLETE}", START, "update ended")
    return [name for name, _ in double.log if name in kept]


def test_the_next_generation_is_asked_for_before_the_update_ends_and_answered_before_weights_are_sent(
    folder: Path, tmp_path: Path, double: Double
) -> None:
    marks = watched(double)

    def hold() -> None:
        """Answer what is asked for ahead only when the update beside it is over: one after the other gets nowhere."""
        generation, deadline = (len(double.calls(COMPLETE)) - 1) // 2, time.monotonic() + 60
        while events(double).count("update ended") < generation and time.monotonic() < deadline:
            time.sleep(0.005)

    double.before[COMPLETE] = hold
    before = set(threading.enumerate())
    trainer = trainer_of(folder, tmp_path, double, callbacks=[marks])
    trainer.train()
    seen = events(double)
    for i, event in enumerate(seen):
        asked, answered = seen[:i].count(COMPLETE), seen[:i].count(f"answered {COMPLETE}")
        if event == START:
            assert asked == answered, "no weights while requests are out"
        if event == "update ended":
            number = seen[: i + 1].count("update ended")
            assert asked == 2 * min(number + 1, 4), "two groups each; none after the last"
            assert answered == 2 * number, "those of the update, not yet the next"
    assert seen.count(START) == 4, "once for each generation"
    assert no_thread_is_left(before)


def test_without_it_everything_is_in_turn(folder: Path, tmp_path: Path, double: Double) -> None:
    marks = watched(double)
    trainer = trainer_of(folder, tmp_path, double, callbacks=[marks], async_rollouts=0, max_steps=3)
    trainer.train()
    each = [START, COMPLETE, COMPLETE, f"answered {COMPLETE}", f"answered {COMPLETE}", "update ended"]
    assert [sorted(events(double)[i : i + 6]) for i in range(0, 18, 6)] == [sorted(each)] * 3
    assert len(events(double)) == 18
    assert not any("staleness" in key or "wait" in key for log in logs(trainer) for key in log)


# ---- how old


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 1, 1]),
        ({"num_iterations": 2, "max_steps": 5}, [0, None, 2, None, 2]),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 3}, [0, 0.5, 0.5]),
    ],
    ids=["one each", "two updates each", "two generations each"],
)
def test_how_old_the_weights_of_the_sampler_are(
    folder: Path, tmp_path: Path, double: Double, settings: dict[str, Any], expected: list[float | None]
) -> None:
    trainer = trainer_of(folder, tmp_path, double, **settings)
    trainer.train()
    assert [log.get("sampling/staleness") for log in logs(trainer)] == expected
    waits = [log["rollout/wait_seconds"] for log in logs(trainer) if "rollout/wait_seconds" in log]
    assert waits
    assert all(0 <= wait < 60 for wait in waits)


def test_samples_that_are_too_old_are_refused(folder: Path, tmp_path: Path, double: Double) -> None:
    class Forgets(GRPOTrainer):
        def _refresh_sampler(self) -> None:
            super()._refresh_sampler()
            if self.state.global_step == 2:
                self._ahead.flight.sampled_at -= 1  # type: ignore[union-attr]

    trainer = trainer_of(folder, tmp_path, double, kind=Forgets)
    with pytest.raises(RolloutError, match="with weights 2 updates old; with async_rollouts=1 that must be at most 1"):
        trainer.train()


def walk(micro_steps: int, accumulation: int, per_epoch: int) -> list[tuple[int, int, int]]:
    """Epoch, generation and the update that first takes it, step by step through three epochs."""
    update, places = -1, []
    for epoch in range(3):
        for step in range(per_epoch * micro_steps):
            update += step % accumulation == 0
            if step % micro_steps == 0:
                places.append((epoch, step // micro_steps, update))
    return places


def test_the_bound_holds_and_is_reached_wherever_updates_begin() -> None:
    for micro_steps, accumulation in product(range(1, 9), repeat=2):
        ages = set()
        for per_epoch in range(1, 9):
            facts = {"steps": per_epoch * micro_steps, "micro_steps": micro_steps, "accumulation": accumulation}
            for (epoch, generation, at), (*following, needed) in pairwise(walk(micro_steps, accumulation, per_epoch)):
                facts["begins"] = generation * micro_steps
                ages.add(needed - at)
                assert next_generation(epoch, generation, updates_left=needed - at + 1, **facts) == tuple(following)
                assert next_generation(epoch, generation, updates_left=needed - at, **facts) is None
        assert max(ages) == most_updates_of(micro_steps, accumulation), (micro_steps, accumulation)


# ---- what ends early, or in between


def test_nothing_is_asked_for_that_no_update_takes(folder: Path, tmp_path: Path, double: Double) -> None:
    trainer = trainer_of(folder, tmp_path, double, max_steps=-1, num_train_epochs=2, train_dataset=prompts(4))
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(double.calls(COMPLETE)) == 4 * 2


class StopsEpoch(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 2


def test_an_epoch_that_is_ended_early_goes_on_with_the_prompts_of_the_next(
    folder: Path, tmp_path: Path, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    """What was asked for is of no use; the generation is sampled at once, from the weights of now."""
    settings = {"num_train_epochs": 2, "max_steps": -1, "train_dataset": prompts(8), "callbacks": [StopsEpoch()]}
    trainer = trainer_of(folder, tmp_path, double, **settings)
    trainer.train()
    assert "The prompts to train on now are not those that were requested ahead" in caplog.text
    assert [log["sampling/staleness"] for log in logs(trainer)][:4] == [0, 1, 0, 1]


class StopsRun(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_a_run_that_is_stopped_leaves_no_request_and_no_thread(folder: Path, tmp_path: Path, double: Double) -> None:
    before = set(threading.enumerate())
    trainer = trainer_of(folder, tmp_path, double, callbacks=[StopsRun()])
    double.before[COMPLETE] = lambda: double.slow.update({COMPLETE: 20.0 if trainer.state.global_step == 1 else 0.0})
    start = time.monotonic()
    trainer.train()
    assert time.monotonic() - start < 15, "what nobody wants is not waited for"
    assert trainer._ahead.flight is None
    assert no_thread_is_left(before)


def test_evaluation_has_the_weights_of_now_and_changes_nothing(folder: Path, tmp_path: Path, double: Double) -> None:
    plain = trainer_of(folder, tmp_path / "plain", double)
    plain.train()
    marks = watched(double)
    double.log.clear()
    evaluated: list[Any] = []

    class Looks(GRPOTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            result = super().prediction_step(*args, **kwargs)
            held = double.sampler.model.state_dict()
            evaluated.append(all(torch.equal(held[name], w) for name, w in self.model.state_dict().items()))
            return result

    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "packed_update": False}
    settings = {"kind": Looks, "eval_dataset": prompts(2), "callbacks": [marks], **evaluation}
    double.before[COMPLETE] = lambda: double.slow.update({COMPLETE: 0.3})
    trainer = trainer_of(folder, tmp_path / "evaluated", double, **settings)
    trainer.train()
    assert evaluated
    assert all(evaluated)
    seen = events(double)
    for i, event in enumerate(seen):
        if event == START:
            assert seen[:i].count(COMPLETE) == seen[:i].count(f"answered {COMPLETE}")
    for name, value in weights(plain).items():
        torch.testing.assert_close(torch.tensor(weights(trainer)[name]), torch.tensor(value), rtol=1e-3, atol=1e-5)


def test_rollouts_that_somebody_else_asks_for_leave_it_alone(folder: Path, tmp_path: Path, double: Double) -> None:
    class Asks(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            assert len(self.trainer.rollout([self.trainer.train_dataset[0]] * 2)) == 2

    plain = trainer_of(folder, tmp_path / "plain", double)
    plain.train()
    asks = Asks()
    asks.trainer = trainer_of(folder, tmp_path / "asked", double, callbacks=[asks])
    asks.trainer.train()
    assert weights(asks.trainer) == weights(plain)


# ---- checkpoints


RESUMED: dict[str, dict[str, Any]] = {
    "one update each": {},
    "inside a generation": {"num_iterations": 3, "max_steps": 8},
    "groups replaced": {"dynamic_sampling": True, "reward_funcs": letters_of_some},
    "slices that straddle": RUNS["slices that straddle"] | {"max_steps": 6},
    "second epoch": {"train_dataset": prompts(4), "max_steps": 5},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("settings", listed(RESUMED))
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.medium), 2])
def test_a_resumed_run_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path, double: Double, settings: dict[str, Any], step: int
) -> None:
    straight = trainer_of(folder, tmp_path / "straight", double, callbacks=[SaveAt(step)], **settings)
    straight.train()
    checkpoint = tmp_path / "straight" / f"checkpoint-{step}"
    assert not problems(checkpoint)
    assert json.loads((checkpoint / "run_state-00000.json").read_text())["ahead"]["stops"]
    double.restart()
    double.log.clear()
    resumed = trainer_of(folder, tmp_path / "resumed", double, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert weights(resumed) == weights(straight)
    assert numbers(resumed) == numbers(straight)


def test_the_generation_that_is_saved_is_not_sampled_again(folder: Path, tmp_path: Path, double: Double) -> None:
    trainer_of(folder, tmp_path, double, callbacks=[SaveAt(2)]).train()
    double.log.clear()
    resumed = trainer_of(folder, tmp_path / "resumed", double)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(double.calls(COMPLETE)) == 2, "one generation of two groups: the last"


def test_an_exception_saves_what_is_in_flight_and_leaves_no_thread(
    folder: Path, tmp_path: Path, double: Double
) -> None:
    class Fails(GRPOTrainer):
        fails = True

        def _pack_loss(self, *args: Any) -> Any:
            if self.state.global_step == 2 and self.fails:
                raise ValueError("on purpose")
            return super()._pack_loss(*args)

    straight = trainer_of(folder, tmp_path / "straight", double)
    straight.train()
    before = set(threading.enumerate())
    double.slow = {COMPLETE: 0.2}
    with pytest.raises(ValueError, match="on purpose"):
        trainer_of(folder, tmp_path / "broken", double, kind=Fails).train()
    assert no_thread_is_left(before)
    checkpoint = tmp_path / "broken" / "checkpoint-2"
    assert "ahead" in json.loads((checkpoint / "run_state-00000.json").read_text())
    resumed = trainer_of(folder, tmp_path / "broken", double)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert weights(resumed) == weights(straight)
    assert numbers(resumed) == numbers(straight)


def test_a_failed_generation_does_not_cost_the_checkpoint(
    folder: Path, tmp_path: Path, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is raised where the generation is due; what is saved before it is sampled at once after a resume."""
    trainer = trainer_of(folder, tmp_path, double, callbacks=[SaveAt(2)], save_on_signal=False)

    def refuse() -> None:
        if trainer.state.global_step == 1:
            double.broken[COMPLETE] = [400] * 2

    double.before[COMPLETE] = refuse
    with pytest.raises(RolloutError, match=r"status 400\. broken on purpose"):
        trainer.train()
    assert "the checkpoint is saved without it" in caplog.text
    double.before.clear()
    double.broken.clear()
    resumed = trainer_of(folder, tmp_path, double, callbacks=[])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [log["sampling/staleness"] for log in logs(resumed)][-2:] == [0, 1]


def test_other_settings_leave_the_generation_behind(folder: Path, tmp_path: Path, double: Double) -> None:
    trainer_of(folder, tmp_path, double, callbacks=[SaveAt(2)]).train()
    changes = {"async_rollouts": 0, "resume_allow_changes": ["async_rollouts"]}
    resumed = trainer_of(folder, tmp_path / "resumed", double, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert "sampling/staleness" not in logs(resumed)[-1]


def test_what_is_stored_comes_back_as_it_was(tmp_path: Path) -> None:
    requests = [SampleRequest([3, 4], 2, noise_key=2**64 - 1, first_sample=1), SampleRequest([], 1, noise_key=None)]
    completions = [
        Completion([5, 6], StopReason.EOS, [-0.1234567890123456, None]),
        Completion([], StopReason.NO_ROOM),
        Completion([7], StopReason.LENGTH, [-1e-9]),
    ]
    packed = pack_flight(InFlight.landed(requests, 7, completions, seconds=3.0))
    assert packed is not None
    packed.save(tmp_path, 0)
    loaded = RunState.load(tmp_path, 0)
    assert loaded is not None
    flight = unpack_flight(loaded)
    assert flight is not None
    assert (flight.requests, flight.sampled_at, flight.take()) == (requests, 7, completions)
    assert flight.seconds == pytest.approx(3.0)
    assert unpack_flight(RunState()) is None


# ---- a server that restarts, goes away, refuses or is slow


def once(double: Double, at: int, act: Callable[[], None]) -> None:
    """Do something when so many requests have come."""
    done: list[bool] = []

    def maybe() -> None:
        if len(double.calls(COMPLETE)) >= at and not done:
            done.append(True)
            act()

    double.before[COMPLETE] = maybe


def test_a_server_that_restarts_has_lost_the_generation(
    folder: Path, tmp_path: Path, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    """It is sampled from the weights of now, whose log-probs pass the audits, and the next one is ahead again."""
    once(double, 5, double.restart)  # in the third generation
    trainer = trainer_of(folder, tmp_path, double)
    trainer.train()
    assert "was restarted while sampling: the generation that was requested ahead is lost" in caplog.text
    assert [log["sampling/staleness"] for log in logs(trainer)] == [0, 1, 0, 1]


def test_a_restart_that_evaluation_finds_first(
    folder: Path, tmp_path: Path, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    once(double, 7, double.restart)  # when the third generation is asked for; evaluation asked, too
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = trainer_of(folder, tmp_path, double, eval_dataset=prompts(2), max_steps=3, **evaluation)
    trainer.train()
    assert "is lost" in caplog.text
    assert [log["sampling/staleness"] for log in logs(trainer)].count(1) == 1


def test_a_server_that_goes_away_is_waited_for(
    folder: Path, tmp_path: Path, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    def away() -> None:
        double.instance = "another"
        double.broken[COMPLETE] = [503] * 6

    once(double, 5, away)
    trainer = trainer_of(folder, tmp_path, double)
    trainer.train()
    assert "became unreachable while sampling" in caplog.text
    assert [log["sampling/staleness"] for log in logs(trainer)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ({"broken": {COMPLETE: [400]}}, r"status 400\. broken on purpose"),
        ({"slow": {COMPLETE: 5.0}}, r"had no answer within 0.5 s \(vllm_request_timeout\)"),
    ],
    ids=["refused", "slow"],
)
def test_what_the_server_says_is_raised_in_the_main_thread(
    folder: Path, tmp_path: Path, double: Double, trouble: dict[str, Any], message: str
) -> None:
    before = set(threading.enumerate())

    def begin() -> None:
        for name, value in trouble.items():
            setattr(double, name, value)

    once(double, 5, begin)
    trainer = trainer_of(folder, tmp_path, double, vllm_request_timeout=0.5)
    start = time.monotonic()
    with pytest.raises(RolloutError, match=message):
        trainer.train()
    assert trainer.state.global_step == 2, "when the generation was due"
    assert time.monotonic() - start < 20
    double.slow = {}
    assert no_thread_is_left(before)


def test_what_is_given_up_ends_at_once(folder: Path, tmp_path: Path, double: Double) -> None:
    before = set(threading.enumerate())
    backend = trainer_of(folder, tmp_path, double).backend
    double.slow = {COMPLETE: 20.0}
    start = time.monotonic()
    flight = backend.begin([SampleRequest([9], 2, noise_key=1), SampleRequest([10], 2, noise_key=2)])
    while len(double.calls(COMPLETE)) < 2:
        time.sleep(0.01)
    flight.drop()
    assert time.monotonic() - start < 5
    assert no_thread_is_left(before)
    flight.settle()
    assert flight.take() is None


# ---- what cannot be


def rollout(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
    raise AssertionError("never called")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Hooked(GRPOTrainer):
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return super()._generate_single_turn(*args, **kwargs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_func": rollout}, "a rollout_func makes its own requests"),
        ({"tools": [add]}, "tools and environments take several turns"),
        ({"kind": Hooked}, "Hooked overrides `_generate_single_turn`"),
    ],
    ids=["rollout_func", "tools", "hook"],
)
def test_what_asks_by_itself_is_refused(
    folder: Path, tmp_path: Path, double: Double, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"async_rollouts=1 .*{message}.*Set async_rollouts=0"):
        trainer_of(folder, tmp_path, double, **settings)


# ---- several processes

RANK = int(os.environ.get("RANK", "0"))


@pytest.mark.medium
def test_processes_ask_for_their_own_rows_and_send_weights_when_all_have_their_answers(
    folder: Path, tmp_path: Path, double: Double
) -> None:
    alone = trainer_of(folder, tmp_path / "alone", double, num_generations=4, train_dataset=prompts(8))
    alone.train()
    expected = weights(alone)
    del alone  # a server has one trainer
    gc.collect()
    watched(double)
    double.log.clear()
    double.slow = {COMPLETE: 0.1}
    (tmp_path / "place.json").write_text(json.dumps({"model": str(folder), "url": double.url}))
    run_together(2, "tests.trainer.test_async", tmp_path)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert zero == one
    assert zero["ages"] == [0, 1, 1, 1]
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(zero["weights"][name]), torch.tensor(value), rtol=1e-3, atol=1e-4)
    seen = events(double)
    assert seen.count(COMPLETE) == 4 * 2, "each its part of the group, once per generation"
    for i, event in enumerate(seen):
        if event == START:
            assert seen[:i].count(COMPLETE) == seen[:i].count(f"answered {COMPLETE}")


def main(output: Path) -> None:
    place = json.loads((output / "place.json").read_text())
    transfer.share = share_bytes
    args = GRPOConfig(
        **base_args(
            output,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=place["url"],
            async_rollouts=1,
            max_steps=4,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            num_generations=4,
        )
    )
    trainer = GRPOTrainer(place["model"], length_reward, args, prompts(8))
    trainer.train()
    said = {"weights": weights(trainer), "ages": [log["sampling/staleness"] for log in logs(trainer)]}
    (output / f"rank{RANK}.json").write_text(json.dumps(said))
