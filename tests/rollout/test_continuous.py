"""transformers' continuous batching: the same completions, and a policy that is left as it was."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.config.grpo import GRPOConfig
from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout import continuous
from gruppo.rollout.continuous import ContinuousBatchingBackend
from gruppo.rollout.hf import TransformersBackend
from gruppo.rollout.settings import generation_config
from gruppo.types import SampleRequest, StopReason
from tests.helpers import base_args, sharp, tiny_gpt2, tiny_model
from tests.trainer.runs import run

EOS, PAD = 1, 0
REQUESTS = [SampleRequest([9, 10, 11, 12], 2), SampleRequest([20], 3), SampleRequest([30, 31], 1)]
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
HALF = torch.bfloat16


def config(**kwargs: Any) -> Any:
    args = GRPOConfig(**base_args("unused", **kwargs))
    return generation_config(args, pad_token_id=PAD, bos_token_id=None, stop_ids=[EOS])


def backend(model: Any, dtype: Any = None, settings: Any = None, **kwargs: Any) -> ContinuousBatchingBackend:
    made = config(**({"generation_kwargs": GREEDY} | kwargs))
    return ContinuousBatchingBackend(lambda: model, made, stop_ids=[EOS], settings=settings, autocast_dtype=dtype)


def plain(model: Any) -> list[tuple[list[int], StopReason]]:
    """What transformers generate makes of the requests."""
    sampler = TransformersBackend(lambda: model, config(generation_kwargs=GREEDY), stop_ids=[EOS])
    return pairs(sampler.sample(REQUESTS))


def pairs(completions: Any) -> list[tuple[list[int], StopReason]]:
    return [(list(completion.ids), completion.stop) for completion in completions]


def lora(**kwargs: Any) -> Any:
    """With an adapter that is the same each time: of one in nine, two of the prompts have the same completion."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **kwargs))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=2.0)
    return model


class State:
    """Everything about a model that sampling must leave as it was."""

    def __init__(self, model: nn.Module):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.places = [(name, id(p), p.data_ptr(), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        self.values = [value.clone() for value in model.state_dict().values()]
        self.modes = [module.training for module in model.modules()]
        self.attributes = [sorted(vars(module)) for module in model.modules()]
        self.config = inner.config.to_dict()
        self.attention = inner.config._attn_implementation
        self.gradients = torch.is_grad_enabled()

    def __eq__(self, other: object) -> bool:
        mine, theirs = dict(vars(self)), dict(vars(other))
        values = zip(mine.pop("values"), theirs.pop("values"), strict=True)
        return mine == theirs and all(torch.equal(a, b) for a, b in values)


# ---- completions


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (tiny_model, None),
        (lambda: sharp(tiny_model()), None),
        (lambda: tiny_model().to(HALF), None),
        (lambda: tiny_model(attn_implementation="eager"), None),
        (lambda: sharp(tiny_gpt2()), None),
        (lora, None),
        (lambda: tiny_model().to(HALF), HALF),
        (tiny_model, HALF),
        (lambda: tiny_model(attn_implementation="eager"), HALF),
    ],
    ids=["float32", "float64", "bfloat16", "eager", "gpt2", "lora", "half-weights", "autocast", "eager-autocast"],
)
def test_greedy_completions_are_those_of_generate(make, dtype):
    model = make()
    expected = plain(model)
    before = State(model.train())
    completions = backend(model, dtype).sample(REQUESTS)
    assert pairs(completions) == expected
    assert len({tuple(ids) for ids, _ in expected}) == 3  # the prompts can be told apart
    assert State(model) == before


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "dtype"), [(torch.float32, None), (torch.float32, HALF), (HALF, HALF)])
def test_greedy_completions_are_those_of_generate_on_a_gpu(weights, dtype):
    model = tiny_model().to("cuda", weights)
    before = State(model.train())
    completions = pairs(backend(model, dtype).sample(REQUESTS))
    assert State(model) == before
    assert completions == plain(model)


def test_log_probs_are_those_of_the_sampled_tokens():
    model = sharp(tiny_model(), 3.0)
    completion = backend(model, generation_kwargs={}, temperature=0.5).sample([SampleRequest([9, 10], 1)])[0]
    row = torch.tensor([[9, 10, *completion.ids]])
    with torch.no_grad():
        logps = (model(row).logits[0, 1:-1] / 0.5).log_softmax(-1)
    expected = logps.gather(1, row[0, 2:, None])[:, 0].tolist()
    assert completion.logps == pytest.approx(expected, abs=1e-5)
    assert backend(model, settings={"return_logprobs": False}).sample(REQUESTS)[0].logps is None


def test_completions_of_one_prompt_differ():
    (*completions,) = backend(tiny_model(), generation_kwargs={}).sample([SampleRequest([9, 10], 8)])
    assert len({tuple(completion.ids) for completion in completions}) > 1


def test_no_request_no_completion():
    assert backend(tiny_model()).sample([]) == []


def test_pages_may_be_small_and_few():
    model = tiny_model()
    name = "page_size" if "page_size" in continuous.ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    tight = {name: 8, "num_blocks": 6, "max_batch_tokens": 8}  # the completions take turns
    assert pairs(backend(model, settings=tight).sample(REQUESTS)) == plain(model)


# ---- what is left behind


@pytest.mark.parametrize("make", [tiny_model, lora], ids=["plain", "lora"])
def test_an_exception_leaves_the_policy_as_it_was(make, monkeypatch):
    model = make().train()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.model.layers[1].eval()
    before = State(model)

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        assert not model.training
        inner.set_attn_implementation("paged|eager")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(inner), "generate_batch", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        backend(model).sample(REQUESTS)
    assert State(model) == before


@pytest.mark.parametrize("dtype", [None, HALF])
def test_a_failing_forward_is_an_error_and_leaves_the_policy_as_it_was(dtype, monkeypatch):
    model = tiny_model(attn_implementation="eager").train()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the forward broke")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", fail)
        before = State(model)
        with pytest.raises(RolloutError, match="failed for 6 of 6 prompts: the forward broke"):
            backend(model, dtype).sample(REQUESTS)
        assert State(model) == before
    assert len(backend(model, dtype).sample(REQUESTS)) == 6


def test_a_lost_completion_is_an_error(monkeypatch):
    model = tiny_model()
    output = SimpleNamespace(generated_tokens=[5], logprobs=[], error=None)
    monkeypatch.setattr(type(model), "generate_batch", lambda *a, **k: {f"req_{i}": output for i in range(5)})
    with pytest.raises(RolloutError, match="returned 5 of 6 completions"):
        backend(model).sample(REQUESTS)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams=2"),
        ({"generation_kwargs": {"min_new_tokens": 2}}, "min_new_tokens=2"),
        ({"generation_kwargs": {"stop_strings": "x"}}, "stop_strings='x'"),
        ({"generation_kwargs": {"suppress_tokens": [3]}}, r"suppress_tokens=\[3\]"),
        ({"generation_kwargs": {"use_cache": False}}, "use_cache=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_would_drop_is_an_error(settings, named):
    with pytest.raises(ConfigError, match=f"does not support {named}; remove it"):
        backend(tiny_model(), **settings)


def test_a_soft_cap_that_it_would_drop_is_an_error():
    from tests.engine.models import build

    with pytest.raises(ConfigError, match=r"ignores the soft cap of this model's attention \(2\.0\)"):
        backend(build("gemma2"))


def test_settings_are_checked_anew_each_time():
    sampler = backend(tiny_model())
    sampler.config.min_p = 0.2
    with pytest.raises(ConfigError, match=r"does not support min_p=0\.2"):
        sampler.sample(REQUESTS)
    sampler.config.min_p, sampler.config.max_new_tokens = None, None
    with pytest.raises(ConfigError, match="max_new_tokens=None"):
        sampler.sample(REQUESTS)


def test_virtual_tokens_are_an_error():
    model = get_peft_model(tiny_model(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match="PromptTuningConfig puts virtual tokens before the prompt"):
        backend(model)


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda", {}, {"max_memory_percent": 0.5}),
        ("cuda", {"max_memory_percent": 0.2}, {"max_memory_percent": 0.2}),
        ("cuda", {"num_blocks": 9}, {"num_blocks": 9}),
        ("cpu", {}, {"num_blocks": 4, "max_batch_tokens": 512}),
        ("cpu", {"max_memory_percent": 0.2}, {"max_memory_percent": 0.2}),
    ],
)
def test_how_large_the_pages_get(device, given, expected):
    model = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
    made = backend(tiny_model(), settings=given)._batching(model, [[1, 2], [3]])
    assert made == {"return_logprobs": True, "disable_nccl_graph_mixing": False, **expected}


# ---- runs


@pytest.mark.parametrize(
    ("trainer", "settings"),
    [
        (GRPOTrainer, {}),
        (RLOOTrainer, {}),
        (GRPOTrainer, {"bf16": True}),
        (GRPOTrainer, {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}),
    ],
    ids=["grpo", "rloo", "bf16", "lora"],
)
def test_a_run_trains_its_float32_weights(trainer, settings, tmp_path):
    made = run(tmp_path, trainer, use_transformers_continuous_batching=True, temperature=0.8, top_k=40, **settings)
    assert made.backend.name == "transformers_continuous_batching"
    assert made.timings.calls["transformers.generate_batch"] == 2
    assert {weight.dtype for weight in made.model.parameters()} == {torch.float32}
    assert made.state.global_step == 2


def test_a_config_reaches_it(tmp_path):
    sizes = {"num_blocks": 32, "max_batch_tokens": 64}
    made = run(
        tmp_path,
        GRPOTrainer,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=sizes,
        max_steps=1,
    )
    assert made.backend.settings == sizes
    assert made.backend.autocast_dtype is None
