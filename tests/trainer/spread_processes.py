"""Runs of two processes that FSDP2 spreads the weights over; run by test_spread.py, with its twin on one process.

12 rows in groups of 4, a group of which lies on both processes, and budgets that make unequal numbers of packs.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tests.spread import FSDP2, is_spread
from tests.trainer.packed_two_processes import one_group_differs
from tests.trainer.scripted import make_trainer, rows_in_order, two_process_batches, update_of

RANK = int(os.environ.get("RANK", "0"))
ALL = 10**6
TWO_STEPS = {"max_steps": 2, "learning_rate": 0.1}


class Case(NamedTuple):
    """An update: its recipe, how many tokens each process runs at once, and what else is set."""

    recipe: str
    budgets: tuple[int, int] = (ALL, 12)
    settings: Mapping[str, Any] = MappingProxyType({})


# What varies, each against a recipe or two: the objective, passes before the update, passes of unequal number.
FEW = {
    "grpo": Case("grpo", (ALL, 1)),
    "a reference": Case("kl", (12, ALL)),
    "off policy": Case("rloo", (15, ALL), {"num_iterations": 2, **TWO_STEPS}),
    "adapter": Case("dapo", (1, ALL), {"adapter": True, "beta": 0.1}),
    "checkpointing": Case("gspo", (20, 10), {"gradient_checkpointing": True}),
    "a threshold of all": Case("top_entropy", (1, ALL)),
    "rows that stand still": Case("grpo", (ALL, 10), {"reward": one_group_differs, "num_iterations": 2, **TWO_STEPS}),
    "padded rows": Case("cispo", settings={"packed_update": False}),
}
# And the rest of the recipes, with each of the options.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {"adapter": True, "beta": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "off policy": {"num_iterations": 2, **TWO_STEPS},
    "padded": {"packed_update": False},
}
MANY = {
    f"{recipe}, {option}": Case(recipe, (ALL, 12), settings)
    for recipe in (
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "luspo",
        "cispo",
        "sapo",
        "vespo",
        "kl",
        "truncated",
        "rloo",
        "bnpo",
    )
    for option, settings in OPTIONS.items()
}


def trainer_of(case: Case, folder: Any, processes: int) -> Any:
    settings = dict(case.settings)
    if settings.get("packed_update", True):
        settings["max_tokens_per_micro_batch"] = case.budgets[RANK]
    spread = FSDP2 if processes > 1 else {}
    batches = two_process_batches(case.recipe, processes)
    return make_trainer(case.recipe, folder, **{"parity_check": "off", **batches, **settings, **spread})


def run(case: Case, folder: Path, processes: int) -> tuple[Any, dict[str, torch.Tensor]]:
    trainer = trainer_of(case, folder, processes)
    with rows_in_order("bnpo"):
        return trainer, update_of(trainer)


def main(folder: Path) -> None:
    for name, case in (MANY if (folder / "many").exists() else FEW).items():
        trainer, update = run(case, folder / name, 2)
        assert is_spread(trainer.model), name
        assert (trainer.packed is None) == (case.settings.get("packed_update") is False)
        if RANK == 0:
            norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
            torch.save({"update": update, "norms": norms}, folder / f"{name}.pt")
