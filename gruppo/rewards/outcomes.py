"""The result of a reward on one completion: a typed outcome instead of a bare number.

Reward workers import this, so it needs the standard library only.
"""

import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gruppo.errors import RewardError

Steps = list[tuple[int, float]]  # (index of the step's last completion token, value of the step)

LARGEST = 1e15  # rewards are stored in float32, which must also hold the sum of their squares


class Kind(IntEnum):
    """The kind of result of a reward on a completion; tensors store it as an integer."""

    SCORE = 0
    ABSTAIN = 1  # None: the reward does not apply
    TIMEOUT = 2  # no answer in time
    FAILURE = 3  # an exception, a crash, or a number that is not finite or too large

    @property
    def failed(self) -> bool:
        """Whether the completion is unscorable, regardless of other rewards."""
        return self in (Kind.TIMEOUT, Kind.FAILURE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One reward of one completion.

    Example, two steps that end at the tokens 4 and 9:
        Outcome(Kind.SCORE, 0.5, steps=[(4, 1.0), (9, -0.5)])
    """

    kind: Kind
    value: float = math.nan
    steps: Steps | None = None
    error: str | None = None


ABSTAINED = Outcome(Kind.ABSTAIN)


def read_output(output: Any, name: str, lengths: Sequence[int], first: int = 0) -> list[Outcome]:
    """One outcome per completion from what a reward function returned; `lengths` are the completions' tokens.

    A number that is not finite, or is too large, fails its completion. Anything other than a list of numbers, steps
    and None breaks the contract and raises an error that names the function. `first` is the index of the first
    completion in the batch.
    """
    try:
        values = None if isinstance(output, str | bytes | Mapping | Set) else iter(output)
    except TypeError:
        values = None
    if values is None:
        raise RewardError(
            f"The reward function '{name}' returned {type(output).__name__}; it must return a list with one number "
            "(or None) per completion."
        )
    listed = list(values)  # outside of `try`: a generator may raise its own errors
    if len(listed) != len(lengths):
        raise RewardError(
            f"The reward function '{name}' returned {len(listed)} rewards for {len(lengths)} completions; it must "
            "return exactly one per completion."
        )
    return [read_value(v, name, first + i, n) for i, (v, n) in enumerate(zip(listed, lengths, strict=True))]


def read_value(value: Any, name: str, i: int, length: int) -> Outcome:
    """The outcome of completion `i`, which has `length` tokens."""
    if value is None:
        return ABSTAINED
    if isinstance(value, list | tuple):
        return _read_steps(value, name, i, length)
    number = _number(value, name, i)
    return Outcome(Kind.SCORE, number) if abs(number) <= LARGEST else _out_of_range(value, name, i)


def _read_steps(value: Sequence[Any], name: str, i: int, length: int) -> Outcome:
    steps: Steps = []
    for step in value:
        if not isinstance(step, list | tuple) or len(step) != 2:
            raise _wrong_type(value, name, i)
        try:
            end = int(operator.index(step[0]))
        except TypeError:
            raise _wrong_type(value, name, i) from None
        if not (steps[-1][0] if steps else -1) < end < length:
            raise RewardError(
                f"The reward function '{name}' returned a step that ends at token {end} for completion {i}, which has "
                f"{length} tokens; ends count from 0, increase, and lie within the completion."
            )
        steps.append((end, _number(step[1], name, i)))
    total = sum(number for _, number in steps)
    if not all(abs(number) <= LARGEST for number in (total, *(number for _, number in steps))):
        return _out_of_range(value, name, i)
    return Outcome(Kind.SCORE, float(total), steps)


def _number(value: Any, name: str, i: int) -> float:
    if isinstance(value, str | bytes):
        raise _wrong_type(value, name, i)
    try:
        return float(value)
    except OverflowError:  # an integer too large for a float
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for a tensor with several elements
        raise _wrong_type(value, name, i) from None


def shorten(thing: Any, limit: int = 300) -> str:
    """The repr of a value, with the middle omitted if it is long."""
    try:
        text = repr(thing)
    except Exception as error:
        text = f"<{type(thing).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def clip(text: str, limit: int = 10_000) -> str:
    """A text, with the middle omitted if it is long: the two ends of a traceback are the most informative."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n… {len(text) - limit} characters …\n{text[-limit // 2 :]}"


def _wrong_type(value: Any, name: str, i: int) -> RewardError:
    return RewardError(
        f"The reward function '{name}' returned {shorten(value)} for completion {i}; rewards are finite numbers, "
        "lists of steps (end position, value), or None where the function does not apply."
    )


def _out_of_range(value: Any, name: str, i: int) -> Outcome:
    error = (
        f"The reward function '{name}' returned {shorten(value)} for completion {i}; rewards are finite numbers of at "
        f"most {LARGEST:g} in magnitude, or None where the function does not apply."
    )
    return Outcome(Kind.FAILURE, error=error)
