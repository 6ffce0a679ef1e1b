"""Pure functions for result statistics: intervals, pass@k, majority votes and paired tests.

    mean_interval            the interval of a mean over problems: problems solved, avg@k, pass@k, maj@k
    pass_at_k                the unbiased estimate of the chance that one of k samples is right
    majority_at_k            the score of a majority vote among k samples
    mcnemar                  compares two models on the same problems, with one right-or-wrong attempt each
    paired_difference        the same for any per-problem scores, with the interval of the difference

Only majority votes among a subset of the samples are random. They use a fixed seed, so the same input gives the same
result.
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
    "SEED",
    "SUBSETS",
    "Estimate",
    "majority_at_k",
    "mcnemar",
    "mean_interval",
    "paired_difference",
    "pass_at_k",
]

CONFIDENCE = 0.95
POWER = 0.8  # of a comparison at the difference that it is said to find
# Problems added to a comparison. With three, six differences of one sign are significant at 95 % and five are not, as
# in the exact test.
EXTRA = 3
SUBSETS = 200  # subsets of k samples per problem over which a vote is averaged
SEED = 0


# ---- one model


def mean_interval(scores: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of the mean of scores from 0 to 1, one for each problem.

    With right or wrong it is the Agresti-Coull interval: a normal interval after z² more problems, half of them
    solved. So it has a width at 0 and at 1 too. Scores between 0 and 1 count as the number of right-or-wrong problems
    whose mean is as certain (`_size`). `benchmarks/intervals.py` measures how often it contains the true mean.

    Example, 8 of 10, and none of 20:
        mean_interval([1] * 8 + [0] * 2) == (0.4794, 0.9541)  # rounded
        mean_interval([0] * 20) == (0.0, 0.1898)
    """
    score_P, z = _finite(scores), _z(confidence)
    if score_P.min() < 0 or score_P.max() > 1:
        raise ConfigError("Scores are from 0 to 1.")
    n, mean = len(score_P), math.fsum(score_P) / len(score_P)
    most = mean * (1 - mean)
    centre = (n * mean + z * z / 2) / (n + z * z)
    n_eff = _size(n, float(score_P.var()), most, 4 * n * centre * (1 - centre), z)
    centre = (n_eff * mean + z * z / 2) / (n_eff + z * z)
    margin = z * math.sqrt(centre * (1 - centre) / (n_eff + z * z))
    return max(0.0, min(mean, centre - margin)), min(1.0, max(mean, centre + margin))


def _size(n: int, variance: float, most: float, informative: float, z: float) -> float:
    """The number of all-or-nothing problems whose mean is as certain as that of n problems with this variance.

    `most` is the variance that all-or-nothing problems with the same mean have. Where few problems are `informative`,
    because nearly all are solved, failed or without a difference, the variance found is likely too small: a rare
    problem that is always solved may be missing. There it counts as that of all-or-nothing problems.
    """
    if most <= 0:
        return n
    variance = min(most, variance * n / max(n - 1, 1))  # without bias
    doubt = min(1.0, (z * z / informative) ** 2)
    return n * most / (variance + doubt * (most - variance))


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
    """A mean difference with its interval, and the p-value of the hypothesis that it is 0."""

    mean: float
    low: float
    high: float
    p_value: float
    detectable: float  # a true difference that a comparison like this one finds in four of five cases


def paired_difference(differences: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of the per-problem differences with its interval and a two-sided p-value.

    A difference is one problem's score with the second model minus its score with the first: right or wrong, a mean
    over samples (avg@k) or over training seeds, pass@k, a vote. The interval is normal after three more problems,
    which count half for either model; so it has a width if no problem differs. It excludes 0 where the p-value is
    below 1 − confidence. Scores between 0 and 1 count as in `mean_interval`.

    Example, no difference at 20 problems:
        paired_difference([0] * 20) == (0.0, -0.1476, 0.1476, 1.0, 0.211)  # rounded
    """
    difference_P, z = _finite(differences), _z(confidence)
    amount_P = np.abs(difference_P)
    if amount_P.max() > 1:
        raise ConfigError("Differences of scores are from -1 to 1.")
    n = len(difference_P)
    mean, amount = math.fsum(difference_P) / n, math.fsum(amount_P) / n
    squares = float((difference_P**2).sum())
    differing = (n * amount) ** 2 / squares if squares else 0.0  # small differences beside large ones do not count
    n_eff = _size(n, float(difference_P.var()), amount - mean * mean, differing + EXTRA, z)
    total = n_eff + EXTRA
    centre = n_eff * mean / total
    error = math.sqrt(((n_eff * amount + EXTRA) / total - centre * centre) / total)
    p_value = math.erfc(abs(centre) / error / math.sqrt(2))
    low, high = max(-1.0, centre - z * error), min(1.0, centre + z * error)
    return Estimate(mean, low, high, p_value, (z + NormalDist().inv_cdf(POWER)) * error)


# ---- checks


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ConfigError(f"k={k} must be at least 1 and at most the {n} samples there are; draw more, or lower k.")


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} must be above 0 and below 1, such as 0.95.")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _finite(scores: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ConfigError("An interval needs one finite score for each of at least one problem.")
    return array
