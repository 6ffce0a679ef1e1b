"""Weights that FSDP2 spreads over two processes: updates, sampling, saving and resuming are those of one."""

from pathlib import Path

import pytest
import torch

from tests.helpers import timeless
from tests.processes import run_together
from tests.trainer.scripted import relative_difference
from tests.trainer.sharded_processes import FEW, MANY, run
from tests.trainer.sharded_run import seen, trainer_of


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
    run_together(2, "tests.trainer.sharded_processes", tmp_path)
    compare(tmp_path, FEW)


@pytest.mark.slow
def test_every_recipe_with_every_option(tmp_path: Path) -> None:
    (tmp_path / "many").touch()
    run_together(2, "tests.trainer.sharded_processes", tmp_path, seconds=900)
    compare(tmp_path, MANY)


@pytest.mark.medium
def test_a_whole_run_is_that_of_one_process(tmp_path: Path) -> None:
    """Sampled by the built-in engine from gathered weights, with replaced prompts, evaluations and a resume."""
    run_together(2, "tests.trainer.sharded_run", tmp_path)
    found = torch.load(tmp_path / "straight.pt", weights_only=False)
    alone = trainer_of(tmp_path / "alone", 1)
    alone.train()
    expected = seen(alone)
    assert found["completions"] == expected["completions"]
    for name, weight in expected["weights"].items():
        assert torch.allclose(weight, found["weights"][name], atol=1e-9), name
    own = ("ledger/", "update/", "rollout/", "balance/")  # what each process says of itself
    for ours, theirs in zip(found["logs"], expected["logs"], strict=True):
        ours, theirs = timeless(ours), timeless(theirs)
        shared = {key: value for key, value in theirs.items() if not key.removeprefix("eval_").startswith(own)}
        assert ours.keys() >= shared.keys()
        same = {key: value for key, value in shared.items() if value is not None}
        assert {key: ours[key] for key in same} == pytest.approx(same, rel=1e-6, abs=1e-7)
