import asyncio
import gc
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from gruppo.tools.calls import Call, Outcome
from gruppo.tools.executor import ToolExecutor


def now(value: Any) -> Any:
    return value


async def soon(value: Any, seconds: float = 0.0) -> Any:
    await asyncio.sleep(seconds)
    return value


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def raising(error: BaseException) -> None:
    raise error


async def raising_soon(error: BaseException) -> None:
    raise error


def made(function: Any, *values: Any, **arguments: Any) -> Call:
    names = function.__code__.co_varnames
    given = {**dict(zip(names, values, strict=False)), **arguments}
    return Call(function.__name__, function, given, asyncio.iscoroutinefunction(function))


def values(outcomes: list[list[Outcome]]) -> list[list[Any]]:
    return [[outcome.value for outcome in sample] for sample in outcomes]


@pytest.mark.parametrize("max_parallel", [1, 2, 32])
def test_results_are_in_the_order_of_the_calls(max_parallel: int) -> None:
    calls = [made(soon, "a", 0.05), made(now, "b"), made(soon, "c"), made(now, "d")]
    outcomes = ToolExecutor(max_parallel=max_parallel).run([calls, [], [made(now, "e")]])
    assert values(outcomes) == [["a", "b", "c", "d"], [], ["e"]]


def test_samples_run_at_the_same_time() -> None:
    together = threading.Barrier(8)

    def meet() -> str:
        together.wait(timeout=20)
        return "met"

    assert values(ToolExecutor(max_parallel=8).run([[made(meet)] for _ in range(8)])) == [["met"]] * 8


def test_eight_slow_samples_take_little_more_than_one() -> None:
    start = time.perf_counter()
    ToolExecutor().run([[made(sleep, 0.2)] for _ in range(8)])
    assert time.perf_counter() - start < 1.0


def test_no_more_samples_than_allowed_run_at_the_same_time() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def count() -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return ""

    ToolExecutor(max_parallel=3).run([[made(count)] for _ in range(9)])
    assert 1 < most <= 3


def test_calls_of_one_sample_run_in_order_on_one_thread() -> None:
    seen: list[tuple[int, int]] = []

    def note(number: int) -> int:
        time.sleep(0.01 * (3 - number))
        seen.append((number, threading.get_ident()))
        return number

    ToolExecutor().run([[made(note, i) for i in range(3)]])
    assert [number for number, _ in seen] == [0, 1, 2]
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_one_at_a_time_runs_in_the_callers_thread() -> None:
    ((outcome,),) = ToolExecutor(max_parallel=1).run([[Call("ident", threading.get_ident)]])
    assert outcome.value == str(threading.get_ident())


@pytest.mark.parametrize("function", [raising, raising_soon])
@pytest.mark.parametrize("error", [ValueError("nope"), SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_whatever_a_tool_raises_is_an_outcome(function: Any, error: BaseException) -> None:
    executor = ToolExecutor()
    outcomes = executor.run([[made(now, "before"), made(function, error), made(now, "after")]])
    assert values(outcomes) == [["before", None, "after"]]
    assert type(outcomes[0][1].error) is type(error)
    assert values(executor.run([[made(soon, "still there")]])) == [["still there"]]


@pytest.mark.parametrize("max_parallel", [1, 4])
@pytest.mark.parametrize("function", [raising, raising_soon])
def test_an_interrupt_stops_the_run(function: Any, max_parallel: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        ToolExecutor(max_parallel=max_parallel).run([[made(function, KeyboardInterrupt())]])


def test_a_call_that_cannot_be_made_fails() -> None:
    bad_arguments = Call("now", now, {"wrong": 1})
    (unknown, wrong), (bytes_,) = ToolExecutor().run(
        [[Call("x", problem="Tool x not found."), bad_arguments], [made(now, b"bytes")]]
    )
    assert str(unknown.error) == "Tool x not found."
    assert "unexpected keyword argument 'wrong'" in str(wrong.error)
    assert "returned bytes" in str(bytes_.error)


def test_calls_that_overrun_are_given_up() -> None:
    release = threading.Event()

    def hang() -> str:
        release.wait(60)
        return "late"

    async def hang_too() -> str:
        await asyncio.sleep(60)
        return "late"

    start = time.perf_counter()
    executor = ToolExecutor(timeout=0.2, max_parallel=2)
    # Two samples hang in both threads there are; a third one and the later calls still run.
    outcomes = executor.run([[made(hang), made(now, "a"), made(hang_too)], [made(hang)], [made(now, "b")]])
    assert time.perf_counter() - start < 20
    assert values(outcomes) == [[None, "a", None], [None], ["b"]]
    assert [outcome.timed_out for outcome in outcomes[0]] == [True, False, True]
    assert "hang took longer than 0.2 s" in str(outcomes[0][0].error)
    release.set()
    time.sleep(0.05)
    assert values(executor.run([[made(now, "c")], [made(now, "d")]])) == [["c"], ["d"]]


def test_an_async_tool_that_blocks_is_given_up_too() -> None:
    async def block() -> str:
        time.sleep(1.0)
        return "late"

    start = time.perf_counter()
    ((outcome,),) = ToolExecutor(timeout=0.2).run([[made(block)]])
    assert outcome.timed_out
    assert time.perf_counter() - start < 0.9


def test_threads_end_with_the_executor() -> None:
    def alive() -> int:
        gc.collect()
        return sum(thread.name.startswith("gruppo-tool") for thread in threading.enumerate())

    before = alive()
    executor = ToolExecutor()
    executor.run([[made(now, 1), made(soon, 2)]])
    assert alive() > before
    del executor
    deadline = time.perf_counter() + 20
    while alive() > before and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert alive() <= before


def test_a_call_that_never_returns_does_not_keep_the_program_from_ending() -> None:
    program = (
        "import threading\n"
        "from gruppo.tools.calls import Call\n"
        "from gruppo.tools.executor import ToolExecutor\n"
        "executor = ToolExecutor(timeout=0.1)\n"
        "((outcome,),) = executor.run([[Call('hang', threading.Event().wait)]])\n"
        "print(outcome.timed_out)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"
