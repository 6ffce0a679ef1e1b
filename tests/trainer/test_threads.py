"""Advice for a run on the processor whose waiting threads spin on a busy machine."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gruppo.trainer.processes import threads
from gruppo.trainer.processes.threads import POLICY, BusyMachine, seconds_without_core, threads_spin
from tests.trainer.runs import make


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BusyMachine, "_said", False)


def updates(waiting: list[float | None], main: bool = True) -> int:
    """How many of 30 updates of two seconds are looked at; so many threads wait in each, the last value stays."""
    state = SimpleNamespace(is_world_process_zero=main, global_step=0)
    looked = []

    def without_core() -> float | None:
        looked.append(state.global_step)
        done = [waiting[min(update, len(waiting) - 1)] for update in range(state.global_step)]
        return None if None in waiting else 2.0 * sum(each or 0.0 for each in done)

    callback = BusyMachine(without_core, clock=lambda: 2.0 * state.global_step)
    for _ in range(30):
        callback.on_step_begin(None, state, None)
        state.global_step += 1
        callback.on_step_end(None, state, None)
    return len(looked) // 2


@pytest.mark.parametrize(
    ("waiting", "main", "looked", "said"),
    [
        ([0.1], True, 20, 0),
        ([0.1, 0.1, 1.5], True, 3, 1),
        ([9.0], False, 0, 0),
    ],
    ids=["quiet", "busy later", "another process"],
)
def test_it_is_given_once_and_early(
    waiting: list[float | None], main: bool, looked: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", threads.__name__):
        assert updates(waiting, main) == looked
        assert updates(waiting, main) == (0 if said else looked), "a second trainer of the process"
    assert [f"{POLICY}=passive" in record.message for record in caplog.records] == [True] * said


def test_nothing_is_said_where_the_system_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", threads.__name__):
        updates([None])
    assert caplog.records == []


def test_the_load_that_neighbours_of_a_container_make_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (500.0, 500.0, 500.0))
    monkeypatch.setattr(threads, "threads_spin", lambda: True)
    with caplog.at_level("WARNING", threads.__name__):
        trainer = make(tmp_path, max_steps=1)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, BusyMachine):
                callback._without_core = lambda: 0.0
        trainer.train()
    assert caplog.records == []


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_the_kernel_counts_threads_that_share_a_core() -> None:
    cores = os.sched_getaffinity(0)
    before, began = seconds_without_core(), time.perf_counter()
    assert before is not None
    both = [threading.Thread(target=torch.mm, args=(torch.ones(900, 900), torch.ones(900, 900))) for _ in range(2)]
    os.sched_setaffinity(0, {min(cores)})  # for threads that begin now
    try:
        for thread in both:
            thread.start()
        while time.perf_counter() - began < 0.2:
            pass
        for thread in both:
            thread.join()
        after = seconds_without_core()
    finally:
        os.sched_setaffinity(0, cores)
    assert after is not None
    assert after - before > 0.01


@pytest.mark.parametrize(
    ("policy", "count", "spins"), [(None, 2, True), (None, 1, False), ("passive", 2, False), ("active", 2, False)]
)
def test_who_watches(
    policy: str | None, count: int, spins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(POLICY, raising=False)
    if policy is not None:
        monkeypatch.setenv(POLICY, policy)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert threads_spin() == spins
    callbacks: list[Any] = make(tmp_path).callback_handler.callbacks
    assert any(isinstance(callback, BusyMachine) for callback in callbacks) == spins


def test_a_count_of_spins_is_a_policy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICY, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert not threads_spin()
