"""Paired comparisons: what is significant, what is not, and how it is said."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.compare import McNemar, check_same_problems, compare
from gruppo.evaluation.statistics import mcnemar
from gruppo.evaluation.types import Problem


def once(marks):
    """One attempt at each problem: 1 is right, 0 wrong."""
    return {f"p{i}": [mark == "1"] for i, mark in enumerate(marks)}


def test_one_attempt_each():
    first, second = "1" * 40 + "0" * 60, "1" * 37 + "0" * 3 + "1" * 15 + "0" * 45
    result = compare(once(first), once(second))
    assert result.accuracies == (0.40, 0.52)
    assert result.difference == pytest.approx(12.0)
    assert (result.problems, result.only_first, result.only_second, result.attempts) == (100, 0, 0, (100, 100))
    assert result.mcnemar == McNemar(3, 15, mcnemar(3, 15))
    assert result.differing == 18
    low, high = result.interval
    spread = 1.96 * 100 * np.sqrt((0.18 - 0.12**2) / 100)
    assert (low, high) == pytest.approx((12 - spread, 12 + spread), abs=1.1)
    assert result.significant is True


def test_the_order_gives_the_sign():
    first, second = once("1" * 40 + "0" * 60), once("1" * 60 + "0" * 40)
    forth, back = compare(first, second), compare(second, first)
    assert forth.difference == -back.difference == pytest.approx(20.0)
    assert forth.mcnemar == McNemar(0, 20, 2 / 2**20)
    assert back.mcnemar == McNemar(20, 0, 2 / 2**20)


def test_equal_results():
    result = compare(once("1010"), once("1010"))
    assert (result.difference, result.p_value, result.differing) == (0.0, 1.0, 0)
    assert result.interval[0] < -20
    assert result.interval[1] > 20
    assert result.mcnemar == McNemar(0, 0, 1.0)
    assert result.significant is False
    assert "There is no difference" in result.describe()


def test_differences_that_cancel_out():
    result = compare(once("1100"), once("1010"))
    assert (result.difference, result.differing) == (0.0, 2)
    assert "There is no difference in the mean" in result.describe()


def test_pairing_sees_what_two_intervals_hide():
    """On 400 problems 60 % and 64 %: their intervals overlap, but nearly every change is for the better."""
    result = compare(once("1" * 240 + "0" * 160), once("0" * 2 + "1" * 238 + "1" * 18 + "0" * 142))
    assert result.accuracies == (0.60, 0.64)
    assert result.significant is True


@pytest.mark.parametrize(("changes", "significant"), [(5, False), (6, True)])
def test_fewer_than_six_changes_prove_nothing(changes, significant):
    """As in the exact test, where p is 2 / 32 for five."""
    first, second = once("0" * 100), once("1" * changes + "0" * (100 - changes))
    result = compare(first, second)
    assert (result.interval[0] > 0) is significant
    assert result.significant is significant
    twice = compare(
        {problem: score * 2 for problem, score in first.items()},
        {problem: score * 2 for problem, score in second.items()},
    )
    assert twice.mcnemar is None
    assert twice.significant is significant
    assert ("at least 6 are needed to tell" in twice.describe()) is not significant


def test_the_exact_test_has_a_say_too():
    """8 against 1: p = 0.039; 7 against 1: 0.07. The interval agrees."""
    for wins, expected in ((8, True), (7, False)):
        result = compare(once("0" * wins + "1" + "0" * 91), once("1" * wins + "0" + "0" * 91))
        assert (result.interval[0] > 0) is expected
        assert result.significant is expected


def test_several_attempts_are_averaged():
    first = {"a": [1, 0, 0, 0], "b": [0, 0], "c": [1]}
    second = {"a": [1, 1], "b": [1, 0], "c": [1]}
    result = compare(first, second)
    assert result.accuracies == (pytest.approx((0.25 + 0 + 1) / 3), pytest.approx((1 + 0.5 + 1) / 3))
    assert result.attempts == (7, 5)
    assert result.mcnemar is None
    assert result.differing == 2


def test_scores_between_0_and_1():
    result = compare({"a": [0.5], "b": [0.25]}, {"a": [1.0], "b": [0.25]})
    assert result.difference == pytest.approx(25.0)
    assert result.mcnemar is None


def test_equal_shares_of_unequal_counts_do_not_differ():
    assert compare({"a": [1, 0, 0]}, {"a": [1, 1, 0, 0, 0, 0]}).differing == 0


def test_only_problems_that_both_have():
    first, second = once("1100"), {**once("10"), "other": [True]}
    result = compare(first, second)
    assert (result.problems, result.only_first, result.only_second) == (2, 2, 1)
    assert result.accuracies == (1.0, 0.5)
    text = result.describe()
    assert "Left out: 2 problems that only first has scores for." in text
    assert "Left out: 1 problem that only second has scores for." in text


def test_false_alarms_are_rare():
    generator = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        chances = generator.random(100)
        first, second = ({str(i): [bool(x)] for i, x in enumerate(generator.random(100) < chances)} for _ in range(2))
        found += compare(first, second).significant
    assert found <= 16  # 10 are expected at 95 % of a test that is not conservative


def test_a_real_difference_is_found():
    generator = np.random.default_rng(1)
    first = {str(i): (generator.random(8) < 0.4).tolist() for i in range(200)}
    second = {str(i): (generator.random(8) < 0.5).tolist() for i in range(200)}
    result = compare(first, second)
    assert result.significant is True
    assert result.interval[0] < 10 < result.interval[1]


def test_a_comparison_is_json():
    result = compare(once("1100"), once("1010"))
    plain = result.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["mcnemar"] == {"only_first": 1, "only_second": 1, "p_value": 1.0}
    assert plain["accuracies"] == [0.5, 0.5]
    assert compare({"a": [0.5]}, {"a": [1]}).to_dict()["mcnemar"] is None


def test_what_is_said():
    result = compare(once("1" * 40 + "0" * 60), once("1" * 25 + "0" * 75), names=("base", "tuned"))
    lines = result.describe().splitlines()
    assert lines[0] == "base: 40.0%. tuned: 25.0%. Both on 100 problems."
    assert lines[1].startswith("tuned is 15.00 points lower (95 % interval of the difference, paired by problem: -")
    assert lines[2] == "Right with base only: 15; with tuned only: 0 (McNemar's exact test, p = 6.1e-05)."
    assert lines[3] == "The difference is significant at 95 %."
    assert len(lines) == 4


def test_what_is_said_of_chance():
    result = compare(once("1" * 10 + "0" * 10), once("0" * 5 + "1" * 10 + "0" * 5))
    text = result.describe()
    assert "Not significant at 95 %: it may be chance." in text
    assert f"finds a difference of {result.detectable:.1f} points in four of five cases" in text
    assert 30 < result.detectable < 60


@pytest.mark.parametrize(("problems", "points"), [(20, 30.0), (1000, 0.6)])
def test_models_that_solve_nothing_could_differ(problems, points):
    """At least six problems must differ, so a comparison cannot find fewer."""
    result = compare(once("0" * problems), once("0" * problems))
    assert result.detectable == pytest.approx(points)
    assert result.interval == pytest.approx((-339.5 / (problems + 3), 339.5 / (problems + 3)), rel=1e-3)
    assert f"finds a difference of {points:.1f} points" in result.describe()


def test_too_few_problems_to_tell():
    assert "5 problems cannot show a difference" in compare(once("00000"), once("11111")).describe()


@pytest.mark.parametrize("second", [{}, {"q": [True]}])
def test_nothing_in_common(second):
    with pytest.raises(ConfigError, match=r"The 2 problems of base and the \d of tuned have no id in common"):
        compare(once("10"), second, names=("base", "tuned"))


@pytest.mark.parametrize("scores", [[], [1.5], [-0.1], [float("nan")]])
def test_scores_that_are_none(scores):
    with pytest.raises(DataError, match="'p0' has"):
        compare(once("10"), {"p0": scores})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": "2 * 7 = ?"}, r"b has '2 \* 7 = \?', answer '4'\."),
        ({"answers": ("5",)}, r"b has '2 \+ 2 = \?', answer '5'\."),
        ({"answers_mode": "any"}, r"b has '2 \+ 2 = \?', answer '4' \(any\)\."),
    ],
)
def test_one_id_for_two_problems_is_refused(change, said):
    first = {name: Problem(name, f"{name} + {name} = ?", (str(2 * int(name)),)) for name in "123"}
    check_same_problems(first, {"1": first["1"], "9": Problem("9", "?", ("1",))})
    second = first | {"2": replace(first["2"], **change)}
    message = r"1 of 3 problems with the same id differ\. The first is 2: "
    message += rf"a has '2 \+ 2 = \?', answer '4'; {said}"
    with pytest.raises(ConfigError, match=message):
        check_same_problems(first, second, names=("a", "b"))
