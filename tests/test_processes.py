"""Processes that work together: they know their places, and a failure of one ends all and can be read."""

import os
import time
from pathlib import Path

import pytest
import torch

from tests.processes import run_together

RANK = int(os.environ.get("RANK", "0"))


def main(folder: Path) -> None:
    if (folder / "fail").exists() and RANK == 1:
        raise ValueError("only here")
    if (folder / "hang").exists() and RANK == 1:
        time.sleep(600)
    ranks = torch.tensor([RANK + 1])
    torch.distributed.all_reduce(ranks)
    (folder / f"sum{RANK}").write_text(str(ranks.item()))


@pytest.mark.medium
def test_they_know_each_other(tmp_path: Path) -> None:
    run_together(2, __name__, tmp_path)
    assert [(tmp_path / f"sum{rank}").read_text() for rank in (0, 1)] == ["3", "3"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mishap", "seconds", "words"), [("fail", 60, "only here"), ("hang", 2, "not done within 2 s")]
)
def test_a_failure_of_one_ends_all(mishap: str, seconds: float, words: str, tmp_path: Path) -> None:
    (tmp_path / mishap).touch()
    started = time.monotonic()
    with pytest.raises(AssertionError, match=words):
        run_together(2, __name__, tmp_path, seconds)
    assert time.monotonic() - started < 60, "process 0 was not waited for"
    assert not (tmp_path / "sum0").exists()
