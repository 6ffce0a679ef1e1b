"""Check the gold answers of a benchmark against its grader, so that flaws of either are not blamed on a model.

    check_gold(benchmark, problems).describe()

Every gold answer, written as a model would write it, must be accepted. After a shuffle that gives every problem the
answer of another problem, with a different value, every answer must be rejected.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from gruppo.evaluation.grading import Graders, grade_attempts, require
from gruppo.evaluation.types import Attempt, Benchmark, GradedAttempt, Problem
from gruppo.grading import Rung, extract_gold, normalise, parse_number
from gruppo.types import StopReason

__all__ = ["GoldFailure", "GoldReport", "check_gold"]

SHOWN = 10  # failures that a report lists
# What counts as a different value does not depend on the ladder, so that a too tolerant ladder is detected.
APART = Fraction(1, 1000)

Kind = Literal["gold rejected", "other accepted", "gold rejected by the paper's rules"]


@dataclass(frozen=True)
class GoldFailure:
    """A text that was graded wrongly.

    Example:
        GoldFailure("p1", "gold rejected", gold="who knows", graded="\\\\boxed{who knows}", rung=Rung.NO_GOLD)
    """

    problem: str
    kind: Kind
    gold: str
    graded: str
    rung: Rung


@dataclass(frozen=True)
class GoldReport:
    """How many gold answers are accepted for their own problem, and rejected for another one."""

    benchmark: str
    problems: int
    accepted: int  # problems whose gold answers are all accepted
    shuffled: int  # problems given the answer of another; fewer than `problems` if many answers have equal values
    rejected_shuffled: int
    failures: tuple[GoldFailure, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures

    def describe(self) -> str:
        """The report in words: two counts, and the first failures.

        Example:
            check_gold(benchmark, problems).describe() == "gsm8k: 1319 of 1319 gold answers accepted, …"
        """
        lines = [
            f"{self.benchmark}: {self.accepted} of {self.problems} gold answers accepted, "
            f"{self.rejected_shuffled} of {self.shuffled} answers of other problems rejected."
        ]
        if self.shuffled < self.problems:
            lines.append(
                f"For {self.problems - self.shuffled} problems no other problem with a different answer was found."
            )
        for failure in self.failures[:SHOWN]:
            lines.append(
                f"  {failure.problem}: {failure.kind} ({failure.rung}): gold {failure.gold!r}, "
                f"graded {failure.graded!r}"
            )
        if len(self.failures) > SHOWN:
            lines.append(f"  … and {len(self.failures) - SHOWN} more")
        return "\n".join(lines)


def check_gold(
    benchmark: Benchmark,
    problems: Sequence[Problem],
    seed: int = 0,
    *,
    paper: bool = False,
    workers: Graders | None = None,
) -> GoldReport:
    """Grade the gold answers for their own problems and, shuffled, for other problems.

    `paper` also requires that the DeepSeekMath paper's rules accept them. Whether two formulas have the same value is
    not known beforehand, so a failure "other accepted" among formulas may be two ways to write one answer.

    Example:
        check_gold(benchmark, load_problems(benchmark)).ok is True
    """
    require([benchmark.ladder], paper)
    known = {problem.id: problem for problem in problems}
    written = [_written(problem, benchmark) for problem in problems]
    own = [
        _attempt(problem, text, sample)
        for problem, texts in zip(problems, written, strict=True)
        for sample, text in enumerate(texts)
    ]
    others = [
        _attempt(problem, written[other][0])
        for problem, other in zip(problems, _exchanged(problems, benchmark, seed), strict=True)
        if other is not None
    ]
    in_place = grade_attempts(known, own, benchmark.ladder, paper=paper, workers=workers)
    elsewhere = grade_attempts(known, others, benchmark.ladder, workers=workers)
    rejected = [row for row in in_place if not row.correct]
    accepted = [row for row in elsewhere if row.correct]
    loose = [row for row in in_place if row.paper is False]
    failures = (
        *(_failure(row, known, "gold rejected") for row in rejected),
        *(_failure(row, known, "other accepted") for row in accepted),
        *(_failure(row, known, "gold rejected by the paper's rules") for row in loose),
    )
    return GoldReport(
        benchmark=benchmark.name,
        problems=len(problems),
        accepted=len(problems) - len({row.attempt.problem for row in rejected}),
        shuffled=len(others),
        rejected_shuffled=len(others) - len(accepted),
        failures=failures,
    )


def _written(problem: Problem, benchmark: Benchmark) -> list[str]:
    """The gold answer as a completion would state it; one text per answer if any of several answers is accepted."""
    boxes = [f"\\boxed{{{extract_gold(answer, benchmark.ladder) or answer}}}" for answer in problem.answers]
    return boxes if problem.answers_mode == "any" else [" and ".join(boxes)]


def _attempt(problem: Problem, text: str, sample: int = 0) -> Attempt:
    return Attempt(problem.id, sample, text, tokens=0, stop=StopReason.EOS)


def _failure(row: GradedAttempt, known: dict[str, Problem], kind: Kind) -> GoldFailure:
    gold = ", ".join(known[row.attempt.problem].answers)
    return GoldFailure(row.attempt.problem, kind, gold, graded=row.attempt.text, rung=row.grade.rung)


# ---- the shuffle


@dataclass(frozen=True)
class _Values:
    """The values that the answers of a problem may stand for."""

    numbers: tuple[Fraction, ...]
    texts: frozenset[str]

    def may_equal(self, other: "_Values") -> bool:
        return bool(self.texts & other.texts) or any(
            abs(mine - its) < APART for mine in self.numbers for its in other.numbers
        )


def _values(problem: Problem, benchmark: Benchmark) -> _Values:
    ladder = benchmark.ladder
    golds = [extract_gold(answer, ladder) or answer for answer in problem.answers]
    numbers: list[Fraction] = []
    for gold in golds:
        if (number := parse_number(gold, algebra=not ladder.literal)) is not None:
            numbers += [number.value, number.value / 100] if number.percent else [number.value]
    return _Values(tuple(numbers), frozenset(normalise(gold, ladder) for gold in golds))


def _exchanged(problems: Sequence[Problem], benchmark: Benchmark, seed: int) -> list[int | None]:
    """For each problem, the index of the problem whose answer it gets, with a different value; None if impossible.

    Starts from a random permutation. A problem that got its own value swaps with another one if that suits both.
    """
    values = [_values(problem, benchmark) for problem in problems]
    rng = random.Random(seed)
    order = list(range(len(problems)))
    rng.shuffle(order)
    for i in range(len(order)):
        if not values[i].may_equal(values[order[i]]):
            continue
        for j in rng.sample(range(len(order)), len(order)):
            fits = not values[i].may_equal(values[order[j]]) and not values[j].may_equal(values[order[i]])
            if fits:
                order[i], order[j] = order[j], order[i]
                break
    return [None if values[i].may_equal(values[other]) else other for i, other in enumerate(order)]
