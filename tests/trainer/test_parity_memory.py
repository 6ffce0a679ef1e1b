"""The parity guard where memory is short: it takes less, then goes without, and the run goes on."""

import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import GRPOTrainer
from gruppo.errors import ParityError
from gruppo.trainer.update import guard, parity, planning
from gruppo.trainer.update.parity import ParityReport
from gruppo.types import TrainBatch
from tests.trainer.runs import make, run

OK = ParityReport((), rows=4, tokens=9, dtype="float32", reference="float64", engine_difference=0.0)


class Held:
    """Stands for what a pass has allocated."""


class Shortage:
    """In place of `check_parity`: the first calls find no memory."""

    def __init__(self, failures: int):
        self.failures = failures
        self.batches: list[TrainBatch] = []
        self.held: list[weakref.ref[Held]] = []

    def __call__(self, model: Any, packed: Any, batch: TrainBatch, **options: Any) -> ParityReport:
        self.batches.append(batch)
        if len(self.batches) > self.failures:
            return parity.check_parity(model, packed, batch, **options)
        held = Held()
        self.held.append(weakref.ref(held))
        raise torch.OutOfMemoryError("not enough")


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_run_goes_on(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"num_iterations": 2, "max_steps": 4}
    calm = run(tmp_path, GRPOTrainer, reuse_sampling_logps=False, **settings)
    shortage = Shortage(failures)
    monkeypatch.setattr(guard, "check_parity", shortage)
    trainer = make(tmp_path, GRPOTrainer, **settings)
    released: list[bool] = []
    release = trainer.planner.release

    def watched() -> None:
        released.append(all(held() is None for held in shortage.held))
        release()

    trainer.planner.release = watched
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert released == [True] * failures, "what the failed pass held is free by then"
    assert len(shortage.batches) == min(failures + 1, 2), "tried once more, and not again in later updates"
    assert [batch.engine_logps is None for batch in shortage.batches] == [False, True][: failures + 1]
    assert trainer.parity.reuses_engine_logps == (failures == 0)
    assert ("tried again with the last 256 tokens" in caplog.text) == (failures > 0)
    assert ("parity_check='off' skips the check" in caplog.text) == (failures == 2)
    for a, b in zip(calm.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_layers_are_computed_again_if_the_update_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def watched(model: Any, *args: Any, **options: Any) -> ParityReport:
        seen.append(model.is_gradient_checkpointing)
        return parity.check_parity(model, *args, **options)

    monkeypatch.setattr(guard, "check_parity", watched)
    monkeypatch.setattr(planning, "free_memory", lambda device: 0)
    run(tmp_path, GRPOTrainer, gradient_checkpointing=None, max_steps=1)
    assert seen == [True]


# Of another process: ok, the engine's difference, rows, whether it had memory.
OTHERS = {
    "fine": (1.0, 0.0, 4.0, 1.0),
    "without memory": (1.0, torch.nan, 0.0, 0.0),
    "at fault": (0.0, 0.0, 4.0, 1.0),
    "without rows": (1.0, torch.nan, 0.0, 1.0),
}


@pytest.mark.parametrize("mine", [OK, None], ids=["fine", "without memory"])
@pytest.mark.parametrize("other", OTHERS)
def test_processes_agree(
    other: str, mine: ParityReport | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever memory each of them has, they exchange one row of numbers and decide the same."""
    trainer = make(tmp_path, GRPOTrainer)
    calls: list[int] = []

    def gather(local: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.cat([local, torch.tensor([OTHERS[other]])])

    monkeypatch.setattr(trainer.accelerator, "gather", gather)
    if other == "at fault":
        with pytest.raises(ParityError, match="on another process"):
            trainer.parity.take_verdict(mine, 0)
        assert trainer.parity.checked_at is None
    else:
        trainer.parity.take_verdict(mine, 0)
        assert trainer.parity.checked_at == 0
    assert len(calls) == 1
    assert trainer.parity.reuses_engine_logps == (mine is OK and other in ("fine", "at fault"))
