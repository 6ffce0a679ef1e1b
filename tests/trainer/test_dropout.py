"""Dropout: which passes of a run have it, and what `disable_dropout` turns off."""

import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.policy.loading import disable_dropout_in_model
from gruppo.policy.unwrap import dropouts, is_noisy
from tests.helpers import tiny_gpt2, tiny_model
from tests.policy.experts import experts
from tests.trainer.runs import make

LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.3}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For every call of a dropout module: whether it drops something, and whether a gradient follows."""
    seen: list[tuple[bool, bool]] = []
    forward = nn.Dropout.forward

    def watched(self: nn.Dropout, x: Any) -> Any:
        seen.append((self.training and self.p > 0, torch.is_grad_enabled()))
        return forward(self, x)

    monkeypatch.setattr(nn.Dropout, "forward", watched)
    return seen


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["modules", "adapter"])
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_only_the_update_drops_anything(
    trainer_class: Any, kind: str, packed: bool, passes: list[tuple[bool, bool]], tmp_path: Path
) -> None:
    """Sampling, old log-probs and the reference are those of the model itself."""
    policy = {"model": tiny_gpt2()} if kind == "modules" else {"peft_config": peft.LoraConfig(**LORA)}
    settings = {"packed_update": packed, "beta": 0.1, "num_iterations": 2, "max_steps": 2, "parity_check": "off"}
    trainer = make(tmp_path, trainer_class, **policy, skip_zero_advantage=False, **settings)
    passes.clear()
    trainer.train()
    assert {dropped for dropped, gradient in passes if gradient} == {True}
    assert {dropped for dropped, gradient in passes if not gradient} == {False}


@pytest.mark.parametrize("kind", ["modules", "adapter"])
def test_disabled_means_nowhere(kind: str, passes: list[tuple[bool, bool]], tmp_path: Path) -> None:
    policy = {"model": tiny_gpt2()} if kind == "modules" else {"peft_config": peft.LoraConfig(**LORA)}
    trainer = make(tmp_path, GRPOTrainer, **policy, disable_dropout=True, beta=0.1, max_steps=1)
    trainer.train()
    assert not any(dropped for dropped, _ in passes)
    found = [module.p for module in dropouts(trainer.model)]
    assert found == [0.0] * len(found) != []


def test_what_is_no_module_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(attention_dropout=0.25)
    with caplog.at_level(logging.WARNING):
        disable_dropout_in_model(model)
    assert model.model.layers[0].self_attn.attention_dropout == 0.25
    assert "LlamaAttention.attention_dropout=0.25 is not a module and stays on" in caplog.text
    caplog.clear()
    disable_dropout_in_model(tiny_model())
    disable_dropout_in_model(tiny_gpt2())
    assert not caplog.records


def test_dropout_of_other_classes() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5), nn.Linear(1, 1))
    assert [type(module) for module in dropouts(model)] == [nn.Dropout, nn.AlphaDropout, nn.Dropout1d]
    disable_dropout_in_model(model)
    assert [module.p for module in dropouts(model)] == [0.0, 0.0, 0.0]
    tuned = peft.get_peft_model(
        tiny_model(), peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"], module_dropout=0.5)
    )
    assert len(dropouts(tuned)) == 2
    disable_dropout_in_model(tuned)
    assert all(module.p == 0 for module in dropouts(tuned))


@pytest.mark.parametrize(("jitter", "noisy"), [(0.0, False), (0.1, True)])
def test_a_routers_jitter_is_noise(jitter: float, noisy: bool) -> None:
    model = experts("mixtral", router_jitter_noise=jitter)
    assert is_noisy(model, model) == noisy
