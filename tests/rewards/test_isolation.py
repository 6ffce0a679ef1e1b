"""What a reward cannot do to the run and to other rewards: forks, floods, changed arguments, stray processes."""

import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gruppo.rewards import runner as running
from gruppo.rewards import worker as in_worker_process
from gruppo.rewards.calling import Log, Reply
from gruppo.rewards.outcomes import ABSTAINED, Kind
from gruppo.rewards.pipes import receive, send
from gruppo.rewards.process import LostCallError
from tests.rewards.test_pool import batch
from tests.rewards.test_runner import BATCH, runner, same
from tests.rewards.test_worker import ask, gone, scaled, values, working

FAILURE, SCORE = Kind.FAILURE, Kind.SCORE


# ---- forks


def forks(completions: list[str], **kwargs: Any) -> list[float]:
    """Its child ends in the usual way, and it goes on."""
    if completions[0].startswith("fork"):
        child = os.fork()
        if child == 0:
            if completions[0] == "fork and raise":
                raise ValueError("in the child")
            sys.exit(3)
        _, status = os.waitpid(child, 0)
        return [float(os.waitstatus_to_exitcode(status))] * len(completions)
    return [float(len(completion)) for completion in completions]


def test_a_fork_in_a_worker_does_not_become_a_second_worker():
    scoring = runner(forks, timeout=30.0)
    for completion, expected in [("fork", 3.0), ("a", 1.0), ("fork and raise", 1.0), ("abc", 3.0), ("ab", 2.0)]:
        values_BR = scoring.score(batch(completion, completion)).values_BR
        assert values_BR.tolist() == [[expected]] * 2, completion


FORKING = """
    import os, sys, torch
    from gruppo.rewards.runner import RewardInputs, RewardRunner

    def forks(completions, **kwargs):
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        return [1.0] * len(completions)

    async def forks_too(completions, **kwargs):
        return forks(completions)

    function = {"sync": forks, "async": forks_too}[sys.argv[1]]
    runner = RewardRunner([function], ["mine"], [None], device=torch.device("cpu"))
    scores = runner.score(RewardInputs([{}] * 2, ["p"] * 2, ["a", "b"], [[1]] * 2))
    print("out", scores.values_BR.tolist(), flush=True)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_fork_in_this_process_does_not_become_a_second_run(how):
    command = [sys.executable, "-c", textwrap.dedent(FORKING), how]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2], env=env
    )
    assert found.stdout == "out [[1.0], [1.0]]\n", found.stderr


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([ABSTAINED] * 2, Log(2), number=1), "belongs to request 1, not 2"),
        (Reply([ABSTAINED] * 3, Log(3), number=2), "has 3 results for 2 completions"),
        ("something", "has the type str"),
    ],
)
def test_a_reply_that_belongs_to_no_question_ends_the_worker(reply, message, monkeypatch):
    with working(scaled) as worker:
        assert values(ask(worker)) == [2.0, 4.0]
        monkeypatch.setattr(worker, "_exchange", lambda *arguments: reply)
        with pytest.raises(LostCallError, match=message) as caught:
            ask(worker)
        assert caught.value.kind is FAILURE
        assert not worker.alive()


# ---- what comes back


def floods(completions: list[str], **kwargs: Any) -> Any:
    raise ValueError("begin" + "x" * 5_000_000 + "end")


def test_a_long_error_is_cut_in_the_worker():
    with working(floods) as worker:
        error = ask(worker).outcomes[0].error or ""
    assert len(error) < 10_100
    assert "in floods" in error
    assert error.rstrip().endswith("xend")


def test_a_long_error_is_short_in_the_log(caplog):
    runner(floods).score(BATCH)
    assert len(caplog.records[0].message) < 5000


def test_a_reply_that_is_too_large_is_a_failure(monkeypatch):
    def logs(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("x", ["y" * 1000] * len(completions))
        return [1.0] * len(completions)

    def reply(largest: int) -> Reply:
        monkeypatch.setattr(in_worker_process, "LARGEST_REPLY", largest)
        arguments = {"completions": ["a"], "completion_ids": [[1]]}
        found = pickle.loads(in_worker_process.answer(logs, "mine", pickle.dumps((7, pickle.dumps(arguments), 0, 1))))
        assert found.number == 7
        return found  # type: ignore[no-any-return]

    assert reply(10_000).outcomes[0].kind is SCORE
    refused = reply(500)
    assert refused.lost
    assert "logged so much" in str(refused.outcomes[0].error)


def test_a_message_that_is_too_large_is_not_read():
    out, into = os.pipe()
    send(into, b"12345")
    with pytest.raises(ValueError, match="5 bytes"):
        receive(out, largest=4)
    for pipe in (out, into):
        os.close(pipe)


class Poison:
    """Pickles well, and cannot be read again."""

    def __reduce__(self) -> Any:
        return exec, ("raise ValueError('poison')",)

    def __repr__(self) -> str:
        return "<poison>"


def logs_things(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    local = type("Local", (), {"__module__": "__main__", "__repr__": lambda self: "<local>"})
    log_extra("mixed", [threading.Lock(), local()][: len(completions)])
    log_extra("poison", [Poison(), {"a": 1}][: len(completions)])
    log_metric("size", len(completions))
    return [1.0] * len(completions)


def test_what_is_logged_and_cannot_be_sent_does_not_cost_the_scores():
    columns: dict[str, Any] = {}
    metrics: list[Any] = []
    scores = runner(logs_things, timeout=30.0).score(
        BATCH, log_extra=columns.__setitem__, log_metric=lambda *metric: metrics.append(metric)
    )
    assert scores.values_BR.tolist() == [[1.0], [1.0]]
    assert columns["mixed"][0].startswith("<unlocked _thread.lock")
    assert columns["mixed"][1] == "<local>"
    assert columns["poison"] == ["<poison>", {"a": 1}]
    assert metrics == [("size", 2.0)]


# ---- what a worker is, and leaves behind


def variables(completions: list[str], **kwargs: Any) -> list[float]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return [float(sum(name in os.environ for name in names)), float(os.environ["OMP_NUM_THREADS"])]


def test_a_worker_is_no_process_of_the_run(monkeypatch):
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    for name in (*launched, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    with working(variables) as worker:
        assert values(ask(worker)) == [0.0, 1.0]


def leaves_its_session(completions: list[str], **kwargs: Any) -> Any:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(kwargs["file"]).write_text(str(child.pid))
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_children_in_sessions_of_their_own_are_killed_too(tmp_path):
    with working(leaves_its_session) as worker, pytest.raises(LostCallError, match="was killed"):
        ask(worker, seconds=1.0, file=str(tmp_path / "pid"))
    assert gone(int((tmp_path / "pid").read_text()))


# ---- arguments


def changes(completions: list[Any], completion_ids: list[Any], notes: list[Any], **kwargs: Any) -> list[float]:
    rows = len(completions)
    completions[0][0]["content"] = "changed"
    completion_ids[0].clear()
    notes[0]["x"].append("changed")
    completions.pop()
    if kwargs["raising"][0]:
        raise ValueError
    return [1.0] * rows


async def changes_too(**kwargs: Any) -> list[float]:
    return changes(**kwargs)


@pytest.mark.parametrize("raising", [False, True])
@pytest.mark.parametrize("function", [changes, changes_too])
def test_a_reward_cannot_change_what_others_are_shown(function, raising):
    seen: list[Any] = []

    def second(completions: list[Any], completion_ids: list[Any], notes: list[Any], **kwargs: Any) -> list[float]:
        seen.append((completions, completion_ids, notes))
        return [2.0] * len(completions)

    async def second_too(**kwargs: Any) -> list[float]:
        return second(**kwargs)

    outputs = [[{"role": "assistant", "content": text}] for text in ("a", "b")]
    shown = batch(*outputs, notes=[{"x": []}, {"x": []}], raising=[raising] * 2)  # type: ignore[arg-type]
    runner(function, second, second_too, retries=0).score(shown)
    assert outputs[0][0]["content"] == "a"
    assert seen == [(outputs, [[1, 2]] * 2, [{"x": []}] * 2)] * 2


def test_environments_are_the_ones_themselves():
    here = [threading.Lock(), threading.Lock()]

    def reward(completions: list[str], environments: list[Any], **kwargs: Any) -> list[float]:
        return [float(found is mine) for found, mine in zip(environments, here, strict=True)]

    assert runner(reward).score(BATCH, environments=here).values_BR.tolist() == [[1.0], [1.0]]


# ---- retries in this process


def test_a_retry_that_fails_from_the_first_ends_early():
    calls: list[int] = []

    def down(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        raise ConnectionError("the judge is down")

    scores = runner(down).score(batch(*["a"] * 64))
    assert calls == [64] + [1] * 8
    assert scores.kinds_BR.tolist() == [[FAILURE]] * 64


def test_a_retry_that_takes_too_long_ends(monkeypatch):
    monkeypatch.setattr(running, "RETRY_SECONDS", 0.3)

    def slow(completions: list[str], **kwargs: Any) -> list[float]:
        if len(completions) > 1:
            raise ValueError
        time.sleep(0.1)
        return [1.0]

    kinds = runner(slow).score(batch(*["a"] * 64)).kinds_BR[:, 0].tolist()
    assert 1 <= kinds.count(SCORE) <= 5
    assert kinds == sorted(kinds)


def test_one_sample_that_fails_among_many_costs_only_itself():
    def picky(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0 / (completion != "bad") for completion in completions]

    completions = ["bad"] * 7 + ["fine"] + ["bad"] * 4 + ["fine"]
    scores = runner(picky).score(batch(*completions))
    assert same(scores.values_BR, [[1.0 if text == "fine" else float("nan")] for text in completions])
