"""What a GenerationConfig becomes in the engine, beside what generate makes of it."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import GenerationConfig

from gruppo.config.grpo import GRPOConfig
from gruppo.engine.settings import (
    HONOURED,
    IRRELEVANT,
    NO_FILTER,
    SAMPLING_ONLY,
    UNSUPPORTED,
    SamplingSettings,
    filters,
    in_effect,
    merged_config,
    unsupported,
    with_plain_output,
)
from gruppo.errors import ConfigError
from gruppo.rollout.settings import generation_config
from tests.helpers import base_args, tiny_model

FIELDS = GenerationConfig().to_dict()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="transformers")


def settings(stop_ids: Any = (1,), vocab_size: int | None = None, **fields: Any) -> SamplingSettings:
    """Settings of a config with these fields; others are transformers' defaults."""
    config = GenerationConfig(**({"max_new_tokens": 8, "do_sample": True} | fields))
    return SamplingSettings.from_generation_config(config, stop_ids=stop_ids, vocab_size=vocab_size)


# ---- the tables


def test_every_field_of_the_installed_transformers_stands_in_one_table() -> None:
    tables = [*HONOURED, *IRRELEVANT, *UNSUPPORTED]
    assert len(tables) == len(set(tables))
    assert set(FIELDS) - set(tables) == set(), "new in transformers: decide what the engine does with it"
    assert set(tables) - set(FIELDS) == set(), "gone from transformers"
    assert set(UNSUPPORTED) > SAMPLING_ONLY


def test_the_defaults_of_generate_are_supported() -> None:
    """Were a default not an `off` value, no config would pass."""
    assert unsupported(merged_config(GenerationConfig(), None)) == []
    assert unsupported(merged_config(GenerationConfig(do_sample=True), GenerationConfig())) == []


# A value of each unsupported field that is not off.
SET: dict[str, Any] = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "low_memory": True,
    "constraints": ["x"],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "use_mtp": True,
    "is_assistant": True,
    "assistant_early_exit": 2,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "prompt_lookup_num_tokens": 3,
    "use_cache": False,
    "cache_implementation": "static",
    "continuous_batching_config": {"num_blocks": 4},
    "typical_p": 0.9,
    "epsilon_cutoff": 1e-4,
    "eta_cutoff": 1e-4,
    "top_h": 0.4,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[3]],
    "sequence_bias": {(3,): 1.0},
    "exponential_decay_length_penalty": (5, 1.1),
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "token_healing": True,
    "max_time": 1.0,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig")
def test_an_unsupported_field_is_named_with_its_value(name: str) -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=4, **{name: SET[name]})
    (reason,) = unsupported(config)
    assert reason.startswith(f"{name}=")
    assert f"unset `{name}`" in reason
    with pytest.raises(ConfigError, match=name):
        SamplingSettings.from_generation_config(config, stop_ids=(1,))
    for off in UNSUPPORTED[name][0]:
        assert unsupported(GenerationConfig(do_sample=True, max_new_tokens=4, **{name: off})) == []


@pytest.mark.parametrize("name", sorted(SAMPLING_ONLY))
def test_what_only_shapes_sampling_does_not_stop_greedy_decoding(name: str) -> None:
    assert unsupported(GenerationConfig(do_sample=False, max_new_tokens=4, **{name: SET[name]})) == []


@pytest.mark.parametrize("name", sorted(IRRELEVANT))
def test_an_irrelevant_field_may_be_anything(name: str) -> None:
    config = GenerationConfig(max_new_tokens=4)
    setattr(config, name, 3)
    assert unsupported(config) == []


def test_an_unknown_field_is_refused_unless_it_is_unset() -> None:
    config = GenerationConfig(max_new_tokens=4, chat_format="chatml", of_the_future=None)
    assert unsupported(config) == ["chat_format='chatml' is not known to the built-in engine; remove it."]


def test_several_reasons_are_all_told() -> None:
    with pytest.raises(ConfigError, match=r"(?s)num_beams=4.*no_repeat_ngram_size=3"):
        settings(num_beams=4, no_repeat_ngram_size=3)


# ---- lengths


def test_new_tokens_win_over_total_lengths() -> None:
    result = settings(max_new_tokens=7, max_length=99, min_new_tokens=2, min_length=50)
    assert (result.max_new_tokens, result.min_new_tokens) == (7, 2)


def test_lengths_that_count_the_prompt_are_refused() -> None:
    assert unsupported(GenerationConfig(max_length=30)) == [
        "max_length=30 counts the tokens of the prompt; set max_new_tokens."
    ]
    assert unsupported(GenerationConfig(max_new_tokens=3, min_length=5)) == [
        "min_length=5 counts the tokens of the prompt; set min_new_tokens."
    ]
    with pytest.raises(ConfigError, match="max_length=30"):
        settings(max_new_tokens=None, max_length=30)


def test_without_any_length_twenty_tokens_are_sampled_as_generate_does() -> None:
    assert settings(max_new_tokens=None).max_new_tokens == 20
    config = merged_config(GenerationConfig(), GenerationConfig(max_length=4096))  # as Llama's checkpoints have it
    assert config.max_new_tokens is None
    assert len(unsupported(config)) == 1
    assert merged_config(GenerationConfig(), GenerationConfig(max_new_tokens=5)).max_new_tokens == 5


# ---- merging, beside generate's own

MODEL_CONFIGS = {
    "empty": {},
    "sampling": dict(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05),
    "lengths": dict(max_length=64, min_length=3, max_new_tokens=11),
    "tokens": dict(eos_token_id=[1, 2], pad_token_id=5, suppress_tokens=[7], forced_eos_token_id=1),
    "unsupported": dict(num_beams=3, no_repeat_ngram_size=2, typical_p=0.9, chat_format="chatml"),
    "hybrid cache": dict(cache_implementation="hybrid"),
}
CONFIGS = {
    "empty": {},
    "explicit": dict(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0),
    "part": dict(do_sample=False, max_new_tokens=9, num_beams=1, min_p=None, custom_entry=4),
    "hybrid cache": dict(cache_implementation="hybrid", max_length=40),
}


@pytest.mark.parametrize("of_model", MODEL_CONFIGS)
@pytest.mark.parametrize("given", CONFIGS)
def test_gaps_are_filled_as_generate_fills_them(of_model: str, given: str) -> None:
    model = tiny_model()
    model.generation_config = GenerationConfig(**MODEL_CONFIGS[of_model])
    config = GenerationConfig(**CONFIGS[given])
    before = config.to_dict(), model.generation_config.to_dict()
    expected = with_plain_output(model._prepare_generation_config(config)[0]).to_dict()
    result = merged_config(config, model.generation_config).to_dict()
    if expected["max_new_tokens"] is None and config.max_length is None and model.generation_config.max_length is None:
        expected["max_new_tokens"] = 20  # the one thing decided earlier; see the next test
    assert result == expected
    assert (config.to_dict(), model.generation_config.to_dict()) == before
    assert merged_config(merged_config(config, model.generation_config), None).to_dict() == result


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_generate_itself_samples_as_many_tokens_as_the_merged_config_says() -> None:
    model = tiny_model(eos_token_id=None)
    model.generation_config = GenerationConfig(pad_token_id=0)
    for fields in ({}, {"max_new_tokens": 3}, {"max_new_tokens": 4, "max_length": 2}):
        config = GenerationConfig(**fields)
        out = model.generate(model.dummy_inputs["input_ids"][:, :3], generation_config=config)
        assert out.shape[1] - 3 == merged_config(config, model.generation_config).max_new_tokens


def test_the_settings_of_a_run_take_in_the_models_generation_config(tmp_path: Any) -> None:
    """min_p is None in a run that does not set it, so a model's own min_p holds, as it does with generate."""
    args = GRPOConfig(**base_args(tmp_path, temperature=0.7))
    config = generation_config(args, pad_token_id=0, bos_token_id=None, stop_ids=[1, 3])
    model_config = GenerationConfig(min_p=0.2, top_k=5, temperature=0.1, suppress_tokens=[9])
    result = SamplingSettings.from_generation_config(merged_config(config, model_config), stop_ids=[1, 3])
    assert (result.temperature, result.top_k, result.min_p, result.suppress_tokens) == (0.7, 0, 0.2, (9,))
    assert (result.stop_ids, result.pad_token_id, result.greedy) == ((1, 3), 0, False)
    assert result.max_new_tokens == args.max_completion_length


# ---- fields


def test_unset_fields_mean_what_they_mean_to_generate() -> None:
    result = SamplingSettings.from_generation_config(GenerationConfig(max_new_tokens=3), stop_ids=[1])
    assert result == SamplingSettings(max_new_tokens=3, greedy=True, top_k=50, stop_ids=(1,))


def test_one_value_and_lists_become_tuples() -> None:
    result = settings(
        stop_ids=[1, 2],
        forced_eos_token_id=2,
        forced_bos_token_id=6,
        suppress_tokens=[3, 4],
        begin_suppress_tokens=[5],
        stop_strings="END",
        eos_token_id=2,
    )
    assert result.forced_eos_token_id == (2,)
    assert result.forced_bos_token_id == 6
    assert (result.suppress_tokens, result.begin_suppress_tokens) == ((3, 4), (5,))
    assert (result.stop_ids, result.stop_strings) == ((1, 2), ("END",))
    assert settings(forced_eos_token_id=[1, 2]).forced_eos_token_id == (1, 2)
    assert len({result, replace(result), replace(result, top_k=3)}) == 2, "hashable, so that it can key a table"


def test_an_end_that_is_no_stop_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eos_token_id=\[1, 7\].*\[7\]"):
        settings(stop_ids=[1, 2], eos_token_id=[1, 7])


@pytest.mark.parametrize("temperature", [0.0, math.nan, -1.0, math.inf])
def test_greedy_decoding_takes_any_temperature(temperature: float) -> None:
    result = settings(do_sample=False, temperature=temperature, top_p=0.0)
    assert result.greedy
    assert result.temperature == 1
    assert settings(do_sample=False, temperature=0.5).temperature == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0.*do_sample=False"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1e-9}, "temperature=1e-09.*at least 1e-06"),
        ({"temperature": True}, "temperature=True"),
        ({"top_p": 0.0}, "top_p=0.0 must be greater than 0"),
        ({"top_p": 1.01}, "top_p=1.01 must be at most 1"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, "top_k=2.5 must be a whole number"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
        ({"repetition_penalty": -2.0, "do_sample": False}, "repetition_penalty=-2.0"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens.*'a'"),
        ({"suppress_tokens": [3, 10]}, r"suppress_tokens.*vocabulary of 10: \[10\].*0 to 9"),
        ({"suppress_tokens": list(range(10))}, "all 10 tokens"),
        ({"begin_suppress_tokens": [-1]}, r"begin_suppress_tokens.*\[-1\]"),
        ({"forced_eos_token_id": [1, 12]}, r"forced_eos_token_id.*\[12\]"),
        ({"forced_bos_token_id": 10}, r"forced_bos_token_id.*\[10\]"),
        ({"forced_bos_token_id": 1.5}, r"forced_bos_token_id.*\[1.5\]"),
    ],
)
def test_values_that_cannot_work_are_named_with_the_fix(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(vocab_size=10, **fields)


def test_edges_of_the_ranges_are_allowed() -> None:
    settings(vocab_size=10, top_p=1.0, top_k=0, min_p=1.0, temperature=1e-6, repetition_penalty=0.5, stop_ids=[1, 99])
    settings(vocab_size=10, min_p=0.0, suppress_tokens=[0, 8], forced_bos_token_id=9, min_new_tokens=99)
    settings(suppress_tokens=[10**6])  # without a vocabulary nobody can say


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_k": 3}, {"temperature": 0.5, "top_k": 3}),
        ({"temperature": 1.0, "top_p": 1, "top_k": 0, "num_beams": 1, "repetition_penalty": 1.0}, {}),
        ({"use_cache": True, "disable_compile": True, "pad_token_id": 7, "suppress_tokens": []}, {}),
        ({"use_cache": False, "num_beams": 2, "min_p": 0.1}, {"use_cache": False, "num_beams": 2, "min_p": 0.1}),
        ({"cache_implementation": "static"}, {"cache_implementation": "static"}),
        ({"suppress_tokens": [3], "stop_strings": "."}, {"suppress_tokens": [3], "stop_strings": "."}),
    ],
)
def test_settings_that_matter(settings: dict[str, Any], found: dict[str, Any]) -> None:
    assert in_effect(GenerationConfig(**settings)) == found


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_k": 3, "min_p": 0.1}, {"top_k": 3, "min_p": 0.1}),
        ({"max_new_tokens": 9, "eos_token_id": [1], "stop_strings": ".", "max_time": 3.0, "use_cache": False}, {}),
        ({"suppress_tokens": [3], "typical_p": 0.9}, {"suppress_tokens": [3], "typical_p": 0.9}),
        ({"a_field_of_somebody_else": 3}, {}),
        ({"do_sample": False}, {"do_sample": False}),
    ],
)
def test_filters_draw_from_another_distribution(settings: dict[str, Any], found: dict[str, Any]) -> None:
    usual = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
    assert filters(merged_config(GenerationConfig(**(usual | settings)), None), 0.7) == found


def test_the_table_of_what_is_no_filter_names_known_fields() -> None:
    assert HONOURED | UNSUPPORTED.keys() >= NO_FILTER
