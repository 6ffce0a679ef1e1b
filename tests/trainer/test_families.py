"""Runs of models whose layers differ from each other, or are not all standard attention."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from gruppo import GRPOTrainer
from tests.policy.families import family
from tests.trainer.runs import make

FALLS_BACK = ["mamba2", "lfm2", "lfm2_moe", "lfm3", "minimax", "llama4"]


@pytest.mark.parametrize("name", ["gemma4", "gemma4, wide", "gemma3n", *FALLS_BACK])
def test_a_family_is_trained(name: str, tmp_path: Path) -> None:
    model: Any = family(name)
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    dataset = Dataset.from_list([{"prompt": "abc de" * (1 + i % 3)} for i in range(4)])
    rewards = lambda completions, **_: [float(i % 2) for i in range(len(completions))]  # noqa: E731
    trainer = make(
        tmp_path, GRPOTrainer, rewards=rewards, model=model, dataset=dataset, max_steps=1, learning_rate=1e-2, beta=0.0
    )
    trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert math.isfinite(log["loss"])
    assert log["grad_norm"] > 0
    assert sum(not torch.equal(weight, before[key]) for key, weight in model.named_parameters()) > len(before) / 2
    assert (trainer.packed is None) == (name in FALLS_BACK)
