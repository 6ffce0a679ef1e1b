import asyncio
import gc
import logging
import math
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from gruppo.errors import ConfigError, DataError, RolloutError
from gruppo.tools import closing
from gruppo.tools.environments import Environments, add_observation, method_call
from gruppo.tools.executor import ToolExecutor
from tests.tools.scripted import eventually

ROW: dict[str, Any] = {"prompt": [{"role": "user", "content": "Count. "}], "goal": 3}


class Base:
    def inherited(self) -> str:
        """Say where it is from."""
        return "base"


class Counter(Base):
    """An environment with everything that is a tool, and everything that is none."""

    made = 0
    closed = 0
    setting = 3

    def __init__(self) -> None:
        type(self).made += 1
        self.count, self.goal = 0, 0
        self.rows: list[dict[str, Any]] = []

    def reset(self, **row: Any) -> str:
        self.count, self.goal = 0, row["goal"]
        self.rows.append(row)
        row["prompt"][0]["content"] = "changed"
        return f"Up to {self.goal}."

    def increment(self, by: int) -> int:
        """Count on.

        Args:
            by: how far
        """
        self.count += by
        return self.count

    @staticmethod
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: which
        """
        return 2 * number

    @classmethod
    def of_class(cls) -> None: ...

    @property
    def property(self) -> None:
        raise AssertionError("it was run")

    def _private(self) -> None: ...

    def get_reward(self) -> float:
        if self.count == 99:
            raise ValueError("too far")
        return float(self.count == self.goal)

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture(autouse=True)
def fresh_counts() -> None:
    gc.collect()  # environments of earlier tests are closed by now
    for cls in (Counter, *Counter.__subclasses__()):
        cls.made = cls.closed = 0


class Quiet:
    def reset(self, **row: Any) -> None: ...

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


def environments(factory: Any = Counter, **settings: Any) -> Environments:
    return Environments(factory, ToolExecutor(**settings))


def test_tools_are_the_functions_of_the_class() -> None:
    (kind,) = environments().kinds.values()
    assert [tool.name for tool in kind.tools] == ["double", "increment", "inherited"]
    assert Counter.made == 1


class WithoutReset:
    pass


class ResetOfNothing:
    def reset(self) -> None: ...


class Undescribed:
    def reset(self, **row: Any) -> None: ...
    def act(self, what: str) -> None: ...


def broken_factory() -> Any:
    raise OSError("no display")


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (WithoutReset, "WithoutReset, which has no method `reset`"),
        (ResetOfNothing, r"ResetOfNothing.reset\(\).*Add `\*\*row`"),
        (Undescribed, "Undescribed: the tool `act`.*no docstring"),
        (broken_factory, "environment_factory raised.*no display"),
        ({"a": Counter, "b": WithoutReset}, r"environment_factory\['b'\] made a WithoutReset"),
        (Counter(), "must be a class or a function"),
        ({}, "empty dict"),
    ],
)
def test_what_is_no_environment(factory: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        environments(factory)


def test_pools_grow_and_are_used_again() -> None:
    pool = environments()
    first = pool.take([ROW] * 3, "train")
    assert len({id(env) for env in first}) == 3
    assert pool.take([ROW] * 2, "train") == first[:2]
    assert pool.take([ROW] * 4, "train")[:3] == first
    assert Counter.made == 4


def test_training_and_evaluation_have_their_own() -> None:
    pool = environments()
    train, held_out = pool.take([ROW] * 2, "train"), pool.take([ROW] * 5, "eval")
    assert not {id(env) for env in train} & {id(env) for env in held_out}


def test_rows_name_their_environment() -> None:
    pool = environments({"count": Counter, "quiet": Quiet})
    rows = [{**ROW, "environment": name} for name in ("quiet", "count", "quiet")]
    taken = pool.take(rows, "train")
    assert [type(env) for env in taken] == [Quiet, Counter, Quiet]
    assert taken[0] is not taken[2]
    pool.reset(taken, rows)
    assert set(taken[1].rows[0]) == {"prompt", "goal"}, "the name is not a column of the episode"
    for row in ({**ROW, "environment": "chess"}, ROW):
        with pytest.raises(DataError, match=r"A row has environment=.* has 'count', 'quiet'"):
            pool.take([row], "train")


def test_reset_gets_every_column_and_cannot_change_the_row() -> None:
    pool = environments()
    taken = pool.take([ROW, ROW], "train")
    assert pool.reset(taken, [ROW, ROW]) == ["Up to 3."] * 2
    assert set(taken[0].rows[0]) == {"prompt", "goal"}
    assert ROW["prompt"][0]["content"] == "Count. "


class Fragile(Counter):
    def reset(self, **row: Any) -> Any:
        if row["goal"] is None:
            raise SystemExit("out of order")
        return row["goal"]


@pytest.mark.parametrize("bad", [None, 7, b"bytes", [{"type": "image"}]])
def test_an_environment_whose_reset_fails_is_replaced(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool = environments(Fragile)
    rows = [{**ROW, "goal": goal} for goal in ("fine", bad, bad)]
    first = pool.take(rows, "train")
    with caplog.at_level(logging.WARNING):
        assert pool.reset(first, rows) == ["fine", None, None]
    assert [id(env) in pool.unstarted for env in first] == [False, True, True]
    (said,) = caplog.records
    assert "Fragile.reset failed" in said.message
    assert said.exc_info is not None
    assert pool.rewards()[0](environments=first) == [1.0, None, None]

    second = pool.take(rows, "train")
    assert second[0] is first[0]
    assert not {id(env) for env in first[1:]} & {id(env) for env in second}
    eventually(lambda: Fragile.closed == 2)
    assert not pool.unstarted


class Slow(Counter):
    def reset(self, **row: Any) -> None:
        time.sleep(row["goal"])


def test_a_reset_that_overruns_is_a_failed_one() -> None:
    pool = environments(Slow, timeout=0.1)
    rows = [{**ROW, "goal": seconds} for seconds in (0.0, 5.0)]
    taken = pool.take(rows, "train")
    start = time.perf_counter()
    pool.reset(taken, rows)
    assert time.perf_counter() - start < 4
    assert pool.unstarted == {id(taken[1])}


class AsyncReset(Counter):
    async def reset(self, **row: Any) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return "seen"


def test_reset_may_be_async() -> None:
    pool = environments(AsyncReset)
    assert pool.reset(pool.take([ROW], "train"), [ROW]) == ["seen"]


def test_rewards_of_the_class_and_of_no_other() -> None:
    pool = environments({"count": Counter, "again": Counter, "quiet": Quiet})
    count, quiet = pool.rewards()
    assert (count.__name__, quiet.__name__) == ("Counter", "Quiet")
    rows = [{**ROW, "environment": name} for name in ("count", "quiet", "again")]
    taken = pool.take(rows, "train")
    pool.reset(taken, rows)
    taken[2].increment(3)
    assert count(environments=taken, goal=[3, 3, 3]) == [0.0, None, 1.0]
    assert quiet(environments=taken) == [None, 0.5, None]


def test_a_reward_that_fails_fails_its_own_row_only(caplog: pytest.LogCaptureFixture) -> None:
    pool = environments()
    taken = pool.take([ROW] * 3, "train")
    pool.reset(taken, [ROW] * 3)
    taken[1].increment(99)
    with caplog.at_level(logging.WARNING):
        first, second, third = pool.rewards()[0](environments=taken)
    assert (first, third) == (0.0, 0.0)
    assert math.isnan(second)
    assert "Counter.get_reward failed: too far" in caplog.text
    assert taken[1] not in pool.take([ROW] * 3, "train")


def test_an_environment_without_get_reward_gives_none() -> None:
    class Plain:
        def reset(self, **row: Any) -> None: ...

    assert environments(Plain).rewards() == []


def test_spoiled_ones_are_closed_and_replaced() -> None:
    pool = environments()
    first = pool.take([ROW] * 3, "train")
    pool.spoil(first[1])
    assert Counter.closed == 0, "its sample may still be scored"
    second = pool.take([ROW] * 3, "train")
    assert first[1] not in second
    eventually(lambda: Counter.closed == 1)
    assert Counter.made == 4


class StubbornError(Exception):
    pass


class Stubborn(Counter):
    def close(self) -> None:
        super().close()
        raise StubbornError


class AsyncClose(Counter):
    async def close(self) -> None:  # type: ignore[override]
        type(self).closed += 1


@pytest.mark.parametrize("factory", [Counter, Stubborn, AsyncClose])
def test_all_are_closed_at_the_end(factory: Any) -> None:
    pool = environments(factory)
    pool.take([ROW] * 2, "train")
    pool.take([ROW], "eval")
    pool.close()
    assert factory.closed == 3
    pool.close()
    assert factory.closed == 3, "none of them twice"
    assert len(pool.take([ROW] * 2, "train")) == 2


def test_they_are_closed_with_the_last_reference() -> None:
    pool = environments()
    del pool
    gc.collect()
    assert Counter.closed == 1


class Locked(Counter):
    """A call that never returns holds what `close` needs."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def act(self) -> None:
        """Act."""
        with self.lock:
            time.sleep(60)

    def close(self) -> None:
        with self.lock:
            super().close()


class AsyncLocked(Locked):
    async def close(self) -> None:  # type: ignore[override]
        super().close()


@pytest.mark.parametrize("factory", [Locked, AsyncLocked])
def test_one_that_cannot_be_closed_holds_up_nothing(factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool = environments(factory, timeout=1.0)
    (env,) = pool.take([ROW], "train")
    pool.executor.run([[method_call(env, "act")]])
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        assert pool.take([ROW], "train") != [env]
        assert time.perf_counter() - start < 0.8, "nobody waits for it"
        eventually(lambda: f"{factory.__name__}.close failed: close took longer than 1 s" in caplog.text)


def test_the_end_of_a_run_waits_for_no_close_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(closing, "CLOSE_TIME", 0.2)
    pool = environments(Locked)
    held, *_ = pool.take([ROW] * 3, "train")
    held.lock.acquire()
    start = time.perf_counter()
    pool.close()
    assert time.perf_counter() - start < 20
    assert Locked.closed == 2
    assert "close took longer than 0.2 s" in caplog.text


def test_plain_ones_are_closed_in_the_main_thread_if_all_runs_there() -> None:
    class Bound(Quiet):
        def close(self) -> None:
            seen.append(threading.current_thread())

    seen: list[Any] = []
    pool = environments(Bound, max_parallel=1)
    pool.spoil(pool.take([ROW], "train")[0])
    pool.take([ROW], "train")
    pool.close()
    assert seen == [threading.current_thread()] * 2


PROGRAM = """
from gruppo.tools.environments import Environments
from gruppo.tools.executor import ToolExecutor

class Closed:
    def reset(self, **row): ...
    {kind} close(self):
        if self is bad: raise ValueError("stuck")
        print("closed")

pool = Environments(Closed, ToolExecutor(max_parallel={parallel}))
bad = pool.take([{{}}] * 4, "train")[1]
print("end")
"""


@pytest.mark.parametrize("parallel", [1, 8])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_end_of_the_program_closes_them(kind: str, parallel: int) -> None:
    program = PROGRAM.format(kind=kind, parallel=parallel)
    # As in Python 3.12, where a program that is about to end can start no thread.
    guard = "import atexit, threading\ndef none(self): raise RuntimeError('too late')\n"
    program += guard + "threading._register_atexit(lambda: setattr(threading.Thread, 'start', none))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["end", *["closed"] * 3]
    assert "Closed.close failed: stuck" in done.stderr
    assert "too late" not in done.stderr


def test_a_factory_must_make_new_ones() -> None:
    one = Quiet()
    with pytest.raises(RolloutError, match="environment_factory returned an object that it has returned before"):
        environments(lambda: one).take([ROW] * 2, "train")
    with pytest.raises(ConfigError, match=r"environment_factory\['b'\] returned an object"):
        environments({"a": lambda: one, "b": lambda: one})


def test_rows_that_do_not_fit_reset() -> None:
    class Level(Quiet):
        def reset(self, level: int, prompt: Any) -> None: ...  # type: ignore[override]

    pool = environments(Level)
    pool.check_row({"prompt": [], "level": 1})
    with pytest.raises(DataError, match=r"Level.reset\(level: int, prompt.*missing a required argument: 'level'"):
        pool.check_row({"prompt": []})
    with pytest.raises(DataError, match="unexpected keyword argument 'goal'"):
        pool.check_row({"prompt": [], "level": 1, "goal": 2})


def test_a_factory_that_fails_later_says_which() -> None:
    attempts = iter([Quiet])

    def once() -> Any:
        return next(attempts)()

    pool = environments({"quiet": once})
    with pytest.raises(RolloutError, match=r"environment_factory\['quiet'\] could not make another"):
        pool.take([{"environment": "quiet"}] * 2, "train")


@pytest.mark.parametrize(
    ("content", "seen", "expected"),
    [
        ("Play. ", "Go.", "Play. Go."),
        ("", "Go.", "Go."),
        (None, "Go.", "Go."),
        ("Play. ", [{"type": "text", "text": "Go."}], "Play. Go."),
        ("Play. ", None, "Play. "),
        ("Play. ", "", "Play. "),
        (
            [{"type": "text", "text": "Play. "}],
            "Go.",
            [{"type": "text", "text": "Play. "}, {"type": "text", "text": "Go."}],
        ),
        (
            [{"type": "text", "text": "Play. "}],
            [{"type": "text", "text": "Go."}],
            [{"type": "text", "text": "Play. "}, {"type": "text", "text": "Go."}],
        ),
    ],
)
def test_observations_end_the_last_message(content: Any, seen: Any, expected: Any) -> None:
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": content, "name": "n"}]
    result = add_observation(prompt, seen)
    assert result == [{"role": "system", "content": "S"}, {"role": "user", "content": expected, "name": "n"}]
    assert prompt[1]["content"] == content
    if isinstance(content, list):
        assert len(content) == 1, "the blocks of the row are its own"


class OneLoop:
    """What it keeps is bound to the event loop it was made in."""

    async def reset(self, **row: Any) -> None:
        self.loop = asyncio.get_running_loop()

    async def get_reward(self) -> float:
        return float(asyncio.get_running_loop() is self.loop)


def test_all_of_an_async_environment_runs_in_one_event_loop() -> None:
    pool = environments(OneLoop)
    taken = pool.take([ROW] * 2, "train")
    pool.reset(taken, [ROW] * 2)
    assert pool.rewards()[0](environments=taken) == [1.0, 1.0]
