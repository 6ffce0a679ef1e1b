"""A run that is killed and resumed is the run that was never killed, byte for byte."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.resume.cases import CASES
from tests.resume.harness import Outcome, assert_same, killed_and_resumed
from tests.resume.moments import MOMENTS, Stop

Straight = Callable[[str], Outcome]


def drawn_stop(case: str, seed: int, straight: Outcome) -> Stop:
    """A moment that the run reaches, and which time, at random."""
    draw = random.Random(f"{case}/{seed}")
    places = {
        (moment, rank): [i for i, update in enumerate(updates, 1) if update >= CASES[case].after]
        for rank, reached in straight.reached.items()
        for moment, updates in reached.items()
    }
    moment, rank = draw.choice(sorted(place for place, counts in places.items() if counts))
    return Stop(moment, draw.choice(places[moment, rank]), rank=rank)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"seed{seed}", marks=pytest.mark.slow if seed else pytest.mark.medium)
        for seed in range(21)
    ],
)
def test_killed_and_resumed(case: str, seed: int, straight: Straight, tmp_path: Path) -> None:
    stop = drawn_stop(case, seed, straight(case))
    print(stop)
    assert_same(straight(case), killed_and_resumed(case, tmp_path, stop))


@pytest.mark.medium
@pytest.mark.parametrize("case", ["grpo", "second-epoch"])
def test_killed_after_the_last_update(case: str, straight: Straight, tmp_path: Path) -> None:
    """While the checkpoint before the last two is removed: nothing is left to do but to say so."""
    last = len(straight(case).reached[0]["rotating"])
    assert_same(straight(case), killed_and_resumed(case, tmp_path, Stop("rotating", last)))


@pytest.mark.sampled(2)
@pytest.mark.medium
@pytest.mark.parametrize("case", CASES)
def test_every_moment_is_reached(case: str, straight: Straight) -> None:
    """A moment that is never seen is one at which nothing is ever killed."""
    reached = straight(case).reached
    assert set(reached[0]) == set(MOMENTS)
    assert all({"rollout", "scoring", "backward", "optimizer"} <= set(moments) for moments in reached.values())
