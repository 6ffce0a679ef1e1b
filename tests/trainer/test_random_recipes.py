"""A few of the runs of benchmarks/random_recipes.py: random recipes compared with float64, row by row."""

import pytest

from benchmarks.random_recipes import LIMIT, MODELS, run


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(10_000, 10_032))
def test_the_update_is_that_of_the_formulas(seed: int) -> None:
    found = run(seed, list(MODELS))
    assert found["apart"] <= LIMIT[found["dtype"]]
