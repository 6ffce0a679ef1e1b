"""Async rewards: bounds, retries, and how many calls run at a time."""

import asyncio
import concurrent.futures
import time
from typing import Any

import pytest

from gruppo.errors import RewardError
from gruppo.rewards import asynchronous
from gruppo.rewards.outcomes import Kind
from tests.rewards.test_pool import batch
from tests.rewards.test_runner import runner

TIMEOUT, FAILURE, SCORE = Kind.TIMEOUT, Kind.FAILURE, Kind.SCORE


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(asynchronous, "FIRST_WAIT", 0.01)


def kinds(function: Any, *completions: str, **settings: Any) -> list[int]:
    return runner(function, **settings).score(batch(*completions)).kinds_BR[:, 0].tolist()


def test_without_a_bound_there_is_one_call_for_the_batch():
    calls: list[int] = []

    async def reward(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        return [1.0] * len(completions)

    assert kinds(reward, "a", "b", "c") == [SCORE] * 3
    assert calls == [3]


def test_with_a_bound_there_is_one_for_each_sample_and_so_many_at_a_time():
    running, most, calls = 0, 0, 0

    async def reward(completions: list[str], **kwargs: Any) -> list[float]:
        nonlocal running, most, calls
        running, calls = running + 1, calls + 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return [float(completions[0])]

    scores = runner(reward, timeout=60.0, concurrency=3).score(batch(*map(str, range(10))))
    assert scores.values_BR[:, 0].tolist() == list(map(float, range(10)))
    assert (most, calls) == (3, 10)


async def hang(completions: list[str], **kwargs: Any) -> list[float]:
    if "hang" in completions:
        await asyncio.sleep(600)
    return [1.0] * len(completions)


async def stubborn(completions: list[str], **kwargs: Any) -> list[float]:
    while "hang" in completions:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [hang, stubborn])
def test_a_sample_that_hangs_is_given_up(function):
    start = time.monotonic()
    found = kinds(function, "a", "hang", "b", timeout=30.0, sample_timeout=0.3, concurrency=1)
    assert found == [SCORE, TIMEOUT, SCORE]
    assert time.monotonic() - start < 20


def test_a_time_out_cancels():
    cancelled: list[str] = []

    async def reward(completions: list[str], **kwargs: Any) -> list[float]:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(completions[0])
            raise
        return [1.0]

    assert kinds(reward, "a", "b", timeout=30.0, sample_timeout=0.2) == [TIMEOUT] * 2
    assert sorted(cancelled) == ["a", "b"]


@pytest.mark.parametrize("function", [hang, stubborn])
def test_the_batch_as_a_whole_has_an_end(function):
    start = time.monotonic()
    found = kinds(function, "hang", "hang", "a", timeout=0.5, sample_timeout=0.4, concurrency=1)
    assert found == [TIMEOUT] * 3, "the last had no turn"
    assert time.monotonic() - start < 20


def test_a_blocked_event_loop_is_left_behind(monkeypatch):
    monkeypatch.setattr(asynchronous, "GRACE", 0.2)

    async def blocks(completions: list[str], **kwargs: Any) -> list[float]:
        time.sleep(3.0 if completions[0] == "block" else 0.0)
        return [1.0]

    scoring = runner(blocks, timeout=0.3)
    start = time.monotonic()
    assert scoring.score(batch("block", "a")).kinds_BR.tolist() == [[TIMEOUT]] * 2
    assert time.monotonic() - start < 2.5
    assert scoring.score(batch("a", "b")).kinds_BR.tolist() == [[SCORE]] * 2


def flaky(failures: int, error: Exception) -> tuple[Any, dict[str, int]]:
    """A judge that fails so many times for each sample before it answers."""
    calls: dict[str, int] = {}

    async def judge(completions: list[str], **kwargs: Any) -> list[float]:
        calls[completions[0]] = calls.get(completions[0], 0) + 1
        if calls[completions[0]] <= failures:
            raise error
        return [1.0] * len(completions)

    return judge, calls


@pytest.mark.parametrize("error", [ConnectionError("reset"), TimeoutError("read"), KeyError("choices")])
def test_a_flaky_judge_is_asked_again(error):
    judge, calls = flaky(2, error)
    assert kinds(judge, "a", "b", timeout=30.0) == [SCORE] * 2
    assert calls == {"a": 3, "b": 3}
    judge, calls = flaky(3, error)
    assert kinds(judge, "a", timeout=30.0) == [FAILURE]
    assert calls == {"a": 3}


@pytest.mark.parametrize("error", [TypeError("mine"), AttributeError("mine"), NameError("mine")])
def test_a_mistake_in_the_code_is_not(error):
    judge, calls = flaky(1, error)
    assert kinds(judge, "a", timeout=30.0) == [FAILURE]
    assert calls == {"a": 1}


def test_waits_grow_and_end_with_the_bound(monkeypatch):
    monkeypatch.setattr(asynchronous, "FIRST_WAIT", 100.0)
    judge, calls = flaky(1, ConnectionError("reset"))
    start = time.monotonic()
    assert kinds(judge, "a", timeout=5.0) == [FAILURE], "there is no time for another try"
    assert time.monotonic() - start < 5
    assert calls == {"a": 1}


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_whole_batches_are_one_call_with_retries(timeout):
    judge, calls = flaky(1, ConnectionError("reset"))
    judge.whole_batch = True
    assert kinds(judge, "a", "b", timeout=timeout) == [SCORE] * 2
    assert calls == {"a": 2}


def test_a_single_sample_without_a_bound_is_asked_again():
    judge, calls = flaky(2, ConnectionError("reset"))
    assert kinds(judge, "a") == [SCORE]
    assert calls == {"a": 3}


def test_whole_batches_have_an_end():
    async def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return await stubborn(completions)

    reward.whole_batch = True  # type: ignore[attr-defined]
    assert kinds(reward, "a", "hang", timeout=0.3) == [TIMEOUT] * 2


def test_an_exit_does_not_end_the_loop():
    async def leaves(completions: list[str], **kwargs: Any) -> list[float]:
        if completions[0] == "exit":
            raise SystemExit(1)
        return [1.0] * len(completions)

    scoring = runner(leaves, timeout=30.0)
    assert scoring.score(batch("exit", "a")).kinds_BR.tolist() == [[FAILURE], [SCORE]]
    assert scoring.score(batch("a", "a")).kinds_BR.tolist() == [[SCORE], [SCORE]]


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_raised_is_a_failure_whatever_it_is(error, timeout):
    async def leaves(completions: list[str], **kwargs: Any) -> list[float]:
        if "leave" in completions:
            raise error
        return [1.0] * len(completions)

    scoring = runner(leaves, timeout=timeout)
    assert scoring.score(batch("leave", "a")).kinds_BR.tolist() == [[FAILURE], [SCORE]]
    assert scoring.score(batch("a", "a")).kinds_BR.tolist() == [[SCORE], [SCORE]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_task_that_exits_does_not_end_the_loop(error):
    async def leaves() -> float:
        raise error

    async def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [await asyncio.create_task(leaves()) if text == "leave" else 1.0 for text in completions]

    scoring = runner(reward)
    assert scoring.score(batch("leave", "a")).kinds_BR.tolist() == [[FAILURE], [SCORE]]
    assert scoring.score(batch("a", "a")).kinds_BR.tolist() == [[SCORE]] * 2


def test_a_reward_cannot_stop_its_loop():
    async def stops(completions: list[str], **kwargs: Any) -> list[float]:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.1)
        return [1.0] * len(completions)

    assert kinds(stops, "a", "b") == [SCORE] * 2


def test_a_loop_that_has_ended_is_not_waited_for():
    async def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    scoring = runner(reward)
    assert scoring.score(batch("a", "a")).kinds_BR.tolist() == [[SCORE]] * 2
    loop = scoring._async._loops[0]
    loop.stop()
    loop.thread.join()
    loop.start = lambda work: work.close() or concurrent.futures.Future()  # type: ignore[method-assign]
    assert scoring.score(batch("a", "a")).kinds_BR.tolist() == [[FAILURE]] * 2
    assert scoring.score(batch("a", "a")).kinds_BR.tolist() == [[SCORE]] * 2, "on another loop"


def test_a_reward_that_blocks_delays_no_other(monkeypatch):
    monkeypatch.setattr(asynchronous, "GRACE", 0.2)

    async def blocks(completions: list[str], **kwargs: Any) -> list[float]:
        time.sleep(3.0)
        return [1.0] * len(completions)

    async def innocent(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0.01)
        return [1.0] * len(completions)

    scores = runner(blocks, innocent, timeout=0.5).score(batch("a", "b"))
    assert scores.kinds_BR.tolist() == [[TIMEOUT, SCORE]] * 2


def test_a_client_that_cancels_itself_is_a_failure():
    async def cancels(completions: list[str], **kwargs: Any) -> list[float]:
        raise asyncio.CancelledError

    assert kinds(cancels, "a", "b", timeout=30.0, retries=0) == [FAILURE] * 2


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_broken_contract_is_an_error(timeout):
    async def wrong(completions: list[str], **kwargs: Any) -> Any:
        return ["x"] * len(completions)

    with pytest.raises(RewardError, match=r"returned 'x' for completion [01]"):
        kinds(wrong, "a", "b", timeout=timeout)


def test_retries_leave_the_runs_random_numbers_alone():
    import random

    random.seed(5)
    expected = random.random()
    random.seed(5)
    judge, _ = flaky(2, ConnectionError("reset"))
    kinds(judge, "a", "b", timeout=30.0)
    assert random.random() == expected
