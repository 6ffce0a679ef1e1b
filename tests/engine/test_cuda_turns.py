"""Turns on a CUDA device: captured steps, a pool that is lent, and copies that nobody waits for."""

from typing import Any

import pytest
import torch

from gruppo.engine.engine import Engine
from gruppo.engine.scheduler import PromptWork
from gruppo.engine.settings import SamplingSettings
from gruppo.plan import RolloutPlan
from gruppo.policy.support import plain_logps
from gruppo.types import SampleRequest
from tests.engine.models import BUILDERS, build
from tests.engine.test_cuda import requests, wide
from tests.engine.test_turns import HASTY, assert_nothing_is_lost, converse

pytestmark = pytest.mark.gpu

ENDS = tuple(range(1, 8000))  # of a vocabulary of 32,003: a completion has four tokens in the mean


def same_rows(ours: Any, theirs: Any) -> float:
    """The share of first and second turns that are equal; later ones follow from them."""
    pairs = [(a, b) for turn in (0, 1) for a, b in zip(ours.completions[turn], theirs.completions[turn], strict=False)]
    return sum(list(a.ids) == list(b.ids) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("name", BUILDERS)
def test_turns_in_float32_are_those_of_single_calls(name: str) -> None:
    model = build(name).cuda()
    settings = SamplingSettings(max_new_tokens=9, greedy=True, stop_ids=HASTY, forced_eos_token_id=(1,))
    options: Any = dict(prompts=[[9, 8, 7], [5], list(range(20, 31))], group=2, turns=4)
    alone = converse(Engine(lambda: model), settings, **options)
    sampler = Engine(lambda: model, plan=RolloutPlan(2000, 16, 64))
    with sampler.turns():
        together = converse(sampler, settings, **options)
        assert_nothing_is_lost(sampler)
    assert sampler.counters.kept_tokens == sum(together.repeated[:-1])
    assert [[list(c.ids) for c in turn] for turn in together.completions] == [
        [list(c.ids) for c in turn] for turn in alone.completions
    ]


@pytest.mark.parametrize("tight", [False, True])
def test_captured_steps_go_on_from_what_is_kept(tight: bool) -> None:
    model = wide()
    prompts = [list(request.prompt_ids) for request in requests(8)]
    settings = SamplingSettings(max_new_tokens=24, stop_ids=ENDS)
    plan = RolloutPlan(600, 24, 64) if tight else RolloutPlan(20_000, 64, 1024)
    sampler = Engine(lambda: model, plan=plan)
    with sampler.turns():
        together = converse(sampler, settings, prompts=prompts, group=8, turns=4)
        assert_nothing_is_lost(sampler)
    assert sampler.counters.graph_captures > 0
    assert tight or sampler.counters.kept_tokens == sum(together.repeated[:-1])
    alone = converse(Engine(lambda: model, plan=plan), settings, prompts=prompts, group=8, turns=4)
    assert same_rows(together, alone) > 0.8, "batch shapes differ, so logits do in their last bits"


def test_logps_of_a_second_turn_are_those_of_the_model() -> None:
    model = wide(torch.float32)
    settings = SamplingSettings(max_new_tokens=24, stop_ids=ENDS)
    sampler = Engine(lambda: model, plan=RolloutPlan(8000, 64, 1024))
    first = requests(4, 1)
    with sampler.turns():
        completions = sampler.sample(first, settings)
        second = [
            SampleRequest([*r.prompt_ids, *c.ids, 5, 6, 7], 1, r.noise_key, turn=1)
            for r, c in zip(first, completions, strict=True)
            if c.stop.ended
        ]
        assert second
        later = sampler.sample(second, settings)
    assert sampler.counters.kept_tokens == sum(len(request.prompt_ids) - 4 for request in second)
    rows = [[*r.prompt_ids, *c.ids] for r, c in zip(second, later, strict=True)]
    for completion, expected in zip(later, plain_logps(model, rows, None), strict=True):
        assert (torch.tensor(completion.logps) - expected[-len(completion.ids) :]).abs().mean() < 1e-4


def test_the_pool_is_held_for_the_block_and_lent_after_it() -> None:
    model = wide()
    sampler = Engine(lambda: model)
    settings = SamplingSettings(max_new_tokens=16, stop_ids=ENDS)
    with sampler.turns():
        sampler.sample(requests(), settings)
        assert sampler._runner is not None
        pool = sampler._runner.pool
        assert pool.held_bytes == pool.bytes
    assert pool.held_bytes == (pool.bytes if pool._memory is None else 0)


def test_copies_do_not_wait_for_the_device() -> None:
    model = wide()
    sampler = Engine(lambda: model, plan=RolloutPlan(4000, 16, 256))
    sampler.sample(requests(), SamplingSettings(max_new_tokens=4))
    runner = sampler._runner
    assert runner is not None
    ranges = [((50 + first, 7), (70 + first, 9)) for first in (0, 100, 200)]
    prompts = [PromptWork((5,) * 20, 4, start=100 * i, copied=copied) for i, copied in enumerate(ranges)]
    with runner.pool.held():
        for keys, values in zip(runner.pool.keys, runner.pool.values, strict=True):
            keys.normal_()
            values.normal_()
        wanted = [(k[[*range(50, 57), *range(70, 79)]].clone(), k) for k in (*runner.pool.keys, *runner.pool.values)]
        runner._copy_turns(prompts, 10)  # whatever has to be compiled
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner._copy_turns(prompts, 10)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(pool[:16], before) for before, pool in wanted)
