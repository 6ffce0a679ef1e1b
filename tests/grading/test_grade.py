"""The ladder: what equals what, and which rung says so."""

import pickle
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.errors import ConfigError
from gruppo.grading import LADDERS, Ladder, Rule, Rung, compare, find_ladder, grade, normalise

try:
    import math_verify
except ImportError:
    math_verify = None

needs_math = pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")

STRING, NUMBER, SYMBOLIC, NOT_LITERAL = Rung.STRING, Rung.NUMBER, Rung.SYMBOLIC, Rung.NOT_LITERAL

# gold, answer, equal, rung, why
FORMULAS = [
    (r"\frac{1}{2}", "0.5", True, NUMBER, "a fraction and a decimal"),
    (r"11{,}111", "11111", True, STRING, "thousands in LaTeX"),
    (r"\$40", "40", True, STRING, "dollars"),
    (r"90^\circ", "90", True, STRING, "degrees"),
    (r"2\sqrt{3}", r"\sqrt{12}", True, SYMBOLIC, "roots"),
    ("x^2+2x+1", "(x+1)^2", True, SYMBOLIC, "a product multiplied out"),
    ("(1,2)", "(2,1)", False, SYMBOLIC, "pairs have an order"),
    (r"\{1,2\}", r"\{2,1\}", True, SYMBOLIC, "sets have none"),
    ("12, 10, 6", "6,10,12", True, SYMBOLIC, "nor have lists of answers"),
    ("[2,5)", "(2,5)", False, SYMBOLIC, "the ends of an interval matter"),
    (r"x \in [-2,7]", "[-2,7]", True, SYMBOLIC, "membership says the same as the set"),
    (r"15\frac{39}{40}", r"\frac{639}{40}", True, STRING, "a mixed number"),
    ("28_9", "28", True, SYMBOLIC, "the base may be left out"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True, SYMBOLIC, "brackets of matrices"),
    (r"\text{Evelyn}", "Evelyn", True, STRING, "text is text"),
    (r"\text{Evelyn}", r"\text{Carla}", False, SYMBOLIC, "another name"),
    (r"\pm 2", "2,-2", True, SYMBOLIC, "both signs"),
    ("y = 2x+3", "2x - y + 3 = 0", True, SYMBOLIC, "an equation, turned round"),
    ("4,6", "46", False, SYMBOLIC, "a comma is no thousands separator here"),
    ("4,6", "4.6", False, SYMBOLIC, "nor a decimal one"),
    ("2/6", "1/3", True, STRING, "not reduced"),
    ("40%", "0.4", True, NUMBER, "percent, worked in"),
    ("40%", "40", True, NUMBER, "percent, left out"),
    ("40%", r"40\%", True, STRING, "percent in LaTeX"),
    ("18", "18.", True, STRING, "a full stop"),
    ("12", "12.000000000000002", True, NUMBER, "floats of programs"),
    ("1.5e3", "1500", True, STRING, "as programs print it"),
    ("18", "18 dollars", True, STRING, "a unit in words"),
    ("2.5", "2.5元", True, STRING, "a Chinese unit"),
    (r"20\%", "20％", True, STRING, "a full-width percent sign"),
    ("1000000", r"1\,000\,000", True, STRING, "thin spaces"),
    ("3:5", r"\frac{3}{5}", False, STRING, "a ratio is no fraction"),
    ("3:5", "3 : 5", True, STRING, "blanks in a ratio"),
    ("3:5", "3：5", True, STRING, "a full-width colon"),
    ("8:34", "4:17", False, STRING, "a time of day does not reduce"),
    (r"\text{June 20}", "20 June", True, STRING, "a date either way round"),
    (r"\text{June 20}", "20", False, SYMBOLIC, "a date is no number"),
    ("1/3", "0.333", True, NUMBER, "rounded within the tolerance"),
    ("50", "0.5", False, NUMBER, "no factor of a hundred"),
    (r"(2,\infty)", "x>2", True, SYMBOLIC, "an interval and its inequality"),
    ("x>2", r"(2,\infty)", True, SYMBOLIC, "and the other way round"),
    ("5!", "5", False, SYMBOLIC, "an exclamation mark is a factorial"),
    ("5x", "5", False, SYMBOLIC, "a variable is no unit"),
    ("5", r"5\text{ m}", True, SYMBOLIC, "but text is one"),
    (r"\dfrac{x}{2}", r"\frac{x}{2}", True, STRING, "sizes of fractions"),
    (r"\left(\frac12, 3\right)", r"(\frac{1}{2},3)", True, STRING, "sizes of brackets, and short fractions"),
    (r"\sqrt2", r"\sqrt{2}", True, STRING, "short roots"),
    (r"9\cdot 2", "18", True, SYMBOLIC, "symbolic sets work expressions out"),
    ("18", r"\sqrt{324}", True, SYMBOLIC, "on either side"),
    (r"\frac{\pi}{2}", r"\pi/2", True, SYMBOLIC, "a slash"),
    ("2\\pi", "6.28", False, SYMBOLIC, "exact against rounded"),
    ("(3,4)", r"\left(3, 4\right)", True, STRING, "blanks in a pair"),
    ("x=5", "5", True, SYMBOLIC, "the name may be left out"),
    ("x=5", "y=5", False, SYMBOLIC, "but not changed"),
    ("30", r"30^\circ", True, STRING, "degrees may be left out"),
    ("\\text{(A)}", "(A)", True, STRING, "a choice"),
    ("10^{10^{10}}", "10^{10^{10}}", True, STRING, "what cannot be worked out can be read"),
    ("10^{10^{10}}", "10^{10^{11}}", False, Rung.REFUSED, "but not compared"),
    ("1", "9^{9^{9^9}}", False, Rung.REFUSED, "a tower of powers"),
    ("1", "(" * 50 + "1" + ")" * 50, False, Rung.REFUSED, "too deep"),
    ("1", "x+" * 500 + "1", False, Rung.REFUSED, "too long"),
    ("2", "2 theta", False, SYMBOLIC, "a Greek letter is no unit"),
    ("5 xyz", "5", False, SYMBOLIC, "nor are three variables"),
    ("5", r"5 \text{ more apples}", True, SYMBOLIC, "a comparison in text"),
    ("18", r"\approx 18", True, STRING, "about"),
    ("5", r"500\%", False, NUMBER, "a sign of the answer alone is a unit"),
    ("1024", "2^{10}", True, SYMBOLIC, "a power"),
    ("120", "5!", True, SYMBOLIC, "a factorial"),
    ("120", r"\binom{10}{3}", True, SYMBOLIC, "a binomial"),
    ("1024", r"\sqrt{2^{20}}", True, SYMBOLIC, "a root of a power"),
    ("1" + "0" * 100, "10^{100}", True, SYMBOLIC, "a large power"),
    ("1", r"\sqrt{9^{99999}+1}", False, Rung.REFUSED, "a root of a larger one"),
    ("1", "(9999!)^{9999}", False, Rung.REFUSED, "a power of a factorial"),
    ("1", r"\Gamma(99999999)", False, Rung.REFUSED, "a factorial by another name"),
    ("x", r"\boxed", False, SYMBOLIC, "a broken formula"),
]

# gold, answer, equal, rung, why
LITERALS = [
    ("18", "18", True, STRING, "the same"),
    ("18", "18.0", True, STRING, "decimals"),
    ("18", r"18\text{ dollars}", True, STRING, "a unit"),
    ("18", "18元", True, STRING, "a Chinese unit"),
    ("18", "１８", True, STRING, "full-width digits"),
    ("18", "17", False, NUMBER, "another number"),
    ("18", "-18", False, NUMBER, "another sign"),
    ("18", "180", False, NUMBER, "the gold inside it"),
    ("18", "118", False, NUMBER, "the gold at its end"),
    ("18", "18%", True, NUMBER, "asked for percent"),
    ("18", "0.18", False, NUMBER, "no factor of a hundred"),
    ("5", "500%", False, NUMBER, "nor so"),
    ("5", "5 feet 3 inches", False, NOT_LITERAL, "two amounts"),
    ("18", "18 divided by 2", False, NOT_LITERAL, "a division in words"),
    ("5", r"5 \text{ more apples}", True, STRING, "a comparison"),
    ("18", r"9\cdot 2", False, NOT_LITERAL, "left to the grader"),
    ("18", r"\sqrt{324}", False, NOT_LITERAL, "left to the grader too"),
    ("10", r"\binom{5}{2}", False, NOT_LITERAL, "and so is this"),
    ("4", r"\log_2(4^2)", False, NOT_LITERAL, "and this"),
    ("18", "9+9", False, NOT_LITERAL, "a sum"),
    ("18", "18 or 19", False, NOT_LITERAL, "two guesses"),
    ("18", "17, 18", False, NOT_LITERAL, "two guesses, listed"),
    ("18", "eighteen", False, NOT_LITERAL, "words"),
    ("70000", "70,000", True, STRING, "thousands"),
    ("70000", "7万", True, STRING, "in Chinese"),
    ("70000", "7万元", True, STRING, "with a unit"),
    ("4/6", "2/3", True, STRING, "reduced"),
    ("4/6", "0.6667", True, NUMBER, "rounded"),
    ("27.3%", "27.3", True, NUMBER, "the sign left out"),
    ("27.3%", "0.273", True, NUMBER, "worked in"),
    ("27.3%", r"27.3\%", True, STRING, "in LaTeX"),
    ("27.3%", "百分之27.3", True, STRING, "in Chinese"),
    ("3.5", "3个半", False, NOT_LITERAL, "not 3, at least"),
    ("3", "3个半", False, NOT_LITERAL, "nor 3"),
]


@needs_math
@pytest.mark.parametrize(("gold", "answer", "equal", "rung", "why"), FORMULAS, ids=[row[4] for row in FORMULAS])
def test_formulas(gold, answer, equal, rung, why):
    assert compare(gold, answer, LADDERS["math"]) == (equal, rung)


@pytest.mark.parametrize("ladder", ["gsm8k", "mgsm_zh", "cmath"])
@pytest.mark.parametrize(("gold", "answer", "equal", "rung", "why"), LITERALS, ids=[row[4] for row in LITERALS])
def test_literal_numbers(gold, answer, equal, rung, why, ladder):
    assert compare(gold, answer, LADDERS[ladder]) == (equal, rung)


def test_a_grade_says_why():
    good = grade("16 - 3 - 4 = 9, so \\boxed{18 eggs}", "… = 18\n#### 18", "gsm8k")
    assert (good.correct, good.rung, good.rule) == (True, STRING, Rule.BOX)
    assert (good.gold, good.answer, good.boxed) == ("18", "18 eggs", True)
    none = grade("I give up.", "18", "gsm8k")
    assert (none.correct, none.rung, none.gold, none.answer, none.boxed) == (False, Rung.NO_ANSWER, "18", None, False)
    lost = grade(r"\boxed{18}", "who knows", "gsm8k")
    assert (lost.correct, lost.rung) == (None, Rung.NO_GOLD)


@needs_math
@pytest.mark.parametrize(
    ("completion", "gold", "mode", "correct", "why"),
    [
        (r"\boxed{2} and \boxed{5}", ["2", "5"], "all", True, "both boxes of the line"),
        (r"\boxed{5}, \boxed{2}", ["2", "5"], "all", True, "in any order"),
        (r"\boxed{5}", ["2", "5"], "all", False, "one is missing"),
        ("\\boxed{9}\n\\boxed{5}, \\boxed{2}", ["2", "5"], "all", True, "an earlier line does not count"),
        (r"\boxed{2, 5}", ["2", "5"], "all", True, "one box for both"),
        (r"\boxed{5}", ["2", "5"], "any", True, "one is enough"),
        (r"\boxed{4}", ["2", "5"], "any", False, "but not any number"),
        (r"\boxed{2} and \boxed{5}", "5", "last", True, "the last box"),
        (r"\boxed{5} and \boxed{2}", "5", "same", False, "only the last box"),
    ],
)
def test_rows_with_several_answers(completion, gold, mode, correct, why):
    assert grade(completion, gold, "math", mode).correct is correct


def test_the_tolerance_and_the_units_are_settings():
    assert compare("18", "18.4", Ladder(literal=True, tolerance=0.5)) == (True, NUMBER)
    assert compare("18", "18.0001", Ladder(literal=True, tolerance=0.0)) == (False, NUMBER)
    assert compare("18", "18 dollars", Ladder(literal=True, units=False)) == (False, NOT_LITERAL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: find_ladder("gsm8"), "Did you mean 'gsm8k'"),
        (lambda: find_ladder("nothing like it"), "use one of gsm8k, math, mgsm_zh, cmath"),
        (lambda: Ladder(literal=True, languages=("fr",)), "languages="),
        (lambda: Ladder(literal=True, languages=()), "languages="),
        (lambda: Ladder(literal=True, tolerance=-1), "tolerance=-1"),
        (lambda: Ladder(literal=True, seconds=0), "seconds=0"),
        (lambda: grade("1", ["1", "2"], "gsm8k"), 'need answers_mode="all"'),
        (lambda: grade("1", "1", "gsm8k", "some"), "answers_mode='some'"),
    ],
)
def test_impossible_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_ladders_travel():
    for ladder in LADDERS.values():
        assert pickle.loads(pickle.dumps(ladder)) == ladder


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match='pip install "math-verify>='):
        compare("x", "y", LADDERS["math"])
    assert compare("18", "18.0", LADDERS["math"]) == (True, STRING)  # numbers do without


@needs_math
def test_threads_grade_formulas():
    pairs = [("x^2+2x+1", "(x+1)^2", True), (r"2\sqrt{3}", r"\sqrt{12}", True), ("x+1", "x+2", False)]
    results = {}

    def work(n):
        results[n] = [compare(gold, answer, LADDERS["math"])[0] for gold, answer, _ in pairs]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [[equal for _, _, equal in pairs]] * 6


@needs_math
@pytest.mark.parametrize("on_main", [True, False])
def test_a_comparison_that_takes_too_long_is_cut_off(on_main):
    quick = Ladder(literal=False, seconds=0.5)
    results = []

    def work():
        begin = time.monotonic()
        results.append((compare("12345y", "(x+y+z+w)^{99}", quick), time.monotonic() - begin))

    if on_main:
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    (verdict, seconds) = results[0]
    assert verdict == (False, Rung.TIMEOUT)
    assert seconds < 20
    assert compare("18", "18", quick) == (True, STRING)  # and the thread goes on


@given(st.text(max_size=200), st.sampled_from(["gsm8k", "cmath"]))
def test_any_completion_gets_a_grade(text, ladder):
    assert grade(text, "18", ladder).correct in (True, False)


@pytest.mark.parametrize("row", FORMULAS + LITERALS, ids=lambda row: row[4])
def test_normalising_twice_changes_nothing(row):
    for ladder in (LADDERS["math"], LADDERS["cmath"]):
        once = normalise(row[0], ladder)
        assert normalise(once, ladder) == once
