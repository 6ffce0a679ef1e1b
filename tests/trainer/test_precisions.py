"""Weights and arithmetic in every precision: one update against float64, drift of the sampler, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gruppo import GRPOTrainer
from gruppo.errors import ConfigError
from tests.helpers import tiny_model
from tests.trainer.runs import SaveAt, logs, make
from tests.trainer.scripted import make_trainer, update_of

# Weights, autocast, how far an update may be from float64's, and the sampler's log-probs from the trainer's.
KINDS: dict[str, tuple[torch.dtype, dict[str, Any], float, float]] = {
    "float32": (torch.float32, {}, 1e-5, 1e-5),
    "bfloat16 autocast": (torch.float32, {"bf16": True}, 0.05, 0.01),
    "bfloat16": (torch.bfloat16, {}, 0.05, 0.01),
}


def difference(update: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    squares = [(update[name].cpu().double() - change).square().sum() for name, change in true.items()]
    return (torch.stack(squares).sum() / torch.stack([c.square().sum() for c in true.values()]).sum()).sqrt().item()


def gradients(dtype: torch.dtype, folder: Path, **settings: Any) -> dict[str, Tensor]:
    """The gradient of one update: weights in half precision would round what is left of a step."""
    trainer = make_trainer("grpo", folder, dtype=dtype, parity_check="off", **settings)
    seen: dict[str, Tensor] = {}
    step = trainer._end_of_update

    def watched() -> None:
        scaler = trainer.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        seen.update({name: weight.grad.detach().clone().double() / scale for name, weight in named})
        step()

    trainer._end_of_update = watched
    update_of(trainer)
    return seen


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_float64(kind: str, packed: bool, tmp_path: Path) -> None:
    dtype, settings, bound, _ = KINDS[kind]
    true = gradients(torch.float64, tmp_path)
    found = gradients(dtype, tmp_path, packed_update=packed, **settings)
    assert found.keys() == true.keys()
    assert difference(found, true) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_its_continuation(kind: str, tmp_path: Path) -> None:
    dtype, settings, _, drift = KINDS[kind]

    def made(folder: Path, **more: Any) -> Any:
        shared = {"max_steps": 3, "learning_rate": 0.01, "beta": 0.1, **settings}
        return make(folder, GRPOTrainer, model=tiny_model().to(dtype), **shared, **more)

    first = made(tmp_path, callbacks=[SaveAt(2)])
    assert first.packed is not None
    first.train()
    assert {weight.dtype for weight in first.model.parameters()} == {dtype}
    assert all(log["sampling/sampling_logp_difference/mean"] < drift for log in logs(first))
    again = made(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, weight), other in zip(first.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_float16_weights_under_a_scaler_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fp16=True scales gradients.*float32.*torch.float16"):
        make(tmp_path, model=tiny_model().half(), fp16=True)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_float16_with_a_scaler(packed: bool, tmp_path: Path) -> None:
    settings = {"use_cpu": False, "fp16": True, "packed_update": packed}
    true = gradients(torch.float64, tmp_path)
    assert difference(gradients(torch.float32, tmp_path, **settings), true) < 0.02

    def made(folder: Path, **more: Any) -> Any:
        return make(folder, GRPOTrainer, max_steps=3, learning_rate=0.01, beta=0.1, **settings, **more)

    first = made(tmp_path / "run", callbacks=[SaveAt(2)])
    first.train()
    assert first.accelerator.scaler.get_scale() > 1
    assert (tmp_path / "run" / "checkpoint-2" / "scaler.pt").exists()
    assert all(log["grad_norm"] > 0 for log in logs(first))
    assert all(log["sampling/sampling_logp_difference/mean"] < 0.01 for log in logs(first))
    again = made(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for (name, weight), other in zip(first.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
