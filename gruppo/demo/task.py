"""Arithmetic word problems: a seeded generator, two splits that share no calculation, and an exact-match reward.

A problem is a short story about one number that changes two or three times:

    Q: Mia has 14 pears. Mia buys 9 more. Tom takes 5. How many pears now?

Its answer can be given at once (`A: 18`) or worked out (`14+9=23, 23-5=18. A: 18`). The generator knows both forms.
"""

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Problem", "Split", "exact_match", "extract_answer", "generate", "load_task", "problems"]

Split = Literal["train", "held_out"]

PEOPLE = ("Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Leo", "Ida", "Max")
THINGS = ("apples", "pears", "coins", "books", "shells", "cards", "stamps", "marbles", "pens", "buttons")
OPENINGS = ("{name} has {n} {things}.", "{name} starts with {n} {things}.", "{name} finds {n} {things}.")
QUESTIONS = ("How many {things} now?", "How many {things} does {name} have?")
EVENTS: dict[str, tuple[str, ...]] = {
    "+": ("{name} buys {k} more.", "{friend} brings {k}.", "Then {friend} adds {k} {things}."),
    "-": ("{name} sells {k}.", "{friend} takes {k}.", "Then {name} loses {k} {things}."),
    "*": ("{name} gets {k} times as many.", "Then there are {k} times as many."),
}

SMALLEST, LARGEST = 1, 99
START = (3, 30)
CHANGE = (2, 19)
FACTORS = (2, 3, 4)
# One in this many calculations belongs to the held-out split, whatever the story around it.
HELD_OUT_SHARE = 8


@dataclass(frozen=True)
class Problem:
    """One word problem: the text, its calculation step by step, and the answer.

    Example: Problem("Mia has 14 pears. … now?", ("14+9=23", "23-5=18"), 18)
    """

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        """The text the model is given."""
        return f"Q: {self.question}\n"

    @property
    def direct(self) -> str:
        """A completion that answers at once."""
        return f"A: {self.answer}"

    @property
    def worked(self) -> str:
        """A completion that works the answer out first."""
        return f"{', '.join(self.steps)}. A: {self.answer}"

    @property
    def split(self) -> Split:
        """The split this problem belongs to, decided by its calculation alone."""
        # crc32 rather than hash(): the same in every process and on every machine.
        return "held_out" if zlib.crc32(self.worked.encode()) % HELD_OUT_SHARE == 0 else "train"


def _draw_step(rng: random.Random, value: int) -> tuple[str, int, int]:
    """Draw an operation that keeps the running value in range: (sign, operand, new value)."""
    while True:
        sign = rng.choice("++--*")
        k = rng.choice(FACTORS) if sign == "*" else rng.randint(*CHANGE)
        new = {"+": value + k, "-": value - k, "*": value * k}[sign]
        if SMALLEST <= new <= LARGEST:
            return sign, k, new


def _draw_problem(rng: random.Random) -> Problem:
    """Draw one problem of either split."""
    name, friend = rng.sample(PEOPLE, 2)
    words = {"name": name, "friend": friend, "things": rng.choice(THINGS)}
    value = rng.randint(*START)
    sentences = [rng.choice(OPENINGS).format(n=value, **words)]
    steps = []
    for _ in range(rng.choice((2, 3))):
        sign, k, new = _draw_step(rng, value)
        sentences.append(rng.choice(EVENTS[sign]).format(k=k, **words))
        steps.append(f"{value}{sign}{k}={new}")
        value = new
    sentences.append(rng.choice(QUESTIONS).format(**words))
    return Problem(" ".join(sentences), tuple(steps), value)


def generate(split: Split, seed: int = 0) -> Iterator[Problem]:
    """Yield an endless stream of problems of one split; the same seed gives the same stream."""
    rng = random.Random(f"{split}/{seed}")
    while True:
        problem = _draw_problem(rng)
        if problem.split == split:
            yield problem


def problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """The first `count` different problems of a split."""
    chosen: dict[str, Problem] = {}
    for problem in generate(split, seed):
        if len(chosen) == count:
            break
        chosen.setdefault(problem.question, problem)
    return list(chosen.values())


def load_task(train_size: int = 2048, held_out_size: int = 500, seed: int = 0) -> tuple["Dataset", "Dataset"]:
    """Build the train and held-out datasets, with the columns `prompt` (a string) and `answer` (a string)."""
    from datasets import Dataset

    def build(split: Split, count: int) -> Dataset:
        chosen = problems(split, count, seed)
        return Dataset.from_dict({"prompt": [p.prompt for p in chosen], "answer": [str(p.answer) for p in chosen]})

    return build("train", train_size), build("held_out", held_out_size)


_ANSWER = re.compile(r"A: (-?\d+)\s*$")


def extract_answer(completion: str) -> str | None:
    """The number a completion ends with after `A: `, or None if it does not end that way."""
    found = _ANSWER.search(completion)
    return found.group(1) if found else None


def exact_match(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward 1.0 where a completion ends with exactly the right answer, else 0.0."""
    return [float(extract_answer(text) == str(right)) for text, right in zip(completions, answer, strict=True)]
