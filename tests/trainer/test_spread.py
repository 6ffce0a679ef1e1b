"""Weights that FSDP2 spreads over two processes: updates, sampling, saving and resuming are those of one."""

from pathlib import Path

import pytest
import torch

from tests.processes import run_together
from tests.trainer.scripted import relative_difference
from tests.trainer.spread_processes import FEW, MANY, run


def compare(folder: Path, cases: dict) -> None:
    for name, case in cases.items():
        found = torch.load(folder / f"{name}.pt")
        trainer, expected = run(case, folder / "one", 1)
        limit = 1e-5 if case.settings.get("adapter") else 1e-10  # adapters are in float32
        assert relative_difference(expected, found["update"]) < limit, name
        norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
        assert found["norms"] == pytest.approx(norms, rel=1e-5), name


@pytest.mark.medium
def test_one_update_is_that_of_one_process(tmp_path: Path) -> None:
    run_together(2, "tests.trainer.spread_processes", tmp_path)
    compare(tmp_path, FEW)


@pytest.mark.slow
def test_every_recipe_with_every_option(tmp_path: Path) -> None:
    (tmp_path / "many").touch()
    run_together(2, "tests.trainer.spread_processes", tmp_path, seconds=900)
    compare(tmp_path, MANY)
