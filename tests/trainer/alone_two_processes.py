"""A run in which the rows of one process alone show that padding matters; run by test_padded_two_processes.py."""

import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from gruppo import GRPOTrainer
from tests.policy.families import family
from tests.trainer.runs import make

RANK = int(os.environ.get("RANK", "0"))
EQUAL, MIXED = ["abcdefghij", "klmnopqrst"], ["ab", "abcdefgh" * 5]  # of process 0, of process 1


def one_group_differs(prompts: Any, completions: Any, **_: Any) -> list[float]:
    """So that processes have different numbers of rows with a gradient."""
    return [0.0 if prompt == MIXED[0] else float(i % 2) for i, prompt in enumerate(prompts)]


def main(folder: Path) -> None:
    trainer = make(
        folder / "run",
        GRPOTrainer,
        model=family("deepseek_v4"),
        dataset=Dataset.from_list([{"prompt": prompt} for prompt in (EQUAL + MIXED) * 4]),
        rewards=one_group_differs,
        shuffle_dataset=False,
        per_device_train_batch_size=4,
        num_generations=2,
        gradient_accumulation_steps=1,
        max_steps=2,
        max_completion_length=8,
        beta=0.0,
        rollout_backend="transformers",
    )
    trainer.train()
    weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    torch.save((trainer.padding.alone, trainer.backend.padding.alone, weights), folder / f"{RANK}.pt")
