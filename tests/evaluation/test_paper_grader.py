"""The paper's looser grading, beside ours: where an answer is looked for, and what equals what."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.evaluation.paper_grader import paper_answers, paper_equal, paper_match, paper_normalise
from gruppo.evaluation.types import Problem
from gruppo.grading import LADDERS, Ladder, compare

pytest.importorskip("math_verify", reason="needs math-verify: pip install math-verify")

GSM8K, MATH, CMATH = LADDERS["gsm8k"], LADDERS["math"], LADDERS["cmath"]


def pmatrix(kind):
    return rf"\begin{{{kind}}}1\\2\end{{{kind}}}"


# gold, answer, equal by our rules, equal by the paper's
PAIRS = [
    (r"\frac{1}{2}", "0.5", True, True),
    ("11{,}111", "11111", True, False),
    (r"\$40", "40", True, True),
    (r"90^\circ", "90", True, True),
    (r"2\sqrt{3}", r"\sqrt{12}", True, True),
    ("x^2+2x+1", "(x+1)^2", True, True),
    ("(1,2)", "(2,1)", False, False),
    (r"\{1,2\}", r"\{2,1\}", True, False),
    ("12, 10, 6", "6,10,12", True, False),
    ("[2,5)", "(2,5)", False, True),
    (r"x \in [-2,7]", "[-2,7]", True, False),
    (r"15\frac{39}{40}", r"\frac{639}{40}", True, False),
    ("28_9", "28", True, False),
    (pmatrix("pmatrix"), pmatrix("bmatrix"), True, True),
    (r"\text{Evelyn}", "Evelyn", True, True),
    (r"\pm 2", "2,-2", True, False),
    ("y = 2x+3", "2x - y + 3 = 0", True, True),
    ("4,6", "46", False, True),
    ("2/6", "1/3", True, True),
    ("40%", "0.4", True, True),
    ("40%", "40", True, True),
    ("40%", r"40\%", True, True),
    ("18", "18.", True, True),
    ("12", "12.000000000000002", True, True),
    ("1.5e3", "1500", True, True),
    ("18", "18 dollars", True, False),
    ("2.5", "2.5元", True, False),
    (r"20\%", "20％", True, False),
    ("1000000", r"1\,000\,000", True, True),
    ("3:5", r"\frac{3}{5}", False, True),
    ("8:34", "4:17", False, True),
    (r"\text{June 20}", "20 June", True, True),
    ("1/3", "0.333", True, True),  # within the tolerance
    ("50", "0.5", False, True),
    (r"(2,\infty)", "x>2", True, False),
]


def correct(completion, gold, ladder=MATH, question="What is it?", mode="last", few_shot=False):
    answers = (gold,) if isinstance(gold, str) else gold
    found = paper_answers(completion, question, ladder, few_shot)
    return paper_match(found, Problem("p", question, answers, mode), ladder)


@pytest.mark.parametrize(("gold", "answer", "ours", "paper"), PAIRS, ids=[f"{row[0]} {row[1]}" for row in PAIRS])
def test_the_two_gradings_side_by_side(gold, answer, ours, paper):
    assert compare(gold, answer, MATH)[0] is ours
    assert correct(f"$\\boxed{{{answer}}}$", gold) is paper


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("0.5", "50%", True),
        ("18", "18.0009", True),
        ("18", "18.002", False),
        ("1,000", "1000", True),
        ("(1,[2,3))", "(1,(2,3))", True),
        ("(1,2,3)", "(1,2)", False),
        (r"(\frac{1}{2},3)", "(0.5,3)", True),
        (r"(-\infty,2)\cup(3,4)", r"(3,4)\cup(-\infty,2)", True),
        (r"(-\infty,2)\cup(3,4)", r"(-\infty,2)", False),
        ("x=5", "5", True),
        ("5", "x=5", True),
        ("abc=5", "5", False),
        ("x=5", "y=5", False),
        ("y=2x", "2x=y", True),
        ("a=b=c", "c", False),
        (r"9\cdot2", "18", True),
        (r"\frac{\sqrt{2}}{2}", "sqrt(2)/2", True),
        (r"\frac{\pi}{2}", "pi/2", True),
        ("x^2", "x**2", True),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
        ("x", "X", False),
        ("", "18", False),
        ("1", "9^{9^{9^9}}", False),
        ("1", r"\frac{1}{0}", False),
    ],
)
def test_what_equals_what(gold, answer, equal):
    assert paper_equal(gold, answer) is equal


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (r"\left( \dfrac12, \sqrt3 \right)", r"(\frac{1}{2},\sqrt{3})"),
        (r"\tfrac{1}2", r"\frac{1}{2}"),
        (r"\frac1{20}", r"\frac{1}{20}"),
        ("-1/2", r"-\frac{1}{2}"),
        ("3.5/2", "3.5/2"),
        ("18.0", "18"),
        ("18.05", "18.05"),
        (".5", "0.5"),
        (r"5\text{ cm}", "5"),
        (r"5\mbox{ cm}", "5"),
        (r"\text{even}", "even"),
        (r"30^{\circ}", "30"),
        (r"\$1,250\!", "1,250"),
        (r"50\%", "50%"),
        ("", ""),
    ],
)
def test_one_way_of_writing(text, normal):
    assert paper_normalise(text) == normal
    assert paper_normalise(normal) == normal


@pytest.mark.parametrize(
    ("text", "ladder", "answers", "why"),
    [
        ("The final answer is $5$. I hope it is correct. \\boxed{6}", MATH, ("5",), "the sentence of Minerva first"),
        ("\\boxed{3} and \\boxed{5}", MATH, ("3", "5"), "all boxes"),
        ("\\boxed{3} and \\boxed{5}", GSM8K, ("5",), "the last where a number is asked for"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", MATH, ("\\frac{1}{\\sqrt{2}}",), "braces in braces"),
        ("boxed{7}", GSM8K, ("7",), "no backslash needed"),
        ("\\boxed{40}%", GSM8K, ("40%",), "a percent sign behind the box"),
        ("the answer is 5: \\boxed{5", GSM8K, (), "a box that is never closed is all that is looked for"),
        ("The answer is 3. The answer is: 5.", GSM8K, ("5",), "the last sentence"),
        ("The answer is 5.\nThat was 3 steps", GSM8K, ("5",), "its first line"),
        ("```output\n5\n6\n```\nDone in 3", GSM8K, ("5",), "the first line of an output"),
        ("```output\n1\n```\n```output\n2\n```", GSM8K, ("2",), "the last output"),
        ("```output\n\n```\nIt is 3", GSM8K, ("3",), "an empty one is passed over"),
        ("5 + 1,000 = 1,005", GSM8K, ("1005",), "the last number"),
        ("答案是18。一共有3个", CMATH, ("3",), "no Chinese sentences"),
        ("I give up.", GSM8K, (), "nothing"),
        ("\\boxed{2 \\text{ and } 3}", MATH, ("2", "3"), "two in a box"),
    ],
)
def test_where_answers_are_looked_for(text, ladder, answers, why):
    assert paper_answers(text, "What is it?", ladder) == answers


@pytest.mark.parametrize(
    ("text", "output", "answers", "why"),
    [
        ("```output\n5\n```\nDone in 3", "", ("3",), "a fence that the model wrote is no output"),
        ("```output\n5\n```\nDone in 3", "4", ("4",), "a real one counts"),
        ("```output\n4\n9\n```\nDone in 3", "4\n9", ("4",), "its first line"),
        ("Done in 3", "```output\n9\n```\n4", ("```output",), "with all that was printed"),
        ("Done in 3", "Runtime errors: none", ("Runtimeerrors:none",), "an error is an output too"),
        ("\\boxed{7}", "4", ("7",), "after a box"),
        ("The answer is 7", "4", ("7",), "and after a sentence"),
    ],
)
def test_the_outputs_of_programs_are_given(text, output, answers, why):
    assert paper_answers(text, "What is it?", GSM8K, output=output) == answers


@pytest.mark.parametrize(
    ("text", "ladder", "answers", "why"),
    [
        ("The answer is 18, and then 7", GSM8K, ("7",), "the last number"),
        ("所以答案是：18，也就是3×6=18。\n答案是5", CMATH, ("18",), "the line after the first announcement"),
        ("一共\\boxed{18}，3个", CMATH, ("18",), "without one, as usual"),
        ("答案是：很多\n\\boxed{3}", CMATH, ("3",), "so too without a number there"),
        ("The answer is 18, so $x = 18$ and then 7", MATH, ("18,sox=18andthen7",), "formulas as usual"),
    ],
)
def test_few_shot_completions(text, ladder, answers, why):
    assert paper_answers(text, "What is it?", ladder, few_shot=True) == answers


LIST = "Enter all of them, separated by commas."


@pytest.mark.parametrize(
    ("completion", "gold", "question", "mode", "right"),
    [
        ("\\boxed{6,10,12}", "12, 10, 6", LIST, "last", True),
        ("\\boxed{6,10}", "12, 10, 6", LIST, "last", False),
        ("\\boxed{(1,2)}", "(1,2)", LIST, "last", True),
        ("\\boxed{3} then \\boxed{5}", "5", "?", "last", True),  # as many as there are golds, from the end
        ("\\boxed{5} then \\boxed{3}", "5", "?", "last", False),
        ("\\boxed{5} and \\boxed{2}", ("2", "5"), "?", "all", True),
        ("\\boxed{5}", ("2", "5"), "?", "all", False),
        ("\\boxed{5}, \\boxed{5}, \\boxed{2}", ("2", "5"), "?", "all", True),
        ("\\boxed{5}", ("2", "5"), "?", "any", True),
        ("\\boxed{4}", ("2", "5"), "?", "any", False),
        ("I give up.", "5", "?", "last", False),
    ],
)
def test_lists_of_answers(completion, gold, question, mode, right):
    assert correct(completion, gold, MATH, question, mode) is right


def test_a_worked_reference_will_do():
    assert correct("\\boxed{18}", "3 * 6 = 18\n#### 18", GSM8K)


def test_a_comparison_that_takes_too_long_is_wrong():
    quick = Ladder(literal=False, seconds=0.5)
    begin = time.monotonic()
    assert not correct("\\boxed{(x+y+z+w)^{99}}", "(x+y+z+v)^{99}", quick)
    assert time.monotonic() - begin < 20
    assert correct("\\boxed{(x+1)^2}", "x^2+2x+1", MATH)


@given(st.text(alphabet="0123456789x.,-+/\\{}()[]%$ =boxedfracsqrt答案是\n", max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_completion_gets_a_grade(text):
    for ladder in (GSM8K, MATH):
        assert correct(f"{text} \\boxed{{{text}}}", "18", ladder) in (True, False)


@given(st.fractions(min_value=-1000, max_value=1000), st.fractions(min_value=-1000, max_value=1000))
@settings(max_examples=50, deadline=None)
def test_decimals_are_equal_up_to_a_tolerance_and_a_factor_of_a_hundred(left, right):
    left, right = round(left, 4), round(right, 4)
    wanted = any(abs(float(scaled) - float(right)) < 1e-3 for scaled in (left, left / 100, left * 100))
    problem = Problem("p", "?", (f"{float(left):.4f}",))
    assert paper_match((f"{float(right):.4f}",), problem, GSM8K) is wanted
