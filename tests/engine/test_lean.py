"""The shorter way through a decoder: what it is used for, and that it is the same way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from gruppo.engine.engine import Engine
from gruppo.engine.reference import KeyTable, Workspace
from gruppo.engine.settings import SamplingSettings
from gruppo.plan import RolloutPlan
from gruppo.policy.support import plain_logps
from gruppo.types import Completion, SampleRequest
from tests.engine.models import BUILDERS, build

REQUESTS = [SampleRequest([5, 9, 11, 30, 7, 8, 20], 3, noise_key=1), SampleRequest([40], 2, noise_key=2)]
SETTINGS = SamplingSettings(max_new_tokens=9, stop_ids=(1,))
LEAN = ["llama", "llama-mha", "llama-mqa", "qwen2", "qwen2-sliding", "mistral"]


def sampled(model: Any, **options: Any) -> tuple[list[Completion], bool]:
    """Completions, and whether they came the short way."""
    engine = Engine(lambda: model, **options)
    completions = engine.sample(REQUESTS, SETTINGS)
    assert engine._runner is not None
    return completions, engine._runner.lean is not None


def goes_short(model: Any, **options: Any) -> bool:
    return sampled(model, **options)[1]


def assert_same(ours: list[Completion], others: list[Completion]) -> None:
    assert [c.ids for c in ours] == [c.ids for c in others]
    assert [c.stop for c in ours] == [c.stop for c in others]
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(torch.tensor(a.logps), torch.tensor(b.logps), rtol=0, atol=1e-5)


# ---- the same


@pytest.mark.parametrize("plan", [None, RolloutPlan(64, 3, 4)], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", LEAN)
def test_it_samples_what_the_model_itself_does(name: str, plan: RolloutPlan | None) -> None:
    model = build(name)
    ours, short = sampled(model, plan=plan)
    others, long = sampled(model, plan=plan, fuse=False)
    assert (short, long) == (True, False)
    assert_same(ours, others)
    rows = [[*REQUESTS[i // 3].prompt_ids, *c.ids] for i, c in enumerate(ours)]
    for completion, plain in zip(ours, plain_logps(model, rows, None), strict=True):
        torch.testing.assert_close(torch.tensor(completion.logps), plain[-len(completion.ids) :], rtol=0, atol=1e-5)


def test_it_follows_the_weights() -> None:
    model = build("llama")
    engine = Engine(lambda: model)
    before = engine.sample(REQUESTS, SETTINGS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2).add_(0.05 * parameter.roll(1, 0))
        model.model.rotary_emb.inv_freq.mul_(0.7)
    after = engine.sample(REQUESTS, SETTINGS)
    assert engine._runner is not None
    assert engine._runner.lean is not None
    assert [c.logps for c in after] != [c.logps for c in before]
    assert_same(after, sampled(model, fuse=False)[0])
    model.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight.flip(0).clone())
    assert_same(engine.sample(REQUESTS, SETTINGS), sampled(model, fuse=False)[0])


# ---- and where not


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - set(LEAN)))
def test_other_architectures_go_their_own_way(name: str) -> None:
    assert not goes_short(build(name))


class Scaled(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out


class Wide(nn.Linear):
    pass


def with_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))


def without_attention(model: Any) -> Any:
    """Its layers' attention comes to nothing: nobody can see what they do with it."""
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    return model


def changed(part: Callable[[Any], Any], **attributes: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        for name, value in attributes.items():
            setattr(part(model), name, value)
        return model

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_lora,
        without_attention,
        lambda model: model.bfloat16(),
        lambda model: model.double(),
        changed(lambda m: m, __class__=Scaled),
        changed(lambda m: m.model.layers[2].mlp.up_proj, __class__=Wide),
        changed(lambda m: m.model.layers[0].mlp, act_fn=nn.ReLU()),
        changed(lambda m: m.model.layers[0].self_attn, q_norm=nn.Identity()),
        changed(lambda m: m.model.embed_tokens, max_norm=0.1),
        changed(lambda m: m.lm_head, forward=lambda x: x.new_ones(*x.shape[:-1], 64)),
    ],
)
def test_what_is_not_plain_goes_its_own_way(change: Callable[[Any], Any]) -> None:
    assert not goes_short(change(build("llama")))


def test_not_under_autocast() -> None:
    assert not goes_short(build("llama"), autocast_dtype=torch.bfloat16)


def test_hooks_are_called_whenever_there_are_some() -> None:
    """Put on between two rollouts of one engine, and taken off again."""
    model, calls = build("llama"), [0]
    engine = Engine(lambda: model)

    def count(*_: Any) -> None:
        calls[0] += 1

    first = engine.sample(REQUESTS, SETTINGS)
    for part in (model.model.layers[0], model.model.layers[2].self_attn.k_proj, model.lm_head, model.model):
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            hook, calls[0] = register(count), 0
            assert_same(engine.sample(REQUESTS, SETTINGS), first)
            assert calls[0] > 5
            hook.remove()
            assert engine.sample(REQUESTS, SETTINGS) == first, "the short way again"


def test_gathered_keys_are_kept_in_one_place() -> None:
    pool = torch.arange(24.0).view(12, 1, 2)
    one = torch.tensor([[3], [1]])
    table = KeyTable.of(*torch.tensor([[0, 4], [2, 3], [8, 10], [1, 2]]), None)
    space = Workspace()
    wide = space.gather("keys", pool, table)
    assert torch.equal(wide, pool[table.places].view(2, 5, 1, 2))
    narrow = space.gather("keys", pool, KeyTable(one.flatten(), 1, None))
    assert narrow.data_ptr() == wide.data_ptr()
    assert torch.equal(narrow, pool[one])
    assert space.gather("values", pool, table).data_ptr() != wide.data_ptr()
    assert space.gather("keys", pool.double(), table).dtype is torch.float64
