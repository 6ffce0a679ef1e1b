"""Rewards that compare a mathematical answer with the solution, through math-verify."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gruppo.errors import RewardError
from gruppo.grading.deadline import run_within
from gruppo.grading.extract import box_contents
from gruppo.grading.size import explodes
from gruppo.grading.symbolic import load_math_verify
from gruppo.rewards.format import Completion, completion_text
from gruppo.rewards.marks import in_worker

__all__ = ["accuracy_reward", "reasoning_accuracy_reward"]

LogExtra = Callable[[str, list[Any]], None]

PARSE_SECONDS = 10.0
VERIFY_SECONDS = 5.0
# Only this many characters at the end of a text, where the answer is, are read: the time of math-verify's patterns
# grows with the square of the length, and matching cannot be interrupted.
LONGEST = 10_000

OPEN_BOX = r"\boxed{"
BOX = re.compile(r"\\boxed\{.+\}", re.DOTALL)
ANNOUNCED = re.compile(r"final answer is:?\s{0,20}", re.IGNORECASE)
DOLLARS = re.compile(r"(?<!\\)\${1,2}")
BRACKETS = re.compile(r"\\\[(.*?)\\\]|\\\((.*?)\\\)|\s\[([^\[\]\n]+)\]\s", re.DOTALL)
PLAIN = re.compile(r"[0-9.\s+*×/^()÷-]+")
CALCULATION = re.compile(r"\^|[0-9)]\*\*[0-9(-]")

UNPARSEABLE = "[unparseable]"


@dataclass(frozen=True)
class _Verdict:
    """The reward of one completion and the parsed expressions that the completions table shows beside it."""

    reward: float | None
    gold: str
    answer: str


@in_worker
def accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 if the LaTeX answer in the completion equals the solution, 0.0 if not, None if the solution has no answer.

    The answer is the LaTeX that math-verify finds (`\\boxed{…}` first). With `log_extra`, the columns `solution`,
    `gold_parsed` and `answer_parsed` go to the completions table.
    """
    _check_lengths(completions, solution)
    verdicts = [_grade(completion_text(c), gold) for c, gold in zip(completions, solution, strict=True)]
    return _report(verdicts, solution, log_extra)


@in_worker
def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` on the text after the reasoning; 0.0 when the reasoning does not end.

    `reasoning_delimiters` (default `["</think>"]`) are tried in order; the first one that occurs splits the text, and
    the part after its last occurrence is judged.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    _check_lengths(completions, solution)
    verdicts = []
    for completion, gold in zip(completions, solution, strict=True):
        answer = _after_reasoning(completion_text(completion), delimiters)
        if answer is None:
            verdicts.append(_Verdict(0.0, "[incomplete reasoning]", "[incomplete reasoning]"))
        else:
            verdicts.append(_grade(answer, gold))
    return _report(verdicts, solution, log_extra)


def _after_reasoning(text: str, delimiters: Sequence[str]) -> str | None:
    for delimiter in delimiters:
        if delimiter in text:
            return text.rpartition(delimiter)[2]
    return None


def _grade(text: str, solution: str) -> _Verdict:
    verify, parse = load_math_verify()
    gold = _parse(parse, solution)
    if not gold:
        return _Verdict(None, UNPARSEABLE, "[skipped]")
    answer = _parse(parse, text, extraction_config=_latex_only(), extraction_mode="first_match")
    try:
        correct = run_within(VERIFY_SECONDS, lambda: verify(gold, answer, timeout_seconds=None))
    except TimeoutError:
        correct = False
    return _Verdict(float(correct), _shown(gold), _shown(answer) if answer else UNPARSEABLE)


def _parse(parse: Callable[..., list[Any]], text: str, **how: Any) -> list[Any]:
    """The expressions that math-verify parses from a text; empty if that takes too long or is predicted to.

    math-verify's own time limit is an alarm signal, which only the main thread may set; `run_within` works in every
    thread.
    """
    text = text[-LONGEST:]
    if any(explodes(formula) for formula in _math_spans(text, plain="extraction_config" not in how)):
        return []
    try:
        return run_within(PARSE_SECONDS, lambda: parse(text, parsing_timeout=None, **how))
    except TimeoutError:
        return []


def _math_spans(text: str, plain: bool) -> list[str]:
    """The spans that math-verify may parse as mathematics; if there are boxes, only these and announced answers.

    Any two dollar signs may be taken for a pair. With `plain`, calculations outside of math delimiters count too.
    """
    if BOX.search(text):
        start = text.rindex(OPEN_BOX)
        spans = box_contents(text)
        # The last box is parsed even if its closing brace is missing.
        spans += box_contents(text[start:]) or [text[start + len(OPEN_BOX) :]]
        spans += [_first_span(text[found.end() :]) for found in ANNOUNCED.finditer(text)]
    else:
        spans = [content for content in DOLLARS.split(text)[1:-1] if not content.isspace()]
        spans += [found[1] or found[2] or found[3] for found in BRACKETS.finditer(text)]
        spans += [found[0] for found in PLAIN.finditer(text) if plain and CALCULATION.search(found[0])]
    different: list[str] = []
    for span in spans:
        if span and not (different and span in different[-1]):  # skip a box nested in the previous one
            different.append(span)
    return different


def _first_span(text: str) -> str:
    """The mathematics at the beginning of a text, or nothing."""
    if dollars := DOLLARS.match(text):
        return DOLLARS.split(text[dollars.end() :], maxsplit=1)[0]
    found = BRACKETS.match(text)
    return found[1] or found[2] or found[3] if found else ""


def _shown(parsed: list[Any]) -> str:
    try:
        return run_within(VERIFY_SECONDS, lambda: str(parsed))
    except (TimeoutError, ValueError):  # Python does not write numbers of more than 4300 digits
        return "[too large to show]"


@lru_cache(maxsize=1)
def _latex_only() -> list[Any]:
    """Extract LaTeX only, `\\boxed{…}` first, units dropped, never a bare number without an anchor."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    return [
        LatexExtractionConfig(
            try_extract_without_anchor=False,
            boxed_match_priority=0,
            normalization_config=NormalizationConfig(units=True),
        )
    ]


def _check_lengths(completions: Sequence[Completion], solution: Sequence[str]) -> None:
    if isinstance(solution, str) or len(completions) != len(solution):
        raise RewardError(
            f"{len(completions)} completions but {'one string' if isinstance(solution, str) else len(solution)} as "
            "`solution`; the column must hold one solution per completion."
        )


def _report(verdicts: list[_Verdict], solution: Sequence[str], log_extra: LogExtra | None) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [v.gold for v in verdicts])
        log_extra("answer_parsed", [v.answer for v in verdicts])
    return [v.reward for v in verdicts]
