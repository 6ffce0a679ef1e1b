"""Requests with limits of their own and blocks of turns, whichever backend answers."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from gruppo.plan import RolloutPlan
from gruppo.rollout.base import RolloutBackend, with_limits_of
from gruppo.rollout.builtin import BuiltinBackend
from gruppo.rollout.continuous import ContinuousBatchingBackend
from gruppo.rollout.hf import TransformersBackend
from gruppo.types import Completion, SampleRequest, StopReason
from tests.helpers import sharp, tiny_model, tiny_tokenizer

EOS, PAD = 1, 0
BACKENDS: dict[str, Callable[..., RolloutBackend]] = {
    "builtin": BuiltinBackend,
    "transformers": TransformersBackend,
    "continuous": ContinuousBatchingBackend,
}
PROMPTS = [[9, 10, 11, 12], [20], [30, 31]]


def backend(name: str, model: Any = None, **settings: Any) -> Any:
    policy = sharp(tiny_model()) if model is None else model
    config = GenerationConfig(
        **{"max_new_tokens": 6, "do_sample": False, "eos_token_id": [EOS], "pad_token_id": PAD} | settings
    )
    return BACKENDS[name](lambda: policy, config, stop_ids=[EOS])


def pairs(completions: list[Completion]) -> list[tuple[list[int], StopReason]]:
    return [(list(completion.ids), completion.stop) for completion in completions]


def cut(pair: tuple[list[int], StopReason], limit: int | None) -> tuple[list[int], StopReason]:
    """What is left of a completion under a lower limit."""
    ids, _ = pair
    if limit is None or limit >= len(ids):
        return pair
    return ids[: max(limit, 0)], StopReason.LENGTH if limit > 0 else StopReason.NO_ROOM


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("limits", [(2, 3, 1), (2, None, 9), (0, 4, -1), (0, 0, 0)], ids=str)
def test_limits_of_requests(name: str, limits: tuple[int | None, ...]) -> None:
    model = sharp(tiny_model())
    free = pairs(backend(name, model).sample([SampleRequest(prompt, 2) for prompt in PROMPTS]))
    assert all(len(ids) > 2 for ids, _ in free)
    requests = [SampleRequest(p, 2, max_new_tokens=limit) for p, limit in zip(PROMPTS, limits, strict=True)]
    completions = backend(name, model).sample(requests)
    assert pairs(completions) == [cut(pair, limits[i // 2]) for i, pair in enumerate(free)]
    assert all(c.logps is None or len(c.logps) == len(c.ids) for c in completions)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_end_at_the_limit_is_an_end(name: str) -> None:
    model = tiny_model()
    model.lm_head.weight.data.zero_()  # all tokens are as likely: the lowest id, which is the padding token
    limited = SampleRequest([9, 10], 1, max_new_tokens=2)
    assert pairs(backend(name, model, pad_token_id=5).sample([limited])) == [([0, 0], StopReason.LENGTH)]
    assert pairs(backend(name, model).sample([limited])) == [([0, 0], StopReason.EOS)], "as at the common limit"


def test_a_stop_string_beyond_the_limit_is_not_reached() -> None:
    model, tokenizer = sharp(tiny_model()), tiny_tokenizer()
    free = list(backend("transformers", model).sample([SampleRequest([20], 1)])[0].ids)
    sampler = backend("transformers", model, stop_strings=tokenizer.decode(free[2:4]))
    sampler.tokenizer = tokenizer
    limits = [None, 4, 3]
    completions = sampler.sample([SampleRequest([20], 1, max_new_tokens=limit) for limit in limits])
    string = (free[:4], StopReason.STOP_STRING)
    assert pairs(completions) == [string, string, (free[:3], StopReason.LENGTH)]


def test_the_limit_of_a_batch_is_its_largest() -> None:
    config = GenerationConfig(max_new_tokens=8, min_new_tokens=4)

    def lowered(*limits: int | None) -> tuple[int, int]:
        made = with_limits_of([SampleRequest([5], 1, max_new_tokens=limit) for limit in limits], config)
        return made.max_new_tokens, made.min_new_tokens

    assert lowered(2, 6) == (6, 4)
    assert lowered(2, 3) == (3, 3), "generate warns of a minimum that cannot be reached"
    assert lowered(2, None) == lowered(2, 99) == (8, 4)
    assert lowered(0) == (1, 1)
    assert (config.max_new_tokens, config.min_new_tokens) == (8, 4), "the config itself stays"
    without = SimpleNamespace(max_new_tokens=None)
    assert with_limits_of([SampleRequest([5], 1, max_new_tokens=3)], without) is without


@pytest.mark.parametrize("name", BACKENDS)
def test_two_turns_inside_a_block(name: str) -> None:
    """Greedy, and the end tokens of one turn stand in the prompts of the next."""
    model = sharp(tiny_model())
    ends = sorted({pair[0][2] for pair in pairs(backend(name, model).sample([SampleRequest(p, 1) for p in PROMPTS]))})

    def two_turns(sampler: Any) -> list[tuple[list[int], StopReason]]:
        sampler.config.eos_token_id = ends
        sampler.stop_ids = type(sampler.stop_ids)(ends)
        first = sampler.sample([SampleRequest(prompt, 1, noise_key=i) for i, prompt in enumerate(PROMPTS)])
        assert all(completion.stop is StopReason.EOS for completion in first)
        answered = [[*prompt, *c.ids, 40, 41] for prompt, c in zip(PROMPTS, first, strict=True)]
        second = sampler.sample([SampleRequest(ids, 1, i, turn=1) for i, ids in enumerate(answered)])
        return pairs([*first, *second])

    alone = two_turns(backend(name, model))
    sampler = backend(name, model)
    with sampler.turns():
        assert two_turns(sampler) == alone


def test_what_the_engine_says_of_a_block() -> None:
    sampler = backend("builtin", do_sample=True, forced_eos_token_id=EOS)
    sampler.engine.plan = RolloutPlan(kv_tokens=100, rows=4, prefill_tokens=64)
    first = SampleRequest([9, 10, 11, 12], 1, noise_key=3)
    sampler.sample([first])
    assert "rollout/kept_ratio" not in sampler.metrics(), "only a block of turns keeps anything"
    with sampler.turns():
        (completion,) = sampler.sample([first])
        assert completion.stop is StopReason.EOS
        longer = [*first.prompt_ids, *completion.ids, 40, 41]
        sampler.sample([replace(first, prompt_ids=longer, turn=1)])
    # All but the last of what was said is there; that one and the first of the answer are encoded.
    kept, encoded = len(longer) - 3, 3 + 2
    assert sampler.metrics()["rollout/kept_ratio"] == pytest.approx(kept / (kept + encoded))
    assert sampler.work([], [])["prompt_tokens"] == 2, "the last call alone: whoever asks adds them up"
    sampler.sample([first])
    assert sampler.work([], [])["prompt_tokens"] == 3


@torch.no_grad()
def test_turns_of_transformers_draw_other_numbers() -> None:
    """They come from torch's own generator, which goes on by itself."""
    sampler = backend("transformers", do_sample=True)
    torch.manual_seed(0)
    rows = [tuple(sampler.sample([SampleRequest([9, 10], 1, 3, turn=turn)])[0].ids) for turn in range(4)]
    assert len(set(rows)) > 1
