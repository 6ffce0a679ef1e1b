"""Which cases of a large matrix run in `make test`, and which in `make test-slow`; and what running them costs."""

import os
import socket

import pytest

from tests.conftest import _thin_out


class Case:
    def __init__(self, *marks: str):
        self.keywords = set(marks)

    def add_marker(self, mark: object) -> None:
        self.keywords.add(mark.name)  # type: ignore[attr-defined]

    @property
    def is_slow(self) -> bool:
        return "slow" in self.keywords


def test_one_case_of_three_stays() -> None:
    cases = [Case() for _ in range(7)]
    _thin_out(cases, 3)  # type: ignore[arg-type]
    assert [case.is_slow for case in cases] == [False, True, True, False, True, True, False]


def test_fast_cases_stay_all() -> None:
    cases = [Case(), Case("medium"), Case("medium"), Case(), Case("medium")]
    _thin_out(cases, 2)  # type: ignore[arg-type]
    assert [case.is_slow for case in cases] == [False, False, True, False, False]


def test_where_all_are_medium_they_are_sampled_alike() -> None:
    cases = [Case("medium") for _ in range(4)]
    _thin_out(cases, 2)  # type: ignore[arg-type]
    assert [case.is_slow for case in cases] == [False, True, False, True]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="only workers count reruns over a socket")
def test_no_test_waits_for_the_count_of_reruns(pytestconfig: pytest.Config) -> None:
    """Where messages are held back until the one before is acknowledged, ten thousand tests wait 40 ms each."""
    connection = pytestconfig.failures_db.sock  # type: ignore[attr-defined]
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
