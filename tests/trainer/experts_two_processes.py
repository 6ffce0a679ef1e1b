"""A mixture of experts on two processes with different numbers of packs; run by test_experts.py."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.policy.experts import experts
from tests.policy.test_routing import slow_loss
from tests.policy.twins import exact
from tests.trainer import scripted
from tests.trainer.scripted import make_trainer, rows_in_order, two_process_batches, update_of

RANK = int(os.environ.get("RANK", "0"))
BUDGETS = (30, 1000)  # tokens per pack, by process
SPREAD = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["MixtralDecoderLayer"]}}
WAYS = {
    "packed": (True, {}),
    "padded": (False, {}),
    "packed, spread": (True, SPREAD),
    "padded, spread": (False, SPREAD),
}


def policy(seed: int, dtype: torch.dtype) -> Any:
    model = exact(experts("mixtral", seed))
    model.set_experts_implementation("eager")
    sys.modules[type(model).__module__].load_balancing_loss_func = slow_loss  # type: ignore[attr-defined]
    return model


def update(folder: Path, processes: int, *, packed: bool, **more: Any) -> tuple[dict[str, torch.Tensor], float]:
    """The change of every weight, and the logged auxiliary loss."""
    budget = BUDGETS[RANK] if packed and processes > 1 else None
    settings = {"packed_update": packed, "max_tokens_per_micro_batch": budget, "router_aux_loss_coef": 3.0}
    before, scripted.policy = scripted.policy, policy
    try:
        trainer = make_trainer("bnpo", folder, **two_process_batches("bnpo", processes), **settings, **more)
    finally:
        scripted.policy = before
    with rows_in_order("bnpo"):
        return update_of(trainer), trainer.state.log_history[0]["aux_loss"]


def main(folder: Path) -> None:
    for name, (packed, spread) in WAYS.items():
        torch.save(update(folder, 2, packed=packed, **spread), folder / f"{name}.{RANK}.pt")
