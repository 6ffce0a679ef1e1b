from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.demo import model, write_problems


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems of the demo in a data folder: all of them, and a few."""
    folder = write_problems(tmp_path_factory.mktemp("data"))
    few = (folder / "demo.jsonl").read_text().splitlines(keepends=True)[:8]
    (folder / "few.jsonl").write_text("".join(few))
    return folder


@pytest.fixture(scope="package")
def demo() -> Any:
    return model()
