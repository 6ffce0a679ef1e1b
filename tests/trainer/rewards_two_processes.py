"""A reward that raises on process 1 only; run by test_reward_failures.py."""

import os
from pathlib import Path
from typing import Any

import pytest

from gruppo import GRPOTrainer
from gruppo.errors import RewardError
from tests.trainer.runs import make

RANK = int(os.environ.get("RANK", "0"))


def main(folder: Path) -> None:
    """Process 0, whose rewards are fine, raises an error that names the failure of process 1."""

    def reward(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if RANK == 1 and trainer_state.global_step == 1:
            raise KeyError("answer")
        return [float(len(text)) for text in completions]

    trainer = make(folder, GRPOTrainer, rewards=reward, reward_on_error="raise", parity_check="off", max_steps=3)
    with pytest.raises(RewardError) as raised:
        trainer.train()
    (folder / f"rank{RANK}.txt").write_text(str(raised.value))
