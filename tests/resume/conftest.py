"""The uninterrupted runs, each made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.resume.harness import Outcome, run


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """straight("grpo") is the outcome of that configuration without a kill."""
    made: dict[str, Outcome] = {}

    def straight_run(case: str) -> Outcome:
        if case not in made:
            folder: Path = tmp_path_factory.mktemp(f"straight-{case}")
            made[case] = run(case, folder).checked()
        return made[case]

    return straight_run
