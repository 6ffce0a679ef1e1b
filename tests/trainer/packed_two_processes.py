"""Packed updates on two processes that do not have the same work; launched by test_packed_update.py.

12 rows in groups of 4: process 0 has the rows of p0 and half of p1's, process 1 the others of p1 and those of p2.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gruppo.policy.packed import PackedPolicy
from tests.trainer.scripted import make_trainer, two_process_batches, update_of

RANK = int(os.environ.get("RANK", "0"))


def one_group_differs(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """Rewards are equal for every row of process 1."""
    return [len(text) / 8 if prompt == "p0:" else 1.0 for prompt, text in zip(prompts, completions, strict=True)]


def all_the_same(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


class Case(NamedTuple):
    """An update: its recipe, what is set beside it, and what each of the processes may run at once."""

    recipe: str
    settings: dict[str, Any] = {}
    budgets: tuple[int, int] = (10**6, 10**6)
    fails: int | None = None  # the pack of process 1 whose forward pass finds no memory, once


CASES = {
    "packs of many and of one": Case("grpo", budgets=(10**6, 1)),
    "packs of one and of many": Case("dapo", budgets=(1, 10**6)),
    "off policy": Case("rloo", {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}, (15, 10**6)),
    "checkpointing": Case("grpo", {"gradient_checkpointing": True}, (20, 10)),
    "a threshold of all, first cut": Case("top_entropy", budgets=(1, 10**6)),
    "a threshold of all, second cut": Case("top_entropy", budgets=(10**6, 15)),
    "an entropy bonus": Case("dapo", {"entropy_coef": 0.05}, (12, 10**6)),
    "one process stands still": Case("grpo", {"reward": one_group_differs}, (10, 10)),
    "both stand still": Case("grpo", {"reward": all_the_same}),
    "no memory at first": Case("grpo", budgets=(10**6, 20), fails=0),
    "no memory later": Case("dapo", budgets=(10**6, 20), fails=1),
}


def trainer_of(case: Case, folder: Any, processes: int) -> Any:
    return make_trainer(
        case.recipe,
        folder,
        parity_check="off",
        ddp_timeout=60,  # a process that waits for nothing must not do so for half an hour
        max_tokens_per_micro_batch=case.budgets[RANK],
        **two_process_batches(case.recipe, processes),
        **case.settings,
    )


def main(folder: Path) -> None:
    score = PackedPolicy.score
    for name, case in CASES.items():
        packs: list[int] = []
        fails = case.fails if RANK == 1 else None
        trainer = trainer_of(case, folder, 2)
        if fails is not None:
            trainer.model.model.layers[0].register_forward_pre_hook(failing(fails))

        def counted(self: Any, model: Any, pack: Any, seen: list[int] = packs, **options: Any) -> Any:
            seen += [len(pack.rows)] * torch.is_grad_enabled()
            return score(self, model, pack, **options)

        PackedPolicy.score = counted  # type: ignore[method-assign]
        update = update_of(trainer)
        PackedPolicy.score = score  # type: ignore[method-assign]
        entropy = trainer.state.log_history[0]["entropy"]
        torch.save({"update": update, "packs": packs, "entropy": entropy}, folder / f"{name}.{RANK}.pt")
        torch.distributed.barrier()


def failing(count: int) -> Callable[..., None]:
    """A hook that raises in the `count`-th call with a gradient, and then no more."""
    left = [count]

    def hook(*_: Any) -> None:
        left[0] -= torch.is_grad_enabled()
        if left[0] == -1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("not enough")

    return hook


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.barrier()
    # gloo's threads may abort an interpreter that winds down; by now every file is written.
    os._exit(0)
