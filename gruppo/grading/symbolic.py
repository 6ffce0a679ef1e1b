"""Compare two formulas with math-verify, in bounded time.

What could keep a single call into C busy for ever (powers and factorials with millions of digits) is refused before
SymPy sees it; everything else is cut off by a deadline.
"""

import logging
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gruppo.grading.deadline import run_within
from gruppo.grading.types import Rung

__all__ = ["compare_formulas", "explodes", "is_manageable", "load_math_verify"]

LONGEST = 400  # characters of a formula
DEEPEST = 12  # brackets in brackets; the parser's time grows steeply with them
LARGEST_POWER = 100_000

POWER = re.compile(r"\^\s*")
GROUP = re.compile(r"\\.|[{}()]", re.DOTALL)
COSTLY = re.compile(r"!|\\[dt]?binom|\\sum|\\prod|\\choose|\\gcd|\\lcm|\\operatorname")


def load_math_verify() -> tuple[Callable[..., bool], Callable[..., list[Any]]]:
    """math-verify's `verify` and `parse`."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("Symbolic answers need the package math-verify: pip install gruppo[math]") from error
    for name in ("math_verify.parser", "math_verify.grader"):
        # It warns that it runs without its own time limit, which is an alarm signal. Ours is in place.
        logging.getLogger(name).addFilter(_not_about_timeouts)
    return verify, parse


def _not_about_timeouts(record: logging.LogRecord) -> bool:
    return "Timeout is disabled" not in str(record.msg)


@lru_cache(maxsize=1)
def _latex() -> list[Any]:
    """LaTeX only: the other reader evaluates plain text as Python."""
    from math_verify import LatexExtractionConfig

    return [LatexExtractionConfig(boxed_match_priority=0)]


def compare_formulas(gold: str, answer: str, seconds: float) -> tuple[bool, Rung]:
    """Whether two formulas mean the same, and SYMBOLIC, REFUSED, TIMEOUT or ERROR.

    Example:
        compare_formulas(r"2\\sqrt{3}", r"\\sqrt{12}", seconds=5.0) == (True, Rung.SYMBOLIC)
    """
    if not (is_manageable(gold) and is_manageable(answer)):
        return False, Rung.REFUSED
    verify, parse = load_math_verify()

    def read(formula: str) -> list[Any]:
        return parse(f"$\\boxed{{{formula}}}$", extraction_config=_latex(), parsing_timeout=None)

    def compare() -> bool:
        # The order matters to math-verify. Errors are asked for, so that a failure is not taken for "differs".
        return verify(
            read(gold), read(answer), allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
        )

    try:
        return bool(run_within(seconds, compare)), Rung.SYMBOLIC
    except TimeoutError:
        return False, Rung.TIMEOUT
    except Exception:  # SymPy raises all kinds on formulas it cannot handle
        return False, Rung.ERROR


def is_manageable(formula: str) -> bool:
    """Whether a formula is short, shallow and small enough to be worked on."""
    return len(formula) <= LONGEST and _depth(formula) <= DEEPEST and not explodes(formula)


def _depth(formula: str) -> int:
    depth = deepest = 0
    for sign in re.findall(r"[\[({})\]]", formula):
        depth += 1 if sign in "[({" else -1
        deepest = max(deepest, depth)
    return deepest


def explodes(formula: str) -> bool:
    """Whether a formula holds a power, factorial or sum too large to be worked out.

    Example:
        explodes("9^{9^{9^9}}") and not explodes("2^{2024} - 1")
    """
    formula = formula.replace("**", "^")
    powers = 1.0
    for found in POWER.finditer(formula):
        exponent = _group(formula, found.end())
        size = _size(exponent)
        if size > LARGEST_POWER:
            return True
        # (a^b)^c multiplies the exponents; those of a sum of powers do not meet.
        if formula[: found.start()].rstrip().endswith((")", "}", "]")):
            powers *= max(size, 1.0)
    return powers > LARGEST_POWER or _counts_far(formula)


def _group(formula: str, start: int) -> str:
    """The exponent that begins at `start`: a group, or the signs up to the next operation."""
    if formula[start : start + 1] not in ("{", "("):
        bare = re.compile(r"[-+]?[0-9.]+(?:\s*\^\s*[{(]?\s*[-+]?[0-9.]+)*!*|\S").match(formula, start)
        return bare[0] if bare else ""
    depth = 0
    for found in GROUP.finditer(formula, start):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return formula[start + 1 : found.start()]
    return formula[start + 1 :]


def _size(exponent: str) -> float:
    """A bound on the number that an exponent stands for; variables count as 1."""
    numbers = [float(digits) for digits in re.findall(r"[0-9]{1,300}", re.sub(r"(?<=[0-9])\.[0-9]+", "", exponent))]
    if "!" in exponent or "\\binom" in exponent or exponent.count("^") > 1:
        return math.inf if any(number > 2 for number in numbers) else 1.0
    if "^" in exponent and len(numbers) > 1:
        # The largest number to the power of the next: more than the exponent can be.
        low, high = sorted(numbers)[-2:]
        return math.inf if low * math.log10(max(high, 1.0)) > 10 else max(high, low) ** max(low, 1.0)
    return math.prod(max(number, 1.0) for number in numbers)


def _counts_far(formula: str) -> bool:
    if not COSTLY.search(formula):
        return False
    nested = "!!" in formula or (re.search(r"[)}]\s*!", formula) and (formula.count("!") > 1 or "^" in formula))
    return bool(nested) or formula.count("!") > 8 or re.search("[0-9]{5}", formula) is not None
