"""Grade attempts: right or wrong, optionally by the paper's rules too, and which answers are equal (votes).

    grade_attempts(problems, attempts, ladder)    [GradedAttempt, …], in the order of the attempts
                        (…, workers=graders)      the same; slow comparisons run in worker processes
    require(ladders, paper)                       fail early if grading would fail later

Answers that must be literal numbers are compared in this process, thousands per second. Formulas go to the workers. A
program's output comes from running it and is never parsed from a transcript, where a model can write anything.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.graders import Call, Graders, Lost, Outcome, run_calls
from gruppo.evaluation.paper_grader import paper_answers, paper_match
from gruppo.evaluation.programs import inside_block
from gruppo.evaluation.types import Attempt, GradedAttempt, Problem
from gruppo.grading import Answer, Grade, Ladder, Number, Rung, compare, normalise, parse_number
from gruppo.grading.grade import find_answer, grade_answer
from gruppo.grading.numbers import close
from gruppo.grading.symbolic import load_math_verify

__all__ = ["Graders", "grade_attempts", "grader_version", "require"]

GRACE = 5.0  # seconds beyond a comparison's own time limit before its worker is killed
MOST_TIMEOUTS = 2  # after this many timeouts an answer is not compared with further ones


def require(ladders: Iterable[Ladder], paper: bool = False) -> None:
    """Raise `ConfigError` if answers will be compared as formulas and the package for that is missing.

    The paper's rules compare all answers as formulas.

    Example:
        require([LADDERS["math"]])      before a model is loaded
    """
    if not paper and all(ladder.literal for ladder in ladders):
        return
    try:
        load_math_verify()
    except ImportError as error:
        raise ConfigError(f"These answers cannot be graded. {error}") from error


def grader_version(ladder: Ladder, paper: bool = False) -> str:
    """The version of the grader for this ladder: another version may grade the same answer differently.

    Example:
        grader_version(LADDERS["gsm8k"]) == "gruppo 0.1.0-3f2a91c4"
        grader_version(LADDERS["math"]) == "gruppo 0.1.0-3f2a91c4, math-verify 0.8.0"
    """
    own = f"gruppo {_version('gruppo')}-{_code()}"
    return own if ladder.literal and not paper else f"{own}, math-verify {_version('math-verify')}"


@cache
def _code() -> str:
    """A short hash of the grading source: between releases the version number does not identify the code."""
    rules = sorted(files("gruppo.grading").iterdir(), key=lambda each: each.name)
    sources = [each for each in rules if each.name.endswith(".py")]
    sources += [files("gruppo.evaluation") / name for name in ("grading.py", "paper_grader.py")]
    return blake2b(b"\0".join(each.read_bytes() for each in sources), digest_size=4).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a copy of the source that was never installed
        return "unknown"


def grade_attempts(
    problems: Mapping[str, Problem],
    attempts: Sequence[Attempt],
    ladder: Ladder,
    *,
    paper: bool = False,
    few_shot: bool = False,
    workers: Graders | None = None,
) -> list[GradedAttempt]:
    """Grade the attempts; the result is in the same order.

    All attempts at a problem must be passed in one call, because they vote. `paper` also grades by the rules of the
    DeepSeekMath paper; `few_shot` says that the prompts held exemplars, which changes where those rules look for the
    answer.

    Example:
        problem = Problem("p1", "3 + 4 = ?", ("7",))
        attempt = Attempt("p1", 0, "It is \\\\boxed{7}.", tokens=6, stop=StopReason.EOS)
        grade_attempts({"p1": problem}, [attempt], LADDERS["gsm8k"])[0].correct is True
    """
    pairs = [(_problem_of(attempt, problems), attempt) for attempt in attempts]
    grades = _grades(pairs, ladder, workers)
    papers = _paper_grades(pairs, ladder, few_shot, workers) if paper else [None] * len(pairs)
    programs = _program_grades(pairs, ladder, workers)
    votes = _votes(attempts, grades, ladder, workers)
    columns = zip(attempts, grades, papers, programs, votes, strict=True)
    return [GradedAttempt(attempt, found, loose, program, vote) for attempt, found, loose, program, vote in columns]


def _problem_of(attempt: Attempt, problems: Mapping[str, Problem]) -> Problem:
    if attempt.problem not in problems:
        raise DataError(
            f"There is an attempt at {attempt.problem!r}, which is not one of the {len(problems)} problems."
        )
    return problems[attempt.problem]


# ---- who wrote what


def _written(attempt: Attempt) -> str:
    """What the model itself wrote, without the outputs of programs."""
    if not attempt.segments:
        return attempt.text
    return "\n".join(text for kind, text in attempt.segments if kind == "model")


def _output(attempt: Attempt) -> str | None:
    """The complete output of the last program; None: there is none, or it failed."""
    return None if attempt.tools is None else attempt.tools.output


def _last_result(attempt: Attempt) -> str | None:
    """The last program result shown to the model; "" if there was none, None if programs are not run."""
    if attempt.tools is None:
        return None
    return next((inside_block(text) for kind, text in reversed(attempt.segments) if kind == "output"), "")


# ---- right or wrong

Pairs = Sequence[tuple[Problem, Attempt]]


def _grades(pairs: Pairs, ladder: Ladder, workers: Graders | None) -> list[Grade]:
    rows = [
        (problem, find_answer(_written(attempt), ladder, problem.answers_mode, _output(attempt)))
        for problem, attempt in pairs
    ]
    return _compared(rows, ladder, workers)


def _program_grades(pairs: Pairs, ladder: Ladder, workers: Graders | None) -> list[bool | None]:
    """Whether the output of the last program is right, graded as if there were no other text."""
    rows = [
        (problem, find_answer("", ladder, problem.answers_mode, output))
        for problem, attempt in pairs
        if (output := _output(attempt)) is not None
    ]
    grades = iter(_compared(rows, ladder, workers))
    return [None if _output(attempt) is None else bool(next(grades).correct) for _, attempt in pairs]


def _compared(rows: Sequence[tuple[Problem, Answer | None]], ladder: Ladder, workers: Graders | None) -> list[Grade]:
    # Many samples give the same answer; each distinct answer is compared with the gold answer once.
    keys = [(problem.id, None if answer is None else answer.text) for problem, answer in rows]
    calls = {key: _call(problem, answer, ladder) for key, (problem, answer) in zip(keys, rows, strict=True)}
    found = run_calls(list(calls.values()), None if ladder.literal else workers)
    outcomes = dict(zip(calls, found, strict=True))
    return [_grade(problem, answer, outcomes[key]) for key, (problem, answer) in zip(keys, rows, strict=True)]


def _call(problem: Problem, answer: Answer | None, ladder: Ladder) -> Call:
    golds = problem.answers
    comparisons = len(golds) if problem.answers_mode == "any" else 1
    # A single gold answer is passed as a string: a list needs a mode that says what it means.
    gold = golds[0] if len(golds) == 1 else golds
    arguments = (answer, gold, ladder, problem.answers_mode)
    return Call(grade_answer, arguments, seconds=comparisons * ladder.seconds + GRACE)


def _grade(problem: Problem, answer: Answer | None, outcome: Outcome) -> Grade:
    text, rule = (None, None) if answer is None else (answer.text, answer.rule)
    if outcome.lost is not None:
        rung = Rung.TIMEOUT if outcome.lost is Lost.TIMEOUT else Rung.ERROR
        golds = problem.answers[:1] if problem.answers_mode == "any" else problem.answers
        return Grade(False, rung, gold=", ".join(golds), answer=text, rule=rule)
    found: Grade = outcome.value
    # The same answer may have been found by another rule in another sample.
    return replace(found, rule=rule) if found.rule is not None else found


def _paper_grades(pairs: Pairs, ladder: Ladder, few_shot: bool, workers: Graders | None) -> list[bool | None]:
    found = [
        # With programs the few-shot rule does not apply: the answer is in the transcript.
        paper_answers(
            attempt.text, problem.question, ladder, few_shot and attempt.tools is None, _last_result(attempt)
        )
        for problem, attempt in pairs
    ]
    keys = [(problem.id, answers) for (problem, _), answers in zip(pairs, found, strict=True)]
    # The ladder's time limit covers all comparisons of one completion together.
    calls = {
        key: Call(paper_match, (answers, problem, ladder), seconds=ladder.seconds + GRACE)
        for key, (problem, _), answers in zip(keys, pairs, found, strict=True)
    }
    outcomes = dict(zip(calls, run_calls(list(calls.values()), workers), strict=True))
    return [bool(outcomes[key].value) for key in keys]


# ---- votes


def _alike(texts: Mapping[str, str], numbers: Mapping[str, Number | None], tolerance: Fraction) -> dict[str, str]:
    """Map each answer to the first one that is plainly equal: the same number, or the same text.

    The grouping does not depend on the order of the answers. Numbers are grouped in ascending order: a number joins
    while it is close to the smallest number of its group, which has at most one number that is no decimal. A percent
    sign of an answer is a unit, as in `same_number`: 40 % votes with 40 and never with 0.4, whether the gold answer is
    40, 0.4 or 40 %. So an answer never votes with one that is graded differently.

    Example, for 40%, 0.4 and 40.0:
        _alike(texts, numbers, tolerance) == {"40%": "40%", "0.4": "0.4", "40.0": "40%"}
    """
    began: dict[Fraction, Fraction] = {}
    known = [number for number in numbers.values() if number is not None]
    exact = {number.value for number in known if not number.is_decimal}
    smallest, has_exact = None, False
    for value in sorted({number.value for number in known}):
        if smallest is None or not close(smallest, value, tolerance) or (has_exact and value in exact):
            smallest, has_exact = value, False
        began[value] = smallest
        has_exact |= value in exact
    first: dict[Fraction | str, str] = {}
    found: dict[str, str] = {}
    for answer, number in numbers.items():
        found[answer] = first.setdefault(texts[answer] if number is None else began[number.value], answer)
    return found


@dataclass
class _Ballot:
    """The different answers to one problem, and the group that each has joined."""

    ladder: Ladder
    answers: Sequence[str]  # in order of first appearance
    timeouts: Counter[str]
    founder: str = ""  # the first answer of the newest group
    groups: int = 0
    waiting: list[str] = field(init=False)  # answers without a group, one per kind (see `_alike`)
    _kind: dict[str, str] = field(init=False)
    _numbers: dict[str, Number | None] = field(init=False)
    _texts: dict[str, str] = field(init=False)
    _group: dict[str, int] = field(default_factory=dict)  # by kind

    def __post_init__(self) -> None:
        units, algebra = self.ladder.units, not self.ladder.literal
        self._numbers = {answer: parse_number(answer, units=units, algebra=algebra) for answer in self.answers}
        self._texts = {answer: normalise(answer, self.ladder) for answer in self.answers}
        self._kind = _alike(self._texts, self._numbers, Fraction(str(self.ladder.tolerance)))
        self.waiting = list(dict.fromkeys(self._kind.values()))

    def open_group(self) -> list[str]:
        """Let the next answer found a group; returns the answers that only algebra can compare with it."""
        self.founder, *self.waiting = self.waiting
        self._group[self.founder] = self.groups
        self.groups += 1
        return [other for other in self.waiting if self._needs_algebra(other)]

    def join(self, answer: str) -> None:
        """Add an answer to the newest group."""
        self._group[answer] = self._group[self.founder]
        self.waiting.remove(answer)

    def vote(self, answer: str) -> int:
        return self._group[self._kind[answer]]

    def _needs_algebra(self, other: str) -> bool:
        pair = (self.founder, other)
        if self.ladder.literal or all(self._numbers[answer] is not None for answer in pair):
            return False
        slow = any(self.timeouts[answer] >= MOST_TIMEOUTS for answer in pair)
        return not slow and not any(":" in self._texts[answer] for answer in pair)


def _votes(
    attempts: Sequence[Attempt], grades: Sequence[Grade], ladder: Ladder, workers: Graders | None
) -> list[int | None]:
    """The group of equal answers of each attempt, numbered in order of first appearance; None without an answer.

    A formula joins the first group whose founder it equals. This allows comparing all answers with one founder at a
    time, for all problems at once.
    """
    answers: dict[str, list[str]] = {}
    timeouts: dict[str, Counter[str]] = {}
    for i in sorted(range(len(attempts)), key=lambda i: attempts[i].sample):
        if (answer := grades[i].answer) is not None:
            answers.setdefault(attempts[i].problem, []).append(answer)
            slow = timeouts.setdefault(attempts[i].problem, Counter())
            slow[answer] += MOST_TIMEOUTS * (grades[i].rung is Rung.TIMEOUT)
    ballots = {
        problem: _Ballot(ladder, list(dict.fromkeys(given)), timeouts[problem]) for problem, given in answers.items()
    }
    while unsettled := [ballot for ballot in ballots.values() if ballot.waiting]:
        _settle([(ballot, other) for ballot in unsettled for other in ballot.open_group()], ladder, workers)
    return [
        None if found.answer is None else ballots[attempt.problem].vote(found.answer)
        for attempt, found in zip(attempts, grades, strict=True)
    ]


def _settle(pairs: Sequence[tuple[_Ballot, str]], ladder: Ladder, workers: Graders | None) -> None:
    """Compare answers with the founders of their ballots' newest groups."""
    seconds = ladder.seconds + GRACE
    calls = [Call(compare, (ballot.founder, other, ladder), seconds) for ballot, other in pairs]
    for (ballot, other), outcome in zip(pairs, run_calls(calls, workers), strict=True):
        same, rung = (False, Rung.TIMEOUT) if outcome.lost is not None else outcome.value
        if same:
            ballot.join(other)
        ballot.timeouts[other] += rung is Rung.TIMEOUT
