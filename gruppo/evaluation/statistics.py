"""Pure functions for result statistics: intervals, pass@k, majority votes and paired tests.

    wilson                   the interval of a proportion, such as problems solved
    pass_at_k                the unbiased estimate of the chance that one of k samples is right
    majority_at_k            the score of a majority vote among k samples
    mcnemar                  compares two models on the same problems, with one right-or-wrong attempt each
    paired_bootstrap         the same for any per-problem scores; `bootstrap` is the interval of one mean

Only majority votes among a subset of the samples and the bootstrap are random. Both use a fixed seed, so the same
input gives the same result.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gruppo.errors import ConfigError

__all__ = [
    "CONFIDENCE",
    "DRAWS",
    "SEED",
    "SUBSETS",
    "Estimate",
    "bootstrap",
    "majority_at_k",
    "mcnemar",
    "paired_bootstrap",
    "pass_at_k",
    "wilson",
]

CONFIDENCE = 0.95
DRAWS = 10_000  # resamples of a bootstrap
SUBSETS = 200  # subsets of k samples per problem over which a vote is averaged
SEED = 0
_AT_ONCE = 4_000_000  # counts that a bootstrap holds in memory at a time


# ---- one model


def wilson(correct: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The Wilson interval of a proportion. It stays within [0, 1] and has a nonzero width at 0 and at 1 too.

    Example, 8 of 10:
        wilson(8, 10) == (0.4902, 0.9433)  # rounded
    """
    if total < 1 or not 0 <= correct <= total:
        raise ConfigError(f"wilson({correct}, {total}): correct must be from 0 to total, and total at least 1.")
    _check_confidence(confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = correct / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # The formula gives 0 and 1 at the ends; rounding must not move them.
    low = 0.0 if correct == 0 else (centre - spread) / scale
    high = 1.0 if correct == total else (centre + spread) / scale
    return low, high


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of pass@k from n samples of which c are right: 1 − C(n−c, k) / C(n, k).

    Example, two of four samples are right and two are looked at:
        pass_at_k(4, 2, 2) == 5 / 6  # only one pair of the six has none
    """
    if not 0 <= c <= n:
        raise ConfigError(f"pass_at_k(n={n}, c={c}): c must be from 0 to n.")
    _check_k(k, n)
    every = math.comb(n, k)
    # Integer arithmetic up to the single division: no cancellation error, however large n is.
    return (every - math.comb(n - c, k)) / every


def majority_at_k(
    votes: Sequence[int | None], correct: Sequence[bool], k: int, *, subsets: int = SUBSETS, seed: int = SEED
) -> float:
    """The score of a majority vote among k samples of one problem; `votes` has each sample's group of equal answers.

    The largest group wins, and scores 1 if its first sample is right. If groups tie, the score is the fraction of them
    that is right. None means no answer and casts no vote; without any vote the score is 0. With more than k samples
    the score is the mean over subsets of k: all subsets if there are at most `subsets`, otherwise `subsets` random
    ones, the same for every problem. The first sample of a group is the first within the subset, as if only those k
    had been drawn.

    Example, 18 twice and 20 once, 18 being right; and the same if only two vote:
        majority_at_k([0, 1, 0], [True, False, True], 3) == 1.0
        majority_at_k([0, 1, 0], [True, False, True], 2) == (0.5 + 1 + 0.5) / 3
    """
    if len(votes) != len(correct):
        raise ConfigError(f"{len(votes)} votes and {len(correct)} grades: there must be one of each per sample.")
    if subsets < 1:
        raise ConfigError(f"subsets={subsets} must be at least 1.")
    _check_k(k, len(votes))
    groups = {vote: place for place, vote in enumerate(dict.fromkeys(vote for vote in votes if vote is not None))}
    if not groups:
        return 0.0
    chosen = _subsets(len(votes), k, subsets, seed)
    places = np.array([-1 if vote is None else groups[vote] for vote in votes])
    belongs = places[:, None] == np.arange(len(groups))
    counts = chosen @ belongs.astype(np.float32)
    right = _first_is_right(chosen, belongs, np.array(correct, dtype=bool))
    wins = (counts == counts.max(axis=1, keepdims=True)) & (counts > 0)
    scores = (wins & right).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)
    return float(scores.mean())


@lru_cache(maxsize=64)
def _subsets(n: int, k: int, most: int, seed: int) -> NDArray[np.float32]:
    """Subsets of k of n samples: one row per subset, with a 1 for each sample in it."""
    if math.comb(n, k) <= most:
        picks = np.array(list(combinations(range(n), k)))
    else:
        picks = np.random.default_rng([seed, n, k]).random((most, n)).argsort(axis=1)[:, :k]
    rows = np.zeros((len(picks), n), dtype=np.float32)
    np.put_along_axis(rows, picks, 1.0, axis=1)
    rows.setflags(write=False)  # the cached array is shared by all problems
    return rows


def _first_is_right(
    chosen: NDArray[np.float32], belongs: NDArray[np.bool_], correct: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """For each subset and group, whether the group's first sample in the subset is right."""
    right, size = (belongs & correct[:, None]).sum(axis=0), belongs.sum(axis=0)
    if np.all((right == 0) | (right == size)):  # the common case, and cheaper
        return np.broadcast_to(right > 0, (len(chosen), len(size)))
    first = (chosen[:, :, None] * belongs[None]).argmax(axis=1)
    return np.asarray(correct[first], dtype=bool)


# ---- two models on the same problems


def mcnemar(b: int, c: int) -> float:
    """McNemar's exact two-sided p-value: b problems are solved only by the first model, c only by the second.

    If the models are equally good, each of the b + c problems is a fair coin toss. Problems that both models solve, or
    both fail, carry no information.

    Example, 1 against 5:
        mcnemar(1, 5) == 2 * (1 + 6) / 64
    """
    if b < 0 or c < 0:
        raise ConfigError(f"mcnemar({b}, {c}): counts must be at least 0.")
    total = b + c
    term, tail = 1, 0
    for i in range(min(b, c) + 1):
        tail += term
        term = term * (total - i) // (i + 1)
    return min(1.0, 2 * tail / (1 << total))


class Estimate(NamedTuple):
    """A mean with its interval, and the p-value of the hypothesis that it is 0."""

    mean: float
    low: float
    high: float
    p_value: float
    draws: int
    seed: int


def paired_bootstrap(
    differences: Sequence[float], draws: int = DRAWS, seed: int = SEED, confidence: float = CONFIDENCE
) -> Estimate:
    """The mean of the per-problem differences, its percentile interval and a two-sided p-value.

    A difference is one problem's score with the second model minus its score with the first: right or wrong, a mean
    over samples (avg@k) or over training seeds, pass@k, a vote. Problems are drawn with replacement; their order does
    not matter. The p-value is twice the fraction of draws at 0 or on its other side; the smallest is 2 / (draws + 1).

    Example:
        paired_bootstrap([1.0, 0.0, 0.0, 1.0, 0.0, -1.0]).mean == 1 / 6
    """
    means = _resampled_means(differences, draws, seed)
    low, high = _percentiles(means, confidence)
    beyond = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p_value = min(1.0, 2 * (1 + beyond) / (draws + 1))
    return Estimate(math.fsum(differences) / len(differences), low, high, p_value, draws, seed)


def bootstrap(
    scores: Sequence[float], draws: int = DRAWS, seed: int = SEED, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The percentile interval of the mean of per-problem scores. If all scores are equal, its width is 0.

    Example:
        low, high = bootstrap([0.25, 1.0, 0.5, 0.0])
    """
    return _percentiles(_resampled_means(scores, draws, seed), confidence)


def _percentiles(means: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    _check_confidence(confidence)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _resampled_means(scores: Sequence[float], draws: int, seed: int) -> NDArray[np.float64]:
    """The means of `draws` bootstrap resamples of the scores.

    Scores have few distinct values (0 and 1, or eighths), so the count of each value is drawn from a multinomial
    instead of drawing each problem: the same distribution, much faster.
    """
    if draws < 1:
        raise ConfigError(f"draws={draws} must be at least 1.")
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ConfigError("A bootstrap needs one finite score for each of at least one problem.")
    values, counts = np.unique(array, return_counts=True)
    generator, step = np.random.default_rng(seed), max(1, _AT_ONCE // len(values))
    means = [
        generator.multinomial(array.size, counts / array.size, size=min(step, draws - start)) @ values / array.size
        for start in range(0, draws, step)
    ]
    # Fractions such as 1/3 do not cancel exactly, but a mean of 0 must be exactly 0 to be counted on both sides.
    return np.asarray(np.round(np.concatenate(means), 12) + 0.0, dtype=np.float64)  # + 0: no −0


# ---- checks


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ConfigError(f"k={k} must be at least 1 and at most the {n} samples there are; draw more, or lower k.")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} must be above 0 and below 1, such as 0.95.")
