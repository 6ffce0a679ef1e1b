"""Rewards on tags, patterns and length. The factories check their settings and return picklable objects."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gruppo.errors import ConfigError, RewardError
from gruppo.rewards.format import Completion, final_text

__all__ = ["get_length_reward", "get_regex_reward", "get_tag_format_reward"]


@dataclass
class _TagFormatReward:
    gruppo_worker: ClassVar[bool] = True
    tags: tuple[str, ...]
    nothing_else: bool

    def __post_init__(self) -> None:
        self.__name__ = "tag_format_reward"  # what metrics and tables call it

    def __call__(self, completions: Sequence[Completion], **kwargs: Any) -> list[float]:
        return [float(self._holds(final_text(completion))) for completion in completions]

    def _holds(self, text: str) -> bool:
        end = 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return False
            start = text.index(opening)
            if start < end or text.index(closing) < start:
                return False
            if self.nothing_else and text[end:start].strip():
                return False
            end = text.index(closing) + len(closing)
        return not (self.nothing_else and text[end:].strip())


def get_tag_format_reward(tags: Sequence[str] = ("think", "answer"), nothing_else: bool = True) -> _TagFormatReward:
    """1.0 if every tag is opened and closed exactly once, one after the other in this order; else 0.0.

    With `nothing_else`, only white space may be outside of the tags.

    Example:
        get_tag_format_reward()(["<think>3 + 4</think> <answer>7</answer>"]) == [1.0]
    """
    if isinstance(tags, str) or not tags:
        raise ConfigError(f"tags={tags!r} must be a list with at least one name, such as ['think', 'answer'].")
    for tag in tags:
        if not isinstance(tag, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", tag):
            raise ConfigError(f"tags contains {tag!r}, which is not a tag name; write 'think', not '<think>'.")
    if len(set(tags)) < len(tags):
        raise ConfigError(f"tags={list(tags)} contains a name twice; each tag must occur exactly once.")
    return _TagFormatReward(tuple(tags), nothing_else)


@dataclass
class _RegexReward:
    gruppo_worker: ClassVar[bool] = True
    pattern: re.Pattern[str]
    full: bool

    def __post_init__(self) -> None:
        self.__name__ = "regex_reward"  # what metrics and tables call it

    def __call__(self, completions: Sequence[Completion], **kwargs: Any) -> list[float]:
        match = self.pattern.fullmatch if self.full else self.pattern.search
        return [float(match(final_text(completion)) is not None) for completion in completions]


def get_regex_reward(pattern: str, full: bool = True, flags: int = 0) -> _RegexReward:
    """1.0 if the whole text (or, with `full=False`, a part of it) matches a regular expression; else 0.0.

    `flags` are those of `re`, as in `re.DOTALL | re.IGNORECASE`.

    Example:
        get_regex_reward(r"\\d+", full=False)(["It is 7.", "Who knows."]) == [1.0, 0.0]
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"pattern must be a string, not {type(pattern).__name__}; pass flags in `flags`.")
    try:
        return _RegexReward(re.compile(pattern, flags), full)
    except (re.error, ValueError) as error:  # ValueError: contradictory flags
        raise ConfigError(f"pattern={pattern!r} is not a valid regular expression: {error}.") from error


LengthKind = Literal["linear", "target", "band"]
# The arguments that each kind requires; `width` of a band is optional.
NEEDED = {"linear": {"maximum"}, "target": {"target", "width"}, "band": {"low", "high"}}
ALLOWED = NEEDED | {"band": {"low", "high", "width"}}


@dataclass
class _LengthReward:
    gruppo_worker: ClassVar[bool] = True
    low: float  # shortest length with full reward
    high: float  # longest length with full reward
    width: float  # distance from this range at which the reward reaches 0; if 0, it drops immediately
    tokens: bool

    def __post_init__(self) -> None:
        self.__name__ = "length_reward"  # what metrics and tables call it

    def __call__(
        self, completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]] | None = None, **kwargs: Any
    ) -> list[float]:
        if not self.tokens:
            return [self._score(len(final_text(completion))) for completion in completions]
        if completion_ids is None:
            raise RewardError("length_reward counts tokens and got no completion_ids; use unit='characters'.")
        return [self._score(len(ids)) for ids in completion_ids]

    def _score(self, length: int) -> float:
        outside = max(self.low - length, length - self.high, 0)
        if outside == 0:
            return 1.0
        return max(0.0, 1.0 - outside / self.width) if self.width else 0.0


def get_length_reward(
    kind: LengthKind,
    *,
    unit: Literal["tokens", "characters"] = "tokens",
    maximum: int | None = None,
    target: int | None = None,
    low: int | None = None,
    high: int | None = None,
    width: int | None = None,
) -> _LengthReward:
    """A reward between 0 and 1 for the length of a completion.

    "linear"  1 for an empty completion, falling to 0 at `maximum`
    "target"  1 at `target`, falling to 0 at `width` more or less
    "band"    1 from `low` to `high`, falling to 0 at `width` outside of it (immediately without `width`)

    Example:
        get_length_reward("band", unit="characters", low=2, high=4, width=2)(["", "abc", "abcde"]) == [0.0, 1.0, 0.5]
    """
    given = dict(maximum=maximum, target=target, low=low, high=high, width=width)
    numbers = {name: value for name, value in given.items() if value is not None}
    if kind not in NEEDED:
        raise ConfigError(f"kind={kind!r} must be one of {', '.join(NEEDED)}.")
    if unit not in ("tokens", "characters"):
        raise ConfigError(f"unit={unit!r} must be 'tokens' or 'characters'.")
    if missing := NEEDED[kind] - numbers.keys():
        raise ConfigError(f"A {kind} length reward needs {' and '.join(sorted(missing))}.")
    if spare := numbers.keys() - ALLOWED[kind]:
        raise ConfigError(f"A {kind} length reward does not use {' and '.join(sorted(spare))}; leave it out.")
    for name, value in numbers.items():
        if value < (1 if name in ("maximum", "width") else 0):
            raise ConfigError(f"{name}={value} must be at least {1 if name in ('maximum', 'width') else 0}.")
    in_tokens = unit == "tokens"
    if kind == "linear":
        return _LengthReward(0, 0, numbers["maximum"], in_tokens)
    if kind == "target":
        return _LengthReward(numbers["target"], numbers["target"], numbers["width"], in_tokens)
    if numbers["low"] > numbers["high"]:
        raise ConfigError(f"low={low} must not be above high={high}.")
    return _LengthReward(numbers["low"], numbers["high"], numbers.get("width", 0), in_tokens)
