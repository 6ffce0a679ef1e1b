"""Rewards in workers: whole batches, samples one by one, and what becomes of hangs and crashes in between."""

import gc
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from gruppo.errors import ConfigError, RewardError
from gruppo.rewards.outcomes import Kind
from gruppo.rewards.pool import TimeLeft
from gruppo.rewards.runner import LOGS_IN_SNAPSHOT, RewardInputs, RewardRunner, RewardSettings, snapshot
from tests.rewards.test_runner import BATCH, constant, runner, same
from tests.rewards.test_worker import Unloadable, gone

TIMEOUT, FAILURE, SCORE = Kind.TIMEOUT, Kind.FAILURE, Kind.SCORE


def batch(*completions: str, **columns: list[Any]) -> RewardInputs:
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
    return RewardInputs(
        rows, [f"p{i}" for i in range(len(completions))], list(completions), [[1, 2]] * len(completions)
    )


def kinds(scoring: RewardRunner, *completions: str) -> list[int]:
    return scoring.score(batch(*completions)).kinds_BR[:, 0].tolist()


def pids(scoring: RewardRunner) -> list[int]:
    return [worker.process.pid for pool in scoring._pools.values() for worker in pool._workers]


def obedient(completions: list[str], **kwargs: Any) -> list[float]:
    """Does what the completions say."""
    for completion in completions:
        if completion == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        if completion == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if completion == "exit":
            os._exit(0)
        if completion == "raise":
            raise ValueError("as told")
        if completion == "eat":
            bytearray(2**33)
    return [float(len(completion)) for completion in completions]


# ---- single samples


def test_one_hanging_sample_among_sixteen_keeps_fifteen_scores():
    completions = ["fine"] * 11 + ["hang"] + ["fine"] * 4
    scores = runner(obedient, timeout=1.0, workers=2).score(batch(*completions))
    assert scores.kinds_BR[:, 0].tolist() == [SCORE] * 11 + [TIMEOUT] + [SCORE] * 4
    assert same(scores.values_BR, [[math.nan if c == "hang" else 4.0] for c in completions])


@pytest.mark.parametrize(
    ("trouble", "kind"), [("crash", FAILURE), ("exit", FAILURE), ("raise", FAILURE), ("eat", FAILURE)]
)
def test_one_bad_sample_does_not_lose_the_others(trouble, kind):
    scoring = runner(obedient, timeout=60.0, memory_gb=1.0)
    assert kinds(scoring, "a", trouble, "b", trouble) == [SCORE, kind, SCORE, kind]
    assert kinds(scoring, "a", "b") == [SCORE, SCORE], "and the next batch is scored as ever"


def test_workers_are_reused_and_replaced():
    scoring = runner(obedient, timeout=60.0, workers=1)
    assert kinds(scoring, "a", "b") == [SCORE, SCORE]
    first = pids(scoring)
    assert kinds(scoring, "a", "raise") == [SCORE, FAILURE]
    assert pids(scoring) == first, "an exception harms no worker"
    assert kinds(scoring, "a", "crash", "c") == [SCORE, FAILURE, SCORE]
    assert pids(scoring) != first
    assert all(gone(pid) for pid in first)


def test_a_worker_that_died_in_between_is_replaced():
    scoring = runner(obedient, timeout=60.0)
    assert kinds(scoring, "a") == [SCORE]
    os.kill(pids(scoring)[0], signal.SIGKILL)
    assert gone(pids(scoring)[0])
    assert kinds(scoring, "a") == [SCORE]


def test_whole_batches_are_not_split(tmp_path):
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        with open(tmp_path / "calls", "a") as file:
            file.write(f"{len(completions)} ")
        return obedient(completions)

    reward.whole_batch = True  # type: ignore[attr-defined]
    assert kinds(runner(reward, timeout=1.0), "a", "hang", "b") == [TIMEOUT] * 3
    assert kinds(runner(reward, timeout=60.0), "a", "crash") == [FAILURE] * 2
    assert (tmp_path / "calls").read_text().split() == ["3", "2"]


def slow(completions: list[str], **kwargs: Any) -> list[float]:
    time.sleep(600 if len(completions) > 1 else 0.4)
    return [1.0] * len(completions)


def test_a_retry_has_an_end():
    start = time.monotonic()
    found = kinds(runner(slow, timeout=0.5, sample_timeout=30.0, workers=1), *["a"] * 40)
    assert time.monotonic() - start < 30
    assert 1 <= found.count(SCORE) <= 6, "as many as fit into four times the bound"
    assert found == sorted(found)
    assert set(found) == {SCORE, TIMEOUT}


class SlowToLoad:
    """Takes longer to load than a whole retry may take, and hangs on one completion."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        time.sleep(self.seconds)

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return obedient(completions)


def test_the_time_to_load_a_worker_is_no_time_of_its_calls():
    scoring = runner(SlowToLoad(2.0), timeout=0.4, sample_timeout=0.3, workers=1)  # 1.6 s for the retry
    assert kinds(scoring, "a", "hang", *"bcdef") == [SCORE, TIMEOUT, *[SCORE] * 5]


def test_loading_has_an_end_too(monkeypatch):
    monkeypatch.setattr(TimeLeft, "__init__", lambda self, calling: self.__dict__.update(calling=calling, loading=0.5))
    scoring = runner(SlowToLoad(1.0), timeout=60.0, workers=1)
    # Each crash costs a worker: the second one that takes its place is not made.
    assert kinds(scoring, "crash", "crash", "a", "b") == [FAILURE, TIMEOUT, TIMEOUT, TIMEOUT]


def logging_reward(completions: list[str], log_extra: Any, log_metric: Any, answer: list[str], **kwargs: Any) -> Any:
    log_extra("answered", answer)
    log_metric("size", len(completions))
    return obedient(completions)


@pytest.mark.parametrize(
    ("completions", "column", "sizes"),
    [
        (["a", "b"], ["x", "y"], [2.0]),
        (["a", "crash"], ["x", None], [1.0]),
        (["raise", "b"], [None, "y"], [1.0]),
        (["raise", "b", "c"], [None, "y", "z"], [1.0]),  # two calls that count as one
    ],
)
def test_what_is_logged_in_a_worker_is_replayed_here(completions, column, sizes):
    columns: dict[str, Any] = {}
    metrics: list[Any] = []
    runner(logging_reward, timeout=60.0).score(
        batch(*completions, answer=["x", "y", "z"][: len(completions)]),
        log_extra=columns.__setitem__,
        log_metric=lambda name, value: metrics.append((name, value)),
    )
    assert columns == {"answered": column}
    assert metrics == [("size", size) for size in sizes]


def test_the_steps_of_a_worker_arrive():
    def steps(completions: list[str], **kwargs: Any) -> list[Any]:
        return [[(1, 0.5)] for _ in completions]

    scores = runner(steps, timeout=60.0).score(BATCH)
    assert scores.steps == [[[(1, 0.5)]], [[(1, 0.5)]]]


# ---- policy and contract


def test_failures_can_stop_the_run():
    with pytest.raises(RewardError, match=r"(?s)'obedient' failed on 1 of 2 .*completion 'raise'.*as told"):
        runner(obedient, timeout=60.0, on_error="raise").score(batch("a", "raise"))
    with pytest.raises(RewardError, match=r"(?s)'obedient' failed on 1 of 2 .*longer than 1(\.\d+)? s and was killed"):
        runner(obedient, timeout=0.5, on_error="raise").score(batch("a", "hang"))


@pytest.mark.parametrize(
    ("output", "message"),
    [([1.0], "returned 1 rewards for 2"), (["a", "b"], "returned 'a' for completion 0"), (3.0, "returned float")],
)
def test_a_broken_contract_always_stops_it(output, message):
    def wrong(completions: list[str], **kwargs: Any) -> Any:
        return output

    with pytest.raises(RewardError, match=message):
        runner(wrong, timeout=60.0).score(BATCH)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_fails_its_sample(value):
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0, value]

    assert runner(reward, timeout=60.0).score(BATCH).kinds_BR.tolist() == [[SCORE], [FAILURE]]


def test_a_function_that_cannot_be_sent_or_loaded_is_an_error():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="'<lambda>' cannot be sent to a worker process"):
        runner(lambda completions, **kwargs: [lock], timeout=1.0)
    scoring = runner(Unloadable(), timeout=60.0)
    with pytest.raises(ConfigError, match=r"(?s)'Unloadable' could not be loaded.*No module named 'only_here'"):
        scoring.score(BATCH)


# ---- which rewards run where


def where(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(os.getpid())] * len(completions)


def where_marked(completions: list[str], **kwargs: Any) -> list[float]:
    return where(completions)


where_marked.gruppo_worker = True  # type: ignore[attr-defined]


def where_with_environments(completions: list[str], environments: list[Any], **kwargs: Any) -> list[float]:
    return where(completions)


async def where_async(completions: list[str], **kwargs: Any) -> list[float]:
    return where(completions)


@pytest.mark.parametrize(
    ("function", "timeout", "here"),
    [
        (where, None, True),
        (where, 60.0, False),
        (where_marked, None, False),
        (where_marked, 60.0, False),
        (where_with_environments, 60.0, True),
        (where_async, 60.0, True),
    ],
)
def test_where_a_reward_runs(function, timeout, here):
    scores = runner(function, timeout=timeout).score(BATCH, environments=[threading.Lock()] * 2)
    assert (scores.values_BR[0, 0].item() == os.getpid()) is here


def test_rewards_in_workers_run_at_the_same_time_and_beside_those_in_process(tmp_path):
    def wait_for(*others: str) -> float:
        end = time.monotonic() + 30
        while not all((tmp_path / other).exists() for other in others) and time.monotonic() < end:
            time.sleep(0.01)
        return float(all((tmp_path / other).exists() for other in others))

    def meet(own: str, *others: str) -> Any:
        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            (tmp_path / own).touch()
            return [wait_for(*others)] * len(completions)

        return reward

    def here(completions: list[str], environments: Any, **kwargs: Any) -> list[float]:
        return meet("here", "a", "b")(completions)

    scoring = runner(meet("a", "b", "here"), meet("b", "a", "here"), here, timeout=60.0)
    assert scoring.score(BATCH, environments=[]).values_BR.tolist() == [[1.0, 1.0, 1.0]] * 2


def test_a_bound_holds_while_this_process_is_busy(tmp_path):
    def hangs(completions: list[str], **kwargs: Any) -> list[float]:
        if len(completions) > 1:
            (tmp_path / "pid.new").write_text(str(os.getpid()))
            (tmp_path / "pid.new").rename(tmp_path / "pid")
            time.sleep(600)
        return [1.0]

    def busy(completions: list[str], environments: Any, **kwargs: Any) -> list[float]:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        return [float(gone(int((tmp_path / "pid").read_text())))] * len(completions)

    scores = runner(hangs, busy, timeout=0.5).score(batch("a", "b"), environments=[])
    assert scores.values_BR.tolist() == [[1.0, 1.0]] * 2


def test_other_functions_may_take_the_place_of_the_first():
    scoring = runner(constant(1.0), timeout=60.0)
    assert scoring.score(BATCH).values_BR.tolist() == [[1.0], [1.0]]
    before = pids(scoring)
    scoring.functions = [constant(2.0)]
    assert scoring.score(BATCH).values_BR.tolist() == [[2.0], [2.0]]
    assert all(gone(pid) for pid in before)


# ---- what workers are given


def given(completions: list[str], **kwargs: Any) -> list[float]:
    import json

    Path(kwargs["file"][0]).write_text(
        json.dumps({"names": sorted(kwargs), "step": kwargs["trainer_state"].global_step})
    )
    completions.clear()
    return [0.0, 0.0]


def test_workers_get_copies_of_what_can_be_copied(tmp_path, caplog):
    import json

    scoring = runner(given, timeout=60.0)
    for _ in range(2):
        completions = ["a", "b"]
        columns = {"file": [str(tmp_path / "seen")] * 2, "lock": [threading.Lock()] * 2}
        scoring.score(
            batch(*completions, **columns), trainer_state=TrainerState(global_step=7), environments=[object()] * 2
        )
        assert completions == ["a", "b"]
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["names"] == ["completion_ids", "file", "log_extra", "log_metric", "prompts", "trainer_state"]
    assert seen["step"] == 7
    assert ["`lock` cannot be pickled" in record.message for record in caplog.records] == [True]


def test_a_snapshot_of_the_trainers_state_is_small_and_plain():
    state = TrainerState(global_step=3, log_history=[{"step": i} for i in range(1000)])
    copied = snapshot(state)
    assert type(copied) is SimpleNamespace
    assert copied.global_step == 3
    assert copied.log_history == state.log_history[-LOGS_IN_SNAPSHOT:]
    assert len(state.log_history) == 1000
    assert snapshot("anything else") == "anything else"


# ---- settings


def test_bounds_follow_from_the_settings():
    settings = RewardSettings()
    assert (settings.bounds.seconds, settings.bounds.sample_seconds) == (120.0, 12.0)
    assert (settings.patience.seconds, settings.patience.sample_seconds) == (None, None)
    assert 1 <= settings.bounds.workers <= 4
    settings = RewardSettings(timeout=5.0, workers=7)
    assert (settings.bounds.seconds, settings.bounds.sample_seconds, settings.bounds.workers) == (5.0, 1.0, 7)
    assert RewardSettings(timeout=50.0).patience.sample_seconds == 5.0
    assert RewardSettings(timeout=50.0, sample_timeout=0.1).bounds.sample_seconds == 0.1


def test_a_memory_limit_needs_a_worker():
    with pytest.raises(ConfigError, match=r"reward_memory_gb=1.0 .* set reward_timeout"):
        runner(where, memory_gb=1.0)


# ---- the end


def test_workers_end_with_the_runner():
    scoring = runner(obedient, where_marked, timeout=60.0, workers=2)
    assert kinds(scoring, "a", "raise", "b") == [SCORE, FAILURE, SCORE]
    running = pids(scoring)
    assert len(running) == 3, "a second one joined for the samples"
    del scoring
    gc.collect()
    assert all(gone(pid) for pid in running)


def test_an_interrupted_call_leaves_nothing_behind_for_the_next():
    def interrupted(completions: list[str], environments: Any, **kwargs: Any) -> list[float]:
        if completions[0] == "hang":
            raise KeyboardInterrupt
        return [0.0] * len(completions)

    scoring = runner(obedient, interrupted, timeout=30.0)
    with pytest.raises(KeyboardInterrupt):
        scoring.score(batch("hang", "b"), environments=[])
    assert all(gone(pid) for pid in pids(scoring))
    assert scoring.score(batch("abc", "b"), environments=[]).values_BR.tolist() == [[3.0, 0.0], [1.0, 0.0]]


def test_ctrl_c_is_heard_while_a_worker_is_waited_for():
    scoring = runner(obedient, timeout=300.0)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scoring.score(batch("hang", "b"))
    assert time.monotonic() - start < 60
    assert all(gone(pid) for pid in pids(scoring))
