"""Ways in which sampling could go wrong without a sign, each tried once."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from gruppo.engine.engine import Engine
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.shadow import Shadow
from gruppo.engine.support import trial, unsupported_model
from gruppo.plan import RolloutPlan
from gruppo.policy.support import plain_logps
from gruppo.types import SampleRequest
from tests.engine.models import _SIZE, build


def logp_error(model: Any, tokens: int) -> float:
    """Largest difference to a plain forward pass."""
    (completion,) = Engine(lambda: model).sample([SampleRequest([5, 6, 7], 1)], SamplingSettings(tokens))
    (expected,) = plain_logps(model, [[5, 6, 7, *completion.ids]], None)
    assert completion.logps is not None
    return (torch.tensor(completion.logps) - expected[-len(completion.ids) :]).abs().max().item()


def test_a_model_that_changes_with_the_position() -> None:
    """Its queries are scaled by a factor that is 1 at first: the lean decoder, which knows none, must not be used."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.9,
    }
    torch.manual_seed(0)
    config = tf.Ministral3Config(**_SIZE, head_dim=8, rope_parameters=rope)
    model = tf.Ministral3ForCausalLM(config).eval()
    assert logp_error(model, 60) < 1e-4


def test_a_plan_grows_but_does_not_shrink() -> None:
    model = build("llama")
    engine = Engine(lambda: model)
    many, long = [SampleRequest([5, 6], 12)], [SampleRequest([7] * 100, 1)]
    engine.sample(many, SamplingSettings(8))
    engine.sample(long, SamplingSettings(8))
    grown, runner = engine.plan, engine._runner
    assert grown is not None
    assert grown.rows == 12
    assert grown.kv_tokens >= 107
    for requests in (many, long, many):
        engine.sample(requests, SamplingSettings(8))
    assert (engine.plan, engine._runner) == (grown, runner)
    assert RolloutPlan(10, 4, 64).grown(RolloutPlan(20, 2, 16)) == RolloutPlan(20, 4, 64)


def test_what_is_put_around_a_model_is_not_passed_by() -> None:
    model = build("llama")
    handle = model.register_forward_hook(lambda module, inputs, output: output)
    assert any("hook" in reason for reason in unsupported_model(model))
    handle.remove()
    assert unsupported_model(model) == []
    model.forward = lambda **kwargs: None
    assert any("hook" in reason for reason in unsupported_model(model))


def test_a_linear_layer_with_a_forward_of_its_own_has_no_shadow() -> None:
    model = build("llama")
    linear = model.model.layers[0].mlp.down_proj
    original = linear.forward
    linear.forward = lambda x: original(x) + 1
    assert linear not in Shadow(model, torch.bfloat16).linears
    assert model.model.layers[1].mlp.down_proj in Shadow(model, torch.bfloat16).linears


def test_a_head_with_fewer_rows_than_the_embedding() -> None:
    model = build("qwen2")
    model.lm_head = nn.Linear(32, 40, bias=False)
    assert trial(model) is None
    penalised = SamplingSettings(6, repetition_penalty=1.3)
    (completion,) = Engine(lambda: model).sample([SampleRequest([63, 5], 1)], penalised)
    assert len(completion.ids) == 6
    assert max(completion.ids) < 40


def test_a_rollout_in_inference_mode_does_not_spoil_the_next() -> None:
    model = build("llama")
    engine = Engine(lambda: model)
    with torch.inference_mode():
        first = engine.sample([SampleRequest([5, 6], 2)], SamplingSettings(5))
    assert engine.sample([SampleRequest([5, 6], 2)], SamplingSettings(5)) == first


@pytest.mark.parametrize("other", [[5, 6], [9]])
def test_requests_without_a_key_draw_different_numbers(other: list[int]) -> None:
    model = build("llama")
    for parameter in model.lm_head.parameters():
        parameter.data.zero_()  # every token as likely as any: what is drawn is the noise
    first, second = Engine(lambda: model).sample(
        [SampleRequest([5, 6], 1), SampleRequest(other, 1)], SamplingSettings(9)
    )
    assert list(first.ids) != list(second.ids)
