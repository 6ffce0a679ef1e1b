"""Estimates how large the numbers of a formula are, without evaluating it.

A single call into C (a power, a factorial, a root of a long number) cannot be interrupted, so the size of each is
bounded beforehand. Every value is represented by a bound on the magnitude of its logarithm; variables count as 1.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["explodes"]

LARGEST_POWER = 10_000  # as an exponent
LONGEST_NUMBER = 10_000  # digits of a power or a factorial
LONGEST_FACTORED = 1_000  # digits under all roots, or of a number if there is a logarithm: SymPy factors these
LONGEST_TERM = 50_000  # digits of a product
LARGEST_CHOICE = 10_000  # in a binomial
UNKNOWN_FACTORIAL = 100.0  # in a sum over n, n! counts as this power
DEEPEST = 60  # nested brackets

TOKEN = re.compile(
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,9})?|\.[0-9]+)"
    r"|(?P<word>[A-Za-z]+)|\\[A-Za-z]+|\\.|(?<=[\w)\]}])\*\*(?=[\w({\\-])|\S",
    re.DOTALL,
)
IGNORED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])|\{,\}|\\[,;:! ]|~")
OPENING = frozenset(["(", "[", "{", r"\{", r"\(", r"\[", r"\lfloor", r"\lceil", r"\lvert", r"\langle", r"\lbrace"])
CLOSING = frozenset([")", "]", "}", r"\}", r"\)", r"\]", r"\rfloor", r"\rceil", r"\rvert", r"\rangle", r"\rbrace"])
BETWEEN_TERMS = frozenset(["+", "-", ",", ";", "=", "<", ">", "&", "\\\\", r"\pm", r"\mp"])
BARS = frozenset(["|", r"\|", r"\vert", r"\Vert"])
POWER = frozenset(["^", "**"])


class _TooLargeError(Exception):
    """Aborts parsing: the formula is too large."""


@dataclass(frozen=True)
class _Value:
    log: float = 0.0  # at most this many digits, before or after the point
    literal: bool = False  # it contains digits: it may be a number that SymPy evaluates
    broken: bool = False  # a fraction, a decimal or a root
    counted: bool = False  # a sum or a product over a range, whose size is unknown


NOTHING = _Value()
EULER = _Value(math.log10(math.e))


def explodes(formula: str) -> bool:
    """Whether a formula contains a power, factorial, root or sum too large to be evaluated.

    Example:
        explodes("9^{9^{9^9}}") and not explodes("2^{2024} - 1")
    """
    reader = _Reader(IGNORED.sub("", formula))
    try:
        reader.sequence(0)
        if reader.under_roots > LONGEST_FACTORED or (reader.logarithms and reader.longest > LONGEST_FACTORED):
            return True
        # Every term of a sum may be as large as the largest power in it.
        return reader.range * max(reader.exponent, 1.0) > LARGEST_POWER
    except _TooLargeError:
        return True


def _number(text: str) -> _Value:
    mantissa, _, exponent = text.lower().replace(",", "").partition("e")
    whole, _, decimals = mantissa.partition(".")
    whole = whole.lstrip("0")
    if len(whole) > 300:
        size = float(len(whole))
    elif value := float(f"{whole or '0'}.{decimals[:300] or '0'}"):
        size = abs(math.log10(value))
    else:
        size = 0.0
    return _Value(size + abs(int(exponent or 0)), literal=True, broken=bool(decimals.strip("0")))


def _product(*values: _Value) -> _Value:
    return _Value(
        min(sum(v.log for v in values), 1e9),
        any(v.literal for v in values),
        any(v.broken for v in values),
        any(v.counted for v in values),
    )


def _factorial(value: _Value) -> _Value:
    if not value.literal:
        return value
    if value.log > 5 or value.counted:
        raise _TooLargeError
    digits = 10**value.log * value.log
    if digits > LONGEST_NUMBER:
        raise _TooLargeError
    return _Value(digits, literal=True)


def _choice(upper: _Value, lower: _Value) -> _Value:
    if max(upper.log, lower.log) > math.log10(LARGEST_CHOICE) or upper.counted or lower.counted:
        raise _TooLargeError
    return _Value(10**upper.log * math.log10(2) if upper.literal else 0.0, upper.literal or lower.literal)


class _Reader:
    """Reads a formula from left to right, group by group."""

    def __init__(self, formula: str) -> None:
        self.tokens = [(found[0], found.lastgroup) for found in TOKEN.finditer(formula)]
        self.at = 0
        self.range = 1.0  # the largest limit of a sum or product
        self.exponent = 1.0  # the largest exponent so far
        self.longest = 0.0  # the digits of the longest number so far
        self.under_roots = 0.0  # the total digits under roots
        self.logarithms = any(token in (r"\log", r"\ln", r"\lg") for token, _ in self.tokens)
        self.commands: dict[str, Callable[[int], _Value]] = {
            r"\sqrt": self.root,
            r"\Gamma": lambda depth: _factorial(self.atom(depth)),
            r"\exp": lambda depth: self.power(EULER, self.atom(depth)),
            r"\pi": lambda depth: _Value(math.log10(math.pi)),
            r"\sum": self.counting,
            r"\prod": self.counting,
        }
        for size in "dtc":
            self.commands[rf"\{size}frac"] = self.fraction
            self.commands[rf"\{size}binom"] = self.choice
        self.commands[r"\frac"], self.commands[r"\binom"] = self.fraction, self.choice

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def sequence(self, depth: int) -> _Value:
        """A bound on the terms up to the closing bracket or the end: the largest of them, times their number."""
        terms: list[_Value] = []
        factors: list[_Value] = []
        upper: _Value | None = None  # of "a \choose b"
        while token := self.peek():
            if token in CLOSING:
                self.at += 1
                if depth:
                    break
            elif token in BETWEEN_TERMS:
                self.at += 1
                terms += [_term(factors)] if factors else []
                factors = []
            elif token == r"\choose":
                self.at += 1
                upper, terms, factors = _sum([*terms, _term(factors)]), [], []
            elif token in POWER or token == "!":
                factors = self.raised(terms, factors, depth)
            elif token == "_":
                self.at += 1
                self.atom(depth)  # an index is parsed, but is not a factor
            else:
                factors.append(self.atom(depth))
        total = _sum([*terms, _term(factors)])
        self.longest = max(self.longest, total.log)
        return total if upper is None else _choice(upper, total)

    def raised(self, terms: list[_Value], factors: list[_Value], depth: int) -> list[_Value]:
        """The factors, with a power or factorial applied to the last one."""
        before = self.tokens[self.at - 1][0] if self.at else ""
        sign = self.peek()
        self.at += 1
        if before in BARS:
            base, rest = _sum([*terms, _product(*factors)]), factors
        else:
            base, rest = (factors[-1], factors[:-1]) if factors else (NOTHING, [])
        if sign == "!" and not base.literal:
            self.exponent = max(self.exponent, UNKNOWN_FACTORIAL)
        return [*rest, _factorial(base) if sign == "!" else self.power(base, self.superscript(depth))]

    def superscript(self, depth: int) -> _Value:
        while self.peek() in ("+", "-"):
            self.at += 1
        value = self.atom(depth)
        # In 9^9! the factorial may apply to the exponent or to the power; its token is left to be read again.
        after = self.at
        while after < len(self.tokens) and self.tokens[after][0] == "!":
            value = _factorial(value)
            after += 1
        if self.peek() in POWER:
            self.at += 1
            upper = self.superscript(depth + 1)
            tower = self.power(value, upper)
            value = replace(tower, log=max(tower.log, value.log + upper.log))
        return value

    def power(self, base: _Value, exponent: _Value) -> _Value:
        if exponent.log > math.log10(LARGEST_POWER) + 1e-9 or exponent.counted:
            raise _TooLargeError
        if exponent.broken:
            self.under_roots += base.log
        times = max(10**exponent.log, 1.0)
        self.exponent = max(self.exponent, times)
        if base.log * times > LONGEST_NUMBER + 1e-3 or (base.counted and times > 10):
            raise _TooLargeError
        return _Value(base.log * times, base.literal, base.broken or exponent.broken, base.counted)

    def atom(self, depth: int) -> _Value:
        """A number, a variable, a group, or a command with its arguments."""
        if depth > DEEPEST:
            raise _TooLargeError
        if self.at >= len(self.tokens) or self.peek() in CLOSING:
            return NOTHING
        token, kind = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return _number(token)
        if kind == "word":
            return EULER if token == "e" else NOTHING
        if token in OPENING:
            return self.sequence(depth + 1)
        if token in self.commands:
            return self.commands[token](depth + 1)
        if token == "/":
            return _Value(broken=True)
        if token[0] == "\\" and token[1:].isalpha() and self.peek() == "{":
            return self.atom(depth + 1)  # \text{…}, \mathbf{…}
        return NOTHING

    def fraction(self, depth: int) -> _Value:
        return replace(_product(self.atom(depth), self.atom(depth)), broken=True)

    def choice(self, depth: int) -> _Value:
        return _choice(self.atom(depth), self.atom(depth))

    def root(self, depth: int) -> _Value:
        if self.peek() == "[":
            self.atom(depth)
        value = self.atom(depth)
        self.under_roots += value.log
        return replace(value, broken=True)

    def counting(self, depth: int) -> _Value:
        """The limits of a sum or a product."""
        for _ in range(2):
            if self.peek() not in ("_", "^"):
                break
            self.at += 1
            limit = self.atom(depth)
            self.range = max(self.range, 10 ** min(limit.log, 300.0))
        return _Value(literal=True, counted=True)


def _term(factors: list[_Value]) -> _Value:
    value = _product(*factors)
    if value.log > LONGEST_TERM:
        raise _TooLargeError
    return value


def _sum(terms: list[_Value]) -> _Value:
    return replace(_product(*terms), log=max(t.log for t in terms) + math.log10(len(terms)))
