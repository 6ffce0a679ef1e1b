"""Literal numbers, as in grade-school answers; expressions that must be evaluated do not count."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from gruppo.grading.text import CJK, plain_text, slashed, tidy

__all__ = ["SHORT_UNITS", "Number", "close", "numbers_in", "parse_number", "same_number"]

LONGEST = 300  # characters; a longer run of digits is compared as text

# Numbers with thousands separators do not begin with a zero: 0,500 is a decimal comma, which is not supported.
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"
POWER = r"(?:[eE][+-]?[0-9]{1,3}(?![0-9])| ?(?:×|\*|\\times|\\cdot) ?10\^(?:\{-?[0-9]{1,3}\}|[0-9]))"
MIXED = rf"[0-9]+ [0-9]+/[0-9]+|{DECIMAL}/{DECIMAL}(?![/0-9])"
MANY = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8}
TIMES = r"(?: ?(?:(?:hundred|thousand|million|billion|trillion)(?![A-Za-z])|[万亿]))?"

ABOUT = r"(?:(?:\\approx|≈|大?约|about|approximately) ?)?"
LEADING = re.compile(
    rf"(?P<assigned>(?:(?:[A-Za-z](?:_?[A-Za-z0-9])?|[A-Za-z{CJK} ]{{1,40}}?) ?(?:=|\\approx|≈)|=) ?)?{ABOUT}"
    r"(?P<sign>[+-]?) ?(?:[€£¥₹]|USD?|RMB|CNY)? ?(?P<sign2>-?) ?"
    rf"(?:(?P<ratio>{MIXED})|(?P<decimal>{DECIMAL})(?P<power>{POWER})?)(?P<times>{TIMES})(?P<rest>.*)",
    re.DOTALL,
)
# Not in a word, an index or an exponent, not the base of an exponent, nor part of a longer number such as 3.4.5.
IN_TEXT = re.compile(
    rf"(?<![A-Za-z0-9_.^])(?<![_^]\{{)-?(?:0,[0-9]+|{MIXED}|{DECIMAL}(?:[eE][+-]?[0-9]{{1,3}}(?![0-9A-Za-z]))?)"
    rf"(?!\.?[0-9]|\^\{{?-?[0-9]){TIMES}(?: ?%)?"
)

OPERAND = re.compile(r"[0-9A-Za-z)\]}]$|[0-9)\]}] $")

CJK_UNIT = re.compile(rf"(?: ?[{CJK}]){{1,8}}(?: ?(?:/|每) ?[{CJK}]{{1,4}})?")
# These change the amount: 3个半 is 3.5 and 3成 is 30 %. 千 (thousand) is allowed only in a unit such as 千克.
CJK_AMOUNT = re.compile(
    "[半多几百十万亿成折又负乘除减余比不非或错]|千(?![克米瓦卡])|加(?!仑)|分之|点[零一二三四五六七八九]|的[平立]方"
)
CURRENCY = re.compile(" ?[¢€£¥₹]")
BRACKETED = re.compile(r" ?\( ?([^()]*?) ?\)")
WORD = r"[A-Za-z]+(?:['’][A-Za-z]*)?\.?(?: ?\^ ?\{?[23]\}?|[23])?"
LATIN_UNIT = re.compile(rf"(?P<space>[ -]?)(?P<first>(?=([A-Za-z]+)){WORD}) ?(?:(?: |/| / |-| per ){WORD} ?){{0,5}}")
# Words that modify the amount, introduce a second one, or negate it.
NOT_UNITS = re.compile(
    r"\b(?:and|or|to|than|plus|minus|over|mod|choose|point|negative|squared|cubed|root|factorial|divided|multiplied|by|"
    r"out|not|no|never|wrong|incorrect|half|halves|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|"
    r"twelfths?|hundredths?|thousandths?|millionths?|pi|exp|ln|log|sqrt|sin|cos|tan|cot|csc|arcsin|arccos|arctan|am|pm|"
    r"january|february|march|april|may|june|july|august|september|october|november|december|"
    r"(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy|eighty|"
    r"ninety|hundreds?|thousands?|millions|lakhs?|crores?|bn)(?!-))\b",
    re.IGNORECASE,
)
# If letters may be variables, these are not units either.
NOT_IN_ALGEBRA = re.compile(
    r"\b(?:more|less|times|[abcdxyz]+|[a-z]|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|"
    r"omicron|rho|sigma|tau|upsilon|phi|chi|psi|omega)\b",
    re.IGNORECASE,
)
SHORT_UNITS = re.compile(
    "[cdkm]m|[km]g|m[lL]|min|mins|sec|hr|hrs|kmh|mph|ft|in|yd|mi|lb|lbs|oz|gal|USD|usd|RMB|CNY|st|nd|rd|th"
)
LETTER_UNITS = frozenset("mgshLlKCF")


@dataclass(frozen=True)
class Number:
    """An exact literal number.

    Example:
        parse_number("$1,250.50") == Number(value=Fraction(2501, 2), percent=False, text="1250.5")
    """

    value: Fraction
    percent: bool  # followed by a percent sign; `value` is the number before the sign
    text: str

    @property
    def is_decimal(self) -> bool:
        """Whether it may have been rounded: neither a whole number nor a fraction."""
        return "." in self.text


def parse_number(text: str, *, units: bool = True, algebra: bool = False) -> Number | None:
    """Parse a text that as a whole is one literal number; None if it is anything else.

    With `algebra`, letters count as a unit only where they cannot be variables: `5cm`, not `5ab`; and `x = 5` is an
    equation, not a number.

    Example:
        parse_number(r"18\\text{ eggs}").text == "18"
        parse_number(r"9\\cdot 2") is None
    """
    return None if len(text) > LONGEST else _parse_number(text, units, algebra)


@lru_cache(maxsize=4096)  # one comparison calls it up to five times, and completions of a group repeat answers
def _parse_number(text: str, units: bool, algebra: bool) -> Number | None:
    found = LEADING.fullmatch(slashed(tidy(plain_text(text))))
    if found is None or (found["sign"] and found["sign2"]) or (algebra and found["assigned"]):
        return None
    percent, rest = _split_percent(found["rest"])
    if rest and not (units and _is_unit(rest, algebra)):
        return None
    value = _magnitude(found["ratio"], found["decimal"], found["power"])
    if value is None:
        return None
    negative = "-" in (found["sign"], found["sign2"])
    value *= 10 ** MANY.get(found["times"].strip(), 0)
    return _number(-value if negative else value, percent, ratio=found["ratio"] is not None)


def _split_percent(rest: str) -> tuple[bool, str]:
    found = re.match(r" ?(?:%|per ?cent(?:age)?(?![A-Za-z])|pct(?![A-Za-z]))", rest)
    return (True, rest[found.end() :]) if found else (False, rest)


def _magnitude(ratio: str | None, decimal: str | None, power: str | None) -> Fraction | None:
    if ratio is not None:
        whole, _, fraction = ratio.rpartition(" ")
        upper, lower = (Fraction(part.replace(",", "")) for part in fraction.split("/"))
        return Fraction(whole or 0) + upper / lower if lower else None
    assert decimal is not None
    value = Fraction(decimal.replace(",", ""))
    if power is None:
        return value
    if power[0] in "eE":
        return value * Fraction(10) ** int(power[1:])
    # 1.5 × 10³ is scientific notation, 20 × 10² is an unevaluated product.
    exponent = int(power.partition("^")[2].strip("{}"))
    return value * Fraction(10) ** exponent if 1 <= value < 10 else None


def _number(value: Fraction, percent: bool, *, ratio: bool) -> Number:
    sign = "%" if percent else ""
    if ratio or value.denominator == 1:
        return Number(value, percent, f"{value}{sign}")
    # A decimal terminates: its denominator has no prime factors other than 2 and 5.
    digits = next(n for n in range(1, 2000) if 10**n % value.denominator == 0)
    scaled = str(abs(value.numerator) * (10**digits // value.denominator)).rjust(digits + 1, "0")
    return Number(value, percent, f"{'-' * (value < 0)}{scaled[:-digits]}.{scaled[-digits:]}{sign}")


def _is_unit(rest: str, algebra: bool) -> bool:
    if bracketed := BRACKETED.fullmatch(rest):
        rest = f" {bracketed[1]}"
    if CURRENCY.fullmatch(rest):
        return True
    if CJK_UNIT.fullmatch(rest):
        return CJK_AMOUNT.search(rest) is None
    found = LATIN_UNIT.fullmatch(rest)
    if found is None or NOT_UNITS.search(rest):
        return False
    first, apart = found[3], found["space"] == " "
    if SHORT_UNITS.fullmatch(first):
        return True
    if algebra:
        return apart and len(first) >= 3 and NOT_IN_ALGEBRA.search(rest) is None
    return len(first) >= 2 or first in LETTER_UNITS


def numbers_in(text: str) -> Iterator[str]:
    """The literal numbers of a text, in order.

    Example:
        list(numbers_in("16 - 3 = 13 eggs, or 81.25 %")) == ["16", "3", "13", "81.25 %"]
    """
    for found in IN_TEXT.finditer(text):
        number = found[0]
        # In "5-3", "x-3" and "5 -3" the sign is an operator.
        if number[0] == "-" and OPERAND.search(text[max(0, found.start() - 2) : found.start()]):
            number = number[1:]
        yield number


def close(left: Fraction, right: Fraction, tolerance: Fraction) -> bool:
    """Whether two numbers differ by less than `tolerance`, which shrinks with numbers below 0.1: 0 is never 0.0005."""
    return abs(left - right) < tolerance * min(Fraction(1), 10 * max(abs(left), abs(right)))


def same_number(gold: Number, answer: Number, tolerance: float) -> bool:
    """Whether two numbers are equal or, if one of them is a decimal, close.

    If the gold has a percent sign, the answer may omit it or apply it: 40 % equals 40 and 0.4. If only the answer has
    one, it counts as a unit. Without one in the gold, no factor of 100 is allowed: neither 0.5 nor 5000 % equals 50.
    """
    readings = [(gold.value, answer.value)]
    if gold.percent and not answer.percent:
        readings.append((gold.value / 100, answer.value))
    rounded = gold.is_decimal or answer.is_decimal
    limit = Fraction(str(tolerance))
    return any(left == right or (rounded and close(left, right, limit)) for left, right in readings)
