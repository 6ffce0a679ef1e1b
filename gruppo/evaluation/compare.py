"""Compare two models on the same problems: is one better, or could the difference be chance?

The scores are paired by problem. Much of the variance of an accuracy comes from which problems are hard, and that is
the same for both models, so a paired test detects differences that two separate intervals hide.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation import statistics
from gruppo.evaluation.types import Problem

__all__ = ["Comparison", "McNemar", "check_same_problems", "compare"]

Scores = Mapping[str, Sequence[float]]  # problem id -> one score per attempt

LEVEL = 1 - statistics.CONFIDENCE
# Five fair coins all land on the same side with p = 0.0625, so five differing problems can never be significant at
# 95 %.
FEWEST = 6
SHOWN = 80  # characters of a question in a message


@dataclass(frozen=True)
class McNemar:
    """The numbers of problems that only one of the two models solves, and the exact p-value."""

    only_first: int
    only_second: int
    p_value: float


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. Accuracies are 0 to 1; the difference is second minus first, in percentage points."""

    names: tuple[str, str]
    problems: int  # that both models have scores for
    only_first: int  # problems left out because the second model has no score for them
    only_second: int
    attempts: tuple[int, int]  # at the shared problems
    accuracies: tuple[float, float]
    difference: float
    interval: tuple[float, float]  # of the difference, 95 %
    p_value: float
    detectable: float  # a true difference, in points, that a comparison like this one finds in four of five cases
    differing: int  # problems whose scores differ
    mcnemar: McNemar | None  # None: more than one attempt at a problem, or scores between 0 and 1
    significant: bool

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        plain = asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}

    def describe(self) -> str:
        """Plain sentences for a terminal."""
        (first, second), (before, after) = self.names, self.accuracies
        low, high = self.interval
        lines = [f"{first}: {before:.1%}. {second}: {after:.1%}. Both on {_problems(self.problems)}."]
        if self.difference:
            word = "higher" if self.difference > 0 else "lower"
            change = f"{second} is {abs(self.difference):.2f} points {word}"
        else:
            change = "There is no difference in the mean" if self.differing else "There is no difference"
        lines.append(
            f"{change} (95 % interval of the difference, paired by problem: {low:+.2f} to {high:+.2f} points, "
            f"p = {self.p_value:.2g})."
        )
        if self.mcnemar is not None:
            lines.append(
                f"Right with {first} only: {self.mcnemar.only_first}; with {second} only: {self.mcnemar.only_second} "
                f"(McNemar's exact test, p = {self.mcnemar.p_value:.2g})."
            )
        lines.append(self._verdict())
        for name, count in ((first, self.only_first), (second, self.only_second)):
            if count:
                lines.append(f"Left out: {_problems(count)} that only {name} has scores for.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.significant:
            return "The difference is significant at 95 %."
        seen = f"A comparison like this one finds a difference of {self.detectable:.1f} points in four of five cases."
        if self.problems < FEWEST:
            seen = f"{_problems(self.problems)} cannot show a difference; at least {FEWEST} are needed."
        if self.differing < FEWEST:
            return (
                f"Not significant at 95 %: {_problems(self.differing)} with different scores, and at least {FEWEST} "
                f"are needed to tell. {seen}"
            )
        return f"Not significant at 95 %: it may be chance. {seen}"


def check_same_problems(
    first: Mapping[str, Problem], second: Mapping[str, Problem], *, names: tuple[str, str] = ("first", "second")
) -> None:
    """Raise `ConfigError` if an id stands for different questions or answers in the two sets.

    Example:
        check_same_problems(before.problems("gsm8k", "greedy"), after.problems("gsm8k", "greedy"))
    """
    shared = [name for name in first if name in second]
    other = [name for name in shared if _asked(first[name]) != _asked(second[name])]
    if other:
        said = "; ".join(
            f"{name} has {_said(each[other[0]])}" for name, each in zip(names, (first, second), strict=True)
        )
        raise ConfigError(
            f"{len(other)} of {_problems(len(shared))} with the same id differ. The first is {other[0]}: "
            f"{said}. Compare evaluations of the same data."
        )


def _asked(problem: Problem) -> tuple[str, tuple[str, ...], str]:
    return problem.question, problem.answers, problem.answers_mode


def _said(problem: Problem) -> str:
    mode = "" if problem.answers_mode == "last" else f" ({problem.answers_mode})"
    return f"{problem.question[:SHOWN]!r}, answer {', '.join(problem.answers)[:SHOWN]!r}{mode}"


def compare(
    first: Scores,
    second: Scores,
    *,
    names: tuple[str, str] = ("first", "second"),
) -> Comparison:
    """Compare the scores of two models, problem by problem, on the ids that both have.

    Scores are from 0 to 1: right or wrong for each attempt, or what `problem_scores` returns for pass@k and maj@k.
    Several attempts at a problem are averaged, so runs with several training seeds can be pooled; the interval does
    not include the variance between such runs. `detectable` says what difference the comparison could have found.

    `significant` requires that the 95 % interval of the difference excludes 0 and that at least six problems differ;
    if each model has exactly one right-or-wrong attempt at every problem, also p < 0.05 by McNemar's exact test.

    Example, two problems more right and none less:
        compare({"a": [0], "b": [0], "c": [1]}, {"a": [1], "b": [1], "c": [1]}).difference == 100 * 2 / 3
    """
    shared = [problem for problem in first if problem in second]
    if not shared:
        raise ConfigError(
            f"The {len(first)} problems of {names[0]} and the {len(second)} of {names[1]} have no id in common; "
            "compare two evaluations of the same benchmark."
        )
    before, after = ([_mean(problem, scores[problem]) for problem in shared] for scores in (first, second))
    differences = [b - a for a, b in zip(before, after, strict=True)]
    estimate = statistics.paired_difference(differences)
    once = all(
        len(scores[problem]) == 1 and scores[problem][0] in (0, 1) for scores in (first, second) for problem in shared
    )
    test = _mcnemar(differences) if once else None
    differing = sum(difference != 0 for difference in differences)
    excludes = estimate.low > 0 or estimate.high < 0
    return Comparison(
        names=names,
        problems=len(shared),
        only_first=len(first) - len(shared),
        only_second=len(second) - len(shared),
        attempts=(sum(len(first[problem]) for problem in shared), sum(len(second[problem]) for problem in shared)),
        accuracies=(math.fsum(before) / len(shared), math.fsum(after) / len(shared)),
        difference=100 * estimate.mean,
        interval=(100 * estimate.low, 100 * estimate.high),
        p_value=estimate.p_value,
        detectable=100 * min(1.0, max(estimate.detectable, FEWEST / len(shared))),
        differing=differing,
        mcnemar=test,
        significant=excludes and differing >= FEWEST and (test is None or test.p_value < LEVEL),
    )


def _mcnemar(differences: Sequence[float]) -> McNemar:
    only_first, only_second = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    return McNemar(only_first, only_second, statistics.mcnemar(only_first, only_second))


def _mean(problem: str, scores: Sequence[float]) -> float:
    if not len(scores):
        raise DataError(f"{problem!r} has no scores; leave out problems that were not attempted.")
    wrong = [score for score in scores if not 0 <= score <= 1]
    if wrong:
        raise DataError(f"{problem!r} has a score of {wrong[0]}; scores are from 0 to 1.")
    return math.fsum(scores) / len(scores)


def _problems(count: int) -> str:
    return f"{count} problem" if count == 1 else f"{count} problems"
