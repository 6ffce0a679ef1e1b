"""Runs of two processes under DeepSpeed; run by test_deepspeed.py, which compares them with one process without it.

12 rows in groups of 4, one of which spans both processes, in micro-batches of 3.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tests import zero
from tests.trainer.packed_two_processes import one_group_differs
from tests.trainer.scripted import make_trainer, relative_difference, rows_in_order, two_process_batches, update_of

RANK = int(os.environ.get("RANK", "0"))
TWO_STEPS = {"max_steps": 2, "learning_rate": 0.1}
ADAPTER = {"adapter": True, "beta": 0.1}
OFF_POLICY = {"num_iterations": 2, **TWO_STEPS}


class Case(NamedTuple):
    """An update: its recipe, the ZeRO stage, where the stage is requested, and further settings."""

    recipe: str
    stage: int
    asks: str = "config"  # or "launcher"
    settings: Mapping[str, Any] = MappingProxyType({})


# Every recipe except plain dapo, on which others are based, and every stage.
FEW = {
    "the optimizer": Case("vespo", 1),
    "gradients": Case("dr_grpo", 2, "launcher"),
    "weights": Case("grpo", 3, "launcher"),
    "a reference, 1": Case("kl", 1, "launcher"),
    "a reference, 3": Case("rloo", 3, settings=OFF_POLICY),
    "adapter, 2": Case("sapo", 2, settings=ADAPTER),
    "adapter, 3": Case("cispo", 3, "launcher", ADAPTER),
    "checkpointing": Case("gspo", 3, settings={"gradient_checkpointing": True}),
    "clipped": Case("truncated", 2, settings={"max_grad_norm": 0.05, **OFF_POLICY}),
    "clipped shares": Case("luspo", 3, settings={"max_grad_norm": 0.05, "optim": "adamw_torch", **OFF_POLICY}),
    "a threshold of all": Case("top_entropy", 2),
    "rows that stand still": Case("grpo", 1, settings={"reward": one_group_differs, **OFF_POLICY}),
    "micro-batches": Case("bnpo", 3, settings={"reward": one_group_differs}),
}
# The rows of an update depend on the number of processes, so it is compared with a run of two processes.
TWO_UPDATES = Case("dapo", 3, settings={"steps_per_generation": 4, **TWO_STEPS})
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": ADAPTER,
    "checkpointing": {"gradient_checkpointing": True},
    "off policy": OFF_POLICY,
    "clipped": {"max_grad_norm": 0.05, "optim": "adamw_torch"},
}
RECIPES = ("grpo", "dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo", "kl", "truncated", "rloo", "bnpo")
MANY = {
    f"{recipe}, {option}, {stage}": Case(recipe, stage, ("config", "launcher")[i % 2], OPTIONS[option])
    for i, recipe in enumerate(RECIPES)
    for option in OPTIONS
    for stage in (1, 2, 3)
}


def run(case: Case, folder: Path, processes: int, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    batches = two_process_batches(case.recipe, processes)
    settings: dict[str, Any] = {"parity_check": "off", **batches, **case.settings, **more}
    trainer = make_trainer(case.recipe, folder, dtype=torch.float32, **settings)
    with rows_in_order("bnpo"):
        return trainer, update_of(trainer)


def run_spread(case: Case, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    by_launcher = case.asks == "launcher"
    with zero.launched(case.stage if by_launcher else None):
        trainer, update = run(case, folder, 2, **({} if by_launcher else {"deepspeed": zero.config(case.stage)}))
    assert zero.stage_of(trainer) == case.stage
    assert all(hasattr(weight, "ds_id") == (case.stage == 3) for weight in trainer.model.parameters())
    assert trainer.packed is None
    return trainer, update


def main(folder: Path) -> None:
    zero.prepare()
    for name, case in (MANY if (folder / "many").exists() else FEW).items():
        trainer, update = run_spread(case, folder / name)
        if RANK == 0:
            logs = [log for log in trainer.state.log_history if "grad_norm" in log]
            torch.save({"update": update, "logs": logs}, folder / f"{name}.pt")
    _, update = run_spread(TWO_UPDATES, folder / "two updates")
    trainer, expected = run(TWO_UPDATES, folder / "two updates with DDP", 2)
    assert trainer.packed is not None
    assert relative_difference(expected, update) < 1e-4
