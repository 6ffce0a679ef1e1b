"""Formulas are compared in bounded time: what explodes is refused, what drags on is cut off."""

import threading
import time

import pytest

from gruppo.grading.deadline import run_within
from gruppo.grading.size import explodes
from gruppo.grading.symbolic import LONGEST, compare_formulas, is_manageable
from gruppo.grading.types import Rung

try:
    import math_verify
except ImportError:
    math_verify = None

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
    r"\sqrt{9^{99999}+1}",
    r"\sqrt{9^{9999}+1}",
    r"(9^{9999}+1)^{1/2}",
    r"\sqrt{9^{900}+1}\sqrt{9^{901}+1}",
    r"\log(9^{9999}+1)",
    "(9999!)^{9999}",
    "9999!^{9999}",
    "9999!",
    "9^9!",
    r"\Gamma(99999999)",
    r"\binom{9999}{5000}^{9999}",
    r"{9999 \choose 5000}^{9999}",
    r"\binom{3}{99999999}",
    r"\prod_{n=1}^{9999} n^{99}",
    r"\sum_{n=1}^{9999} n!",
    r"9^{\sum_{k=1}^{99} k^{9}}",
    r"3^{\lfloor e^{25}\rfloor}",
    r"3^{\exp(30)}",
    r"3^{\frac{1}{0.000000001}}",
    "3^{99999 99999}",
    "3^{1,000,000}",
    "3^{1e9}",
    r"\left|9^{9999}\right|^{99}",
    r"\left\lfloor 9^{999}\right\rfloor^{999}",
    r"\mathbf{9}^{\text{99999}}",
    "9" * 400 + "^{99}",
    "(" * 100 + "9",
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
    "2^{10}",
    "10^{100}",
    "5!",
    r"\binom{10}{3}",
    r"\sqrt{2^{20}}",
    "10^{10000}",
    r"\frac{2024!}{2023!}",
    "x^{1+2+3+4+5+6+7+8+9+10}",
    "(x+1)^2 " * 17,
    r"\left(\frac{3}{4}\right)^{2005}",
    r"\log_2(3^{100})",
    r"\Gamma(\frac{1}{2})",
    r"{10 \choose 3}",
    r"\sum_{n=1}^{1000} n^{-2}",
    "x_{12}^{3}",
    "",
    "}^{",
    "!",
]


@pytest.mark.parametrize("formula", EXPLODES)
def test_what_explodes_is_refused(formula):
    assert explodes(formula)
    assert not is_manageable(formula)


# Nothing here is a formula, though there are signs of one.
PROSE = [
    "Great question! There were 12000 eggs",
    "(finally)! Nice!",
    "Wow!!!",
    "Yes! " * 9,
    "5 **120000** eggs",
    "a _b_ c",
]


@pytest.mark.parametrize("text", PROSE)
def test_prose_does_not_explode(text):
    assert not explodes(text)


@pytest.mark.parametrize("formula", FINE)
def test_what_does_not_is_worked_on(formula):
    assert not explodes(formula)
    assert is_manageable(formula)


# What is just small enough to be worked on.
NEAR_THE_LIMIT = [
    r"\sqrt{9^{999}+1}",
    r"\log(9^{999}+1)",
    r"\frac{9^{9999}+1}{7^{9999}+2}",
    "2500!",
    r"\binom{9999}{5000}",
    r"\prod_{n=1}^{1000} n^{10}",
    r"\prod_{n=1}^{100} n!",
]


@pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")
@pytest.mark.parametrize("formula", NEAR_THE_LIMIT)
def test_what_is_worked_on_ends(formula):
    begin = time.monotonic()
    assert compare_formulas(r"\sqrt{7}", formula, 5.0) == (False, Rung.SYMBOLIC)
    assert time.monotonic() - begin < 10


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
