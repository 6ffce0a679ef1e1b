"""Runs that several tests use, trained once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gruppo import GRPOTrainer
from tests.replay.worlds import OFF_POLICY, RUNS, trained
from tests.trainer.runs import run

Recorded = Callable[[str], Path]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A function that returns the folder of a run of `RUNS`, which is trained on the first call."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("recorded") / "run"
            trained(folders[name], **RUNS[name])
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates on one generation of a tiny model: 8 prompts, 2 groups of 4 in each update."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    run(folder, GRPOTrainer, beta=0.1, **OFF_POLICY)
    return folder
