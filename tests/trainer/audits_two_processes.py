"""A failure that only process 1 can detect, and one that both detect; run by test_audits.py."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import GRPOTrainer
from gruppo.types import Completion, StopReason
from tests.trainer.failures import by_place, change_completions, change_loss
from tests.trainer.runs import logs, make

RANK = int(os.environ.get("RANK", "0"))


def main(folder: Path) -> None:
    """Three updates: in the second, process 1 samples nothing; in the third, its loss is infinite."""
    trainer = make(folder, GRPOTrainer, rewards=by_place, parity_check="off", max_steps=3)
    with pytest.MonkeyPatch.context() as patch:

        def write(one: Completion) -> Completion:
            nothing = Completion([], StopReason.NO_ROOM, logps=[], plain_logps=[], entropies=[])
            return nothing if RANK == 1 and trainer.state.global_step == 1 else one

        def spoil(loss: torch.Tensor) -> torch.Tensor:
            return loss * (math.inf if RANK == 1 and trainer.state.global_step == 2 else 1.0)

        change_completions(trainer, patch, write)
        change_loss(patch, spoil)
        trainer.train()
    seen: dict[str, Any] = {
        "counts": dict(trainer.audits.auditor.counts),
        "logged": [{key: value for key, value in line.items() if key == "audit/empty"} for line in logs(trainer)],
        "skipped": trainer.audits.bad_updates.total,
        "weights": [weight.sum().item() for weight in trainer.model.parameters()],
    }
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))
