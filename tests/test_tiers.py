"""Which cases of a large matrix run in `make test`, and which in `make test-slow`."""

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
