"""How reward functions and reward models are called."""

import asyncio
import functools
import logging
import math
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from gruppo.config.grpo import GRPOConfig
from gruppo.errors import RewardError
from gruppo.rewards.outcomes import Kind
from gruppo.rewards.resolve import function_name, is_async, is_reward_model, resolve_rewards, unique_names
from gruppo.rewards.runner import RewardInputs, RewardRunner, RewardSettings
from gruppo.trainer.grpo import GRPOTrainer
from tests.helpers import base_args, prompts, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
BATCH = RewardInputs(
    rows=[{"prompt": "p", "answer": "1", "level": 3}, {"prompt": "q", "answer": "2", "completion": "x"}],
    prompts=["p", "q"],
    completions=["a", "bc"],
    completion_ids=[(5, 1), (6, 7, 1)],
)


def runner(*functions: Any, tokenizers: Any = None, timer: Any = nullcontext, **settings: Any) -> RewardRunner:
    names = unique_names([function_name(f) for f in functions])
    tokenizers = tokenizers or [None] * len(functions)
    return RewardRunner(functions, names, tokenizers, device=CPU, settings=RewardSettings(**settings), timer=timer)


def constant(value: Any) -> Any:
    def reward(completions: list[Any], **kwargs: Any) -> list[Any]:
        return [value] * len(completions)

    return reward


def same(found: torch.Tensor, expected: list[list[float]]) -> bool:
    return torch.equal(found.nan_to_num(9e9), torch.tensor(expected).nan_to_num(9e9))


# ---- what a function is given


def test_every_keyword_of_the_protocol():
    given: dict[str, Any] = {}

    def reward(*args: Any, **kwargs: Any) -> list[float]:
        assert not args
        given.update(kwargs)
        return [0.0, 0.0]

    state = object()
    runner(reward).score(BATCH, trainer_state=state, environments=["e", "f"])
    assert callable(given.pop("log_extra"))
    assert callable(given.pop("log_metric"))
    assert given == {
        "prompts": ["p", "q"],
        "completions": ["a", "bc"],
        "completion_ids": [[5, 1], [6, 7, 1]],
        "answer": ["1", "2"],
        "level": [3, None],  # the second row has no such column
        "trainer_state": state,
        "environments": ["e", "f"],
    }


def test_a_column_that_only_later_rows_have_is_given_too():
    batch = RewardInputs([{"prompt": "p"}, {"prompt": "q", "hint": "h"}], ["p", "q"], ["a", "b"], [[1], [1]])
    assert batch.columns() == {"hint": [None, "h"]}


def test_columns_called_like_arguments_of_ours_do_not_shadow_them():
    rows = [{"prompt": "p", "prompts": "x", "completions": "y", "trainer_state": "z"}]
    seen: dict[str, Any] = {}

    def reward(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0]

    runner(reward).score(RewardInputs(rows, ["p"], ["a"], [[1]]), trainer_state="state")
    assert (seen["prompts"], seen["completions"], seen["trainer_state"]) == (["p"], ["a"], "state")


def test_a_function_may_name_what_it_wants():
    def reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(a) + len(c) for c, a in zip(completions, answer, strict=True)]

    assert runner(reward).score(BATCH).values_BR.tolist() == [[2.0], [4.0]]


# ---- what a function returns


def test_none_becomes_nan_in_float32():
    rewards = runner(constant(None), constant(0.1)).score(BATCH).values_BR
    assert rewards.dtype == torch.float32
    assert same(rewards, [[math.nan, 0.1], [math.nan, 0.1]])


def test_a_completion_that_nothing_scores_is_reported_with_its_row(caplog):
    def second_only(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None, 1.0]

    with caplog.at_level(logging.WARNING, "gruppo.rewards.runner"):
        runner(second_only, constant(0.0)).score(BATCH)
        assert not caplog.records
        runner(second_only, second_only).score(BATCH)
    (record,) = caplog.records
    assert "1 of 2 completions" in record.message
    assert "prompt 'p', completion 'a'" in record.message
    assert "'answer': '1'" in record.message


# ---- what a function does instead of returning


def raises_on_b(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 / (completion != "bc") for completion in completions]


async def raises_on_b_too(completions: list[str], **kwargs: Any) -> list[float]:
    return raises_on_b(completions)


@pytest.mark.parametrize("function", [raises_on_b, raises_on_b_too])
def test_an_exception_loses_no_other_sample_and_is_shown_once(function, caplog):
    scoring = runner(function, constant(0.5), retries=0)
    with caplog.at_level(logging.WARNING, "gruppo.rewards.runner"):
        scores = scoring.score(BATCH)
        scoring.score(BATCH)
    assert same(scores.values_BR, [[1.0, 0.5], [math.nan, math.nan]]), "the row is unscorable as a whole"
    assert scores.kinds_BR.tolist() == [[Kind.SCORE, Kind.SCORE], [Kind.FAILURE, Kind.SCORE]]
    assert scores.kinds_BR.dtype == torch.int8
    (record,) = caplog.records
    assert "failed on 1 of 2 completions" in record.message
    assert "prompt 'q', completion 'bc'" in record.message
    assert "ZeroDivisionError" in record.message


@pytest.mark.parametrize("function", [raises_on_b, raises_on_b_too])
def test_an_exception_can_be_made_to_stop_the_run(function):
    with pytest.raises(RewardError, match=r"(?s)'raises_on_b.*failed on 1 of 2.*ZeroDivisionError"):
        runner(function, on_error="raise", retries=0).score(BATCH)


def test_whole_batches_are_asked_once():
    calls: list[int] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        raise ValueError("no")

    reward.whole_batch = True  # type: ignore[attr-defined]
    scores = runner(reward).score(BATCH)
    assert calls == [2]
    assert scores.kinds_BR.tolist() == [[Kind.FAILURE]] * 2


def test_an_exit_is_a_failure_and_an_interrupt_is_one_by_the_user():
    def leaves(**kwargs: Any) -> list[float]:
        raise SystemExit(3)

    def interrupted(**kwargs: Any) -> list[float]:
        raise KeyboardInterrupt

    assert runner(leaves).score(BATCH).kinds_BR.tolist() == [[Kind.FAILURE]] * 2
    with pytest.raises(KeyboardInterrupt):
        runner(interrupted).score(BATCH)


def test_a_column_that_is_not_there_is_an_error():
    def reward(completions: list[str], no_such_column: list[str], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"'reward' cannot be called: missing .*'no_such_column'.*answer, comple"):
        runner(reward).score(BATCH)
    with pytest.raises(RewardError, match=r"'<lambda>' cannot be called: .*unexpected keyword"):
        runner(lambda completions: [1.0, 2.0]).score(BATCH)


# ---- what a function logs


def logs(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    log_extra("text", completions)
    log_metric("asked", len(completions))
    log_extra("twice", [completion * 2 for completion in completions])
    if "bc" in completions:
        raise ValueError("after it has logged")
    return [1.0] * len(completions)


async def logs_too(**kwargs: Any) -> list[float]:
    return logs(**kwargs)


@pytest.mark.parametrize("function", [logs, logs_too])
def test_only_calls_that_count_are_logged(function):
    columns: dict[str, list[Any]] = {}
    metrics: list[Any] = []
    log = {"log_extra": columns.__setitem__, "log_metric": lambda name, value: metrics.append((name, value))}
    runner(function, retries=0).score(BATCH, **log)
    assert columns == {"text": ["a", None], "twice": ["aa", None]}
    assert metrics == [("asked", 1.0)]


def test_a_column_of_the_wrong_length_is_an_error():
    def reward(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("c", ["one"])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"log_extra\('c'\) got 1 values for 2 completions"):
        runner(reward).score(BATCH)


# ---- steps


def test_steps_are_kept_beside_their_sum():
    def steps(completions: list[str], **kwargs: Any) -> list[Any]:
        return [[(0, 1.0), (1, -0.5)], None]

    scores = runner(constant(2.0), steps).score(BATCH)
    assert same(scores.values_BR, [[2.0, 0.5], [2.0, math.nan]])
    assert scores.steps == [[None, [(0, 1.0), (1, -0.5)]], [None, None]]
    assert runner(constant(2.0)).score(BATCH).steps is None


# ---- order


def test_columns_are_in_the_order_of_the_functions_sync_and_async_mixed():
    async def later(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [2.0, 2.0]

    assert runner(constant(1.0), later, constant(3.0)).score(BATCH).values_BR.tolist() == [[1.0, 2.0, 3.0]] * 2


def test_sync_functions_run_in_order_and_before_async_ones():
    calls: list[str] = []

    def named(name: str) -> Any:
        def reward(**kwargs: Any) -> list[float]:
            calls.append(name)
            return [0.0, 0.0]

        return reward

    async def waiting(**kwargs: Any) -> list[float]:
        calls.append("async")
        return [0.0, 0.0]

    runner(waiting, named("a"), named("b")).score(BATCH)
    assert calls == ["a", "b", "async"]


def test_async_functions_run_at_the_same_time():
    # Each waits until both have started: one after the other, they would wait for ever.
    async def meet(barrier: threading.Barrier, **kwargs: Any) -> list[float]:
        barrier.wait(20)
        return [1.0, 1.0]

    barrier = threading.Barrier(2)
    together = [functools.partial(meet, barrier), functools.partial(meet, barrier)]
    assert runner(*together).score(BATCH).values_BR.tolist() == [[1.0, 1.0]] * 2


def test_async_functions_keep_their_event_loop():
    loops: list[Any] = []

    async def reward(**kwargs: Any) -> list[float]:
        loops.append((asyncio.get_running_loop(), threading.current_thread().name))
        return [0.0, 0.0]

    scoring = runner(reward)
    scoring.score(BATCH)
    scoring.score(BATCH)
    assert loops[0] == loops[1]
    assert loops[0][1] == "gruppo-async-rewards"


def test_every_function_is_timed_under_its_name():
    timed: list[str] = []

    class Timer:
        def __init__(self, name: str):
            timed.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: Any) -> None: ...

    async def slow(**kwargs: Any) -> list[float]:
        return [0.0, 0.0]

    runner(constant(1.0), slow, timer=Timer).score(BATCH)
    assert timed == ["reward", "slow"]


# ---- what counts as a reward, and its name


def plain(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


async def coroutine(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


class Judge:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    def method(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


class AsyncJudge:
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    async def method(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


def own_name() -> Any:
    judge = Judge()
    judge.__name__ = "my_judge"
    return judge


@pytest.mark.parametrize(
    ("function", "name", "asynchronous"),
    [
        (plain, "plain", False),
        (coroutine, "coroutine", True),
        (functools.partial(plain, extra=1), "plain", False),
        (functools.partial(functools.partial(coroutine), extra=1), "coroutine", True),
        (Judge(), "Judge", False),
        (AsyncJudge(), "AsyncJudge", True),
        (functools.partial(AsyncJudge(), extra=1), "AsyncJudge", True),
        (Judge().method, "method", False),
        (AsyncJudge().method, "method", True),
        (own_name(), "my_judge", False),
        (lambda completions, **kwargs: [1.0] * len(completions), "<lambda>", False),
    ],
)
def test_callables_of_every_kind(function, name, asynchronous):
    assert function_name(function) == name
    assert is_async(function) is asynchronous
    assert not is_reward_model(function)
    assert runner(function).score(BATCH).values_BR.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("names", "unique"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "a"], ["a", "a_2", "a_3"]),
        (["a", "b", "a", "b"], ["a", "b", "a_2", "b_2"]),
        (["a_2", "a", "a"], ["a_2", "a", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_2", "a_2_2"]),
        ([], []),
    ],
)
def test_names_are_never_shared(names, unique):
    assert unique_names(names) == unique
    assert len(set(unique)) == len(names)


def test_the_users_lists_are_not_touched():
    functions, tokenizers, weights = [plain], [None], [2.0]
    resolved, _, tensor = resolve_rewards(functions, tokenizers, weights, trust_remote_code=False)
    assert resolved == [plain]
    assert resolved is not functions
    assert (functions, tokenizers, weights) == ([plain], [None], [2.0])
    assert (tensor.tolist(), tensor.dtype) == ([2.0], torch.float32)


def test_a_single_function_and_default_weights():
    functions, tokenizers, weights = resolve_rewards(plain, None, None, trust_remote_code=False)
    assert (functions, tokenizers, weights.tolist()) == ([plain], [None], [1.0])


def test_a_trainer_leaves_the_list_alone_and_logs_duplicates_apart(tmp_path):
    functions = [plain, plain]
    trainer = GRPOTrainer(
        tiny_model(), functions, GRPOConfig(**base_args(tmp_path)), prompts(), processing_class=tiny_tokenizer()
    )
    assert functions == [plain, plain]
    assert trainer.reward_func_names == ["plain", "plain_2"]
    trainer.collect(trainer.train_dataset.select([0, 0, 1, 1]))
    assert {"rewards/plain/mean", "rewards/plain_2/mean"} <= trainer.metrics.values["train"].keys()
