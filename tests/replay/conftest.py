"""Runs that several tests look at, trained once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.replay.worlds import RUNS, trained

Recorded = Callable[[str], Path]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The folder of a run of `RUNS`."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("recorded") / "run"
            trained(folders[name], **RUNS[name])
        return folders[name]

    return folder
