"""Policy, tokenizer and reference: found, checked, made ready."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from gruppo.config.grpo import GRPOConfig
from gruppo.errors import ConfigError
from gruppo.policy import loading
from tests.helpers import base_args, tiny_model, tiny_tokenizer
from tests.vision.families import FAMILIES, picture


def args(**kwargs: Any) -> GRPOConfig:
    return GRPOConfig(**base_args("unused", **kwargs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in bfloat16 with its tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model().bfloat16().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


# ---- the policy


@pytest.mark.parametrize(
    ("dtype", "resolved"),
    [
        ("auto", "auto"),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_resolve_dtype(dtype, resolved):
    assert loading.resolve_dtype(dtype) is resolved or loading.resolve_dtype(dtype) == resolved


@pytest.mark.parametrize("dtype", ["float33", "nn", "Tensor", 32, None])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(ConfigError, match=rf"model_init_kwargs\['dtype'\]={dtype!r} is not a torch dtype; use 'auto'"):
        loading.resolve_dtype(dtype)


@pytest.mark.parametrize(
    ("kwargs", "dtype"),
    [
        (None, torch.float32),
        ({}, torch.float32),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_a_named_model_is_loaded_in_float32_unless_told_otherwise(folder, kwargs, dtype):
    settings = args(model_init_kwargs=None if kwargs is None else dict(kwargs))
    model = loading.load_policy(folder, settings)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == dtype
    assert settings.model_init_kwargs == kwargs  # not written into


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        (0, {}, None),
        (0, {"model_init_kwargs": {"device_map": "auto"}}, None),
        (1, {}, {"": 0}),
        (1, {"use_cpu": True}, None),
        (1, {"model_init_kwargs": {"device_map": "auto"}}, "auto"),
    ],
)
def test_where_a_named_model_is_loaded_to(gpus, settings, expected, folder, monkeypatch):
    """On one GPU "auto" may leave layers in main memory, and says so in a line of the log at most."""
    asked = args(**({"use_cpu": False} | settings))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    seen = {}

    def from_pretrained(name, **kwargs):
        seen.update(kwargs)
        return tiny_model()

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", from_pretrained)
    loading.load_policy(folder, asked)
    assert seen["device_map"] == expected


def test_a_model_object_is_used_as_it_is(caplog):
    model = tiny_model()
    with caplog.at_level(logging.WARNING):
        assert loading.load_policy(model, args()) is model
        assert not caplog.records
        assert loading.load_policy(model, args(model_init_kwargs={"dtype": "float16"})) is model
    assert "model_init_kwargs is ignored" in caplog.text
    assert model.dtype == torch.float32


class Cut(torch.Tensor):
    """A share of a weight, as far as one is recognised."""

    def full_tensor(self):
        raise AssertionError("nobody asks for it")


def test_a_model_object_that_is_tensor_parallel_is_refused():
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.as_subclass(Cut))
    with pytest.raises(ConfigError, match=r"The LlamaForCausalLM is sharded over processes.*without tp_plan"):
        loading.load_policy(model, args())


def test_an_unknown_architecture_is_left_to_the_auto_class(folder, monkeypatch):
    assert loading.model_class(folder, {}) is LlamaForCausalLM
    unknown = SimpleNamespace(architectures=["NobodysModel"])
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *a, **k: unknown)
    assert loading.model_class(folder, {}) is AutoModelForCausalLM


# ---- the tokenizer


def test_a_tokenizer_is_found_by_the_models_name(folder):
    tokenizer = loading.load_processing_class(None, loading.load_policy(folder, args()), args())
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.pad_token) == ("left", "left", "<pad>")


def test_the_end_token_serves_as_pad_token():
    tokenizer = tiny_tokenizer(pad_token=None)
    assert loading.load_processing_class(tokenizer, tiny_model(), args()) is tokenizer
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<eos>", 1)


def test_the_pad_token_is_mirrored_into_the_model():
    model = tiny_model(pad_token_id=7)
    loading.align_pad_token(model, tiny_tokenizer())
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (0, 0)


@pytest.mark.parametrize(
    ("of_model", "expected"), [(None, [1]), (1, [1]), (7, [1, 7]), ([7, 8], [1, 7, 8]), ([7, 1], [7, 1])]
)
def test_stop_tokens_are_the_tokenizers_and_the_models(of_model, expected):
    model = tiny_model()
    model.generation_config.eos_token_id = of_model
    assert loading.stop_token_ids(model, tiny_tokenizer()) == expected


def test_stop_tokens_of_a_model_without_generation_config():
    assert loading.stop_token_ids(SimpleNamespace(), tiny_tokenizer()) == [1]


def test_a_tokenizer_may_be_smaller_than_the_model_but_not_larger():
    loading.check_vocabulary(tiny_model(vocab_size=128), tiny_tokenizer())
    with pytest.raises(ConfigError, match="101 tokens but the model embeds only 100"):
        loading.check_vocabulary(tiny_model(vocab_size=100), tiny_tokenizer())


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=77), 77),
        (GPT2Config(n_positions=55), 55),
        (SimpleNamespace(), None),
        (SimpleNamespace(max_position_embeddings=-1), None),
        (SimpleNamespace(max_position_embeddings=None), None),
    ],
    ids=lambda v: type(v).__name__,
)
def test_context_length(config, length):
    assert loading.context_length(SimpleNamespace(config=config)) == length


# ---- the reference


def test_a_reference_is_a_frozen_copy_that_stays_as_it_was():
    model = tiny_model().train()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)  # changed in memory: the copy is of what is there, not of a checkpoint
    reference = loading.copy_as_reference(model)
    before = {name: weight.clone() for name, weight in reference.named_parameters()}
    assert not reference.training
    assert model.training
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert all(weight.requires_grad for weight in model.parameters())
    assert torch.equal(reference.lm_head.weight, model.lm_head.weight)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    for name, weight in reference.named_parameters():
        assert torch.equal(weight, before[name])


def test_a_reference_keeps_tied_weights_tied():
    reference = loading.copy_as_reference(tiny_model(tie_word_embeddings=True))
    assert reference.lm_head.weight is reference.model.embed_tokens.weight


def test_dropout_modules_are_turned_off():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.9)))
    loading.disable_dropout_in_model(model)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.0, 0.0]


def test_image_features_fit_among_embeddings_under_autocast() -> None:
    """With transformers 5.17 SmolVLM needs help; a copy has it too, and nothing is done twice."""
    model, processor = FAMILIES["smolvlm"].make()
    rows = processor(text=["<image>what"], images=[[picture(0, (16, 16))]], return_tensors="pt")
    loading.cast_image_features(model)
    before = getattr(model.model, "inputs_merger", None)
    loading.cast_image_features(model)
    assert getattr(model.model, "inputs_merger", None) is before
    exact = model(**rows).logits
    for each in (model, loading.copy_as_reference(model)):
        with torch.autocast("cpu", torch.bfloat16):
            logits = each(**rows).logits
        assert 0 < (logits - exact).abs().max() < 0.05
