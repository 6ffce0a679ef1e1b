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


def test_an_interrupt_in_the_callers_thread_stops_the_run() -> None:
    with pytest.raises(KeyboardInterrupt):
        ToolExecutor(max_parallel=1).run([[made(raising, KeyboardInterrupt())]])


@pytest.mark.parametrize(("function", "max_parallel"), [(raising, 4), (raising_soon, 1), (raising_soon, 4)])
def test_a_tools_own_interrupt_is_an_outcome(function: Any, max_parallel: int) -> None:
    executor = ToolExecutor(max_parallel=max_parallel)
    ((outcome,),) = executor.run([[made(function, KeyboardInterrupt("mine"))]])
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert values(executor.run([[made(soon, "still there")]])) == [["still there"]]


async def in_a_group(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(raising_soon(error))


async def gathered(error: BaseException) -> None:
    await asyncio.gather(raising_soon(error), asyncio.sleep(0.01))


async def on_the_side(error: BaseException) -> str:
    task = asyncio.ensure_future(raising_soon(error))
    await asyncio.sleep(0.05)
    return f"done: {task.done()}"


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("function", [in_a_group, gathered, on_the_side])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_of_an_async_tool_that_exits_ends_neither_loop_nor_run(
    function: Any, error: BaseException, timeout: float | None
) -> None:
    executor, found = ToolExecutor(timeout=timeout), []
    calls = [[made(soon, "a", 0.1)], [made(function, error)], [made(soon, "b")]]
    thread = threading.Thread(target=lambda: found.append(executor.run(calls)), daemon=True)
    thread.start()
    thread.join(20)
    (outcomes,) = found
    assert [outcomes[0][0].value, outcomes[2][0].value] == ["a", "b"]
    if function is on_the_side:
        assert outcomes[1][0].value == "done: True"
    else:
        assert type(outcomes[1][0].error) is type(error)
    assert values(executor.run([[made(soon, "still there")]])) == [["still there"]]


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


def test_an_async_tool_that_blocks_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    begun: list[str] = []

    async def block() -> str:
        release.wait(60)
        return "late"

    async def count(name: str) -> str:
        begun.append(name)
        return name

    executor = ToolExecutor(timeout=0.2)
    outcomes = executor.run([[made(block)], [made(count, "a"), made(count, "b")], [made(count, "c")]])
    assert outcomes[0][0].timed_out
    assert values(outcomes[1:]) == [["a", "b"], ["c"]], "they are made in another event loop"
    assert values(executor.run([[made(soon, "d")]])) == [["d"]]
    assert caplog.text.count("blocks its event loop") == 1
    release.set()
    time.sleep(0.1)
    assert sorted(begun) == ["a", "b", "c"], "none of them twice"


def test_many_that_block_fail_in_bounded_time() -> None:
    async def block() -> None:
        time.sleep(30)

    start = time.perf_counter()
    outcomes = ToolExecutor(timeout=0.1).run([[made(block)] for _ in range(20)])
    assert time.perf_counter() - start < 15
    assert all(outcome.error is not None for (outcome,) in outcomes)
    assert any("never began" in str(outcome.error) for (outcome,) in outcomes)


def test_calls_that_never_return_get_so_many_threads_and_no_more() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    def threads() -> int:
        return sum(thread.name == "gruppo-tool" for thread in threading.enumerate())

    executor, before = ToolExecutor(timeout=0.05, max_parallel=2), threads()
    executor.run([[made(hang)] for _ in range(8)])
    assert threads() == before + 8
    start = time.perf_counter()
    ((hung, other),) = executor.run([[made(hang), made(now, "a")]])
    assert time.perf_counter() - start < 5
    for outcome in (hung, other):
        assert "8 calls that took too long are still running" in str(outcome.error)
    assert threads() == before + 8
    release.set()
    deadline = time.perf_counter() + 20
    while threads() > before and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert values(executor.run([[made(now, "b")]])) == [["b"]]


@pytest.mark.parametrize("function", [now, soon])
@pytest.mark.parametrize("first", [True, False])
def test_a_thread_that_cannot_be_started_is_a_failed_call(
    function: Any, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = ToolExecutor()
    if not first:
        executor.run([[]])  # the coordinator is there

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        ((outcome,),) = executor.run([[made(function, "a")]])
    assert "No thread could be started" in str(outcome.error)
    assert values(executor.run([[made(function, "a")]])) == [["a"]]


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
