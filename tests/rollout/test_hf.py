"""Sampling with transformers' generate: order, ends, modes, settings."""

import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GenerationConfig

from gruppo.config.grpo import GRPOConfig
from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.hf import TransformersBackend, sampling_mode
from gruppo.rollout.settings import generation_config
from gruppo.types import SampleRequest, StopReason
from tests.engine.models import build
from tests.helpers import base_args, sharp, tiny_gpt2, tiny_model, tiny_tokenizer

EOS, PAD = 1, 0
REQUESTS = [SampleRequest([9, 10, 11, 12], 2), SampleRequest([20], 3), SampleRequest([30, 31], 1)]


def config(tmp_path: Any = "unused", stop_ids: Any = (EOS,), **kwargs: Any) -> Any:
    args = GRPOConfig(**base_args(tmp_path, **kwargs))
    return generation_config(args, pad_token_id=PAD, bos_token_id=None, stop_ids=stop_ids)


def backend(model: Any, stop_ids: Any = (EOS,), greedy: bool = True, **kwargs: Any) -> TransformersBackend:
    own = {name: kwargs.pop(name) for name in ("pad_to_multiple_of", "share_prefill", "tokenizer") if name in kwargs}
    if greedy:
        kwargs["generation_kwargs"] = {"do_sample": False, **kwargs.get("generation_kwargs", {})}
    settings = config(stop_ids=stop_ids, **kwargs)
    return TransformersBackend(lambda: model, settings, stop_ids=stop_ids, **own)


def ids(completions: Any) -> list[list[int]]:
    return [list(completion.ids) for completion in completions]


def greedy_alone(model: Any, prompt: list[int], length: int = 6) -> list[int]:
    """The likeliest continuation, one forward of the whole unpadded row per token."""
    row = list(prompt)
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
            if row[-1] == EOS:
                break
    return row[len(prompt) :]


class Scripted(nn.Module):
    """A policy that continues with what it is told and keeps what it was asked."""

    def __init__(self, continuations: list[list[int]]):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.continuations = torch.tensor(continuations)
        self.asked: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.asked = {"input_ids": input_ids, "training": self.training, "grad": torch.is_grad_enabled(), **kwargs}
        return torch.cat([input_ids[: len(self.continuations)], self.continuations], 1)


# ---- order and counts


@pytest.mark.parametrize("make", [tiny_model, tiny_gpt2])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("multiple", [None, 8])
def test_greedy_completions_are_those_of_each_prompt_alone(make, share, multiple):
    model = sharp(make())
    # One prompt is a single token, which the shared encoding (all but the last token) sees as nothing but padding.
    completions = backend(model, share_prefill=share, pad_to_multiple_of=multiple).sample(REQUESTS)
    expected = [greedy_alone(model, list(r.prompt_ids)) for r in REQUESTS for _ in range(r.count)]
    assert ids(completions) == expected
    assert len({tuple(row) for row in expected}) == 3  # the prompts can be told apart


def test_no_request_no_completion():
    assert backend(tiny_model()).sample([]) == []


def test_prompts_are_padded_on_the_left_and_repeated_by_count():
    policy = Scripted([[5, 5]] * 6)
    backend(policy).sample(REQUESTS)
    assert policy.asked["input_ids"].tolist() == [[9, 10, 11, 12]] * 2 + [[0, 0, 0, 20]] * 3 + [[0, 0, 30, 31]]
    assert policy.asked["attention_mask"].tolist() == [[1, 1, 1, 1]] * 2 + [[0, 0, 0, 1]] * 3 + [[0, 0, 1, 1]]


def test_a_lost_completion_is_an_error():
    with pytest.raises(RolloutError, match="generate returned 5 sequences for 6 prompts"):
        backend(Scripted([[5, 5]] * 5)).sample(REQUESTS)


def test_samples_follow_the_tempered_distribution():
    model, prompt, count = tiny_model().double(), [9, 10, 11], 4000
    with torch.no_grad():
        model.lm_head.weight *= 16  # far from uniform
        logits = model.eval()(torch.tensor([prompt])).logits[0, -1]
    torch.manual_seed(0)
    sampler = backend(model, greedy=False, temperature=0.5, max_completion_length=1)
    drawn = torch.tensor([row[0] for row in ids(sampler.sample([SampleRequest(prompt, count)]))])
    found = drawn.bincount(minlength=101) / count

    def distance(distribution: torch.Tensor) -> float:
        return float((found - distribution).abs().sum() / 2)

    assert distance((logits / 0.5).softmax(-1)) < 0.05
    assert distance(logits.softmax(-1)) > 0.2


# ---- where a completion ends


@pytest.mark.parametrize(
    ("continuation", "kept", "stop"),
    [
        ([5, 6, 7, 8], [5, 6, 7, 8], StopReason.LENGTH),
        ([5, EOS, PAD, PAD], [5, EOS], StopReason.EOS),
        ([EOS, PAD, PAD, PAD], [EOS], StopReason.EOS),
        ([5, 6, 7, EOS], [5, 6, 7, EOS], StopReason.EOS),
        ([5, 3, EOS, PAD], [5, 3], StopReason.EOS),  # 3 ends a completion too
        ([5, PAD, 6, EOS], [5, PAD, 6, EOS], StopReason.EOS),  # a pad that was sampled is a token like any other
    ],
)
def test_a_completion_is_cut_after_its_first_end_token(continuation, kept, stop):
    (completion,) = backend(Scripted([continuation]), stop_ids=[EOS, 3]).sample([SampleRequest([9], 1)])
    assert (list(completion.ids), completion.stop) == (kept, stop)
    assert completion.logps is None
    assert completion.model_mask is None


def test_a_pad_token_that_is_the_end_token_too():
    policy = Scripted([[5, EOS, EOS, EOS], [5, 6, 7, 8]])
    sampler = TransformersBackend(
        lambda: policy, GenerationConfig(pad_token_id=EOS), stop_ids=[EOS], share_prefill=False
    )
    first, second = sampler.sample([SampleRequest([9], 2)])
    assert (list(first.ids), first.stop) == ([5, EOS], StopReason.EOS)
    assert (list(second.ids), second.stop) == ([5, 6, 7, 8], StopReason.LENGTH)


def test_generation_really_stops_at_every_stop_token():
    model = tiny_model().double()
    prompt = [9, 10, 11]
    plain = greedy_alone(model, prompt)
    (completion,) = backend(model, stop_ids=[EOS, plain[2]]).sample([SampleRequest(prompt, 1)])
    assert list(completion.ids) == plain[: plain.index(plain[2]) + 1]
    assert completion.stop is StopReason.EOS


# ---- stop strings


def stopping(model: Any, strings: Any, **kwargs: Any) -> TransformersBackend:
    return backend(model, tokenizer=tiny_tokenizer(), generation_kwargs={"stop_strings": strings}, **kwargs)


@pytest.mark.parametrize("share", [True, False])
def test_a_stop_string_ends_a_completion_and_stays_in_it(share):
    model, tokenizer = sharp(tiny_model()), tiny_tokenizer()
    plain = ids(backend(model).sample(REQUESTS))
    wanted = tokenizer.decode(plain[2][1:3])  # of the second prompt only
    completions = stopping(model, ["not to be found", wanted], share_prefill=share).sample(REQUESTS)
    assert ids(completions) == [*plain[:2], *[plain[2][:3]] * 3, plain[5]]
    assert [c.stop for c in completions[2:5]] == [StopReason.STOP_STRING] * 3
    assert all(c.stop is not StopReason.STOP_STRING for c in (*completions[:2], completions[5]))


@pytest.mark.parametrize(
    "own",
    [
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True},
        {"num_return_sequences": 2},
    ],
    ids=str,
)
def test_what_the_model_s_own_config_says_about_other_things_changes_nothing(own: dict[str, Any]) -> None:
    model = sharp(tiny_model())
    plain = ids(backend(model).sample(REQUESTS))
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    assert ids(backend(model).sample(REQUESTS)) == plain


def test_beams_of_the_model_s_own_config() -> None:
    model = sharp(tiny_model())
    model.generation_config.num_beams = 2
    assert ids(backend(model).sample(REQUESTS)) == ids(backend(model, share_prefill=False).sample(REQUESTS))
    model.generation_config.stop_strings = ["a"]
    with pytest.raises(ConfigError, match=r"stop_strings=\['a'\] with num_beams=2: beams change places"):
        backend(model, tokenizer=tiny_tokenizer()).sample(REQUESTS)


def test_stop_strings_of_the_model_s_own_config() -> None:
    model, tokenizer = sharp(tiny_model()), tiny_tokenizer()
    wanted = tokenizer.decode(ids(backend(model).sample(REQUESTS))[2][1:3])
    expected = stopping(model, [wanted]).sample(REQUESTS)
    model.generation_config.stop_strings = [wanted]
    assert backend(model, tokenizer=tokenizer).sample(REQUESTS) == expected
    assert model.generation_config.stop_strings == [wanted]


def test_the_last_token_may_complete_a_stop_string():
    model = sharp(tiny_model())
    (plain,) = ids(backend(model).sample([SampleRequest([20], 1)]))
    assert len(plain) == 6
    (completion,) = stopping(model, tiny_tokenizer().decode(plain)).sample([SampleRequest([20], 1)])
    assert (list(completion.ids), completion.stop) == (plain, StopReason.STOP_STRING)


def test_a_stop_string_is_not_taken_for_the_end_token_that_pads_it():
    model = sharp(tiny_model())
    (plain,) = ids(backend(model).sample([SampleRequest([20], 1)]))
    sampler = stopping(model, tiny_tokenizer().decode(plain[1:3]))
    sampler.config.pad_token_id = EOS
    first, second = sampler.sample([SampleRequest([20], 1), SampleRequest([30, 31], 1)])
    assert (list(first.ids), first.stop) == (plain[:3], StopReason.STOP_STRING)
    assert len(second.ids) > 3, "the first row must have been padded, or this proves nothing"


def test_an_end_token_before_a_stop_string_is_an_end():
    policy = Scripted([[5, EOS, PAD, PAD]])
    sampler = stopping(policy, "<pad>")
    assert sampler._completion([5, EOS, PAD, PAD], cut=3) == sampler._completion([5, EOS])


def test_a_stop_string_that_begins_in_the_prompt_does_not_count():
    model, tokenizer = sharp(tiny_model()), tiny_tokenizer()
    prompt = [9, 10, 11, 12]
    plain = greedy_alone(model, prompt)
    across = tokenizer.decode([prompt[-1], plain[0]])
    (completion,) = stopping(model, across).sample([SampleRequest(prompt, 1)])
    assert list(completion.ids) == plain


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ConfigError, match=r"stop_strings=\['x'\] need a tokenizer"):
        backend(tiny_model(), generation_kwargs={"stop_strings": "x"}).sample(REQUESTS)


def test_the_settings_keep_their_stop_strings():
    sampler = stopping(tiny_model(), ["x"])
    sampler.sample(REQUESTS)
    assert sampler.config.stop_strings == ["x"]


# ---- modes


def mixed_mode() -> nn.Module:
    """A model in training whose second layer someone has put in evaluation mode."""
    model = tiny_model().train()
    model.model.layers[1].eval()
    return model


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_every_modules_mode_comes_back():
    model = mixed_mode()
    before = flags(model)
    assert set(before.values()) == {True, False}
    with sampling_mode(model):
        assert set(flags(model).values()) == {False}
        assert not torch.is_grad_enabled()
    assert flags(model) == before
    assert torch.is_grad_enabled()


def test_modes_come_back_when_generate_raises(monkeypatch):
    model = mixed_mode()
    before = flags(model)

    def fail(**kwargs: Any) -> None:
        assert not model.training
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        backend(model).sample(REQUESTS)
    assert flags(model) == before
    assert torch.is_grad_enabled()


def test_generate_runs_in_evaluation_mode_without_gradients():
    policy = Scripted([[5]] * 6).train()
    backend(policy).sample(REQUESTS)
    assert (policy.asked["training"], policy.asked["grad"]) == (False, False)
    assert policy.training


def lora_with_dropout() -> Any:
    model = get_peft_model(tiny_model(), LoraConfig(r=4, lora_dropout=0.9, target_modules=["q_proj", "v_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=2.0)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model(attention_dropout=0.9),
        lambda: tiny_gpt2(resid_pdrop=0.9, attn_pdrop=0.9, embd_pdrop=0.9),
        lora_with_dropout,
    ],
    ids=["llama", "gpt2", "lora"],
)
def test_dropout_is_off_while_sampling(make):
    model = make()
    prompts = [[9, 10, 11, 12], [20], [30, 31]]
    expected = [greedy_alone(model, prompt) for prompt in prompts]
    model.train()
    noisy = {tuple(model(torch.tensor([prompts[0]])).logits[0, -1].tolist()) for _ in range(8)}
    assert len(noisy) > 1, "in training mode this model must be noisy, or the test proves nothing"
    assert ids(backend(model).sample([SampleRequest(prompt, 1) for prompt in prompts])) == expected
    assert model.training


def test_gradient_checkpointing_does_not_get_in_the_way():
    model = tiny_model().double()
    expected = ids(backend(model).sample(REQUESTS))
    model.gradient_checkpointing_enable()
    model.train()
    assert ids(backend(model).sample(REQUESTS)) == expected
    assert model.is_gradient_checkpointing


def test_the_policy_is_asked_for_anew_each_time():
    models = iter([Scripted([[5]]), Scripted([[6]])])
    sampler = TransformersBackend(lambda: next(models), config(), stop_ids=[EOS])
    assert [ids(sampler.sample([SampleRequest([9], 1)])) for _ in range(2)] == [[[5]], [[6]]]


# ---- settings


def test_the_fields_of_the_config_arrive(tmp_path):
    made = config(
        tmp_path,
        stop_ids=[EOS, 3],
        max_completion_length=33,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
        cache_implementation="static",
    )
    expected = {
        "max_new_tokens": 33,
        "do_sample": True,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": [EOS, 3],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "cache_implementation": "static",
    }
    assert {name: getattr(made, name) for name in expected} == expected


def test_generation_kwargs_override_fields_and_add_others(tmp_path):
    made = config(
        tmp_path, temperature=0.7, generation_kwargs={"temperature": 0.2, "num_beams": 2, "disable_compile": False}
    )
    assert (made.temperature, made.num_beams, made.disable_compile) == (0.2, 2, False)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 1}, {"top_p": 1e-6}, {"generation_kwargs": {"top_k": 1}}, {"temperature": 1e-4}],
    ids=repr,
)
def test_settings_that_leave_one_token_are_greedy(settings):
    model = tiny_model().double()
    narrow = backend(model, greedy=False, **settings).sample(REQUESTS)
    assert ids(narrow) == ids(backend(model).sample(REQUESTS))


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_implementation": "static"},
        {"generation_kwargs": {"use_cache": False}},
        {"generation_kwargs": {"max_new_tokens": 3}},
        {"generation_kwargs": {"min_new_tokens": 6}},
        {"repetition_penalty": 1.5},
        {"generation_kwargs": {"num_beams": 2}},
    ],
    ids=repr,
)
def test_a_shared_prefill_changes_no_completion(settings):
    model = tiny_model().double()
    shared = backend(model, **settings).sample(REQUESTS)
    apart = backend(model, share_prefill=False, **settings).sample(REQUESTS)
    assert ids(shared) == ids(apart)
    assert len(shared) == 6


def test_a_shared_prefill_encodes_each_prompt_once(monkeypatch):
    model = tiny_model().double()
    widths = []
    forward = type(model).forward

    def counting(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        widths.append(tuple(input_ids.shape))
        return forward(self, input_ids, **kwargs)

    counting.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", counting)
    backend(model, max_completion_length=2).sample(REQUESTS)
    assert widths == [(3, 3), (6, 1), (6, 1)]


@pytest.mark.parametrize("share_prefill", [True, False])
@pytest.mark.parametrize("name", ["gemma2", "mistral", "llama"])
def test_padding_that_sees_no_key_in_eager_attention_and_float64(name, share_prefill):
    model = build(name).double()
    model.set_attn_implementation("eager")
    found = backend(model, share_prefill=share_prefill, max_completion_length=6).sample(REQUESTS)
    alone = [greedy_alone(model, list(r.prompt_ids)) for r in REQUESTS for _ in range(r.count)]
    assert ids(found) == alone
