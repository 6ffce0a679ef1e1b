"""The engine against transformers: the same tokens and the same log-probs, for every kind of model it runs."""

import random
from typing import Any

import pytest
import torch

from gruppo.engine.engine import Engine
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.support import trial, unsupported_model
from gruppo.plan import RolloutPlan
from gruppo.policy.support import plain_logps
from gruppo.types import Completion, SampleRequest, StopReason
from tests.engine.models import BUILDERS, VOCABULARY, build

LENGTHS = (1, 2, 3, 7, 12, 12, 20)
NEW_TOKENS = 14


def prompts() -> list[list[int]]:
    choose = random.Random(0)
    return [[choose.randrange(3, VOCABULARY) for _ in range(n)] for n in LENGTHS]


def generate(model: Any, ids: list[int]) -> list[int]:
    """Greedy tokens of transformers, one prompt at a time, cut after the end token."""
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)[0, len(ids) :].tolist()
    return out[: out.index(1) + 1] if 1 in out else out


def greedy(model: Any, requests: list[SampleRequest], plan: RolloutPlan | None = None) -> list[Completion]:
    settings = SamplingSettings(max_new_tokens=NEW_TOKENS, greedy=True, stop_ids=(1,))
    return Engine(lambda: model, plan=plan).sample(requests, settings)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BUILDERS)
def test_greedy_equals_generate(name: str) -> None:
    model = build(name)
    assert unsupported_model(model) == []
    expected = [generate(model, ids) for ids in prompts()]
    assert len({tuple(ids) for ids in expected}) > 3, "the model says the same whatever it is asked"

    together = greedy(model, [SampleRequest(ids, 1) for ids in prompts()])
    assert [list(c.ids) for c in together] == expected
    single = [greedy(model, [SampleRequest(ids, 1)])[0] for ids in prompts()]
    assert [list(c.ids) for c in single] == expected
    for completion in together:
        ended = completion.ids[-1] == 1
        assert completion.stop is (StopReason.EOS if ended else StopReason.LENGTH)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt-neox"])
@pytest.mark.parametrize("seed", range(3))
def test_admission_order_and_budgets_do_not_matter(name: str, seed: int) -> None:
    model = build(name)
    expected = [generate(model, ids) for ids in prompts()]
    order = list(range(len(expected)))
    random.Random(seed).shuffle(order)
    # Room for two completions or so at a time, and prompts in chunks of five tokens.
    plan = RolloutPlan(kv_tokens=70 - 9 * seed, rows=3, prefill_tokens=5)
    completions = greedy(model, [SampleRequest(prompts()[i], 2) for i in order], plan)
    assert [list(c.ids) for c in completions] == [expected[i] for i in order for _ in range(2)]


@pytest.mark.parametrize("name", BUILDERS)
def test_logps_equal_a_plain_forward(name: str) -> None:
    model = build(name)
    settings = SamplingSettings(max_new_tokens=NEW_TOKENS)
    requests = [SampleRequest(ids, 3, noise_key=i) for i, ids in enumerate(prompts())]
    completions = Engine(lambda: model).sample(requests, settings)
    rows = [prompts()[i // 3] + list(c.ids) for i, c in enumerate(completions)]
    for completion, expected in zip(completions, plain_logps(model, rows, None), strict=True):
        torch.testing.assert_close(torch.tensor(completion.logps), expected[-len(completion.ids) :], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_trial_accepts(name: str) -> None:
    assert trial(build(name)) is None
