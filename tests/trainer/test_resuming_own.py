"""Runs with optimizers, schedules and tensors of a user's own resume as well as those of the libraries."""

import contextlib
import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import SchedulerType

from gruppo.errors import CheckpointError
from gruppo.trainer.resume.loaded import check_optimizer
from tests.helpers import prompts
from tests.trainer.runs import RecordedGRPO, make


class LowRank(torch.optim.Optimizer):
    """Moments of the first two rows of the gradient, and a setting that gets its value during the run."""

    def __init__(self, weights: Any):
        super().__init__(weights, {"lr": 1e-3, "scale": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["scale"] = 0.5
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                state.setdefault("exp_avg", torch.zeros_like(weight.grad[:2])).lerp_(weight.grad[:2], 0.1)
                state["kind"] = "low rank"
                weight[:2].add_(state["exp_avg"], alpha=-group["lr"])


class OwnSchedule(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer: Any):
        self.held: float | None = None
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: Any = None) -> None:
        super().step()
        if self.last_epoch:
            self.seen_step, self.held = self.last_epoch, 0.5


class WithOwn(RecordedGRPO):
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer = LowRank(self.model.parameters())
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        self.lr_scheduler = OwnSchedule(self.optimizer)
        return self.lr_scheduler


class WithTensors(RecordedGRPO):
    """Adds tensors of its own to what is scored."""

    added: list[tuple[int, ...]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        rows = len(output["completion_ids"])
        return output | {"regions": torch.zeros(rows, 5), "boxes": torch.zeros(rows, 3, 2), "one": torch.zeros(rows)}

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self.added = [tuple(inputs[name].shape[1:]) for name in ("regions", "boxes", "one")]
        return super()._compute_loss(model, inputs)


def test_optimizers_and_schedules_of_a_users_own(tmp_path: Path) -> None:
    make(tmp_path, WithOwn, max_steps=2, save_strategy="steps", save_steps=1).train()
    resumed = make(tmp_path, WithOwn, max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 2
    assert (resumed.lr_scheduler.seen_step, resumed.lr_scheduler.held) == (2, 0.5)


def test_tensors_that_a_subclass_adds(tmp_path: Path) -> None:
    settings = {"steps_per_generation": 2, "max_steps": 2, "parity_check": "off"}
    make(tmp_path, WithTensors, save_strategy="steps", save_steps=1, **settings).train()
    resumed = make(tmp_path, WithTensors, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 2
    assert resumed.added == [(5,), (3, 2), ()]
    assert not resumed.generations, "the rest of the generation was in the checkpoint"


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_schedules_that_wait_for_a_plateau(schedule: str, tmp_path: Path) -> None:
    if schedule not in {kind.value for kind in SchedulerType}:
        pytest.skip("not in this release")
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4)}
    settings = {"lr_scheduler_type": schedule, **evaluation, "metric_for_best_model": "reward", "max_steps": 3}
    make(tmp_path, save_strategy="steps", save_steps=1, **settings).train()
    resumed = make(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3


class SameStep(torch.optim.AdamW):
    """A subclass with torch's own step."""


class OwnStep(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.state[weight] = {"exp_avg": weight.grad[:1].clone()}


@pytest.mark.parametrize(("kind", "refused"), [(torch.optim.Adam, True), (SameStep, True), (OwnStep, False)])
def test_the_shapes_of_moments_are_those_of_the_step(kind: Any, refused: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    weight.grad = torch.ones(4, 2)
    optimizer = kind([weight])
    groups = copy.copy(optimizer.param_groups)
    optimizer.step()
    check_optimizer(optimizer, groups)
    optimizer.state[weight]["exp_avg"] = torch.zeros(1, 2)
    with pytest.raises(CheckpointError) if refused else contextlib.nullcontext():
        check_optimizer(optimizer, groups)


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_checkpoint_of_another_name_in_the_folder_of_the_run(name: str, tmp_path: Path) -> None:
    """A link to it, or a copy; checkpoints that are newer are put aside."""
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    if name == "latest":
        (tmp_path / name).symlink_to("checkpoint-1")
    else:
        shutil.copytree(tmp_path / "checkpoint-1", tmp_path / name)
    resumed = make(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / name))
    assert resumed.state.global_step == 2
    assert [path.name for path in tmp_path.glob("earlier/*/checkpoint-*")] == ["checkpoint-2"]
    assert (tmp_path / "checkpoint-1").is_dir()
