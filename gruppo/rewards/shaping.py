"""Rewards on length and repetition. The factories return picklable objects, which can be sent to workers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import ConfigError
from gruppo.rewards.format import Completion

__all__ = ["get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"]


@dataclass
class _SoftOverlongPunishment:
    gruppo_worker: ClassVar[bool] = True
    max_completion_len: int
    soft_punish_cache: int

    def __post_init__(self) -> None:
        self.__name__ = "soft_overlong_punishment_reward"  # what metrics and tables call it

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self._punish(len(ids)) for ids in completion_ids]

    def _punish(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        if length <= self.max_completion_len:
            return (free - length) / self.soft_punish_cache
        return -1.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> _SoftOverlongPunishment:
    """DAPO's soft punishment of long completions, https://huggingface.co/papers/2503.14476, eq. 13.

    With M = `max_completion_len`, c = `soft_punish_cache` and a completion of L tokens:
    0 for L ≤ M − c, then (M − c − L) / c down to −1 at L = M, and −1 beyond.
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ConfigError(
            f"soft_punish_cache={soft_punish_cache} must lie between 0 and max_completion_len={max_completion_len}."
        )
    return _SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass
class _RepetitionPenalty:
    gruppo_worker: ClassVar[bool] = True
    ngram_size: int
    max_penalty: float

    def __post_init__(self) -> None:
        self.__name__ = "repetition_penalty_reward"  # what metrics and tables call it

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self._penalise(ids) for ids in completion_ids]

    def _penalise(self, ids: Sequence[int]) -> float:
        total = len(ids) - self.ngram_size + 1
        if total <= 0:
            return 0.0
        unique = {tuple(ids[i : i + self.ngram_size]) for i in range(total)}
        repeated = total - len(unique)
        return repeated / total * self.max_penalty if repeated else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> _RepetitionPenalty:
    """A penalty on repeated token n-grams, https://huggingface.co/papers/2502.03373.

    (1 − distinct / all n-grams) · `max_penalty`, which is 0 without repetition or with fewer than n tokens.
    """
    if max_penalty > 0:
        raise ConfigError(f"max_penalty={max_penalty} must not be positive; it is what full repetition costs.")
    if ngram_size < 1:
        raise ConfigError(f"ngram_size={ngram_size} must be at least 1.")
    return _RepetitionPenalty(ngram_size, max_penalty)


@dataclass
class _CosineScaledReward:
    gruppo_worker: ClassVar[bool] = True
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float

    def __post_init__(self) -> None:
        self.__name__ = "cosine_scaled_reward"  # what metrics and tables call it

    def __call__(
        self,
        completions: Sequence[Completion],
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        from gruppo.rewards.accuracy import accuracy_reward

        verdicts = accuracy_reward(completions, solution)
        return [self._scale(v, len(ids)) for v, ids in zip(verdicts, completion_ids, strict=True)]

    def _scale(self, verdict: float | None, length: int) -> float | None:
        if verdict is None:
            return None
        if verdict == 1.0:
            low, high = self.min_value_correct, self.max_value_correct
        else:
            # Reversed: a long wrong answer costs less than a short one.
            low, high = self.max_value_wrong, self.min_value_wrong
        progress = min(length / self.max_len, 1.0)
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * progress))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> _CosineScaledReward:
    """`accuracy_reward` scaled by length along a cosine, https://huggingface.co/papers/2502.03373.

    The reward of a correct answer falls from `max_value_correct` at length 0 to `min_value_correct` at `max_len`
    tokens; that of a wrong answer rises from `min_value_wrong` to `max_value_wrong`. None stays None.
    """
    if max_len < 1:
        raise ConfigError(f"max_len={max_len} must be at least 1 token.")
    return _CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
