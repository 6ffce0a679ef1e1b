"""Two numbers stay two: no blank, star, sign or wrapper that is taken out makes a third number of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.grading import LADDERS, Rule, compare, extract, grade, parse_number
from gruppo.grading.text import plain_text, tidy

try:
    import math_verify
except ImportError:
    math_verify = None

needs_math = pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")

# What may stand between two numbers; none of it makes one number of them.
BETWEEN = [
    *("*", "**", " * ", " ** ", "\\*", "∗", "＊", "×", "·", "\\cdot ", "\\ast "),
    *(" ", "  ", "\n", "\t", "\u2003", "\u2009 ", "~", "\\,", "\\;", "\\:", "\\ ", "\\!", "\\quad ", "\\qquad "),
    *("$", "$$", "\\$", " $ ", "\\(", "\\)\\(", "\\] \\[", "$ $", "\\left", "\\right "),
    *("°", "° ", "^\\circ", "^{\\circ} ", "\\degree ", "\\text{ }", "\\text{}", "\\mbox{ }", "'", '"', "′"),
    *(",", ", ", "{,}", ";", ":", "-", "–", "+", "/", "|", "&", "_", "^", "%", "\\%", "!", "又", "个", "元", " and "),
]
# A part of the answer may be set off.
SET_OFF = [
    "**{}**{}",
    "*{}*{}",
    "{}**{}**",
    "{}*{}*",
    "\\text{{{}}}\\text{{{}}}",
    "{}\\text{{{}}}",
    "\\textbf{{{}}}{}",
]
SET_OFF += ["\\mathbf{{{}}}\\mathbf{{{}}}", "\\mathbf{{{} {}}}", "${}$${}$", "\\({}\\)\\({}\\)", "{{{}}}{{{}}}"]


@pytest.mark.parametrize("ladder", ["cmath", pytest.param("math", marks=needs_math)])
@pytest.mark.parametrize("between", BETWEEN)
def test_nothing_between_two_numbers_joins_them(between, ladder):
    for left, right in (("1", "3"), ("12", "34"), ("1", "23"), ("-4", "2"), ("2.5", "5")):
        assert not grade(f"\\boxed{{{left}{between}{right}}}", f"{left}{right}", ladder).correct, (left, right)


@pytest.mark.parametrize("ladder", ["cmath", pytest.param("math", marks=needs_math)])
@pytest.mark.parametrize("form", SET_OFF)
def test_a_number_that_is_set_off_is_not_joined_to_the_next(form, ladder):
    assert not grade(f"\\boxed{{{form.format(4, 2)}}}", "42", ladder).correct


@pytest.mark.parametrize(
    "form", ["so he has {}", "The answer is {}.", "#### {}", "Answer: **{}**", "答案是{}。", "共{}个"]
)
@pytest.mark.parametrize("ladder", ["gsm8k", "cmath"])
def test_nor_does_a_text(form, ladder):
    pairs = [("1", "3"), ("6", "9"), ("12", "34"), ("1", "23"), ("100", "0"), ("1234", "5")]
    joined = [
        (left, between, right)
        for left, right in pairs
        for between in BETWEEN
        if grade(form.format(f"{left}{between}{right}"), f"{left}{right}", ladder).correct
    ]
    assert joined == []


# text, value, why
ONE_NUMBER = [
    ("1 234", 1234, "thousands, apart"),
    ("$1 234$", 1234, "between math signs"),
    ("10 000", 10000, "two digits before them"),
    ("1 000 000.5", 1000000.5, "with decimals"),
    ("1\\,234", 1234, "a thin space of LaTeX"),
    ("1~234", 1234, "a tie"),
    ("1\u2009234", 1234, "a thin space of Unicode"),
    ("1\u202f234\u202f567", 1234567, "a narrow one, twice"),
    ("1\u00a0234", 1234, "a space that no line ends at"),
    ("10,\\!000", 10000, "a comma with its space taken back"),
    ("**12**", 12, "bold"),
    ("*12*", 12, "italic"),
    ("***12***", 12, "both"),
    ("** 12 **", 12, "bold, with blanks"),
    ("**12** dollars", 12, "bold before its unit"),
    ("**$12$**", 12, "bold around math signs"),
    ("**12**\\text{ cm}", 12, "bold before a unit of LaTeX"),
    ("$**1\\,234**\\;\\text{cm}$", 1234, "and before a space and one"),
    ("**12**元", 12, "bold before a Chinese unit"),
    ("-**12**", -12, "a sign before"),
    ("5 1/2", 5.5, "a mixed number"),
    ("5\\frac12", 5.5, "a mixed number in LaTeX"),
    ("5 100/8", 17.5, "a mixed number, though three digits follow"),
    ("3又1/2", 3.5, "a Chinese one"),
    ("3 又 1/2", 3.5, "with blanks"),
    ("1.5*10^3", 1500, "scientific notation with a star"),
    ("1.5*10**3", 1500, "as programs write it"),
    ("\u20115", -5, "a hyphen that does not break, for a minus"),
]


@pytest.mark.parametrize(("text", "value", "why"), ONE_NUMBER, ids=[row[2] for row in ONE_NUMBER])
def test_one_number(text, value, why):
    number = parse_number(text)
    assert number is not None
    assert number.value == value
    assert parse_number(text, algebra=True) == number


# text, why not
NO_NUMBER = [
    ("0 123", "thousands do not begin with a zero"),
    ("0,123", "with a comma neither"),
    ("1000 000", "four digits before the group"),
    ("1 000 00", "two digits in a group"),
    ("1 23 456", "two digits in the middle"),
    ("1,234 567", "two kinds of separators"),
    ("12,34,567", "groups of two"),
    ("3,5", "a comma is no decimal point"),
    ("1.234,5", "nor is it behind a point"),
    ("1.000.000", "nor is a point a comma"),
    ("12-13", "a range"),
    ("3.4.5", "two points"),
    ("1 .5", "a blank before the point"),
    ("1. 5", "a blank behind it"),
    ("15*10^2", "a product, not scientific notation"),
    ("\\frac134", "a third, and a 4"),
    ("\\frac{1}{3}4", "a fraction before a digit"),
    ("1/2 3", "the same in plain text"),
    ("\\frac{1 2}{3}", "two numbers above the line"),
    ("½5", "a fraction in one character before a digit"),
    ("5₂", "an index"),
    ("1①", "a circled digit"),
    ("①①", "two of them"),
    ("50‰", "a thousandth is not a hundredth"),
    ("5%3", "a remainder"),
    ("5 thousands", "neither 5 nor quite 5000"),
    ("5 lakh", "an Indian amount"),
    ("5元或六元", "two amounts in Chinese"),
    ("5点五", "a decimal in Chinese words"),
    ("5的平方", "a power in Chinese words"),
]


@pytest.mark.parametrize(("text", "why"), NO_NUMBER, ids=[row[1] for row in NO_NUMBER])
def test_no_number(text, why):
    assert parse_number(text) is None
    assert parse_number(text, algebra=True) is None


# completion, answer, rule, why
TEXTS = [
    ("so he has 6*9", "9", Rule.LAST_NUMBER, "the last number of a product"),
    ("so he has 6**9", "9", Rule.LAST_NUMBER, "and of a power"),
    ("so he has 6*-9", "-9", Rule.LAST_NUMBER, "with its sign"),
    ("The answer is 1*2.", "1*2", Rule.SENTENCE, "no number is picked out of a product"),
    ("The answer is 3 * 4 = 12.", "12", Rule.SENTENCE, "but its result is"),
    ("The answer is **18** dollars.", "18 dollars", Rule.SENTENCE, "bold in a sentence"),
    ("**Answer:** 42", "42", Rule.SENTENCE, "a bold announcement"),
    ("**Answer:** *42*", "42", Rule.SENTENCE, "and an italic answer"),
    ("**Answer:**2**3", "2**3", Rule.SENTENCE, "and a power"),
    ("所以答案是：**18**元。", "18元", Rule.SENTENCE, "bold in Chinese"),
    ("所以答案是：6*9。", "6*9", Rule.SENTENCE, "a product in Chinese"),
    ("一共**1，234**元", "1,234", Rule.LAST_NUMBER, "bold thousands in Chinese"),
    ("she owes -**5**", "-5", Rule.LAST_NUMBER, "a sign before bold"),
    ("that is **5**%", "5%", Rule.LAST_NUMBER, "a percent sign behind it"),
    ("so 1\\,234", "1234", Rule.LAST_NUMBER, "thousands in LaTeX"),
    ("so 1\\,23", "23", Rule.LAST_NUMBER, "no thousands"),
    ("so 1\u202f234", "1234", Rule.LAST_NUMBER, "a narrow space"),
    ("so 1 000", "1000", Rule.LAST_NUMBER, "no other number begins with a zero"),
    ("so 1 500 000", "1500000", Rule.LAST_NUMBER, "in any group"),
    ("on day 3 200 came", "200", Rule.LAST_NUMBER, "but this may be two numbers"),
    ("so $\\frac{1}{2}3$", "3", Rule.LAST_NUMBER, "a fraction before a digit"),
    ("so $5 \\frac{1}{2}$", "5 1/2", Rule.LAST_NUMBER, "a mixed number"),
    ("5$6", "6", Rule.LAST_NUMBER, "money"),
    ("7 in version 3.4.5", "7", Rule.LAST_NUMBER, "two points"),
    ("3 squared, so 5^2", "3 squared", Rule.LAST_NUMBER, "the base of a power is not its value"),
    ("it turns by 90^\\circ", "90", Rule.LAST_NUMBER, "but degrees are no power"),
    ("The answer is not 18.", "not 18", Rule.SENTENCE, "taken back"),
    ("The answer is negative 18.", "negative 18", Rule.SENTENCE, "a sign in words"),
    ("The answer is less than 18 eggs.", "less than 18 eggs", Rule.SENTENCE, "a bound"),
    ("The answer is that it is 18 or twenty.", "that it is 18 or twenty", Rule.SENTENCE, "another number in words"),
    ("答案是负18。", "-18", Rule.SENTENCE, "a minus in Chinese"),
    ("胜负18场", "18", Rule.LAST_NUMBER, "which is also a lost game"),
    ("so 0,500", "0,500", Rule.LAST_NUMBER, "a decimal comma, which is not read"),
]


@pytest.mark.parametrize(("completion", "answer", "rule", "why"), TEXTS, ids=[row[3] for row in TEXTS])
def test_the_answer_of_a_text(completion, answer, rule, why):
    found = extract(completion, LADDERS["cmath"])
    assert found is not None
    assert (found.text, found.rule) == (answer, rule)


# gold, answer, equal, why
FORMULAS = [
    ("8", "2**3", True, "a power as programs write it"),
    ("x^2", "x**2", True, "of a variable"),
    ("2x", "x**2", False, "which is no product"),
    (r"\sqrt{2}", "2**(1/2)", True, "with a bracket"),
    ("1", "9**9**9", False, "a tower"),
    ("4", "1 3", False, "nor is a sum left out"),
    ("3", "5 1/2", False, "a mixed number is not (5 + 1)/2"),
    ("(5.5,3)", "(5 1/2, 3)", True, "a mixed number in a pair"),
    ("(3,3)", "(5 1/2, 3)", False, "there neither"),
    (r"\sqrt{13}", r"\sqrt{1 3}", False, "under a root"),
    ("x^{13}", "x^{1 3}", False, "in an exponent"),
    ("x^{13}", "x^1 3", False, "behind one"),
    ("72", "2^3 3^2", True, "powers side by side are a product"),
    ("(1,23)", "(1,2 3)", False, "in a pair"),
    ("23x", "2 3 x", False, "before a variable"),
    ("1000x", r"1\,000x", True, "thousands before a variable"),
    ("3015", r"30^\circ 15'", False, "degrees and minutes"),
    ("1/34", r"\frac134", False, "braces left out"),
    ("2^1/2", r"2^\frac{1}{2}", False, "a fraction in an exponent is no quotient"),
    ("2/3/4", r"2/\frac{3}{4}", False, "nor is one below a slash"),
    ("8/3", r"2/\frac{3}{4}", True, "but it is what it is"),
    (r"(1/2,3)", r"(\frac12, 3)", True, "a fraction and a slash"),
    (r"\log_{2}{3}", r"\log_2 3", True, "the base of a logarithm"),
    (r"3\sqrt{2}", r"\sqrt 2 3", True, "a root without braces"),
    ("5", r"5\text{ or 6}", False, "text that offers another answer is no unit"),
    ("1", r"1\text{3}", False, "nor are digits"),
    ("5", r"5\text{ squared}", False, "nor is a power in words"),
    ("13", r"13\text{ (not 14)}", False, "nor is a doubt"),
    (r"2\pi", r"2\pi\text{ cm^2}", True, "a power of a unit is one"),
    ("3", r"3\text{ times}", True, "and so is a word"),
    ("5", "5t", False, "a letter at the end is a variable"),
    ("2ab", "2", False, "and so are two"),
    ("2ab", "2ba", True, "in any order"),
    (r"\frac{1}{2}h", r"\frac12", False, "behind a fraction"),
    (r"\frac{1}{2}h", "h/2", True, "which may be written so"),
    (r"2\pi r h", r"2\pi r", False, "behind a blank"),
    (r"2\pi", r"2\pi cm", True, "but a unit of two letters is a unit"),
    ("y=5t", "5t-y=0", True, "in an equation"),
]


@needs_math
@pytest.mark.parametrize(("gold", "answer", "equal", "why"), FORMULAS, ids=[row[3] for row in FORMULAS])
def test_formulas(gold, answer, equal, why):
    assert compare(gold, answer, LADDERS["math"])[0] is equal


@given(st.text(alphabet="0123456789 .,*$\\!°~{}x", max_size=12))
def test_tidying_joins_nothing_but_thousands(text):
    """What is left of the digits are the same runs, or groups of three that were one number."""
    runs = [run for run in "".join(c if c.isdigit() else " " for c in plain_text(text)).split() if run]
    left = "".join(c if c.isdigit() else " " for c in tidy(plain_text(text))).split()
    while left:
        run = left.pop(0)
        group = runs.pop(0)
        assert run.startswith(group)
        while group != run:
            assert len(runs[0]) == 3, (text, run)
            group += runs.pop(0)
    assert not runs
