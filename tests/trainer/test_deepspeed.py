"""DeepSpeed on two processes: updates, sampling, saving and resuming are those of one process without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import timeless
from tests.processes import ROOT, run_together
from tests.trainer.scripted import relative_difference
from tests.trainer.zero_processes import FEW, MANY, run
from tests.trainer.zero_run import same, seen, trainer_of
from tests.zero import needs_deepspeed, runs_deepspeed

pytestmark = [needs_deepspeed, runs_deepspeed]
ALIKE = ("loss", "grad_norm", "reward")  # which do not depend on the cut into micro-batches


def compare(folder: Path, cases: dict) -> None:
    for name, case in cases.items():
        found = torch.load(folder / f"{name}.pt")
        trainer, expected = run(case, folder / "one", 1)
        limit = 1e-3 if case.settings.get("adapter") else 1e-4  # adapters move by little, in float32
        assert relative_difference(expected, found["update"]) < limit, name
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        for ours, theirs in zip(found["logs"], logs, strict=True):
            same = {key: theirs[key] for key in ALIKE if key in theirs}
            assert {key: ours[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-6), name


@pytest.mark.medium
def test_one_update_is_that_of_one_process(tmp_path: Path) -> None:
    run_together(2, "tests.trainer.zero_processes", tmp_path)
    compare(tmp_path, FEW)


@pytest.mark.slow
def test_a_whole_run_is_that_of_one_process(tmp_path: Path) -> None:
    """Sampled by the built-in engine, with a reference, a reward model, evaluations, saved models and a resume."""
    run_together(2, "tests.trainer.zero_run", tmp_path)
    alone = trainer_of(tmp_path / "alone", 1)
    alone.train()
    expected = seen(alone)
    own = ("ledger/", "update/", "rollout/", "balance/")  # what each process says of itself
    for stage in ("2", "3"):
        found = torch.load(tmp_path / stage / "straight.pt", weights_only=False)
        assert found["completions"] == expected["completions"]
        same(found["weights"], expected["weights"], atol=1e-5)
        for place in ("final", "straight/checkpoint-4"):
            saved = AutoModelForCausalLM.from_pretrained(tmp_path / stage / place)
            same(dict(saved.named_parameters()), found["weights"])
        for ours, theirs in zip(found["logs"], expected["logs"], strict=True):
            shared = timeless(theirs)
            shared = {key: value for key, value in shared.items() if not key.removeprefix("eval_").startswith(own)}
            shared = {key: value for key, value in shared.items() if value is not None and "kl" not in key}
            assert {key: ours.get(key) for key in shared} == pytest.approx(shared, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_every_recipe_with_every_option_and_stage(tmp_path: Path) -> None:
    (tmp_path / "many").touch()
    run_together(2, "tests.trainer.zero_processes", tmp_path, seconds=1200)
    compare(tmp_path, MANY)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_single_process_in_half_precision(stage: int, device: str, tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [sys.executable, "-m", "tests.trainer.zero_alone", str(tmp_path), str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | hidden, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"stage {stage} on {device}" in done.stdout
