"""DeepSpeed on two processes: updates, sampling, saving and resuming are those of one process without it."""

from pathlib import Path

import pytest
import torch

from tests.processes import run_together
from tests.trainer.scripted import relative_difference
from tests.trainer.zero_processes import FEW, MANY, run
from tests.zero import needs_deepspeed

pytestmark = needs_deepspeed
ALIKE = ("loss", "grad_norm", "reward")  # which do not depend on the cut into micro-batches


def compare(folder: Path, cases: dict) -> None:
    for name, case in cases.items():
        found = torch.load(folder / f"{name}.pt")
        trainer, expected = run(case, folder / "one", 1)
        assert relative_difference(expected, found["update"]) < 1e-4, name
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        for ours, theirs in zip(found["logs"], logs, strict=True):
            same = {key: theirs[key] for key in ALIKE if key in theirs}
            assert {key: ours[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-6), name


@pytest.mark.medium
def test_one_update_is_that_of_one_process(tmp_path: Path) -> None:
    run_together(2, "tests.trainer.zero_processes", tmp_path)
    compare(tmp_path, FEW)


@pytest.mark.slow
def test_every_recipe_with_every_option_and_stage(tmp_path: Path) -> None:
    (tmp_path / "many").touch()
    run_together(2, "tests.trainer.zero_processes", tmp_path, seconds=1200)
    compare(tmp_path, MANY)
