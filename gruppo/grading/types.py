"""Types of grading: where an answer was found, what decided, and how a data set is graded."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from gruppo.errors import ConfigError

__all__ = ["LADDERS", "Answer", "AnswersMode", "Grade", "Ladder", "Rule", "Rung", "find_ladder"]

# What several golds of one row mean: all of them, any of them, or (last, same) a single given one.
AnswersMode = Literal["last", "same", "all", "any"]
Language = Literal["en", "zh"]


class Rule(StrEnum):
    """Which rule found the answer in a completion, in the order in which they are tried."""

    BOX = "box"  # the last complete \boxed{…}
    MINERVA = "minerva"  # "final answer is $…$"
    HASHES = "hashes"  # "#### 18"
    SENTENCE = "sentence"  # "the answer is …", "答案是…"
    OUTPUT = "output"  # what the last program printed
    LAST_NUMBER = "last_number"  # the last number of the text


class Rung(StrEnum):
    """What decided a grade."""

    STRING = "string"  # the normalised texts are equal; or they differ, and only texts may be compared
    NUMBER = "number"  # both are literal numbers
    NOT_LITERAL = "not_literal"  # the data set requires a literal number and this is not one: wrong
    SYMBOLIC = "symbolic"  # math-verify compared them
    REFUSED = "refused"  # too long, too deep or too large to be compared symbolically: wrong
    TIMEOUT = "timeout"  # math-verify ran out of time: wrong
    ERROR = "error"  # math-verify failed: wrong
    NO_ANSWER = "no_answer"  # the completion has no answer: wrong
    NO_GOLD = "no_gold"  # the reference has no answer: neither right nor wrong


@dataclass(frozen=True)
class Answer:
    """An answer as written in a text.

    Example:
        Answer(text="18\\\\text{ eggs}", rule=Rule.BOX)
    """

    text: str
    rule: Rule


@dataclass(frozen=True)
class Grade:
    """Right, wrong or (None) undetermined, and why.

    Example:
        Grade(correct=True, rung=Rung.NUMBER, gold="18", answer="18.0", rule=Rule.BOX)
    """

    correct: bool | None
    rung: Rung
    gold: str | None = None
    answer: str | None = None
    rule: Rule | None = None

    @property
    def boxed(self) -> bool:
        return self.rule is Rule.BOX


@dataclass(frozen=True)
class Ladder:
    """How the answers of one data set are graded.

    Example, grade-school problems in Chinese:
        Ladder(literal=True, languages=("en", "zh"))
    """

    literal: bool  # accept only a literal number, fraction or percentage: `9\cdot 2` is not an answer
    languages: tuple[Language, ...] = ("en",)  # languages of answer sentences to look for
    units: bool = True  # a unit after a number is dropped
    tolerance: float = 1e-3  # a decimal that differs by less is equal; below 0.1 by proportionally less
    seconds: float = 5.0  # time limit of one symbolic comparison

    def __post_init__(self) -> None:
        object.__setattr__(self, "languages", tuple(self.languages))  # a list has no hash
        unknown = set(self.languages) - {"en", "zh"}
        if unknown or not self.languages:
            raise ConfigError(f"languages={self.languages!r} must name at least one of 'en' and 'zh', and no other.")
        if not 0 <= self.tolerance < 1:
            raise ConfigError(f"tolerance={self.tolerance} must be at least 0 and below 1.")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"seconds={self.seconds} must be positive and at most an hour.")


LADDERS: Mapping[str, Ladder] = MappingProxyType(
    {
        "gsm8k": Ladder(literal=True),
        "math": Ladder(literal=False),
        "mgsm_zh": Ladder(literal=True, languages=("en", "zh")),
        "cmath": Ladder(literal=True, languages=("en", "zh")),
    }
)


def find_ladder(ladder: "str | Ladder") -> Ladder:
    """The ladder of a data set by its name; a Ladder object is returned unchanged."""
    if isinstance(ladder, Ladder):
        return ladder
    if ladder not in LADDERS:
        near = get_close_matches(str(ladder), LADDERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"Unknown ladder {ladder!r}; use one of {', '.join(LADDERS)}, or pass a Ladder.{hint}")
    return LADDERS[ladder]
