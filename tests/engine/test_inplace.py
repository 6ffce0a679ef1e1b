"""The engine borrows the training module: it comes back as it was, and training does not notice."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gruppo.engine import engine as engine_module
from gruppo.engine import runner as runner_module
from gruppo.engine.cache import ATTENTION_NAME
from gruppo.engine.engine import Engine
from gruppo.engine.settings import SamplingSettings
from gruppo.policy import fusion
from gruppo.policy.inplace import Swap
from gruppo.policy.support import plain_logps
from gruppo.policy.unwrap import inner_model
from gruppo.types import SampleRequest
from tests.engine.models import build
from tests.processes import wrapped_alone

REQUESTS = [SampleRequest([5, 9, 11, 30], 2, noise_key=1), SampleRequest([40, 41], 2, noise_key=2)]
SETTINGS = SamplingSettings(max_new_tokens=5)
GREEDY = SamplingSettings(max_new_tokens=8, greedy=True, stop_ids=(1,))


# ---- policies as a trainer has them


class Policy(NamedTuple):
    module: Any
    autocast: torch.dtype | None = None

    @property
    def inner(self) -> Any:
        return inner_model(self.module)

    def engine(self) -> Engine:
        return Engine(lambda: self.module, autocast_dtype=self.autocast)


def in_training() -> Any:
    """A model in training mode, all but one layer, with dropout so that random numbers matter."""
    model = build("llama").train()
    model.model.layers[1].eval()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    model.lm_head.requires_grad_(False)
    return model


def checkpointed() -> Any:
    model = in_training().train()
    model.gradient_checkpointing_enable()
    return model


def with_lora(**options: Any) -> Any:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(in_training(), adapter)


@pytest.fixture(params=["plain", "checkpointed", "ddp", "lora", "bfloat16", "masters", "lora masters"])
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    if request.param == "ddp":
        with wrapped_alone(in_training()) as wrapper:
            yield Policy(wrapper)
        return
    yield {
        "plain": lambda: Policy(in_training()),
        "checkpointed": lambda: Policy(checkpointed()),
        "lora": lambda: Policy(with_lora(lora_dropout=0.3)),
        "bfloat16": lambda: Policy(in_training().bfloat16()),
        "masters": lambda: Policy(checkpointed(), torch.bfloat16),
        "lora masters": lambda: Policy(with_lora(), torch.bfloat16),
    }[request.param]()


class Snapshot:
    """Everything about a module that sampling could leave changed."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.modules = list(module.modules())
        self.attributes = [dict(vars(part)) for part in self._owners()]
        self.parameters = list(module.parameters())
        self.gradients = [p.grad for p in self.parameters]
        self.addresses = self._addresses()
        self.values = [tensor.clone() for tensor in self._tensors()]
        self.random = torch.random.get_rng_state()

    def _addresses(self) -> list[tuple[int, bool]]:
        return [(p.data_ptr(), p.requires_grad) for p in self.module.parameters()]

    def _tensors(self) -> list[torch.Tensor]:
        held = [*self.parameters, *self.gradients, *self.module.buffers()]
        return [tensor.detach() for tensor in held if tensor is not None]

    def _owners(self) -> list[Any]:
        """The modules, their configs, and the files in which the modules are written."""
        configs = {id(m.config): m.config for m in self.modules if hasattr(m, "config")}
        homes = {type(m).__module__ for m in self.modules if type(m).__module__.startswith("transformers.models")}
        assert configs
        assert homes
        return [*self.modules, *configs.values(), *(sys.modules[home] for home in sorted(homes))]

    def assert_unchanged(self) -> None:
        assert len(self.modules) == len(list(self.module.modules()))
        for owner, attributes in zip(self._owners(), self.attributes, strict=True):
            assert vars(owner).keys() == attributes.keys(), type(owner)
            changed = [name for name, value in attributes.items() if vars(owner)[name] is not value]
            assert changed == [], (type(owner), changed)
        for now, before, gradient in zip(self.module.parameters(), self.parameters, self.gradients, strict=True):
            assert now is before
            assert now.grad is gradient
        assert self._addresses() == self.addresses
        assert all(torch.equal(a, b) for a, b in zip(self._tensors(), self.values, strict=True))
        assert torch.equal(torch.random.get_rng_state(), self.random)


# ---- back as it was


def test_the_module_comes_back_as_it_was(policy: Policy) -> None:
    gradients(policy, None, "before")  # such as an accumulation step leaves
    engine = policy.engine()
    before = Snapshot(policy.module)
    assert any(module.training for module in before.modules)
    assert any(gradient is not None for gradient in before.gradients)
    for settings in (SETTINGS, GREEDY):
        engine.sample(REQUESTS, settings)
        before.assert_unchanged()
    engine.release()
    before.assert_unchanged()


def test_while_it_runs_it_is_another(policy: Policy) -> None:
    """The test above would pass if nothing were ever switched."""
    seen: list[tuple[bool, bool, str, bool]] = []

    def look(module: Any, *_: Any) -> None:
        replaced = any("forward" in vars(part) for part in policy.inner.modules())
        attention = policy.inner.config._attn_implementation
        seen.append((module.training, torch.is_grad_enabled(), attention, replaced))

    policy.inner.model.layers[0].register_forward_hook(look)
    policy.engine().sample(REQUESTS, SETTINGS)
    assert len(seen) > SETTINGS.max_new_tokens
    assert {entry[:3] for entry in seen} == {(False, False, ATTENTION_NAME)}
    assert seen[-1][3], "norms are fused, and under autocast linear layers have their copies"


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_also_when_interrupted(policy: Policy, passes: int) -> None:
    """In the look at the shapes, while prompts are encoded, half-way through decoding."""
    engine, count = policy.engine(), [0]

    def interrupt(*_: Any) -> None:
        count[0] += 1
        if count[0] == passes:
            raise KeyboardInterrupt

    hook = policy.inner.model.layers[1].register_forward_hook(interrupt)
    before = Snapshot(policy.module)
    with pytest.raises(KeyboardInterrupt):
        engine.sample(REQUESTS, SETTINGS)
    before.assert_unchanged()
    assert engine._shadow is None or engine._shadow._last is None, "no activation is held"
    hook.remove()
    assert engine.sample(REQUESTS, SETTINGS) == policy.engine().sample(REQUESTS, SETTINGS)


def test_also_when_sampling_fails(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("in the sampler")

    engine = policy.engine()
    before = Snapshot(policy.module)
    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "choose", fail)
        with pytest.raises(ZeroDivisionError):
            engine.sample(REQUESTS, SETTINGS)
    before.assert_unchanged()
    assert engine.sample(REQUESTS, SETTINGS) == policy.engine().sample(REQUESTS, SETTINGS)


def everything_fused(model: nn.Module, dtypes: set[torch.dtype]) -> list[Swap]:
    """What `fused_swaps` does on CUDA; the operations have twins on the CPU."""
    swaps = fusion.fused_swaps(model, dtypes, everything=True)
    assert len(swaps) == 7 + 3 + 1, "norms, MLPs and the rotary embedding"
    return swaps


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_is_fused_on_cuda_comes_back_too(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model, original, seen = in_training(), modeling_llama.apply_rotary_pos_emb, []

    def look(*_: Any) -> None:
        seen.append(modeling_llama.apply_rotary_pos_emb)
        if interrupted and len(seen) == 4:
            raise KeyboardInterrupt

    expected = Engine(lambda: model).sample(REQUESTS, GREEDY)
    monkeypatch.setattr(engine_module, "fused_swaps", everything_fused)
    model.model.layers[1].register_forward_hook(look)
    before = Snapshot(model)
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        assert [c.ids for c in Engine(lambda: model).sample(REQUESTS, GREEDY)] == [c.ids for c in expected]
    assert seen[-1] is not original
    before.assert_unchanged()


# ---- training does not notice


def gradients(policy: Policy, engine: Engine | None, when: str) -> list[torch.Tensor]:
    """Of one step, with a rollout before it, or between its forward and its backward pass."""
    policy.module.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    if engine is not None and when == "before":
        engine.sample(REQUESTS, SETTINGS)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]])
    with torch.autocast("cpu", policy.autocast, enabled=policy.autocast is not None):
        loss = policy.module(input_ids=ids, labels=ids).loss
    if engine is not None and when == "between":
        engine.sample(REQUESTS, SETTINGS)
    loss.backward()
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    return [p.grad.clone() for p in trained]  # type: ignore[union-attr]


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_training_step_is_the_same_to_the_last_bit(policy: Policy, when: str) -> None:
    without = gradients(policy, None, when)
    with_it = gradients(policy, policy.engine(), when)
    assert any(gradient.abs().max() > 0 for gradient in without)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_sampling_is_the_same_in_training_and_in_evaluation(policy: Policy) -> None:
    in_train = policy.engine().sample(REQUESTS, SETTINGS)
    policy.module.eval()
    assert policy.engine().sample(REQUESTS, SETTINGS) == in_train


# ---- adapters


def generated(model: Any) -> list[list[int]]:
    """Greedy tokens of transformers, one prompt at a time."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    rows = []
    for request in REQUESTS:
        ids = list(request.prompt_ids)
        out = model.generate(
            input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=GREEDY.max_new_tokens, use_cache=True
        )
        rows.append(out[0, len(ids) :].tolist())
    for module in training:
        module.training = True
    return rows


@pytest.mark.filterwarnings("ignore:Already unmerged")
def test_adapters_are_what_generate_makes_of_them() -> None:
    """Active, off, another one, merged: one engine throughout."""
    model = with_lora()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    engine = Engine(lambda: model)

    def sampled() -> list[list[int]]:
        return [list(c.ids) for c in engine.sample(REQUESTS, GREEDY)[::2]]

    active = sampled()
    assert active == generated(model)
    with model.disable_adapter():
        off = sampled()
        assert off == generated(model) != active
    assert sampled() == active
    model.set_adapter("other")
    assert sampled() == generated(model)
    assert sampled() not in (active, off)
    model.set_adapter("default")
    model.merge_adapter()
    before = Snapshot(model)
    assert sampled() == generated(model) == active
    before.assert_unchanged()
    model.unmerge_adapter()
    assert sampled() == active


def test_captured_steps_are_dropped_when_adapters_change() -> None:
    """A CUDA graph repeats what was recorded: with other adapters it must be recorded anew."""
    model = with_lora()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    engine = Engine(lambda: model)

    def runner() -> Any:
        engine.sample(REQUESTS, GREEDY)
        return engine._runner

    first = runner()
    assert runner() is first
    with model.disable_adapter():
        off = runner()
        assert off is not first
        assert runner() is off
    model.set_adapter("other")
    other = runner()
    model.set_adapter("default")
    model.merge_adapter()
    merged = runner()
    model.unmerge_adapter()
    assert len({id(kept) for kept in (first, off, other, merged, runner())}) == 5


def test_memory_that_graphs_point_to_stays_when_a_call_does_without_it() -> None:
    model = build("llama")
    engine = Engine(lambda: model)
    penalised = SamplingSettings(max_new_tokens=3, repetition_penalty=1.5)
    engine.sample(REQUESTS, penalised)
    runner = engine._runner
    assert runner is not None
    memory = runner.seen
    assert memory is not None
    engine.sample(REQUESTS, SamplingSettings(max_new_tokens=3))
    assert engine._runner is runner
    assert runner.seen is None
    engine.sample(REQUESTS, penalised)
    assert engine._runner is runner
    assert runner.seen is memory


# ---- float32 masters under bfloat16 autocast


def tied() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        size = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        return LlamaForCausalLM(
            LlamaConfig(**size, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2)
        )


def masters(name: str) -> Any:
    return {"llama": lambda: build("llama"), "biases": lambda: build("qwen2"), "tied": tied, "lora": with_lora}[name]()


@pytest.mark.parametrize("name", ["llama", "biases", "tied", "lora"])
def test_there_is_exactly_one_copy_of_the_linear_weights(name: str) -> None:
    model = masters(name)
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    distinct = {p.data_ptr(): p.numel() for m in linears for p in (m.weight, m.bias) if p is not None}
    engine = Engine(lambda: model, autocast_dtype=torch.bfloat16)
    engine.sample(REQUESTS, SETTINGS)
    shadow = engine._shadow
    assert shadow is not None
    assert shadow.bytes == 2 * sum(distinct.values())
    copies = [copy.data_ptr() for copy in shadow._copies.values()]
    engine.sample(REQUESTS, SETTINGS)
    assert engine._shadow is shadow
    assert [copy.data_ptr() for copy in shadow._copies.values()] == copies
    assert all(p.dtype is torch.float32 for p in model.parameters())
    engine.release()
    assert engine._shadow is None
    if name == "tied":
        assert model.lm_head.weight.data_ptr() in distinct
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float64, None)]
)
def test_others_need_no_copy(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    model = build("llama").to(dtype)
    engine = Engine(lambda: model, autocast_dtype=autocast)
    engine.sample(REQUESTS, SETTINGS)
    assert engine._shadow is None


@pytest.mark.parametrize("name", ["llama", "biases", "tied", "lora"])
def test_the_copy_follows_the_weights(name: str) -> None:
    model = masters(name)
    engine = Engine(lambda: model, autocast_dtype=torch.bfloat16)
    first = engine.sample(REQUESTS, SETTINGS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2).add_(0.05 * parameter.roll(1, 0))
    second = engine.sample(REQUESTS, SETTINGS)
    fresh = Engine(lambda: model, autocast_dtype=torch.bfloat16).sample(REQUESTS, SETTINGS)
    assert second == fresh
    assert [c.logps for c in second] != [c.logps for c in first]


@pytest.mark.parametrize("name", ["llama", "biases", "tied", "lora"])
def test_log_probs_are_those_of_a_pass_under_the_same_autocast(name: str) -> None:
    model = masters(name)
    completions = Engine(lambda: model, autocast_dtype=torch.bfloat16).sample(REQUESTS, SETTINGS)
    rows = [[*REQUESTS[i // 2].prompt_ids, *c.ids] for i, c in enumerate(completions)]

    def distance(dtype: torch.dtype | None) -> float:
        logps = plain_logps(model, rows, dtype)
        return torch.cat(
            [(torch.tensor(c.logps) - own[-len(c.ids) :]).abs() for c, own in zip(completions, logps, strict=True)]
        ).mean()

    assert distance(torch.bfloat16) < 0.02
    assert distance(torch.bfloat16) < 0.5 * distance(None), "the arithmetic is autocast's, not float32"
