"""Statistics against exact fractions, full enumeration and numbers worked by hand."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.errors import ConfigError
from gruppo.evaluation.statistics import (
    majority_at_k,
    mcnemar,
    mean_interval,
    paired_difference,
    pass_at_k,
)

# ---- the interval of a mean


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        (8, 10, 0.479368, 0.954113),  # Agresti-Coull: p̃ = (8 + z²/2) / (10 + z²), p̃ ± z sqrt(p̃ (1 − p̃) / (10 + z²))
        (0, 20, 0.0, 0.189810),
        (20, 20, 0.810190, 1.0),
        (1, 2, 0.094531, 0.905469),
        (1164, 1319, 0.863951, 0.898801),
    ],
)
def test_right_and_wrong(correct, total, low, high):
    assert mean_interval([1.0] * correct + [0.0] * (total - correct)) == pytest.approx((low, high), abs=1e-6)


CHANCES = (0.0, 0.005, 0.02, 0.1, 0.5, 0.98, 1.0)


@pytest.mark.parametrize("problems", [20, 100, 1000])
def test_the_interval_of_right_and_wrong_covers(problems):
    """Summed over all outcomes. Wilson's interval, for one, has 0.905 for 20 problems at 0.005."""
    intervals = [mean_interval([1.0] * right + [0.0] * (problems - right)) for right in range(problems + 1)]
    for chance in CHANCES:
        covered = sum(
            math.comb(problems, right) * chance**right * (1 - chance) ** (problems - right)
            for right, (low, high) in enumerate(intervals)
            if low <= chance <= high
        )
        assert covered >= 0.94, chance


def simulated(chance, problems, samples, correlation, repeats, seed=0):
    """Rows of scores; the chance of a right sample differs from problem to problem."""
    generator, spread = np.random.default_rng(seed), (1 - correlation) / correlation
    shape = (repeats, problems)
    chances = (
        np.full(shape, chance) if chance in (0, 1) else generator.beta(chance * spread, (1 - chance) * spread, shape)
    )
    return generator.binomial(samples, chances) / samples


@pytest.mark.parametrize("problems", [20, 100])
@pytest.mark.parametrize(("samples", "correlation"), [(2, 0.5), (8, 0.2), (8, 0.7)])
@pytest.mark.parametrize("chance", CHANCES)
def test_the_interval_of_several_samples_covers(chance, samples, correlation, problems):
    """A bootstrap over problems covers 0.005 in a quarter of such evaluations, or less."""
    rows = simulated(chance, problems, samples, correlation, repeats=600)
    found = [mean_interval(row) for row in rows.tolist()]
    assert np.mean([low <= chance <= high for low, high in found]) >= 0.925  # 0.94, but for the noise of 600
    if chance == 0.5:
        normal = 2 * 1.96 * rows.std(axis=1) / math.sqrt(problems)
        assert np.mean([high - low for low, high in found]) < 1.06 * normal.mean()


def test_equal_scores_say_something_too():
    assert mean_interval([0.0] * 20)[1] > 0.15
    low, high = mean_interval([0.5] * 20)
    assert 0.02 < 0.5 - low == pytest.approx(high - 0.5)


def test_more_certain_scores_have_a_smaller_interval():
    halves = [0.0] * 50 + [1.0] * 50, [0.25] * 50 + [0.75] * 50
    wide, small = (high - low for low, high in map(mean_interval, halves))
    assert small == pytest.approx(wide / 2, rel=0.03)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=40))
def test_an_interval_contains_the_mean_and_stays_within_0_and_1(scores):
    low, high = mean_interval(scores)
    assert 0 <= low <= sum(scores) / len(scores) <= high <= 1
    assert mean_interval([1 - score for score in scores]) == pytest.approx((1 - high, 1 - low), abs=1e-9)


@pytest.mark.parametrize("scores", [[], [float("nan")], [0.0, float("inf")], [[0.0], [1.0]]])
def test_scores_that_have_no_interval(scores):
    for interval in (mean_interval, paired_difference):
        with pytest.raises(ConfigError, match="finite score"):
            interval(scores)


def test_scores_out_of_range():
    with pytest.raises(ConfigError, match="from 0 to 1"):
        mean_interval([1.5])
    with pytest.raises(ConfigError, match="from -1 to 1"):
        paired_difference([-1.5])


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_a_confidence_is_between_0_and_1(confidence):
    for interval in (mean_interval, paired_difference):
        with pytest.raises(ConfigError, match=f"confidence={confidence}"):
            interval([0.0, 1.0], confidence=confidence)


# ---- pass@k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 2, 2, 5 / 6),
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (10, 3, 1, 0.3),
        (10, 3, 8, 1.0),
        (1, 1, 1, 1.0),
        (5, 1, 2, 0.4),
    ],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations(range(n), k))
    assert pass_at_k(n, c, k) == float(Fraction(sum(min(subset) < c for subset in subsets), len(subsets)))


@given(st.integers(1, 500), st.data())
def test_pass_at_k_is_the_product_of_the_protocol(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    expected = 1 - math.prod(1 - Fraction(k, i) for i in range(n - c + 1, n + 1)) if n - c >= k else 1
    assert pass_at_k(n, c, k) == float(expected)


def test_pass_at_k_is_without_bias():
    """Averaged over what n samples of a problem may be, it is the chance of k samples; the plug-in estimate is not."""
    n, k, chance = 6, 3, 0.2

    def expectation(estimate):
        return sum(math.comb(n, c) * chance**c * (1 - chance) ** (n - c) * estimate(c) for c in range(n + 1))

    truth = 1 - (1 - chance) ** k
    assert expectation(lambda c: pass_at_k(n, c, k)) == pytest.approx(truth, abs=1e-12)
    assert abs(expectation(lambda c: 1 - (1 - c / n) ** k) - truth) > 0.02


def test_pass_at_k_of_many_samples_keeps_small_values():
    assert pass_at_k(10**6, 1, 1) == 1e-6
    assert pass_at_k(5000, 1, 2500) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ConfigError):
        pass_at_k(n, c, k)


# ---- majority votes

T, F = True, False


@pytest.mark.parametrize(
    ("votes", "correct", "expected"),
    [
        ([0, 1, 0], [T, F, T], 1.0),
        ([0, 1, 1], [T, F, F], 0.0),
        ([0, 1], [T, F], 0.5),  # a tie: one of two groups is right
        ([0, 0, 1, 1, 2, 2], [F, F, T, T, F, F], 1 / 3),
        ([0, 1, 2, 2], [T, F, F, F], 0.0),  # only the largest groups count
        ([None, None, 0], [F, F, T], 1.0),  # two without an answer do not outvote one
        ([None, None], [F, F], 0.0),
        ([0, 1, 0], [T, F, F], 1.0),  # equal answers, unequal grades: the first speaks for its group
        ([0, 1, 0], [F, F, T], 0.0),
        ([7], [T], 1.0),
    ],
)
def test_a_vote_among_all_samples(votes, correct, expected):
    assert majority_at_k(votes, correct, len(votes)) == pytest.approx(expected)


def vote(votes, correct):
    """One election, step by step."""
    counts = Counter(each for each in votes if each is not None)
    if not counts:
        return Fraction(0)
    tied = [group for group in counts if counts[group] == max(counts.values())]
    return Fraction(sum(correct[votes.index(group)] for group in tied), len(tied))


def mean_vote(votes, correct, k):
    scores = [
        vote([votes[i] for i in subset], [correct[i] for i in subset]) for subset in combinations(range(len(votes)), k)
    ]
    return sum(scores) / len(scores)


ELECTIONS = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2, 5]), st.booleans()), min_size=1, max_size=8)


@given(ELECTIONS, st.data())
def test_a_vote_among_some_is_the_mean_over_all_subsets(samples, data):
    votes, correct = [each[0] for each in samples], [each[1] for each in samples]
    k = data.draw(st.integers(1, len(samples)))  # C(8, 4) is 70: all subsets are taken
    assert majority_at_k(votes, correct, k) == pytest.approx(float(mean_vote(votes, correct, k)), abs=1e-12)


@pytest.mark.parametrize("unequal_grades", [False, True])
def test_many_subsets_are_drawn_and_come_near_the_mean_over_all(unequal_grades):
    generator = np.random.default_rng(1)
    errors, drawn = [], []
    for _ in range(60):
        votes = generator.integers(0, 3, size=12).tolist()
        correct = [each == 0 for each in votes] if not unequal_grades else (generator.random(12) < 0.4).tolist()
        drawn.append(majority_at_k(votes, correct, 6))  # 924 subsets
        errors.append(drawn[-1] - float(mean_vote(votes, correct, 6)))
    assert 0 < np.abs(errors).max() < 0.15  # a standard error is at most 0.5 / √200 = 0.035
    assert abs(np.mean(errors)) < 0.01
    assert np.std(drawn) > 0.1


def test_drawn_subsets_are_fixed_by_the_seed():
    votes, correct = [0, 1, 2, 0, 1, 0, 3, 1, 0, 2, 1, 0], [T, F, F, T, F, T, F, F, T, F, F, T]
    assert majority_at_k(votes, correct, 6) == majority_at_k(votes, correct, 6, seed=0, subsets=200)
    assert len({majority_at_k(votes, correct, 6, seed=seed) for seed in range(5)}) > 1
    exact = majority_at_k(votes, correct, 6, subsets=924)
    assert exact == pytest.approx(float(mean_vote(votes, correct, 6)))


def test_drawn_subsets_have_the_right_size_and_treat_samples_alike():
    """One right sample among twelve different answers wins its share of ties: in 6 / 12 of subsets, one of six."""
    scores = [majority_at_k(list(range(12)), [i == place for i in range(12)], 6) for place in range(12)]
    assert sum(scores) == pytest.approx(1.0)
    assert all(abs(score - 1 / 12) < 0.03 for score in scores)


@pytest.mark.parametrize(
    ("votes", "correct", "k", "message"),
    [([0], [T, F], 1, "1 votes and 2 grades"), ([0], [T], 2, "k=2"), ([0], [T], 0, "k=0"), ([], [], 1, "k=1")],
)
def test_votes_that_cannot_be_counted(votes, correct, k, message):
    with pytest.raises(ConfigError, match=message):
        majority_at_k(votes, correct, k)


def test_no_subsets_are_refused():
    with pytest.raises(ConfigError, match="subsets=0"):
        majority_at_k([0, 0], [T, T], 1, subsets=0)


# ---- McNemar


@pytest.mark.parametrize(
    ("b", "c", "expected"),
    [(0, 0, 1.0), (0, 5, 2 / 32), (0, 6, 2 / 64), (1, 5, 14 / 64), (3, 3, 1.0), (10, 2, 2 * (1 + 12 + 66) / 4096)],
)
def test_mcnemar(b, c, expected):
    assert mcnemar(b, c) == mcnemar(c, b) == expected


@given(st.integers(0, 7), st.integers(0, 7))
def test_mcnemar_counts_the_coins_that_fall_at_least_as_unevenly(b, c):
    throws = [sum(coins) for coins in product((0, 1), repeat=b + c)]
    extreme = sum(abs(2 * heads - (b + c)) >= abs(b - c) for heads in throws)
    assert mcnemar(b, c) == float(Fraction(extreme, len(throws)))


def test_mcnemar_of_thousands():
    """Near the normal approximation with a correction for continuity: z = (300 − 1) / √5300."""
    z = (300 - 1) / math.sqrt(5300)
    assert mcnemar(2500, 2800) == pytest.approx(2 * (1 - NormalDist().cdf(z)), rel=0.01)
    assert mcnemar(0, 5000) == 0.0


def test_mcnemar_refuses_negative_counts():
    with pytest.raises(ConfigError, match="at least 0"):
        mcnemar(-1, 2)


# ---- the difference of two models


def test_a_difference_by_hand():
    """10 problems better, 2 worse, 28 alike, and three more, half better and half worse."""
    found, z = paired_difference([1.0] * 10 + [-1.0] * 2 + [0.0] * 28), NormalDist().inv_cdf(0.975)
    centre, error = 8 / 43, math.sqrt((15 / 43 - (8 / 43) ** 2) / 43)
    assert found.mean == 0.2
    assert (found.low, found.high) == pytest.approx((centre - z * error, centre + z * error))
    assert found.p_value == pytest.approx(2 * (1 - NormalDist().cdf(centre / error)))
    assert found.detectable == pytest.approx((z + NormalDist().inv_cdf(0.8)) * error)


def test_many_differences_have_the_normal_interval():
    generator = np.random.default_rng(2)
    differences = (generator.integers(0, 9, size=2000) - generator.integers(0, 9, size=2000)) / 8
    found = paired_difference(differences.tolist())
    margin = 1.96 * differences.std() / math.sqrt(2000)
    assert found.high - found.mean == pytest.approx(margin, rel=0.02)
    assert found == pytest.approx(paired_difference(sorted(differences.tolist())), rel=1e-9), "in any order"


def test_equal_models_may_still_differ():
    found = paired_difference([0.0] * 20)
    assert (found.mean, found.p_value) == (0.0, 1.0)
    assert -found.low == found.high == pytest.approx(0.1476, abs=1e-4)
    assert paired_difference([0.0] * 2000).high < 0.002
    assert paired_difference([0.5] * 20).low > 0


@given(st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=40))
def test_the_interval_and_the_p_value_agree(differences):
    found = paired_difference(differences)
    assert (found.low > 0 or found.high < 0) == (found.p_value < 0.05)
    assert found.low <= found.mean + 1e-12
    assert found.mean <= found.high + 1e-12


@pytest.mark.parametrize("problems", [20, 100])
@pytest.mark.parametrize(("samples", "correlation"), [(1, 0.7), (2, 0.5), (8, 0.5)])
@pytest.mark.parametrize(("chance", "shift"), [(0.0, 0.0), (0.005, 0.0), (0.02, 0.05), (0.5, 0.1), (0.98, 0.0)])
def test_the_interval_of_a_difference_covers(chance, shift, samples, correlation, problems):
    generator, spread = np.random.default_rng(1), (1 - correlation) / correlation
    shape = (600, problems)
    first = np.zeros(shape) if chance == 0 else generator.beta(chance * spread, (1 - chance) * spread, shape)
    second = np.where(generator.random(shape) < shift / (1 - chance), 1.0, first)
    differences = (generator.binomial(samples, second) - generator.binomial(samples, first)) / samples
    found = [paired_difference(row) for row in differences.tolist()]
    assert np.mean([one.low <= shift <= one.high for one in found]) >= 0.925  # 0.94, but for the noise of 600


def test_a_detectable_difference_is_detected():
    """In about four of five comparisons, if the truth is as large as one of them says."""
    generator = np.random.default_rng(3)
    draws = generator.choice([-1.0, 0.0, 1.0], size=(400, 300), p=[0.1, 0.7, 0.2])
    found = [paired_difference(row) for row in draws.tolist()]
    assert np.mean([one.detectable for one in found]) == pytest.approx(0.09, abs=0.01)
    larger = generator.choice([-1.0, 0.0, 1.0], size=(400, 300), p=[0.105, 0.7, 0.195])
    assert 0.7 < np.mean([paired_difference(row).low > 0 for row in larger.tolist()]) < 0.9
