"""Memory that is measured where a config does not give the sizes of layers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from gruppo.plan import ModelShape, Passes, plan_update
from gruppo.policy.measuring import kept_bytes, measured_shape
from tests.policy.families import family


def qwen2() -> torch.nn.Module:
    config = Qwen2Config(
        hidden_size=128, intermediate_size=384, num_attention_heads=8, num_key_value_heads=2, vocab_size=128,
        num_hidden_layers=3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_measured_is_about_what_is_computed_where_both_can_be(checkpointing: bool) -> None:
    model, passes = qwen2(), Passes(stream=4, product=4, fused=False, device="cpu")
    measured, computed = measured_shape(model), ModelShape.from_config(model.config)
    assert (measured.layers, measured.hidden, measured.vocabulary) == (3, 128, 128)
    assert measured.layer_weights == pytest.approx(computed.layer_weights, rel=0.02)
    found, expected = (shape.update_bytes(passes, checkpointing=checkpointing) for shape in (measured, computed))
    assert found == pytest.approx(expected, rel=0.35)


def test_a_model_without_attention_is_measured_and_planned_for() -> None:
    model = family("mamba2").train()
    shape = measured_shape(model)
    assert shape.kept > shape.layers * 32 * 4, "more than the inputs of the layers"
    assert 2 * kept_bytes(model, 64) > kept_bytes(model, 128) > kept_bytes(model, 64)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    passes = Passes(stream=4, product=4, fused=False, device="cpu")
    plans = [plan_update(shape, passes, longest_row=100, free_bytes=free) for free in (0, 10**10)]
    assert [plan.checkpointing for plan in plans] == [True, False]
