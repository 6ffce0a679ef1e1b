"""Grading by the looser rules of the DeepSeekMath paper, for results that are compared with the paper's.

    paper_answers(completion, question, ladder)     the answers of a completion
    paper_match(answers, problem, ladder)           whether they match those of a problem

Looser than the ladder: a factor of 100 is ignored (0.5 for 50), commas are removed (`4,6` is 46), the kind of bracket
does not matter, a ratio is a fraction, and sums that are not worked out count. Stricter: units, full-width
characters, sets, mixed numbers and `x \\in …` are not understood.

Differences from the released code: math-verify's parser reads formulas instead of SymPy's, and formulas are never
evaluated as Python; the time limit for a completion is the ladder's (5 s) instead of 15 s; gold answers come from the
data and are not extracted from the worked solution.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from gruppo.evaluation.programs import OUTPUT_STOP
from gruppo.evaluation.types import Problem
from gruppo.grading import Ladder, extract_gold
from gruppo.grading.deadline import run_within
from gruppo.grading.symbolic import is_manageable, load_math_verify

__all__ = ["paper_answers", "paper_equal", "paper_match", "paper_normalise"]

TOLERANCE = 1e-3
LONGEST = 100_000  # characters of a completion that are read, counted from its end
LONGEST_ANSWER = 1_000
DEEPEST = 5  # tuples in tuples


# ---- find


BOXES = re.compile(r"boxed\{|[{}]")
NUMBER = re.compile(r"-?[0-9]*\.?[0-9]+")


def paper_answers(
    completion: str, question: str, ladder: Ladder, few_shot: bool = False, output: str | None = None
) -> tuple[str, ...]:
    """The normalised answers of a completion: all of them if the ladder grades formulas, else only the last one.

    `few_shot`: the prompt held exemplars. `output` is the last program result in a transcript, an error or not, or ""
    if there is none; then fences in the text are not searched for output. Without programs (None) an output block is
    ordinary text, and the paper's rules search for it.

    Example:
        paper_answers("So \\\\boxed{\\\\frac12} or \\\\boxed{.5}", "…", LADDERS["math"]) == ("\\\\frac{1}{2}", "0.5")
    """
    text = completion[-LONGEST:]
    found = (_few_shot(text, ladder) if few_shot and ladder.literal else None) or _extracted(text, output)
    if ladder.literal:
        found = found[-1:]
    return tuple(_prepared(found, question, ladder))


def _extracted(text: str, output: str | None) -> list[str]:
    if "final answer is $" in text and "$. I hope" in text:
        return [text.partition("final answer is $")[2].partition("$. I hope")[0]]
    if "boxed" in text:
        return _boxed(text)
    if "he answer is" in text:
        return [text.rpartition("he answer is")[2]]
    if output is None:
        output = text.rpartition(OUTPUT_STOP)[2].partition("```")[0].strip() if OUTPUT_STOP in text else ""
    return [output] if output else NUMBER.findall(text.replace(",", ""))[-1:]


def _boxed(text: str) -> list[str]:
    opened: list[int | None] = []  # where the content of a box begins; None for other braces
    found: list[tuple[int, str]] = []
    for sign in BOXES.finditer(text):
        if sign[0] != "}":
            opened.append(sign.end() if len(sign[0]) > 1 else None)
        elif opened and (start := opened.pop()) is not None:
            percent = "%" if text[sign.end() : sign.end() + 1] == "%" else ""
            found.append((start, text[start : sign.start()] + percent))
    return [content for _, content in sorted(found)]


def _few_shot(text: str, ladder: Ladder) -> list[str] | None:
    """The last number, as the exemplars end with one; None if the usual rules apply."""
    if "zh" in ladder.languages:
        if "答案是" not in text:
            return None
        text = text.partition("答案是")[2].partition("\n")[0]
    return NUMBER.findall(text.replace(",", ""))[-1:] or None


def _prepared(answers: Sequence[str], question: str, ladder: Ladder) -> list[str]:
    """Cut answers to their first line, split texts that hold several answers, and normalise them."""
    lines = [answer.strip().partition("\n")[0].lstrip(":").rstrip("./ ") for answer in answers]
    if not ladder.literal:
        lines = [part for line in lines for part in _taken_apart(line, question)]
    return [normal for line in lines if (normal := paper_normalise(line[:LONGEST_ANSWER]))]


def _taken_apart(answer: str, question: str) -> list[str]:
    if "separated by commas" in question and not re.search(r"[\[({]", answer):
        return answer.split(",")
    return re.split(r"\\text\{\s*and\s*\}", answer)


# ---- normalise


DROPPED = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,]|\\?\$|\^\{?\\circ\}?|\\mbox\{[^{}]*\}|\s+")
TRAILING_UNIT = re.compile(r"(?<=.)\\text\{[^{}]*\}$", re.DOTALL)
WRAPPED = re.compile(r"\\text\{([^{}]*)\}")


def paper_normalise(text: str) -> str:
    """Bring LaTeX into one canonical form.

    Example:
        paper_normalise(r"\\left( \\dfrac12, \\sqrt3 \\right)") == r"(\\frac{1}{2},\\sqrt{3})"
    """
    text = DROPPED.sub("", TRAILING_UNIT.sub("", text.strip()))
    text = WRAPPED.sub(r"\1", text).replace(r"\%", "%")
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\sqrt([0-9A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(?:([0-9])(\{[^{}]*\})|(\{[^{}]*\})([0-9]))", _both_in_braces, text)
    text = re.sub(r"^(-?)([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<![0-9.])\.(?=[0-9])", "0.", text)
    return re.sub(r"(?<=[0-9])\.0+(?![0-9])", "", text)


def _both_in_braces(fraction: re.Match[str]) -> str:
    upper, lower = fraction[3] or f"{{{fraction[1]}}}", fraction[2] or f"{{{fraction[4]}}}"
    return rf"\frac{upper}{lower}"


# ---- compare


PLAIN = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
MATRIX = re.compile(r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", re.DOTALL)
TUPLE = re.compile(r"[\[(](.*)[\])]", re.DOTALL)
ASSIGNED = re.compile(r"[^=]{1,2}=([^=]+)")
# The parser used here reads LaTeX thousands separators and numbers with a base; the paper's parser fails on them.
NOT_READ = re.compile(r"\{,\}|[0-9]_")


def paper_match(answers: Sequence[str], problem: Problem, ladder: Ladder) -> bool:
    """Whether answers match a problem's: each on either side equals one on the other. A timeout counts as no match.

    Example:
        paper_match(("0.333",), Problem("p", "…", ("1/3",)), LADDERS["math"]) is True
    """
    either = problem.answers_mode == "any"
    given = [extract_gold(answer, ladder) or answer for answer in problem.answers]
    readings = [[answer] for answer in given] if either else [given]
    golds = [list(dict.fromkeys(_prepared(reading, problem.question, ladder))) for reading in readings]
    if not answers:
        return False
    if any(list(answers) == gold for gold in golds):  # identical text, the usual right answer, needs no time limit
        return True
    try:
        return run_within(ladder.seconds, lambda: any(_same_lists(gold, answers) for gold in golds))
    except TimeoutError:
        return False


def _same_lists(golds: Sequence[str], answers: Sequence[str]) -> bool:
    answers = list(dict.fromkeys(answers))[-len(golds) :] if golds else []
    return (
        bool(answers)
        and all(any(paper_equal(gold, answer) for answer in answers) for gold in golds)
        and all(any(paper_equal(gold, answer) for gold in golds) for answer in answers)
    )


def paper_equal(gold: str, answer: str, depth: int = 0) -> bool:
    """Whether two normalised answers are equal. The caller sets the time limit.

    Example:
        paper_equal("50", "0.5") and paper_equal("[2,5)", "(2,5)") and not paper_equal("18", "18dollars")
    """
    if gold == answer:
        return True
    left, right = _number(gold), _number(answer)
    if left is not None and right is not None:
        return any(abs(scaled - right) < TOLERANCE for scaled in (left, left / 100, left * 100))
    if depth < DEEPEST:
        if r"\cup" in gold + answer:
            return _same_parts(gold.split(r"\cup"), answer.split(r"\cup"), depth)
        inside = [_entries(text) for text in (gold, answer)]
        if inside[0] is not None and inside[1] is not None:
            return _same_entries(inside[0], inside[1], depth)
        if gold.count("=") != answer.count("=") and (ASSIGNED.fullmatch(gold) or ASSIGNED.fullmatch(answer)):
            return paper_equal(ASSIGNED.sub(r"\1", gold), ASSIGNED.sub(r"\1", answer), depth + 1)
    return _same_formula(gold, answer)


def _number(text: str) -> float | None:
    bare = text.replace(",", "")
    percent = bare.endswith("%")
    bare = bare[:-1] if percent else bare
    if PLAIN.fullmatch(bare) is None:
        return None
    return float(bare) / 100 if percent else float(bare)


def _entries(text: str) -> list[list[str]] | None:
    """The rows of a matrix; a tuple is one with a single row."""
    if matrix := MATRIX.fullmatch(text):
        return [row.split("&") for row in matrix[1].split(r"\\") if row]
    bracketed = TUPLE.fullmatch(text)
    parts = _at_commas(bracketed[1]) if bracketed else []
    return [parts] if len(parts) > 1 else None


def _at_commas(text: str) -> list[str]:
    """Split at the commas that stand outside all brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _same_entries(gold: list[list[str]], answer: list[list[str]], depth: int) -> bool:
    if [len(row) for row in gold] != [len(row) for row in answer]:
        return False
    rows = zip(gold, answer, strict=True)
    return all(paper_equal(a, b, depth + 1) for left, right in rows for a, b in zip(left, right, strict=True))


def _same_parts(golds: list[str], answers: list[str], depth: int) -> bool:
    return all(any(paper_equal(g, a, depth + 1) for a in answers) for g in golds) and all(
        any(paper_equal(g, a, depth + 1) for g in golds) for a in answers
    )


# ---- algebra


def _same_formula(gold: str, answer: str) -> bool:
    left, right = _difference(gold), _difference(answer)
    if left is None or right is None:
        return False
    equations = "=" in gold and "=" in answer
    return _vanishes(left - right) or (equations and _vanishes(left + right))


def _difference(text: str) -> Any:
    """A formula, or for an equation its left side minus its right side; None for anything else."""
    sides = [_formula(side) for side in text.split("=")]
    if None in sides or len(sides) > 2:
        return None
    return sides[0] if len(sides) == 1 else sides[0] - sides[1]


@lru_cache(maxsize=1)
def _reader() -> Any:
    load_math_verify()  # raises with installation instructions if it is missing
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    conversion = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    return lambda text: latex2sympy(text, conversion_config=conversion)


@lru_cache(maxsize=1024)
def _formula(text: str) -> Any:
    """A SymPy expression; None for sets, intervals, inequalities, and what cannot be read."""
    read = _reader()
    from sympy import Expr

    # Programs print formulas as Python writes them.
    text = re.sub(r"(?<!\\)\bsqrt\(([^()]*)\)", r"\\sqrt{\1}", text).replace("**", "^")
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text).replace("*", r"\cdot ").replace("%", r"\%")
    text = re.sub(r"(?<=[0-9])\\frac", r"\\cdot\\frac", text)  # a product, not a mixed number
    if not text or NOT_READ.search(text) or not is_manageable(text):
        return None
    try:
        found = read(text)
    except Exception:  # the parser raises many exception types on input it cannot read
        return None
    return found if isinstance(found, Expr) else None


def _vanishes(difference: Any) -> bool:
    from sympy import N, simplify

    try:
        if not difference.free_symbols:
            return bool(abs(complex(N(difference))) < TOLERANCE)
        return bool(simplify(difference) == 0)
    except Exception:  # SymPy raises many exception types on formulas it cannot handle
        return False
