"""Rows that go where there is least to do: the plan, the exchange, and what is logged about it."""

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gruppo.trainer.books.metrics import MetricStore
from gruppo.trainer.books.profiling import Stopwatch
from gruppo.trainer.processes.balancing import (
    Move,
    imbalance_of,
    max_over_mean,
    plan_moves,
    report_stragglers,
    units_of,
)
from gruppo.types import TrainBatch
from tests.processes import run_together
from tests.trainer.scripted import relative_difference


@pytest.mark.parametrize(
    ("costs", "moves"),
    [
        ([[5, 6, 4], [3]], [Move(0, 1, 1)]),
        ([[9, 5, 4], [3]], [Move(0, 0, 1)]),
        ([[10], [3]], []),  # its last unit stays
        ([[10, 10], [10, 10]], []),
        ([[10, 11], [10, 10]], []),  # not worth it
        ([[], []], []),
        ([[0, 0], [0]], []),
        ([[100, 1], [3]], [Move(0, 1, 1)]),
        ([[4, 4, 4], [], [1]], [Move(0, 0, 1), Move(0, 1, 2)]),
    ],
)
def test_who_gives_what_to_whom(costs: list[list[int]], moves: list[Move]) -> None:
    assert plan_moves(costs) == moves


def after(costs: list[list[int]], moves: list[Move]) -> list[int]:
    loads = [sum(own) for own in costs]
    for source, unit, target in moves:
        loads[source] -= costs[source][unit]
        loads[target] += costs[source][unit]
    return loads


def test_ragged_lengths_become_even() -> None:
    """Eight processes with 16 groups each, of which about half have a gradient; lengths as of reasoning models."""
    chance = random.Random(0)
    before, even = [], []
    for _ in range(50):
        costs = [[int(chance.lognormvariate(8, 0.7)) for _ in range(16) if chance.random() < 0.5] for _ in range(8)]
        moves = plan_moves(costs)
        assert len({(move.source, move.unit) for move in moves}) == len(moves), "nothing is given twice"
        before.append(max_over_mean([sum(own) for own in costs]))
        even.append(max_over_mean(after(costs, moves)))
    assert sum(before) / 50 > 1.4
    assert sum(even) / 50 < 1.07
    assert max(even) < 1.2


def test_groups_are_cut_where_the_prompt_is_short() -> None:
    mask = torch.ones(4, 6, dtype=torch.long)
    prompts = torch.tensor([[1], [1], [2], [2]])
    batch = TrainBatch(prompts, torch.ones_like(prompts), torch.zeros_like(mask), mask)
    assert units_of(batch, [0, 1, 3]) == ([[0], [1], [3]], [7, 7, 7])
    long = torch.cat([prompts] * 8, 1)
    batch = TrainBatch(long, torch.ones_like(long), torch.zeros_like(mask), mask)
    assert units_of(batch, [0, 1, 2, 3]) == ([[0, 1], [2, 3]], [20, 20])


def test_what_is_logged() -> None:
    assert imbalance_of([60, 40], [80, 20], [1.0, 3.0]) == {
        "balance/tokens_max_over_mean": 1.2,
        "balance/tokens_before": 1.6,
        "balance/seconds_max_over_mean": 1.5,
        "balance/slowest_rank": 1.0,
    }
    assert max_over_mean([0, 0]) == 1.0
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"| `{key}` |" in page for key in imbalance_of([1], [1], [1.0]))


def test_the_slowest_process_is_not_averaged() -> None:
    """Of several updates between two logs; the other numbers are."""
    took: list[list[float]] = []
    accelerator = SimpleNamespace(device="cpu", gather=lambda mine: torch.tensor([[6, s] for s in took.pop(0)]))
    trainer = SimpleNamespace(
        accelerator=accelerator,
        metrics=MetricStore(accelerator),  # type: ignore[arg-type]
        packed=None,
        presence=SimpleNamespace(take_seconds=lambda phase: 0.0),
        ledger=SimpleNamespace(update_tokens=6),
    )
    took += [[3.0, 1.0, 2.0], [1.0, 1.0, 4.0]]
    for _ in range(2):
        report_stragglers(trainer, 1.0, [])
    logged = trainer.metrics.take("train")
    assert logged["balance/slowest_rank"] == 2.0
    assert logged["balance/seconds_max_over_mean"] == 1.75


def test_a_stopwatch_forgets_what_was_taken() -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.take() == 0.0
    watch.start()
    assert watch.take() == 0.0, "it was not stopped"
    watch.start()
    watch.stop()
    assert watch.take() > 0.0
    assert watch.take() == 0.0


def test_a_stopwatch_does_not_count_its_pauses() -> None:
    watch = Stopwatch(torch.device("cpu"))
    with watch.paused():
        pass
    assert watch.take() == 0.0, "a pause does not start it"
    watch.start()
    with watch.paused():
        time.sleep(0.3)
    time.sleep(0.01)
    watch.stop()
    assert 0.01 <= watch.take() < 0.3


@pytest.mark.medium
def test_an_exchange_changes_no_number(tmp_path: Path) -> None:
    run_together(2, "tests.trainer.balanced_processes", tmp_path)
    from tests.trainer.balanced_processes import CASES

    for name in CASES:
        found: dict[bool, Any] = {
            on: [torch.load(tmp_path / f"{name}.{on}.{rank}.pt", weights_only=False) for rank in (0, 1)]
            for on in (True, False)
        }
        assert relative_difference(found[False][0]["update"], found[True][0]["update"]) < 1e-10, name
        for rank in (0, 1):
            on, off = (found[way][rank]["logs"] for way in (True, False))
            assert on.keys() == off.keys()
            same = {key: value for key, value in off.items() if not key.startswith("balance/")}
            assert {key: on[key] for key in same} == pytest.approx(same, rel=1e-9, abs=1e-7), (name, rank)
        assert found[False][0]["logs"]["balance/tokens_max_over_mean"] > 1.2, name
        assert on["balance/tokens_before"] > 1.2
        assert on["balance/tokens_max_over_mean"] < off["balance/tokens_max_over_mean"] - 0.1, name
