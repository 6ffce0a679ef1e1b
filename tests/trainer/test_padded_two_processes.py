"""Two processes with padded rows, compiled models and reentrant checkpoints make the update of one."""

from pathlib import Path

import pytest
import torch

from tests.processes import run_together
from tests.trainer import alone_two_processes
from tests.trainer import padded_two_processes as two_processes


@pytest.mark.medium
def test_two_processes_make_the_update_of_one(tmp_path: Path) -> None:
    run_together(2, two_processes.__name__, tmp_path)  # one that waits for what the other never sends is ended
    for name in two_processes.CASES:
        zero, one = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in (0, 1))
        alone = two_processes.update_in_order(two_processes.trainer_of(name, tmp_path, 1))
        assert any(change.any() for change in alone.values())
        for key, change in alone.items():
            assert torch.equal(zero[key], one[key]), f"{name}: {key}"
            assert (zero[key] - change).norm() <= 1e-9 * change.norm(), f"{name}: {key}"


@pytest.mark.medium
def test_processes_run_rows_alone_together(tmp_path: Path) -> None:
    """Only one of them has rows that show that padding matters, and they have different numbers of moving rows."""
    run_together(2, alone_two_processes.__name__, tmp_path)
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert zero[:2] == one[:2] == (True, True)
    assert all(torch.equal(weight, one[2][name]) for name, weight in zero[2].items())
