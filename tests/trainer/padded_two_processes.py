"""Updates through DDP in which processes make different passes; run by test_padded_two_processes.py."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.trainer.packed_two_processes import one_group_differs, update_in_order
from tests.trainer.scripted import make_trainer, two_process_batches

RANK = int(os.environ.get("RANK", "0"))
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
# Only process 0 has rows whose advantage is not 0; the others are run without a gradient.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("grpo", {"packed_update": False, "reward": one_group_differs}),
    "compiled": ("grpo", {**COMPILED, "reward": one_group_differs}),
    "compiled, off policy": ("grpo", {**COMPILED, "reward": one_group_differs, "num_iterations": 2, "max_steps": 2}),
    "reentrant checkpoints": ("dapo", {**REENTRANT, "gradient_checkpointing": True}),
    "reentrant checkpoints of an adapter": ("dapo", {**REENTRANT, "gradient_checkpointing": True, "adapter": True}),
    "reentrant checkpoints of padded rows": (
        "grpo",
        {**REENTRANT, "gradient_checkpointing": True, "adapter": True, "packed_update": False},
    ),
    "reentrant checkpoints, if memory is short": ("dapo", {**REENTRANT, "gradient_checkpointing": None}),
}


def trainer_of(name: str, folder: Path, processes: int) -> Any:
    recipe, settings = CASES[name]
    trainer = make_trainer(recipe, folder, parity_check="off", **settings, **two_process_batches(recipe, processes))
    if name.endswith("if memory is short"):
        planner = trainer.planner
        plan_of = planner.plan

        def recomputing(batch: Any) -> Any:
            planner._apply(replace(plan_of(batch), checkpointing=True))
            return planner.in_force

        planner.plan = recomputing
    return trainer


def main(folder: Path) -> None:
    for name in CASES:
        update = update_in_order(trainer_of(name, folder, 2))
        torch.save(update, folder / f"{name}.{RANK}.pt")
        torch.distributed.barrier()
