"""Compares two formulas with math-verify, in bounded time.

Formulas that could block a single call into C (powers and factorials with millions of digits) are refused before SymPy
sees them; everything else is interrupted at a deadline.
"""

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gruppo.errors import install_line
from gruppo.grading.deadline import run_within
from gruppo.grading.size import explodes
from gruppo.grading.types import Rung

__all__ = ["compare_formulas", "is_manageable", "load_math_verify"]

LONGEST = 400  # characters of a formula
DEEPEST = 12  # nested brackets; the parser's time grows steeply with their depth


def load_math_verify() -> tuple[Callable[..., bool], Callable[..., list[Any]]]:
    """math-verify's `verify` and `parse`."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError(f"Symbolic answers need the package math-verify: {install_line('math')}") from error
    for name in ("math_verify.parser", "math_verify.grader"):
        # It warns that its own time limit, an alarm signal, is disabled; `run_within` is used instead.
        logging.getLogger(name).addFilter(_not_about_timeouts)
    return verify, parse


def _not_about_timeouts(record: logging.LogRecord) -> bool:
    return "Timeout is disabled" not in str(record.msg)


@lru_cache(maxsize=1)
def _latex() -> list[Any]:
    """LaTeX only: the other extractor evaluates plain text as Python."""
    from math_verify import LatexExtractionConfig

    return [LatexExtractionConfig(boxed_match_priority=0)]


def compare_formulas(gold: str, answer: str, seconds: float) -> tuple[bool, Rung]:
    """Whether two formulas are equivalent, and the rung: SYMBOLIC, REFUSED, TIMEOUT or ERROR.

    Example:
        compare_formulas(r"2\\sqrt{3}", r"\\sqrt{12}", seconds=5.0) == (True, Rung.SYMBOLIC)
    """
    if not (is_manageable(gold) and is_manageable(answer)):
        return False, Rung.REFUSED
    verify, parse = load_math_verify()

    def read(formula: str) -> list[Any]:
        return parse(f"$\\boxed{{{formula}}}$", extraction_config=_latex(), parsing_timeout=None)

    def compare() -> bool:
        # math-verify depends on the order. It must raise on errors, so that a failure does not count as "different".
        return verify(
            read(gold), read(answer), allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
        )

    try:
        return bool(run_within(seconds, compare)), Rung.SYMBOLIC
    except TimeoutError:
        return False, Rung.TIMEOUT
    except Exception:  # SymPy raises many kinds of errors on formulas it cannot handle
        return False, Rung.ERROR


def is_manageable(formula: str) -> bool:
    """Whether a formula is short, shallow and small enough to be compared symbolically."""
    return len(formula) <= LONGEST and _depth(formula) <= DEEPEST and not explodes(formula)


def _depth(formula: str) -> int:
    depth = deepest = 0
    for sign in re.findall(r"[\[({})\]]", formula):
        depth += 1 if sign in "[({" else -1
        deepest = max(deepest, depth)
    return deepest
