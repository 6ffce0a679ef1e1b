"""Runs of two processes with weights sharded by FSDP2; run by test_sharded.py, which compares them with one process.

12 rows in groups of 4, one of which spans both processes, and budgets that result in unequal numbers of packs.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from tests.sharded import FSDP2, is_sharded, whole
from tests.trainer.packed_two_processes import one_group_differs
from tests.trainer.scripted import make_trainer, relative_difference, rows_in_order, two_process_batches, update_of

RANK = int(os.environ.get("RANK", "0"))
ALL = 10**6
TWO_STEPS = {"max_steps": 2, "learning_rate": 0.1}


class Case(NamedTuple):
    """An update: its recipe, how many tokens each process runs at once, and further settings."""

    recipe: str
    budgets: tuple[int, int] = (ALL, 12)
    settings: Mapping[str, Any] = MappingProxyType({})
    spread: Mapping[str, Any] = MappingProxyType({})  # settings for two processes only


ADAPTER = {"adapter": True, "beta": 0.1}
OFF_POLICY = {"num_iterations": 2, **TWO_STEPS}
PADDED = {"packed_update": False}
RECOMPUTED = {"fsdp_config": {**FSDP2["fsdp_config"], "activation_checkpointing": True}}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}

# Every recipe once, every option at least twice, and unequal numbers of passes.
FEW = {
    "plain": Case("grpo", (ALL, 1)),
    "DoRA": Case("dr_grpo", (12, ALL), {"adapter": "dora"}),
    "adapter": Case("dapo", (1, ALL), ADAPTER),
    "adapter, micro-batches": Case("bnpo", (ALL, 12), ADAPTER),
    "checkpointing": Case("gspo", (20, 10), {"gradient_checkpointing": True}),
    "checkpointing, a reference": Case("kl", (12, ALL), {"gradient_checkpointing": True}),
    "checkpointing by FSDP2": Case("sapo", (ALL, 12), spread=RECOMPUTED),
    "off policy": Case("truncated", (ALL, 12), OFF_POLICY),
    "off policy, a reference": Case("rloo", (15, ALL), OFF_POLICY),
    "off policy, rows that stand still": Case("luspo", (ALL, 10), {"reward": one_group_differs, **OFF_POLICY}),
    "padded rows": Case("cispo", settings=PADDED),
    "padded rows, sequence weights": Case("vespo", settings=PADDED),
    "a threshold of all": Case("top_entropy", (1, ALL)),
}
# Every recipe except top_entropy with each of these options, and a compiled model: these take longer.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": ADAPTER,
    "checkpointing": {"gradient_checkpointing": True},
    "off policy": OFF_POLICY,
    "padded": PADDED,
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
} | {"compiled": Case("grpo", settings=PADDED, spread=COMPILED)}


def trainer_of(case: Case, folder: Any, processes: int) -> Any:
    settings = dict(case.settings)
    if settings.get("packed_update", True):
        settings["max_tokens_per_micro_batch"] = case.budgets[RANK]
    spread = {**FSDP2, **case.spread} if processes > 1 else {}
    batches = two_process_batches(case.recipe, processes)
    return make_trainer(case.recipe, folder, **{"parity_check": "off", **batches, **settings, **spread})


def run(case: Case, folder: Path, processes: int) -> tuple[Any, dict[str, torch.Tensor]]:
    trainer = trainer_of(case, folder, processes)
    with rows_in_order("bnpo"):
        return trainer, update_of(trainer)


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Keeps the full (unsharded) gradients of an update."""

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.found = {name: whole(weight.grad).clone() for name, weight in model.named_parameters()}


def check_half_precision(folder: Path) -> None:
    """Gradients are reduced in float32, as with DDP: sums in bfloat16 would all be representable in bfloat16."""
    found = {}
    for way, spread in {"DDP": {}, "FSDP2": FSDP2}.items():
        settings = {"bf16": True, "parity_check": "off", **two_process_batches("grpo", 2), **spread}
        trainer = make_trainer("grpo", folder / way, dtype=torch.float32, **settings)
        trainer.add_callback(seen := Gradients())
        trainer.train()
        found[way] = {name.removeprefix("module."): gradient for name, gradient in seen.found.items()}
        row = torch.cat([gradient.flatten() for gradient in seen.found.values()])
        row = row[row != 0]
        assert (row == row.bfloat16()).float().mean() < 0.5, way
    assert relative_difference(found["DDP"], found["FSDP2"]) < 0.03


def main(folder: Path) -> None:
    if not (folder / "many").exists():
        check_half_precision(folder)
    for name, case in (MANY if (folder / "many").exists() else FEW).items():
        trainer, update = run(case, folder / name, 2)
        assert is_sharded(trainer.model), name
        assert (trainer.packed is None) == (case.settings.get("packed_update") is False)
        assert hasattr(trainer.model_wrapped, "_orig_mod") == (case.spread is COMPILED), name
        wraps = any(type(module).__name__.endswith("CheckpointWrapper") for module in trainer.model.modules())
        assert wraps == (case.spread is RECOMPUTED), name
        if RANK == 0:
            norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
            torch.save({"update": update, "norms": norms}, folder / f"{name}.pt")
