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
    bootstrap,
    majority_at_k,
    mcnemar,
    paired_bootstrap,
    pass_at_k,
    wilson,
)

# ---- Wilson


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),
        (0, 10, 0.0, 0.277533),  # z² / (n + z²), with z = 1.959964
        (10, 10, 0.722467, 1.0),
        (1, 2, 0.094531, 0.905469),
        (1164, 1319, 0.863987, 0.898765),  # by bisection of (p − 1164/1319)² = z² p (1 − p) / 1319
    ],
)
def test_wilson(correct, total, low, high):
    assert wilson(correct, total) == pytest.approx((low, high), abs=1e-6)


@given(st.integers(1, 6000), st.data())
def test_the_ends_of_a_wilson_interval_are_where_the_normal_test_just_rejects(total, data):
    correct = data.draw(st.integers(0, total))
    confidence = data.draw(st.sampled_from([0.5, 0.9, 0.95, 0.99]))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = wilson(correct, total, confidence)
    assert 0 <= low <= correct / total <= high <= 1
    for end in (low, high):
        if end not in (0.0, 1.0):
            distance = abs(correct / total - end)
            assert distance == pytest.approx(z * math.sqrt(end * (1 - end) / total), rel=1e-6)


def test_wilson_covers_95_percent():
    total, chance, covered = 40, 0.3, 0.0
    for correct in range(total + 1):
        low, high = wilson(correct, total)
        if low <= chance <= high:
            covered += math.comb(total, correct) * chance**correct * (1 - chance) ** (total - correct)
    assert 0.93 < covered < 0.97


@pytest.mark.parametrize(("correct", "total"), [(0, 0), (-1, 3), (4, 3)])
def test_wilson_refuses_impossible_counts(correct, total):
    with pytest.raises(ConfigError, match="correct must be from 0 to total"):
        wilson(correct, total)


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_a_confidence_is_between_0_and_1(confidence):
    for call in (
        lambda: wilson(1, 2, confidence),
        lambda: bootstrap([0.0, 1.0], confidence=confidence),
        lambda: paired_bootstrap([0.0, 1.0], confidence=confidence),
    ):
        with pytest.raises(ConfigError, match=f"confidence={confidence}"):
            call()


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


# ---- bootstrap


def all_means(differences):
    """The mean of every way to draw with replacement."""
    return np.array([sum(map(Fraction, draw)) / len(draw) for draw in product(differences, repeat=len(differences))])


@pytest.mark.parametrize(
    "differences", [[1.0, 1.0, 0.0, 0.0, -1.0], [0.5, 0.25, -0.25, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
)
def test_a_bootstrap_against_every_resample(differences):
    means = all_means(differences)
    exact_p = min(1.0, 2 * min(float(np.mean(means <= 0)), float(np.mean(means >= 0))))
    low, high = np.quantile(means.astype(float), [0.1, 0.9])
    estimate = paired_bootstrap(differences, draws=50_000, confidence=0.8)
    assert estimate.mean == pytest.approx(sum(differences) / len(differences))
    assert estimate.p_value == pytest.approx(exact_p, abs=0.01)
    assert estimate.low == pytest.approx(low, abs=0.02)
    assert estimate.high == pytest.approx(high, abs=0.02)


def test_a_bootstrap_against_drawing_problems_one_by_one():
    generator = np.random.default_rng(5)
    scores = generator.integers(0, 9, size=300) / 8
    drawn = scores[generator.integers(0, 300, size=(10_000, 300))].mean(axis=1)
    assert bootstrap(scores.tolist()) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.003)


def test_a_bootstrap_is_near_the_normal_interval():
    scores = [1.0] * 700 + [0.0] * 300
    width = NormalDist().inv_cdf(0.975) * math.sqrt(0.7 * 0.3 / 1000)
    assert bootstrap(scores) == pytest.approx((0.7 - width, 0.7 + width), abs=0.002)


def test_a_bootstrap_does_not_depend_on_the_order_of_problems():
    generator = np.random.default_rng(2)
    differences = (generator.integers(0, 9, size=200) / 8 - generator.integers(0, 9, size=200) / 8).tolist()
    assert paired_bootstrap(differences) == paired_bootstrap(sorted(differences))


def test_a_bootstrap_in_several_pieces_is_the_same(monkeypatch):
    differences = [0.1 * i - 0.7 for i in range(20)]
    whole = paired_bootstrap(differences, draws=1000)
    monkeypatch.setattr("gruppo.evaluation.statistics._AT_ONCE", 70)
    assert paired_bootstrap(differences, draws=1000) == whole


def test_a_bootstrap_says_its_seed():
    differences = [1.0, 0.0, 0.0, -1.0, 1.0, 0.5]
    estimate = paired_bootstrap(differences, draws=500, seed=3)
    assert (estimate.draws, estimate.seed) == (500, 3)
    assert estimate == paired_bootstrap(differences, draws=500, seed=3)
    assert estimate != paired_bootstrap(differences, draws=500, seed=4)._replace(seed=3)


def test_equal_models_have_no_difference():
    estimate = paired_bootstrap([0.0] * 50)
    assert estimate[:4] == (0.0, 0.0, 0.0, 1.0)
    assert str(estimate.low) == "0.0", "and not −0"


def test_thirds_that_cancel_are_zero():
    """Means of three seeds: 0.1 + 0.2 − 0.3 is not 0 in floats, and must be for the p-value."""
    estimate = paired_bootstrap([0.1, 0.2, -0.3])
    means = all_means([Fraction(1, 10), Fraction(2, 10), Fraction(-3, 10)])
    exact = 2 * min(float(np.mean(means <= 0)), float(np.mean(means >= 0)))
    assert estimate.p_value == pytest.approx(min(1.0, exact), abs=0.03)


def test_the_smallest_p_value():
    assert paired_bootstrap([1.0] * 20, draws=999).p_value == 2 / 1000


def test_the_interval_and_the_p_value_agree():
    generator = np.random.default_rng(0)
    for _ in range(30):
        estimate = paired_bootstrap(
            generator.choice([-1.0, 0.0, 1.0], size=100, p=[0.15, 0.6, 0.25]).tolist(), draws=2000
        )
        if not 0.04 < estimate.p_value < 0.06:
            assert (estimate.low > 0 or estimate.high < 0) == (estimate.p_value < 0.05)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=40))
def test_an_interval_is_within_the_scores(scores):
    low, high = bootstrap(scores, draws=200)
    assert min(scores) <= low <= high <= max(scores)


@pytest.mark.parametrize("scores", [[], [float("nan")], [0.0, float("inf")], [[0.0], [1.0]]])
def test_scores_that_cannot_be_resampled(scores):
    with pytest.raises(ConfigError, match="finite score"):
        bootstrap(scores)


def test_no_draws_are_refused():
    with pytest.raises(ConfigError, match="draws=0"):
        paired_bootstrap([1.0], draws=0)
