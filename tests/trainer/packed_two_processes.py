"""Packed updates on two processes with unequal work; run by test_packed_update.py.

12 rows in groups of 4: process 0 has the rows of p0 and half of those of p1, process 1 the other half and those of p2.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from gruppo.policy.packed import PackedPolicy
from tests.trainer.scripted import make_trainer, rows_in_order, two_process_batches, update_of

RANK = int(os.environ.get("RANK", "0"))


def one_group_differs(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """Rewards that are equal for every row of process 1."""
    return [len(text) / 8 if prompt == "p0:" else 1.0 for prompt, text in zip(prompts, completions, strict=True)]


def all_the_same(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def some_judge_steps(prompts: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[Any]:
    """Step rewards for p0 and for completions of three tokens; single rewards for all other rows."""
    return [
        [(0, 1.0), (len(ids) - 1, float(ids[0] % 7))] if prompt == "p0:" or len(ids) == 3 else float(len(ids))
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def first_judges_steps(prompts: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[Any]:
    """Step rewards for p0 only: process 1 has only single rewards, among them those of half the rows of p1."""
    return [
        [(0, 1.0), (len(ids) - 1, float(len(ids)))] if prompt == "p0:" else float(len(ids))
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


class Failure(NamedTuple):
    """Process 1 runs out of memory in these forward passes of an update, counting those with or without gradient."""

    calls: tuple[int, ...]
    has_gradient: bool = True
    step: int = 0


class Case(NamedTuple):
    """An update: its recipe, how many tokens each process runs at once, further settings, and a failure."""

    recipe: str
    budgets: tuple[int, int]
    settings: Mapping[str, Any] = MappingProxyType({})
    failure: Failure | None = None


ALL = 10**6
TWO_STEPS = {"max_steps": 2, "learning_rate": 0.1}
CASES = {
    "packs of many and of one": Case("grpo", (ALL, 1)),
    "packs of one and of many": Case("dapo", (1, ALL)),
    "adapter": Case("dapo", (12, ALL), {"adapter": True, "beta": 0.1}),
    "off policy": Case("rloo", (15, ALL), {"num_iterations": 2, **TWO_STEPS}),
    "checkpointing": Case("grpo", (20, 10), {"gradient_checkpointing": True}),
    "a threshold of all, first cut": Case("top_entropy", (1, ALL)),
    "a threshold of all, second cut": Case("top_entropy", (ALL, 15)),
    "an entropy bonus": Case("dapo", (12, ALL), {"entropy_coef": 0.05}),
    "a reduction by micro-batch": Case("bnpo", (ALL, 12)),
    "one process stands still": Case("grpo", (10, 10), {"reward": one_group_differs}),
    "both stand still": Case("grpo", (ALL, ALL), {"reward": all_the_same}),
    "rewards of steps": Case("grpo", (ALL, 12), {"reward": some_judge_steps}),
    "rewards of steps on one process": Case("grpo", (ALL, 12), {"reward": first_judges_steps}),
    "no memory at first": Case("grpo", (ALL, 20), failure=Failure((0,))),
    "no memory later": Case("dapo", (ALL, 20), failure=Failure((1,))),
    "no memory for rows that stand still": Case(
        "grpo",
        (ALL, 20),
        {"reward": one_group_differs, "num_iterations": 2, **TWO_STEPS},
        Failure((0,), has_gradient=False, step=1),
    ),
    # The parity check comes before the update, so the budget is not halved.
    "less memory for the parity check": Case("grpo", (ALL, 20), {"parity_check": "first"}, Failure((0,))),
    "no memory for the parity check": Case("dapo", (ALL, 20), {"parity_check": "first"}, Failure((0, 1))),
}


def trainer_of(case: Case, folder: Any, processes: int) -> Any:
    return make_trainer(
        case.recipe,
        folder,
        max_tokens_per_micro_batch=case.budgets[RANK],
        **two_process_batches(case.recipe, processes),
        **{"parity_check": "off", **case.settings},
    )


def update_in_order(trainer: Any) -> dict[str, torch.Tensor]:
    """The update without shuffling the rows, so that one process and two have the same micro-batches."""
    with rows_in_order("bnpo"):
        return update_of(trainer)


def fail(trainer: Any, failure: Failure) -> None:
    calls: list[int] = []

    def hook(*_: Any) -> None:
        if (trainer.state.global_step, torch.is_grad_enabled()) == (failure.step, failure.has_gradient):
            calls.append(1)
            if len(calls) - 1 in failure.calls:
                raise torch.OutOfMemoryError("not enough")

    trainer.model.model.layers[0].register_forward_pre_hook(hook)


def main(folder: Path) -> None:
    score = PackedPolicy.score
    for name, case in CASES.items():
        packs: list[int] = []

        def counted(self: Any, model: Any, pack: Any, seen: list[int] = packs, **options: Any) -> Any:
            seen += [len(pack.rows)] * torch.is_grad_enabled()
            return score(self, model, pack, **options)

        trainer = trainer_of(case, folder, 2)
        if case.failure is not None and RANK == 1:
            fail(trainer, case.failure)
        PackedPolicy.score = counted  # type: ignore[method-assign]
        update = update_in_order(trainer)
        PackedPolicy.score = score  # type: ignore[method-assign]
        left = trainer.planner.in_force.tokens
        torch.save({"update": update, "packs": packs, "left": left}, folder / f"{name}.{RANK}.pt")
        torch.distributed.barrier()
