"""Literal numbers: what counts as one, what it is worth, and what must not be taken for one."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.grading import parse_number
from gruppo.grading.numbers import numbers_in, same_number

# text, value, canonical text, why
NUMBERS = [
    ("18", 18, "18", "a number"),
    ("-18", -18, "-18", "a sign"),
    ("+18", 18, "18", "a needless sign"),
    ("−18", -18, "-18", "the Unicode minus"),
    ("18.0", 18, "18", "needless decimals"),
    ("18.", 18, "18", "a full stop is no decimal point"),
    ("18。", 18, "18", "nor is a Chinese one"),
    (".5", Fraction(1, 2), "0.5", "no leading zero"),
    ("-0.25", Fraction(-1, 4), "-0.25", "a negative decimal keeps its sign"),
    ("007", 7, "7", "leading zeros"),
    ("1,234", 1234, "1234", "thousands"),
    ("1,234,567.5", Fraction(2469135, 2), "1234567.5", "thousands and decimals"),
    ("1，234", 1234, "1234", "a full-width comma"),
    ("11{,}111", 11111, "11111", "LaTeX's way to set thousands"),
    (r"1\,000\,000", 1000000, "1000000", "LaTeX thin spaces"),
    ("1 000 000", 1000000, "1000000", "thousands apart"),
    ("１８", 18, "18", "full-width digits"),
    ("٤٢", 42, "42", "Arabic-Indic digits"),
    ("18\u200b", 18, "18", "an invisible character"),
    ("$18$", 18, "18", "math signs"),
    (r"\(18\)", 18, "18", "the other math signs"),
    (r"\$18", 18, "18", "dollars"),
    ("-$18", -18, "-18", "a debt"),
    ("$-18", -18, "-18", "a debt, written the other way"),
    ("¥18", 18, "18", "yuan"),
    ("€ 18", 18, "18", "euros"),
    ("US$18", 18, "18", "dollars of a country"),
    ("**18**", 18, "18", "bold in Markdown"),
    (r"\textbf{18}", 18, "18", "bold in LaTeX"),
    (r"\text{\mathbf{18}}", 18, "18", "two wrappers"),
    ("x = 18", 18, "18", "a short name before it"),
    ("= 18", 18, "18", "an equals sign before it"),
    ("1/2", Fraction(1, 2), "1/2", "a fraction"),
    ("2/6", Fraction(1, 3), "1/3", "not reduced, as in CMATH"),
    (r"\frac{1}{2}", Fraction(1, 2), "1/2", "in LaTeX"),
    (r"\dfrac{1}{2}", Fraction(1, 2), "1/2", "larger"),
    (r"\frac12", Fraction(1, 2), "1/2", "without braces"),
    (r"\frac{1}2", Fraction(1, 2), "1/2", "with half of them"),
    (r"-\frac{1}{2}", Fraction(-1, 2), "-1/2", "the sign before"),
    (r"\frac{-1}{2}", Fraction(-1, 2), "-1/2", "the sign inside"),
    (r"15\frac{39}{40}", Fraction(639, 40), "639/40", "a mixed number is a sum, not a product"),
    ("1 1/2", Fraction(3, 2), "3/2", "a mixed number in plain text"),
    ("3½", Fraction(7, 2), "7/2", "one character, which must not become 31/2"),
    ("½", Fraction(1, 2), "1/2", "one character alone"),
    ("4分之3", Fraction(3, 4), "3/4", "Chinese says the denominator first"),
    ("1又2分之1", Fraction(3, 2), "3/2", "a Chinese mixed number"),
    ("1.5e3", 1500, "1500", "as programs print it"),
    ("2E-2", Fraction(1, 50), "0.02", "with a negative exponent"),
    (r"1.5 \times 10^{3}", 1500, "1500", "scientific notation"),
    ("1.5×10³", 1500, "1500", "the same in Unicode"),
    ("18 dollars", 18, "18", "a unit"),
    ("18 dollars per day", 18, "18", "a rate"),
    (r"18\text{ eggs}", 18, "18", "a unit in LaTeX"),
    (r"18 \mathrm{~cm}^2", 18, "18", "a power of a unit is no power of the number"),
    ("18cm", 18, "18", "a unit without a blank"),
    ("18 m", 18, "18", "a unit of one letter"),
    ("60 km/h", 60, "60", "a quotient of units"),
    ("18 m²", 18, "18", "a superscript in a unit"),
    ("18㎡", 18, "18", "a unit in one character"),
    ("5 \\text{ more apples}", 5, "5", "a comparison"),
    ("3 \\text{ times}", 3, "3", "a ratio in words"),
    ("3 times as many", 3, "3", "a longer one"),
    ("50¢", 50, "50", "cents"),
    ("50\\text{¢}", 50, "50", "cents in LaTeX"),
    ("18€", 18, "18", "euros behind"),
    ("18（元）", 18, "18", "a Chinese unit in brackets"),
    ("18 \\text{ (dollars)}", 18, "18", "a unit in brackets"),
    ("18 个 鸡蛋", 18, "18", "two Chinese words"),
    ("3加仑", 3, "3", "gallons: their 加 is no plus"),
    ("\\approx 18", 18, "18", "about"),
    ("约18", 18, "18", "about, in Chinese"),
    ("大约 18 元", 18, "18", "about, with a unit"),
    ("x \\approx 18", 18, "18", "a name, and about"),
    ("\\text{Total} = 18", 18, "18", "a word before it"),
    ("\\text{Total cost} = \\$18", 18, "18", "two words before it"),
    ("总数=18", 18, "18", "a Chinese word before it"),
    ("8 \\text{ children’s books}", 8, "8", "an apostrophe"),
    ("5 two-dollar bills", 5, "5", "a number in a compound word"),
    ("18th", 18, "18", "an ordinal"),
    ("2.5元", Fraction(5, 2), "2.5", "a Chinese unit"),
    ("18 个", 18, "18", "with a blank"),
    ("3千克", 3, "3", "a kilogram: its 千 is no thousand"),
    ("12平方厘米", 12, "12", "a long one"),
    ("60千米/时", 60, "60", "a Chinese rate"),
    (r"18\text{元}", 18, "18", "a Chinese unit in LaTeX"),
    ("90^\\circ", 90, "90", "degrees"),
    ("90°", 90, "90", "degrees in Unicode"),
    ("3万", 30000, "30000", "ten thousands are an amount"),
    ("2.5亿元", 250000000, "250000000", "and so are hundred millions, before a unit"),
    ("18 million", 18000000, "18000000", "an English amount"),
    ("2 thousand dollars", 2000, "2000", "with a unit"),
    ("9" * 300, int("9" * 300), "9" * 300, "long, but a number"),
]

# text, why not
NOT_NUMBERS = [
    ("", "nothing"),
    ("abc", "a word"),
    (r"9\cdot 2", "still to be worked out"),
    ("9*2", "the same in plain text"),
    ("9+9", "a sum"),
    ("20-2", "a difference"),
    (r"\sqrt{144}", "a root"),
    ("2^4", "a power"),
    ("5!", "a factorial"),
    (r"\log_2(4^2)", "a logarithm"),
    (r"\binom{5}{2}", "a binomial"),
    (r"20\times 10^2", "not scientific: a product"),
    ("--18", "two signs"),
    ("1/0", "no number at all"),
    ("1/2/3", "not a fraction"),
    ("4,6", "two numbers"),
    ("12, 100", "two numbers, of which the second has three digits"),
    ("1,2345", "not thousands"),
    ("3:5", "a ratio"),
    ("8:34", "a time"),
    ("3 pm", "a time of day"),
    ("18 or 20", "undecided"),
    ("18 and a half", "more than 18"),
    ("5 halves", "not 5"),
    ("3个半", "three and a half"),
    ("3成", "thirty percent"),
    ("8折", "a discount"),
    ("18多", "more than 18"),
    ("2小时30分", "two numbers"),
    ("5 feet 3 inches", "two amounts"),
    ("5 feet 3", "two amounts, one without a unit"),
    ("5 hundredths", "a fraction in words"),
    ("18 divided by 2", "a division in words"),
    ("18 divided by two", "a division in words only"),
    ("18 times two", "a product in words"),
    ("18 by 3", "two sides"),
    ("18 out of 3", "a share"),
    ("18 not", "taken back"),
    ("5 more than 3", "a sum in words"),
    ("18(17)", "two numbers, one in brackets"),
    ("18(x+1)", "a product with a bracket"),
    ("18负", "a sign behind"),
    ("3乘以", "the beginning of a product"),
    ("9*2 = 18", "a calculation before it"),
    ("5²", "25, and certainly not 52"),
    ("5x", "a term"),
    ("20 June", "a date"),
    ("1.2.3", "a version"),
    ("28_9", "base nine"),
    ("9" * 301, "too long to be one"),
]


@pytest.mark.parametrize(("text", "value", "canonical", "why"), NUMBERS, ids=[row[3] for row in NUMBERS])
def test_a_number(text, value, canonical, why):
    number = parse_number(text)
    assert number is not None
    assert (number.value, number.text, number.percent) == (value, canonical, False)


@pytest.mark.parametrize(("text", "why"), NOT_NUMBERS, ids=[row[1] for row in NOT_NUMBERS])
def test_not_a_number(text, why):
    assert parse_number(text) is None


@pytest.mark.parametrize("text", ["40%", r"40\%", "40 %", "40％", "40 percent", "百分之40", r"$40\%$", "40% of them"])
def test_percentages(text):
    number = parse_number(text)
    assert number is not None
    assert (number.value, number.percent, number.text) == (40, True, "40%")


@pytest.mark.parametrize(
    ("text", "algebra", "why"),
    [
        ("5ab", False, "two variables, or so it may be"),
        ("5 m", False, "slope or metres"),
        ("x = 5", False, "an equation has a name for its number"),
        ("5cm", True, "no one names variables so"),
        ("5 dollars", True, "a word"),
        ("5 theta", False, "a Greek letter"),
        ("5 alpha", False, "another one"),
        ("5 xyz", False, "three variables"),
        ("5 times", False, "a product, or so it may become"),
        ("5 dollars a", False, "a variable behind a word"),
        ("\\approx 5", True, "about"),
        ("5€", True, "no variable looks so"),
        ("5元", True, "Chinese letters are no variables"),
    ],
)
def test_in_algebra_letters_may_be_variables(text, algebra, why):
    assert parse_number(text) is not None
    assert (parse_number(text, algebra=True) is not None) is algebra


def test_units_may_be_kept():
    assert parse_number("18 dollars", units=False) is None
    assert parse_number("18", units=False) is not None


# gold, answer, equal, why
PAIRS = [
    ("12", "12.000000000000002", True, "floats of programs"),
    ("1/3", "0.333", True, "rounded within the tolerance"),
    ("1/3", "0.33", False, "rounded beyond it"),
    ("18", "18.001", False, "a difference of exactly the tolerance"),
    ("18", "18.0009", True, "just below it"),
    ("0.002", "0.0015", False, "the tolerance shrinks with small numbers"),
    ("0.05", "0.0502", True, "but stays some digits wide"),
    ("1/1024", "0", False, "nothing is not a small number"),
    ("0.0005", "0", False, "however small"),
    ("1/1024", "1/2048", False, "fractions are not rounded"),
    ("1/36", "1/35", False, "however close"),
    ("1/1024", "0.000977", True, "a decimal may be"),
    ("40%", "40%", True, "the same"),
    ("40%", "40", True, "the sign left out"),
    ("40%", "0.4", True, "the sign worked in"),
    ("40%", "4000%", False, "both signs count, so no factor"),
    ("40%", "4", False, "another number"),
    ("40", "40%", True, "the question asks for percent, the gold has no sign"),
    ("0.4", "40%", False, "no factor of a hundred for a gold without a sign"),
    ("5", "500%", False, "however it is written"),
    ("50", "0.5", False, "no factor of a hundred without a sign"),
    ("0.5", "50", False, "nor the other way"),
    ("-5", "5", False, "the sign matters"),
]


@pytest.mark.parametrize(("gold", "answer", "equal", "why"), PAIRS, ids=[row[3] for row in PAIRS])
def test_same_number(gold, answer, equal, why):
    left, right = parse_number(gold), parse_number(answer)
    assert left is not None
    assert right is not None
    assert same_number(left, right, 1e-3) is equal


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("16 - 3 = 13 eggs, or 81.25 %", ["16", "3", "13", "81.25 %"]),
        ("5-3", ["5", "3"]),
        ("x-3", ["3"]),
        ("it is -3", ["-3"]),
        ("=-3", ["-3"]),
        ("4,6", ["4", "6"]),
        ("1,234 and 12,34", ["1,234", "12", "34"]),
        ("x2 H2O v1.2 x^2 x_3 x^{4} a1", []),
        ("1/2 or 1 1/2", ["1/2", "1 1/2"]),
        ("共18万元", ["18万"]),
        ("1/23/4", ["1", "23/4"]),
    ],
)
def test_numbers_in_a_text(text, numbers):
    assert list(numbers_in(text)) == numbers


WAYS = ["{}", "${}$", "\\text{{{}}}", "{} dollars", "{}元", " {}. ", "\\({}\\)", "**{}**"]


@given(st.integers(-(10**12), 10**12), st.sampled_from(WAYS))
def test_a_whole_number_is_itself_however_it_is_set(value, way):
    for written in (f"{value}", f"{value:,}", f"{value}.0"):
        number = parse_number(way.format(written))
        assert number is not None
        assert number.value == value
        assert number.text == str(value)


@given(st.decimals(-1000, 1000, places=3), st.sampled_from(WAYS))
def test_the_canonical_text_reads_back(value, way):
    number = parse_number(way.format(value))
    assert number is not None
    again = parse_number(number.text)
    assert again == number
    assert number.value == Fraction(value)


@given(st.text(max_size=400))
def test_any_text_is_a_number_or_none(text):
    number = parse_number(text)
    assert number is None or parse_number(number.text) == number
