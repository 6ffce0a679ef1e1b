"""Formulas are compared in bounded time: what explodes is refused, what drags on is cut off."""

import threading
import time

import pytest

from gruppo.grading.deadline import run_within
from gruppo.grading.symbolic import LONGEST, explodes, is_manageable

EXPLODES = [
    "9^{9^{9^9}}",
    "9^9^9^9",
    "9**9**9**9",
    "10^{10^{10}}",
    "9^{(9^9)}",
    r"9^{9\cdot 9^9}",
    "9^{99999999}",
    "9^{9!}",
    r"2^{\binom{40}{20}}",
    "(((9^{99})^{99})^{99})^{99}",
    "99999999!",
    "((9!)!)!",
    "9!!",
    "(2^{99})!",
    r"\binom{99999999}{4444444}",
    r"\sum_{k=1}^{99999999} \frac1k",
    "x^{2^{3^{4}}}",
]

FINE = [
    "x^2",
    "2^{2024} - 1",
    "x^{10}+x^9+x^8+x^7+x^6+x^5+x^4+x^3+x^2",
    "e^{-x^2}",
    "x^{2^n}",
    "2^{2^4}+1",
    "10!",
    r"\frac{10!}{3!7!}",
    "(n+1)!",
    r"\binom{49}{6}",
    r"\sum_{k=1}^{100} k",
    "(x+1)^3(x-2)^5",
    "2^{0.123456789}",
    r"\sqrt[3]{2}",
    "123456789012345678901234567890",
]


@pytest.mark.parametrize("formula", EXPLODES)
def test_what_explodes_is_refused(formula):
    assert explodes(formula)
    assert not is_manageable(formula)


@pytest.mark.parametrize("formula", FINE)
def test_what_does_not_is_worked_on(formula):
    assert not explodes(formula)
    assert is_manageable(formula)


def test_length_and_depth():
    assert is_manageable("x" * LONGEST)
    assert not is_manageable("x" * (LONGEST + 1))
    assert is_manageable("(" * 12 + "x" + ")" * 12)
    assert not is_manageable("(" * 13 + "x" + ")" * 13)
    assert not is_manageable("{" * 100_000)


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "done"


def test_a_deadline_lets_results_and_errors_through():
    assert run_within(5.0, lambda: "done") == "done"
    with pytest.raises(KeyError, match="mine"):
        run_within(5.0, lambda: {}["mine"])


def stubborn():
    """Swallows what it can, as some libraries do."""
    try:
        spin(60)
    except Exception:
        return "swallowed"
    return "done"


@pytest.mark.parametrize("function", [lambda: spin(60), stubborn])
def test_a_deadline_ends_what_takes_too_long(function):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        run_within(0.1, function)
    assert time.monotonic() - begin < 30


def test_a_swallowed_exception_comes_again():
    def swallow_once():
        try:
            spin(60)
        except BaseException:
            spin(60)

    with pytest.raises(TimeoutError):
        run_within(0.1, swallow_once)


def test_many_deadlines_that_end_just_in_time():
    """Nothing arrives late: not in the next call, not in what follows, not in another thread."""
    counts = []

    def work(thread):
        late = 0
        for i in range(60):
            try:
                run_within(0.005, lambda i=i: spin(0.004 + (i % 5) * 0.0005))
            except TimeoutError:
                late += 1
        counts.append((spin(1.2), late))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [done for done, _ in counts] == ["done"] * 4
