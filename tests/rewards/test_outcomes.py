"""What a reward function may return, and what becomes of it."""

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from gruppo.errors import RewardError
from gruppo.rewards.calling import Log, Reply, count, join, lost, sample
from gruppo.rewards.outcomes import ABSTAINED, Kind, Outcome, clip, read_output, shorten

LENGTHS = [5, 3]  # tokens of two completions


def values(output: Any) -> list[float]:
    return [outcome.value for outcome in read_output(output, "f", LENGTHS)]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([1, 0.5], [1.0, 0.5]),
        ((True, False), [1.0, 0.0]),
        ([None, 2], [math.nan, 2.0]),
        (np.array([1.5, 2.5], dtype=np.float32), [1.5, 2.5]),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        ([torch.tensor(3.0), np.float64(4)], [3.0, 4.0]),
        ([Fraction(1, 2), -0.0], [0.5, 0.0]),
        ((x for x in (1, 2)), [1.0, 2.0]),
        ([1e15, -1e15], [1e15, -1e15]),
        ([[(0, 1.0), (4, 0.5)], 2], [1.5, 2.0]),
        ([[], ((np.int64(2), 1),)], [0.0, 1.0]),
    ],
)
def test_numbers_of_every_kind(output, expected):
    assert values(output) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([1.0], "'f' returned 1 rewards for 2 completions"),
        ([], "'f' returned 0 rewards for 2 completions"),
        (1.0, "'f' returned float; it must return a list"),
        (None, "'f' returned NoneType"),
        (torch.tensor(1.0), "'f' returned Tensor"),
        ("12", "'f' returned str"),
        (b"12", "'f' returned bytes"),
        ({0: 1.0, 1: 2.0}, "'f' returned dict"),
        ({1.0, 2.0}, "'f' returned set"),
        ([1.0, "2"], "'f' returned '2' for completion 1"),
        ([1.0, b"2"], "'f' returned b'2' for completion 1"),
        ([1.0, {}], "'f' returned {} for completion 1"),
        ([1.0, [2.0]], r"'f' returned \[2.0\] for completion 1"),
        ([1.0, (1, 2)], r"'f' returned \(1, 2\) for completion 1"),
        ([1.0, [(0.5, 2.0)]], r"'f' returned \[\(0.5, 2.0\)\] for completion 1"),
        ([1.0, [(0, "2")]], "'f' returned '2' for completion 1"),
        ([1.0, 1j], "'f' returned 1j for completion 1"),
        ([torch.ones(2), 1.0], "for completion 0"),
        ([[(5, 1.0)], 1.0], "a step that ends at token 5 for completion 0, which has 5 tokens"),
        ([[(-1, 1.0)], 1.0], "a step that ends at token -1"),
        ([[(2, 1.0), (2, 1.0)], 1.0], "a step that ends at token 2 .* increase"),
    ],
)
def test_a_broken_contract_is_an_error_that_names_the_function(output, message):
    with pytest.raises(RewardError, match=message):
        read_output(output, "f", LENGTHS)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        1.1e15,
        -3e38,
        10**400,
        [(0, math.nan)],
        [(0, 1e15), (1, 1e15)],
        torch.tensor(math.nan),
    ],
)
def test_a_number_that_is_not_finite_or_too_large_fails_its_completion(value):
    outcomes = read_output([1.0, value], "f", LENGTHS, first=6)
    assert [outcome.kind for outcome in outcomes] == [Kind.SCORE, Kind.FAILURE]
    assert "'f' returned" in outcomes[1].error
    assert "for completion 7; rewards are finite numbers of at most 1e+15 in magnitude, or None" in outcomes[1].error


def test_what_a_generator_raises_is_its_own():
    def generator() -> Any:
        yield 1.0
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        read_output(generator(), "f", LENGTHS)


def test_kinds():
    assert [kind.failed for kind in Kind] == [False, False, True, True]
    assert read_output([None, 1], "f", LENGTHS) == [ABSTAINED, Outcome(Kind.SCORE, 1.0)]
    step = Outcome(Kind.SCORE, 1.0, [(0, 1.0)])
    assert pickle.loads(pickle.dumps(step, protocol=5)) == step


def test_arguments_of_one_sample():
    arguments = {"completions": ["a", "b"], "answer": [1, 2], "limits": [1, 2, 3], "pair": (1, 2), "state": "xy"}
    assert count(arguments) == 2
    assert sample(arguments, 1) == {
        "completions": ["b"],
        "answer": [2],
        "limits": [1, 2, 3],
        "pair": (1, 2),
        "state": "xy",
    }


def test_replies_to_samples_are_joined():
    one = Reply([Outcome(Kind.SCORE, 1.0)], Log(1, {"a": ["x"]}, [("m", 1.0)]))
    two = Reply([ABSTAINED], Log(1, {"b": ["y"]}, [("m", 2.0)]))
    joined = join([one, lost(Kind.TIMEOUT, "late", 1), two])
    assert [outcome.kind for outcome in joined.outcomes] == [Kind.SCORE, Kind.TIMEOUT, Kind.ABSTAIN]
    assert joined.log.columns == {"a": ["x", None, None], "b": [None, None, "y"]}
    assert joined.log.metrics == [("m", 1.5)], "as if it had been one call"
    assert not joined.lost


def test_long_things_are_shown_in_part():
    assert shorten("abc") == "'abc'"
    assert len(shorten("x" * 10_000)) < 310
    assert clip("abc") == "abc"
    long = clip("a" * 50_000 + "b" * 50_000)
    assert (long[0], long[-1]) == ("a", "b")
    assert len(long) < 10_100
    assert len(lost(Kind.FAILURE, "x" * 10**6, 2).outcomes[0].error or "") < 10_100


def test_a_thing_whose_repr_raises_is_named():
    class Shy:
        def __repr__(self) -> str:
            raise ValueError

    assert shorten(Shy()) == "<Shy, whose repr raised ValueError>"
