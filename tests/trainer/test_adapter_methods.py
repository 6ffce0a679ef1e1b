"""Every way to adapt a model through the real trainer: sampled, trained, interrupted, saved."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.errors import ConfigError
from tests.helpers import tiny_model
from tests.policy.methods import METHODS, VIRTUAL, adalora, adapted
from tests.trainer.runs import SaveAt, logs, make, run

FAST = ["dora", "loha", "ia3", "vera", "pissa"]
IDS = torch.tensor([[9, 10, 11, 12]])
SETTINGS: dict[str, Any] = {
    "rollout_backend": "builtin",
    "num_generations": 4,
    "max_completion_length": 5,
    "max_steps": 3,
    "learning_rate": 0.05,
    "num_iterations": 2,
    "beta": 0.1,
}


def tiered(fast: list[str]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.medium) for name in METHODS]


def policy_of(method: str, *, passed: bool) -> dict[str, Any]:
    """A passed adapter that has a past, or the config of a new one."""
    if passed:
        return {"model": adapted(method, lambda: tiny_model(hidden_size=32))}
    return {"model": tiny_model(hidden_size=32), "peft_config": METHODS[method]()}


def trained_weights(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("passed", [False, True], ids=["config", "model"])
@pytest.mark.parametrize("method", tiered(FAST))
def test_a_resumed_run_ends_with_the_same_weights(method: str, passed: bool, tmp_path: Path) -> None:
    first = make(tmp_path, GRPOTrainer, **policy_of(method, passed=passed), callbacks=[SaveAt(2)], **SETTINGS)
    assert first.backend.name == "builtin"
    assert first.packed is not None
    before = trained_weights(first.model)
    first.train()
    straight = trained_weights(first.model)
    assert any(not torch.equal(weight, before[name]) for name, weight in straight.items())
    assert logs(first)[0]["kl"] < logs(first)[2]["kl"]

    again = make(tmp_path / "again", GRPOTrainer, **policy_of(method, passed=passed), **SETTINGS)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = trained_weights(again.model)
    assert resumed.keys() == straight.keys()
    for name, weight in straight.items():
        assert torch.equal(resumed[name], weight), name


@pytest.mark.sampled(9)
@pytest.mark.parametrize("method", tiered(FAST))
def test_plain_peft_loads_a_checkpoint(method: str, tmp_path: Path) -> None:
    trainer = run(
        tmp_path, GRPOTrainer, **policy_of(method, passed=False), callbacks=[SaveAt(2)], **SETTINGS | {"max_steps": 2}
    )
    trainer.save_model(str(tmp_path / "final"))
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=IDS).logits
        for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
            assert not (folder / "model.safetensors").exists()
            assert (folder / "tokenizer_config.json").exists()
            loaded = peft.PeftModel.from_pretrained(tiny_model(hidden_size=32), folder).eval()
            assert (loaded(input_ids=IDS).logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("config", [*VIRTUAL.values(), adalora])
def test_methods_that_cannot_work_are_refused(config: Any, trainer_class: Any, tmp_path: Path) -> None:
    for policy in ({"peft_config": config()}, {"model": peft.get_peft_model(tiny_model(), config())}):
        with pytest.raises(ConfigError, match=f"{type(config()).__name__} .* Use Lo"):
            make(tmp_path, trainer_class, **policy)


def test_a_reference_that_would_move_is_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all", task_type="CAUSAL_LM")
    model = tiny_model(attention_bias=True)
    with pytest.raises(ConfigError, match="the reference, which is the base model"):
        make(tmp_path, model=model, peft_config=config, beta=0.1)
    trainer = run(tmp_path, model=tiny_model(attention_bias=True), peft_config=config, beta=0.0, max_steps=1)
    assert logs(trainer)[0]["grad_norm"] > 0
