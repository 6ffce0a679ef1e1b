"""Which cases of a large matrix run in `make test`, and which in `make test-slow`; and what running them costs."""

import os
import socket

import pytest

from tests.conftest import _thin_out


class Case:
    def __init__(self, name: str, *marks: str):
        self.nodeid = name
        self.keywords = set(marks)

    def add_marker(self, mark: object) -> None:
        self.keywords.add(mark.name)  # type: ignore[attr-defined]

    @property
    def is_slow(self) -> bool:
        return "slow" in self.keywords


def kept(cases: list[Case], every: int) -> list[Case]:
    _thin_out(cases, every)  # type: ignore[arg-type]
    return [case for case in cases if not case.is_slow]


def test_one_case_of_three_stays() -> None:
    cases = [Case(f"test[{i}]") for i in range(7)]
    assert [cases.index(case) // 3 for case in kept(cases, 3)] == [0, 1, 2]


def test_the_same_ones_stay_every_time() -> None:
    first, second = ([Case(f"test[{i}]") for i in range(30)] for _ in range(2))
    assert [case.nodeid for case in kept(first, 4)] == [case.nodeid for case in kept(second, 4)]


def test_every_value_of_an_inner_parameter_is_met() -> None:
    cases = [Case(f"test[{outer}-{inner}]") for outer in range(12) for inner in ("yes", "no")]
    assert {case.nodeid.partition("-")[2] for case in kept(cases, 2)} == {"yes]", "no]"}


def test_fast_cases_stay_all() -> None:
    cases = [Case("a"), Case("b", "medium"), Case("c", "medium"), Case("d"), Case("e", "medium")]
    staying = kept(cases, 2)
    assert len(staying) == 4
    assert {cases[0], cases[3], cases[4]} < set(staying)


def test_where_all_are_medium_they_are_sampled_alike() -> None:
    cases = [Case(f"test[{i}]", "medium") for i in range(4)]
    assert [cases.index(case) // 2 for case in kept(cases, 2)] == [0, 1]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="only workers count reruns over a socket")
def test_no_test_waits_for_the_count_of_reruns(pytestconfig: pytest.Config) -> None:
    """Where messages are held back until the one before is acknowledged, ten thousand tests wait 40 ms each."""
    connection = pytestconfig.failures_db.sock  # type: ignore[attr-defined]
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
