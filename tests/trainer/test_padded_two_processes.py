"""Two processes with padded rows, compiled models and reentrant checkpoints make the update of one."""

from pathlib import Path

import pytest
import torch

from tests.processes import run_together
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
