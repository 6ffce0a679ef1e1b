"""Two processes with unequal work, with and without exchanging rows; run by test_balancing.py."""

import os
from pathlib import Path
from typing import Any

import torch

from tests.helpers import timeless
from tests.sharded import FSDP2
from tests.trainer.packed_two_processes import some_judge_steps
from tests.trainer.scripted import G, make_trainer, rows_in_order, scripted_rollout, two_process_batches, update_of

RANK = int(os.environ.get("RANK", "0"))
CASES: dict[str, Any] = {
    "grpo": ("grpo", {}),
    "by micro-batch": ("bnpo", {"entropy_coef": 0.05}),
    "a reference, off policy": ("rloo", {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}),
    "steps": ("grpo", {"reward": some_judge_steps}),
    "spread": ("kl", FSDP2),
}


def lopsided(prompt_list: list[Any], trainer: Any) -> dict[str, Any]:
    """Process 0 has the long completions."""
    rows = scripted_rollout(prompt_list, trainer)
    first = trainer.args.process_index * len(prompt_list)
    for i, ids in enumerate(rows["completion_ids"]):
        place = (first + i) % G
        if first + i < 6:
            rows["completion_ids"][i] = (ids[:-1] * 8)[: 6 + place] + ids[-1:]
        else:
            rows["completion_ids"][i] = ids[: 1 + place % 2]
    return rows


def main(folder: Path) -> None:
    for name, (recipe, settings) in CASES.items():
        for on in (True, False):
            kw = {**two_process_batches(recipe, 2), **settings}
            rollout = {} if recipe == "rloo" else {"rollout": lopsided}
            trainer = make_trainer(recipe, folder, parity_check="off", balance_processes=on, **rollout, **kw)
            if recipe == "rloo":
                trainer._generate_single_turn = lambda ids, *_, t=trainer, **__: (
                    lopsided([t.processing_class.decode(i) for i in ids], t)["completion_ids"],
                    None,
                )
            with rows_in_order("bnpo"):
                update = update_of(trainer)
            logs = [timeless(log) for log in trainer.state.log_history if "loss" in log][-1]
            logs = {k: v for k, v in logs.items() if not k.startswith(("ledger/", "update/", "rollout/"))}
            torch.save({"update": update, "logs": logs}, folder / f"{name}.{on}.{RANK}.pt")
