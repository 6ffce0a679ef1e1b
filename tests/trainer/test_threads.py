"""Advice for a run on the processor whose waiting threads spin on a busy machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gruppo.trainer.processes import threads
from gruppo.trainer.processes.threads import POLICY, BusyMachine, advice, threads_spin
from tests.trainer.runs import make


def updates(count: int, loads: list[float], main: bool = True) -> int:
    """How often a run of so many updates looks at the load; its last value stays."""
    looked = []

    def load() -> float:
        looked.append(1)
        return loads[min(len(looked), len(loads)) - 1]

    callback = BusyMachine(load, cores=2)
    for _ in range(count):
        callback.on_step_end(None, SimpleNamespace(is_world_process_zero=main), None)
    return len(looked)


def test_only_a_load_that_others_make_is_worth_advice() -> None:
    assert [advice(load, cores) is None for load, cores in ((0.1, 2), (2.2, 2), (2.6, 2), (60.0, 64), (90.0, 64))] == [
        *(True, True, False, True, False)
    ]


@pytest.mark.parametrize(
    ("loads", "main", "looked", "said"),
    [
        ([1.0], True, 20, 0),
        ([1.0, 1.0, 9.0], True, 3, 1),
        ([9.0], False, 0, 0),
    ],
    ids=["quiet", "busy later", "another process"],
)
def test_it_is_given_once_and_early(
    loads: list[float], main: bool, looked: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", threads.__name__):
        assert updates(30, loads, main) == looked
    assert [f"{POLICY}=passive" in record.message for record in caplog.records] == [True] * said


@pytest.mark.parametrize(
    ("policy", "count", "spins"), [(None, 2, True), (None, 1, False), ("passive", 2, False), ("active", 2, False)]
)
def test_who_watches(
    policy: str | None, count: int, spins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(POLICY, raising=False)
    if policy is not None:
        monkeypatch.setenv(POLICY, policy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert threads_spin() == spins
    callbacks: list[Any] = make(tmp_path).callback_handler.callbacks
    assert any(isinstance(callback, BusyMachine) for callback in callbacks) == spins
