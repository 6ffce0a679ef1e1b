"""Grade attempts: right or wrong, by the paper's rules as well if asked, and which answers are the same.

    score(problems, attempts, ladder)                      [Scored, …], in the order of the attempts
    score(problems, attempts, ladder, workers=graders)     the same; what may take long is done by worker processes

Answers that must be literal numbers are compared here, thousands of them a second. Formulas go to the workers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gruppo.errors import DataError
from gruppo.evaluation.graders import Call, Graders, Lost, Outcome, run_calls
from gruppo.evaluation.paper_grader import paper_answers, paper_match
from gruppo.evaluation.types import Attempt, Problem, Scored
from gruppo.grading import Answer, Grade, Ladder, Number, Rule, Rung, compare, extract, grade, normalise, parse_number
from gruppo.grading.extract import boxes_of_the_last_line
from gruppo.grading.numbers import same_number

__all__ = ["Graders", "score"]

GRACE = 5.0  # seconds beyond the limits that comparisons keep themselves, before a worker is killed
MOST_TIMEOUTS = 2  # an answer that ran out of time so often is not compared with further ones


def score(
    problems: Mapping[str, Problem],
    attempts: Sequence[Attempt],
    ladder: Ladder,
    *,
    paper: bool = False,
    few_shot: bool = False,
    workers: Graders | None = None,
) -> list[Scored]:
    """The attempts with their grades, in the same order.

    All attempts at a problem come in one call, because they vote. `paper` grades by the rules of the DeepSeekMath
    paper too; `few_shot` tells it that the prompts held exemplars, which changes where it looks for the answer.

    Example:
        problem = Problem("p1", "3 + 4 = ?", ("7",))
        attempt = Attempt("p1", 0, "It is \\\\boxed{7}.", tokens=6, stop=StopReason.EOS)
        score({"p1": problem}, [attempt], LADDERS["gsm8k"])[0].correct is True
    """
    pairs = [(_problem_of(attempt, problems), attempt) for attempt in attempts]
    grades = _grades(pairs, ladder, workers)
    papers = _paper_grades(pairs, ladder, few_shot, workers) if paper else [None] * len(pairs)
    programs = _program_grades(pairs, ladder, workers)
    votes = _votes(attempts, grades, ladder, workers)
    columns = zip(attempts, grades, papers, programs, votes, strict=True)
    return [Scored(attempt, found, loose, program, vote) for attempt, found, loose, program, vote in columns]


def _problem_of(attempt: Attempt, problems: Mapping[str, Problem]) -> Problem:
    if attempt.problem not in problems:
        raise DataError(f"There is an attempt at {attempt.problem!r}, which is none of the {len(problems)} problems.")
    return problems[attempt.problem]


# ---- right or wrong


def _grades(pairs: Sequence[tuple[Problem, Attempt]], ladder: Ladder, workers: Graders | None) -> list[Grade]:
    with_tools = replace(ladder, tool_output=True)
    rows = [_Row(problem, attempt.text, ladder if attempt.tools is None else with_tools) for problem, attempt in pairs]
    return _grade_rows(rows, workers)


def _program_grades(
    pairs: Sequence[tuple[Problem, Attempt]], ladder: Ladder, workers: Graders | None
) -> list[bool | None]:
    """Whether the last line that a program printed is right, as if it were all that was written."""
    ladder = replace(ladder, tool_output=True)
    outputs = [None if attempt.tools is None else attempt.tools.output for _, attempt in pairs]
    rows = [
        _Row(problem, f"```output\n{_last_line(output)}\n```", ladder)
        for (problem, _), output in zip(pairs, outputs, strict=True)
        if output is not None
    ]
    grades = iter(_grade_rows(rows, workers))
    return [None if output is None else bool(next(grades).correct) for output in outputs]


def _last_line(output: str) -> str:
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


@dataclass(frozen=True)
class _Row:
    """A text to be graded."""

    problem: Problem
    text: str
    ladder: Ladder

    def answer(self) -> Answer | None:
        """The answer that `grade` finds in it."""
        if self.problem.answers_mode == "all" and (joined := boxes_of_the_last_line(self.text)) is not None:
            return Answer(joined, Rule.BOX)
        return extract(self.text, self.ladder)

    def call(self) -> Call:
        golds = self.problem.answers
        comparisons = len(golds) if self.problem.answers_mode == "any" else 1
        # One gold is passed as a text: several need a mode that says what they mean.
        gold = golds[0] if len(golds) == 1 else golds
        arguments = (self.text, gold, self.ladder, self.problem.answers_mode)
        return Call(grade, arguments, seconds=comparisons * self.ladder.seconds + GRACE)

    def grade_from(self, outcome: Outcome, answer: Answer | None) -> Grade:
        text, rule = (None, None) if answer is None else (answer.text, answer.rule)
        if outcome.lost is not None:
            rung = Rung.TIMEOUT if outcome.lost is Lost.TIMEOUT else Rung.ERROR
            golds = self.problem.answers[:1] if self.problem.answers_mode == "any" else self.problem.answers
            return Grade(False, rung, gold=", ".join(golds), answer=text, rule=rule)
        found: Grade = outcome.value
        return replace(found, rule=rule) if found.rule is not None else found


def _grade_rows(rows: Sequence[_Row], workers: Graders | None) -> list[Grade]:
    if all(row.ladder.literal for row in rows):
        return [outcome.value for outcome in run_calls([row.call() for row in rows], None)]
    # Many samples give the same answer; each is compared with the gold one once.
    answers = [row.answer() for row in rows]
    keys = [
        (row.problem.id, row.ladder, None if answer is None else answer.text)
        for row, answer in zip(rows, answers, strict=True)
    ]
    calls = {key: row.call() for key, row in zip(keys, rows, strict=True)}
    outcomes = dict(zip(calls, run_calls(list(calls.values()), workers), strict=True))
    return [row.grade_from(outcomes[key], answer) for row, key, answer in zip(rows, keys, answers, strict=True)]


def _paper_grades(
    pairs: Sequence[tuple[Problem, Attempt]], ladder: Ladder, few_shot: bool, workers: Graders | None
) -> list[bool | None]:
    found = [
        # Where programs run there is no few-shot rule: the answer is in the transcript.
        paper_answers(attempt.text, problem.question, ladder, few_shot and attempt.tools is None)
        for problem, attempt in pairs
    ]
    keys = [(problem.id, answers) for (problem, _), answers in zip(pairs, found, strict=True)]
    # The limit of the ladder holds for all that is compared for one completion.
    calls = {
        key: Call(paper_match, (answers, problem, ladder), seconds=ladder.seconds + GRACE)
        for key, (problem, _), answers in zip(keys, pairs, found, strict=True)
    }
    outcomes = dict(zip(calls, run_calls(list(calls.values()), workers), strict=True))
    return [bool(outcomes[key].value) for key in keys]


# ---- votes


@dataclass
class _Ballot:
    """The different answers to one problem, and the group that each has joined."""

    ladder: Ladder
    waiting: list[str]  # in order of first appearance
    timeouts: Counter[str]
    group: dict[str, int] = field(default_factory=dict)
    founder: str = ""  # the first answer of the newest group
    groups: int = 0
    _numbers: dict[str, Number | None] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        algebra = not self.ladder.literal
        for answer in self.waiting:
            self._texts[answer] = normalise(answer, self.ladder)
            self._numbers[answer] = parse_number(answer, units=self.ladder.units, algebra=algebra)

    def open_group(self) -> list[str]:
        """The next answer founds a group, and those that are plainly the same join; the ones to compare with it."""
        self.founder, *others = self.waiting
        self.group[self.founder] = self.groups
        self.groups += 1
        same = {other: self._plainly_same(other) for other in others}
        for other in others:
            if same[other]:
                self.join(other)
        self.waiting = [other for other in others if not same[other]]
        return [other for other in self.waiting if same[other] is None]

    def join(self, answer: str) -> None:
        self.group[answer] = self.group[self.founder]

    def _plainly_same(self, other: str) -> bool | None:
        """None: only algebra can tell."""
        texts = self._texts[self.founder], self._texts[other]
        if texts[0] == texts[1]:
            return True
        left, right = self._numbers[self.founder], self._numbers[other]
        if left is not None and right is not None:
            # A percent sign counts differently on the two sides. Which answer came first must not matter.
            tolerance = self.ladder.tolerance
            return same_number(left, right, tolerance) or same_number(right, left, tolerance)
        slow = any(self.timeouts[answer] >= MOST_TIMEOUTS for answer in (self.founder, other))
        return False if self.ladder.literal or slow or ":" in "".join(texts) else None


def _votes(
    attempts: Sequence[Attempt], grades: Sequence[Grade], ladder: Ladder, workers: Graders | None
) -> list[int | None]:
    """For each attempt its group of equal answers, numbered in order of first appearance; None without an answer.

    An answer joins the first group whose founder it equals. So all answers can be compared with one founder at a time,
    for all problems at once.
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
        None if found.answer is None else ballots[attempt.problem].group[found.answer]
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
            ballot.waiting.remove(other)
        ballot.timeouts[other] += rung is Rung.TIMEOUT
