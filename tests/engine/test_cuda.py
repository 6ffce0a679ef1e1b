"""The engine on a CUDA device: graphs, precision, memory."""

import gc
import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from gruppo.engine.engine import Engine
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.support import trial
from gruppo.plan import RolloutPlan
from gruppo.policy.support import plain_logps
from gruppo.types import SampleRequest
from tests.engine.models import BUILDERS, build
from tests.engine.test_models import NEW_TOKENS, greedy, prompts

pytestmark = pytest.mark.gpu


def wide(dtype: torch.dtype = torch.bfloat16, layers: int = 4) -> Any:
    """A Qwen2 with head size 64 and a real vocabulary."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_003,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.05,
    )
    return Qwen2ForCausalLM(config).to("cuda", dtype).eval()


def requests(count: int = 4, size: int = 8, length: int = 40) -> list[SampleRequest]:
    choose = random.Random(0)
    return [
        SampleRequest([choose.randrange(3, 32_000) for _ in range(choose.randrange(1, length))], size, noise_key=i)
        for i in range(count)
    ]


@pytest.mark.parametrize("name", BUILDERS)
def test_greedy_on_cuda_equals_cpu_in_float32(name: str) -> None:
    expected = [list(c.ids) for c in greedy(build(name), [SampleRequest(ids, 1) for ids in prompts()])]
    model = build(name).cuda()
    ours = greedy(model, [SampleRequest(ids, 1) for ids in prompts()])
    assert [list(c.ids) for c in ours] == expected
    assert trial(model) is None
    assert trial(model.bfloat16()) is None


def test_graphs_sample_what_eager_steps_sample() -> None:
    model = wide()
    settings = SamplingSettings(max_new_tokens=24, stop_ids=tuple(range(1, 2000)))
    engine = Engine(lambda: model)
    captured = engine.sample(requests(), settings)
    assert engine.counters.graph_captures > 0
    again = engine.sample(requests(), settings)
    assert engine.counters.graph_captures == 0
    assert [list(c.ids) for c in captured] == [list(c.ids) for c in again]
    assert [c.logps for c in captured] == [c.logps for c in again]
    eager = Engine(lambda: model, graphs=False).sample(requests(), settings)
    same = [list(a.ids) == list(b.ids) for a, b in zip(captured, eager, strict=True)]
    assert sum(same) >= 0.8 * len(same)  # batch shapes differ, so logits do in their last bits
    assert len({tuple(c.ids) for c in captured}) > 28


def test_a_failed_capture_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """A model that looks at its values runs step by step; torch's random numbers and its stream are as before."""
    model = wide()
    model.model.norm.register_forward_hook(lambda module, args, output: output * float(output.isfinite().all().item()))
    torch.cuda.manual_seed(7)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(7)
    completions = Engine(lambda: model).sample(requests(), SamplingSettings(max_new_tokens=4))
    assert "cannot be captured as a CUDA graph" in caplog.text
    assert len(completions) == 32
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    assert 0 < torch.nn.functional.dropout(torch.ones(1000, device="cuda")).count_nonzero() < 1000
    another = Engine(lambda: wide())
    another.sample(requests(), SamplingSettings(max_new_tokens=4))
    assert another.counters.graph_captures > 0


def test_the_memory_of_a_failed_capture_is_given_back() -> None:
    """An engine that fails to capture leaves as much reserved as one that does not try."""

    def sample(graphs: bool) -> None:
        model = wide()
        model.model.norm.register_forward_hook(lambda module, args, out: out * float(out.isfinite().all().item()))
        Engine(lambda: model, graphs=graphs).sample(requests(), SamplingSettings(max_new_tokens=4))

    def reserved(*, graphs: bool) -> int:
        sample(graphs)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    reserved(graphs=True)  # workspaces of the capture's stream, which stay
    without = reserved(graphs=False)
    assert reserved(graphs=True) <= without


def test_weights_may_change_between_rollouts_without_new_graphs() -> None:
    model = wide()
    settings = SamplingSettings(max_new_tokens=8, greedy=True)
    engine = Engine(lambda: model)
    first = engine.sample(requests(), settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    second = engine.sample(requests(), settings)
    assert engine.counters.graph_captures == 0
    fresh = Engine(lambda: model).sample(requests(), settings)
    assert [list(c.ids) for c in second] == [list(c.ids) for c in fresh]
    assert [list(c.ids) for c in first] != [list(c.ids) for c in second]


@pytest.mark.parametrize("case", ["bfloat16", "float32", "autocast"])
def test_logps_are_those_of_the_model(case: str) -> None:
    """Stated numerics: mean |difference| to the model's own forward pass."""
    model = wide(torch.bfloat16 if case == "bfloat16" else torch.float32)
    autocast = torch.bfloat16 if case == "autocast" else None
    completions = Engine(lambda: model, autocast_dtype=autocast).sample(
        requests(), SamplingSettings(max_new_tokens=32)
    )
    rows = [list(requests()[i // 8].prompt_ids) + list(c.ids) for i, c in enumerate(completions)]
    expected = plain_logps(model, rows, autocast)
    ours = [torch.tensor(c.logps) for c in completions]
    difference = torch.cat([(a - b[-len(a) :]).abs() for a, b in zip(ours, expected, strict=True)])
    print(case, "mean", difference.mean().item(), "max", difference.max().item())
    assert difference.mean() < {"bfloat16": 2e-2, "float32": 1e-4, "autocast": 2e-2}[case]


def test_no_weights_are_copied() -> None:
    model = wide(layers=8)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    pointers = [p.data_ptr() for p in model.parameters()]
    engine = Engine(lambda: model)
    engine.sample(requests(2, 2, 8), SamplingSettings(max_new_tokens=4))  # workspaces of the libraries stay
    engine.release()
    before = torch.cuda.memory_allocated()
    engine.sample(requests(2, 2, 8), SamplingSettings(max_new_tokens=4))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    engine.release()
    assert torch.cuda.memory_allocated() - before < 0.05 * weights


def test_float32_masters_have_exactly_one_shadow() -> None:
    model = wide(torch.float32)
    engine = Engine(lambda: model, autocast_dtype=torch.bfloat16)
    engine.sample(requests(2, 2, 8), SamplingSettings(max_new_tokens=4))
    linear = {
        m.weight.data_ptr(): m.weight.numel() + (0 if m.bias is None else m.bias.numel())
        for m in model.modules()
        if isinstance(m, torch.nn.Linear)
    }
    assert engine._shadow is not None
    assert engine._shadow.bytes == 2 * sum(linear.values())
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_out_of_memory_halves_the_plan(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from gruppo.engine import engine as module

    model = wide()
    settings = SamplingSettings(max_new_tokens=8)
    expected = Engine(lambda: model).sample(requests(), settings)
    real, failures = module.KvPool, [True, True]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("no memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "KvPool", failing)
    engine = Engine(lambda: model)
    completions = engine.sample(requests(), settings)
    assert "half the budget" in caplog.text
    assert engine.plan is not None
    assert engine.plan.rows == 8
    same = [list(a.ids) == list(b.ids) for a, b in zip(completions, expected, strict=True)]
    assert sum(same) >= 0.8 * len(same)


def test_tiny_budgets_on_cuda() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,
        )
    ).cuda()
    choose = random.Random(1)
    asked = [SampleRequest([choose.randrange(512) for _ in range(choose.randrange(1, 30))], 3, i) for i in range(9)]
    settings = SamplingSettings(max_new_tokens=NEW_TOKENS, greedy=True, stop_ids=(5, 9, 77, 100))
    wide_open = Engine(lambda: model).sample(asked, settings)
    tight = Engine(lambda: model, plan=RolloutPlan(60, 3, 8)).sample(asked, settings)
    assert [list(c.ids) for c in tight] == [list(c.ids) for c in wide_open]
