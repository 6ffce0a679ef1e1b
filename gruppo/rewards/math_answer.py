"""A reward of 1 for the right answer, by the grading ladder of `gruppo.grading`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from gruppo.errors import ConfigError, RewardError
from gruppo.grading import LADDERS, AnswersMode, Grade, Ladder, Rung, find_ladder, grade
from gruppo.grading.extract import is_grade_school
from gruppo.rewards.format import Completion, final_text
from gruppo.rewards.marks import in_worker

__all__ = ["get_math_answer_reward", "math_answer_reward"]

COLUMNS = ("answer", "solution")  # where a gold answer usually is, in order of preference
MODES = "answers_mode"  # the column that says what several golds of a row mean
GENERAL = replace(LADDERS["math"], languages=("en", "zh"))
LITERAL = replace(LADDERS["gsm8k"], languages=("en", "zh"))
UNDECIDED = (Rung.REFUSED, Rung.TIMEOUT, Rung.ERROR)


@dataclass
class _MathAnswerReward:
    gruppo_worker: ClassVar[bool] = True
    ladder: Ladder
    columns: tuple[str, ...]
    answers_mode: AnswersMode | None = None  # None: from the row

    def __post_init__(self) -> None:
        self.__name__ = "math_answer_reward"  # what metrics and tables call it

    def __call__(
        self,
        completions: Sequence[Completion],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        golds = self._golds(columns, len(completions))
        modes = self._modes(columns, len(completions))
        rows = zip(completions, golds, modes, strict=True)
        grades = [self._grade(completion, gold, mode) for completion, gold, mode in rows]
        if log_extra is not None:
            log_extra("gold_parsed", [g.gold or "[unparseable]" for g in grades])
            log_extra("answer_parsed", [_shown_answer(g) for g in grades])
            log_extra("graded_by", [g.rung.value for g in grades])
        graded = [g for g in grades if g.correct is not None]
        if log_metric is not None and graded:
            log_metric("math_answer/boxed", sum(g.boxed for g in graded) / len(graded))
            log_metric("math_answer/undecided", sum(g.rung in UNDECIDED for g in graded) / len(graded))
        return [None if g.correct is None else float(g.correct) for g in grades]

    def _golds(self, columns: dict[str, Any], rows: int) -> list[Any]:
        """One gold per completion, from the first column that has a value in its row."""
        given = [(name, columns[name]) for name in self.columns if columns.get(name) is not None]
        if not given:
            raise RewardError(
                f"math_answer_reward found no gold answers: the dataset has no column {' or '.join(self.columns)}. "
                "Rename the column, or name it: get_math_answer_reward(column=...)."
            )
        for name, values in given:
            if isinstance(values, str) or len(values) != rows:
                count = "one string" if isinstance(values, str) else len(values)
                raise RewardError(f"{rows} completions but {count} as `{name}`; it must hold one per completion.")
        return [next((v[i] for _, v in given if v[i] is not None), None) for i in range(rows)]

    def _modes(self, columns: dict[str, Any], rows: int) -> list[AnswersMode]:
        """The mode of each row: the configured one, or the value of its column, by default "last"."""
        given = columns.get(MODES) if self.answers_mode is None else None
        modes = [self.answers_mode] * rows if given is None else list(given)
        if len(modes) != rows:
            raise RewardError(f"{rows} completions but {len(modes)} as `{MODES}`; it must hold one per completion.")
        for mode in modes:
            if mode is not None and mode not in get_args(AnswersMode):
                raise RewardError(f"{mode!r} in `{MODES}` must be one of {', '.join(get_args(AnswersMode))}.")
        return [mode or "last" for mode in modes]

    def _grade(self, completion: Completion, gold: Any, mode: AnswersMode) -> Grade:
        if gold is None:
            return Grade(None, Rung.NO_GOLD)
        several = mode in ("all", "any") and not isinstance(gold, str) and isinstance(gold, Sequence)
        golds = [str(each) for each in gold] if several else [str(gold)]
        ladder = self.ladder
        # Golds after #### are literal numbers: a calculation that the grader would evaluate is not an answer.
        if ladder == GENERAL and all(is_grade_school(each) for each in golds):
            ladder = LITERAL
        return grade(final_text(completion), golds, ladder, mode)


def _shown_answer(result: Grade) -> str:
    if result.rung is Rung.NO_GOLD:
        return "[skipped]"
    return result.answer or "[none]"


@in_worker
def math_answer_reward(
    completions: Sequence[Completion],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 if the completion's final answer equals the gold one, 0.0 if not, None if there is no gold answer.

    The gold is in the column `answer`, or `solution` where that is missing: the answer itself (`42`, `\\frac{1}{2}`)
    or a worked solution that ends in `#### 42` or boxes it. Answers are found, normalised and compared as in
    `gruppo.grading`; formulas need math-verify. A number after `####` is a grade-school answer: only a literal number
    matches it, not a calculation. `get_math_answer_reward` applies the rules of one data set.

    Example:
        math_answer_reward(["so \\\\boxed{42}", "so \\\\boxed{41}"], answer=["#### 42", "#### 42"]) == [1.0, 0.0]
    """
    reward = _MathAnswerReward(GENERAL, COLUMNS)
    golds = {"answer": answer, "solution": solution, MODES: kwargs.get(MODES)}
    return reward(completions, log_extra, log_metric, **golds)


def get_math_answer_reward(
    ladder: str | Ladder = GENERAL, column: str | None = None, answers_mode: AnswersMode | None = None
) -> _MathAnswerReward:
    """`math_answer_reward` with the rules of a data set, and the column that holds the gold answers.

    `ladder` is gsm8k, math, mgsm_zh, cmath or a `gruppo.grading.Ladder`. Ladders of grade-school sets accept only a
    literal number, so that a policy cannot earn the reward with a calculation that the grader evaluates.

    `answers_mode` says what several golds of a row (a list) mean: "all" requires every one of them, "any" one. By
    default it is read from the dataset's column `answers_mode`, row by row; without that column, a row has one gold.

    Example:
        GRPOTrainer(model, reward_funcs=get_math_answer_reward("gsm8k"), ...)
    """
    if column is not None and not (isinstance(column, str) and column):
        raise ConfigError(f"column={column!r} must be the name of a dataset column.")
    if answers_mode is not None and answers_mode not in get_args(AnswersMode):
        raise ConfigError(f"answers_mode={answers_mode!r} must be one of {', '.join(get_args(AnswersMode))}.")
    return _MathAnswerReward(find_ladder(ladder), COLUMNS if column is None else (column,), answers_mode)
