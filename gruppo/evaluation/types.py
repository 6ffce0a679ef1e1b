"""The data types of an evaluation, in the order in which they appear.

Benchmark ─►  Problem ─► Attempt ─►             GradedAttempt
(a data set)  (a row)    (what a model wrote)  (the same, graded)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from gruppo.errors import ConfigError
from gruppo.grading import AnswersMode, Grade, Ladder
from gruppo.types import StopReason

__all__ = [
    "PASSES",
    "Attempt",
    "Benchmark",
    "Decoding",
    "Exemplar",
    "FewShot",
    "GradedAttempt",
    "HubSource",
    "Language",
    "Mode",
    "Problem",
    "Rendering",
    "ToolUse",
]

Mode = Literal["cot", "tir"]  # chain of thought, tool-integrated reasoning
Language = Literal["en", "zh"]
Rendering = Literal["chat", "plain"]  # the model's own chat template, or `User: …` / `Assistant:`
PASSES = ("greedy", "sampled")  # one greedy attempt at each problem; several sampled ones


# ---- a data set


@dataclass(frozen=True)
class Problem:
    """One row of a benchmark.

    Example:
        Problem(id="cmath/test/42", question="3 + 4 = ?", answers=("7",), level="1")
    """

    id: str
    question: str
    answers: tuple[str, ...]  # the gold answer; several only if `answers_mode` is "all" or "any"
    answers_mode: AnswersMode = "last"
    level: str | None = None
    subject: str | None = None


@dataclass(frozen=True)
class Exemplar:
    """A solved problem for a few-shot prompt: once in words, once with a program and its output."""

    question: str
    cot: str
    tir: str


@dataclass(frozen=True)
class FewShot:
    """How a few-shot prompt is laid out; the exemplars are in exemplars/<file>.

    Example, GSM8K:
        FewShot("gsm8k.jsonl", shots=8, question="Q: {}", answer="A: {}", separator="\\n\\n\\n", stop=("\\nQ:",))
    """

    file: str  # in gruppo/evaluation/exemplars, or a path to your own file
    shots: int  # the usual number of exemplars, and the maximum
    question: str  # template of a question; `{}` is replaced by the question
    answer: str  # template of an answer; the prompt ends where `{}` would be
    separator: str  # between one exemplar and the next
    stop: tuple[str, ...]  # stop strings: the model has begun to invent a new problem


@dataclass(frozen=True)
class HubSource:
    """Where the `datasets` library finds a benchmark, and how its rows are converted to ours."""

    path: str
    split: str
    row: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # converts to the keys question, answer, level, …
    name: str | None = None  # the configuration, if there are several


@dataclass(frozen=True)
class Benchmark:
    """A data set of problems with answers, and how it is prompted and graded. docs/evaluation.md shows how to add one.

    Example:
        Benchmark("gsm8k", "GSM8K", file="gsm8k/test.jsonl", ladder=LADDERS["gsm8k"], rows=1319)
    """

    name: str  # used in file names and metric names
    title: str  # of its column in a table
    file: str  # path in a data folder; `<file>.gz` is found too
    ladder: Ladder
    language: Language = "en"  # of the instruction that follows the question
    rows: int | None = None  # of the published set; if the data differs, a warning is logged and the results note it
    hub: HubSource | None = None
    few_shot: FewShot | None = None
    group_by: tuple[Literal["level", "subject"], ...] = ()  # accuracy is also reported for each of these
    level_name: str = "level"  # the name of a level in this data set

    def __post_init__(self) -> None:
        if not self.name.replace("_", "").replace("-", "").isalnum():
            raise ConfigError(
                f"Benchmark(name={self.name!r}): use letters, digits, - and _ only; file names contain it."
            )


# ---- sampling


@dataclass(frozen=True)
class Decoding:
    """How attempts are sampled: one pass over a benchmark.

    Example, eight samples of each problem:
        Decoding(samples=8, temperature=0.7)
    """

    samples: int = 1
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    max_new_tokens: int = 1024  # tir: in each round
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.max_new_tokens < 1:
            raise ConfigError(f"{self}: samples and max_new_tokens must be at least 1.")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(f"{self}: temperature must be at least 0, and top_p above 0 and at most 1.")
        if self.greedy and (self.samples > 1 or self.top_p < 1):
            raise ConfigError(f"{self}: greedy samples are all the same; set a temperature above 0.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def name(self) -> str:
        """The name of this pass."""
        return PASSES[0] if self.greedy else PASSES[1]


# ---- attempts and grades


@dataclass(frozen=True)
class ToolUse:
    """What the programs of one attempt did."""

    rounds: int = 0  # in which the model generated
    executions: int = 0  # programs that were run; an output requested without a program does not count
    errors: int = 0  # executions that failed in any way, including timeouts
    timeouts: int = 0
    output: str | None = None  # complete stdout of the last execution; None: no execution, or it failed

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Attempt:
    """One completion of one problem.

    Example:
        Attempt(problem="gsm8k/test/17", sample=0, text="… \\\\boxed{18}", tokens=84, stop=StopReason.EOS)
    """

    problem: str  # id of the problem
    sample: int
    text: str  # tir: the whole transcript, with the outputs of programs
    tokens: int  # generated by the model
    stop: StopReason
    tools: ToolUse | None = None  # None: chain of thought
    segments: tuple[tuple[str, str], ...] = ()  # tir: ("model" or "output", text), in order: who wrote what

    @property
    def truncated(self) -> bool:
        return not self.stop.ended


@dataclass(frozen=True)
class GradedAttempt:
    """An attempt and its grades."""

    attempt: Attempt
    grade: Grade
    paper: bool | None = None  # right by the looser grading of the DeepSeekMath paper; None: not requested
    program: bool | None = None  # tir: whether the output of the last program is right; None: no output
    vote: int | None = None  # the group of equal answers among the attempts at its problem; None: no answer

    @property
    def correct(self) -> bool:
        return bool(self.grade.correct)
