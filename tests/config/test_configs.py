"""GRPOConfig and RLOOConfig: defaults, spellings, derived batches, the command line."""

import ast
import json
import math
import re
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import HfArgumentParser, TrainingArguments

import gruppo
from gruppo.config.base import own_fields
from gruppo.config.deprecated import ALIASES
from gruppo.config.grpo import GRPOConfig
from gruppo.config.hints import nearest
from gruppo.config.rloo import RLOOConfig
from gruppo.errors import ConfigError
from tests.helpers import base_args

CONFIGS = [GRPOConfig, RLOOConfig]
# Every run of these tests is on the CPU, in float32, and quiet.
QUIET: dict[str, Any] = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}

INHERITED = {
    "learning_rate": 1e-6,
    "logging_steps": 10,
    "gradient_checkpointing": None,
    "bf16": None,
    "remove_unused_columns": False,
    "lr_scheduler_kwargs": None,
    "use_liger_kernel": False,
    "torch_empty_cache_steps": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "seed": 42,
    "report_to": "none",
}
SHARED = {
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "disable_dropout": False,
    "num_generations_eval": None,
    "max_completion_length": 512,
    "ds3_gather_for_generation": True,
    "shuffle_dataset": True,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None,
    "vllm_server_host": "127.0.0.1",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_request_timeout": 600.0,
    "vllm_seed_requests": True,
    "async_rollouts": 0,
    "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "reward_weights": None,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "log_completions": False,
    "log_multimodal": True,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None,
    "use_transformers_paged": False,
    # earlier names
    "use_liger_loss": None,
    "vllm_guided_decoding_regex": None,
    "wandb_log_unique_prompts": None,
    # ours
    "max_tokens_per_micro_batch": None,
    "packed_update": True,
    "fused_head": True,
    "fused_layers": True,
    "skip_zero_advantage": True,
    "balance_processes": True,
    "reuse_sampling_logps": True,
    "parity_check": "first",
    "dynamic_sampling": False,
    "max_resample_rounds": 4,
    "max_tool_calling_iterations": None,
    "tool_timeout": None,
    "max_parallel_tools": 32,
    "reward_timeout": None,
    "reward_sample_timeout": None,
    "reward_workers": None,
    "reward_memory_gb": None,
    "reward_concurrency": 32,
    "reward_retries": 2,
    "reward_on_error": "abstain",
    "max_reward_failure_rate": 0.5,
    "worker_env": None,
    "record": "all",
    "hub_record": False,
    "resume_allow_changes": None,
    "save_on_signal": True,
    "process_timeout": 20.0,
    "stop_timeout": 300.0,
    "audit": "warn",
    "max_bad_updates": 5,
    "eval_benchmarks": None,
    "eval_benchmarks_dir": None,
    "eval_benchmarks_settings": None,
    "rollout_backend": "auto",
    "max_prompt_length": None,
    "pad_to_multiple_of": None,
}
GRPO = {
    "num_generations": 8,
    "beta": 0.0,
    "cast_lm_head_to_fp32": False,
    "delta": None,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True,
    "log_completions_hub_repo": None,
}
RLOO = {"num_generations": 2, "beta": 0.05, "normalize_advantages": False, "reward_clip_range": None}
DEFAULTS = {GRPOConfig: SHARED | GRPO, RLOOConfig: SHARED | RLOO}

# A legal value other than the default, for every field that is ours or has a default of ours. Together they make one
# config (8 rows per step, 2 steps per generation, groups of 4).
SET_SHARED: dict[str, Any] = {
    "learning_rate": 0.5,
    "logging_steps": 0.5,
    "gradient_checkpointing": False,
    "bf16": True,
    "remove_unused_columns": True,
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "num_generations": 4,
    "num_generations_eval": 2,
    "generation_batch_size": 16,
    "steps_per_generation": 2,
    "num_iterations": 3,
    "shuffle_dataset": False,
    "pad_to_multiple_of": 64,
    "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "eager"},
    "trust_remote_code": True,
    "disable_dropout": True,
    "router_aux_loss_coef": 0.0,
    "max_prompt_length": 77,
    "max_completion_length": 99,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"min_new_tokens": 3, "no_repeat_ngram_size": 4},
    "chat_template_kwargs": {"enable_thinking": False},
    "cache_implementation": "static",
    "rollout_backend": "transformers",
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"max_memory_percent": 0.3},
    "beta": 0.25,
    "epsilon": 0.3,
    "epsilon_high": 0.4,
    "reward_weights": [0.5, 2.0],
    "mask_truncated_completions": True,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 7,
    "log_completions": True,
    "log_multimodal": False,
    "num_completions_to_print": 5,
    "log_unique_prompts": True,
    "max_tokens_per_micro_batch": 5000,
    "fused_head": False,
    "fused_layers": False,
    "skip_zero_advantage": False,
    "balance_processes": False,
    "reuse_sampling_logps": False,
    "parity_check": "every:7",
    "dynamic_sampling": True,
    "max_resample_rounds": 2,
    "max_tool_calling_iterations": 3,
    "tool_timeout": 2.5,
    "max_parallel_tools": 4,
    "reward_timeout": 60.0,
    "reward_sample_timeout": 2.5,
    "reward_workers": 3,
    "reward_memory_gb": 1.5,
    "reward_concurrency": 8,
    "reward_retries": 5,
    "reward_on_error": "raise",
    "max_reward_failure_rate": 0.9,
    "worker_env": ["PATH", "HOME"],
    "record": "metrics",
    "hub_record": True,
    "resume_allow_changes": ["learning_rate"],
    "save_on_signal": False,
    "ds3_gather_for_generation": False,
    "process_timeout": 60.0,
    "stop_timeout": 60.0,
    "audit": "error",
    "max_bad_updates": 2,
    "eval_benchmarks": ["gsm8k:200", "cmath"],
    "eval_benchmarks_dir": "data",
    "eval_benchmarks_settings": {"shots": 4, "max_new_tokens": 256},
}
# Excludes others of them, so it is set by itself.
ALONE = {"packed_update": False}
SET_GRPO: dict[str, Any] = SET_SHARED | {
    "cast_lm_head_to_fp32": True,
    "loss_type": "sapo",
    "importance_sampling_level": "sequence",
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "delta": 4.0,
    "use_bias_correction_kl": False,
    "top_entropy_quantile": 0.2,
    "off_policy_mask_threshold": 0.5,
    "sapo_temperature_neg": 1.5,
    "sapo_temperature_pos": 1.25,
    "vespo_k_pos": 1.1,
    "vespo_lambda_pos": 1.2,
    "vespo_k_neg": 1.3,
    "vespo_lambda_neg": 1.4,
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "entropy_coef_min": 0.01,
    "entropy_coef_max": 0.75,
    "entropy_coef_delta": 0.02,
    "entropy_target": 0.6,
    "log_completions_hub_repo": "me/completions",
}
SET_RLOO: dict[str, Any] = SET_SHARED | {"normalize_advantages": True, "reward_clip_range": [-2.0, 3.0]}
SET = {GRPOConfig: SET_GRPO, RLOOConfig: SET_RLOO}

# With vLLM, each mode with what it has a use for. Engines that processes share need several of those.
VLLM: dict[str, Any] = {
    "use_vllm": True,
    "vllm_structured_outputs_regex": "[0-9]+",
    "vllm_seed_requests": False,
}
COLOCATE: dict[str, Any] = VLLM | {
    "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 1024,
}
SERVER: dict[str, Any] = VLLM | {
    "vllm_mode": "server",
    "vllm_server_base_url": "http://localhost:9000",
    "vllm_server_host": "localhost",
    "vllm_server_port": 9000,
    "vllm_server_timeout": 10.0,
    "vllm_request_timeout": 20.0,
    "vllm_group_port": 51217,
}
CORRECTION: dict[str, Any] = {
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.1,
}
# Needs a server and the correction, so it is set by itself.
AHEAD: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "async_rollouts": 1}
WITH_VLLM = {*COLOCATE, *SERVER, *CORRECTION, "vllm_tensor_parallel_size"}


def having(names: Iterable[str]) -> list[tuple[type, str]]:
    """Each config with each of the names that it has."""
    return [(config, name) for config in CONFIGS for name in names if name in own_fields(config)]


def command_line(values: dict[str, Any]) -> list[str]:
    """The flags that a shell would pass for these values."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            flags += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags += [f"--{name}", str(value)]
    return flags


def parse(config: type, values: dict[str, Any]) -> Any:
    (parsed,) = HfArgumentParser(config).parse_args_into_dataclasses(command_line(values))
    return parsed


# ---- defaults


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_the_known_ones(config):
    by_name = {f.name: f.default for f in fields(config)}
    assert {name: by_name[name] for name in own_fields(config)} == DEFAULTS[config]
    assert {name: by_name[name] for name in INHERITED} == INHERITED


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_of_ours_has_a_help_text(config):
    redeclared = ["learning_rate", "logging_steps", "gradient_checkpointing", "bf16", "remove_unused_columns"]
    by_name = {f.name: f.metadata.get("help", "") for f in fields(config)}
    short = [name for name in [*own_fields(config), *redeclared] if len(by_name[name]) < 15]
    assert not short


@pytest.mark.parametrize(
    ("given", "resolved"),
    [({}, True), ({"fp16": True}, False), ({"bf16": False}, False), ({"bf16": True}, True)],
)
def test_bf16_is_on_unless_told_otherwise(given, resolved):
    assert GRPOConfig("unused", use_cpu=True, **given).bf16 is resolved


# ---- the update


@pytest.mark.parametrize(("given", "interval"), [("first", 0), ("off", None), ("every:1", 1), ("every:250", 250)])
def test_parity_checks_have_an_interval(given, interval):
    assert GRPOConfig(**QUIET, parity_check=given).parity_interval == interval


@pytest.mark.parametrize(("given", "layers"), [(None, {}), ({"rope": False}, {"rope": False})])
def test_liger_is_for_layers_only(given, layers):
    config = GRPOConfig(**QUIET, use_liger_kernel=True, liger_kernel_config=given)
    assert config.liger_kernel_config == {"fused_linear_cross_entropy": False, **layers}
    assert GRPOConfig(**QUIET).liger_kernel_config is None


@pytest.mark.parametrize("config", CONFIGS)
def test_packed_rows_can_be_turned_off(config):
    assert parse(config, QUIET | ALONE).packed_update is False


# ---- spellings


@pytest.mark.parametrize(
    ("given", "resolved"),
    [(True, "group"), (False, "none"), ("True", "group"), ("false", "none"), ("batch", "batch"), ("none", "none")],
)
def test_scale_rewards_takes_bools(given, resolved):
    assert GRPOConfig(**QUIET, scale_rewards=given).scale_rewards == resolved


@pytest.mark.parametrize(
    ("given", "resolved"), [("auto", None), ("none", None), ("NULL", None), ("64", 64), (8, 8), (None, None)]
)
def test_pad_to_multiple_of_takes_words(given, resolved):
    assert GRPOConfig(**QUIET, pad_to_multiple_of=given).pad_to_multiple_of == resolved


def test_top_k_of_none_is_off():
    assert RLOOConfig(**QUIET, top_k=None).top_k == 0


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_init_kwargs", {"dtype": "bfloat16", "revision": "main"}),
        ("generation_kwargs", {"num_beams": 2, "suppress_tokens": [3, 4]}),
        ("chat_template_kwargs", {"enable_thinking": False, "depth": {"a": [1]}}),
        ("lr_scheduler_kwargs", {"num_cycles": 2}),
    ],
)
def test_dict_fields_take_json(config, name, value):
    assert getattr(config(**QUIET, **{name: json.dumps(value)}), name) == value


# ---- earlier names

# old name -> a value for it, and the new name's value; None where the new name needs vLLM
OLD_NAMES: dict[str, tuple[Any, Any]] = {
    "use_liger_loss": (True, True),
    "wandb_log_unique_prompts": (True, True),
    "use_transformers_paged": (True, True),
    "vllm_guided_decoding_regex": ("[0-9]+", None),
    "vllm_importance_sampling_cap": (2.0, None),
}


def test_every_alias_is_in_the_table():
    assert OLD_NAMES.keys() == ALIASES.keys()


@pytest.mark.parametrize(("config", "old"), having(OLD_NAMES))
def test_an_earlier_name_warns_and_stands_for_the_new_one(config, old):
    (value, arrives), new = OLD_NAMES[old], ALIASES[old]
    waits = pytest.raises(ConfigError, match=re.escape(f"{new}={value!r} needs use_vllm=True"))
    made = None
    with (
        pytest.warns(FutureWarning, match=f"`{old}` is deprecated; use `{new}`"),
        waits if arrives is None else nullcontext(),
    ):
        made = config(**QUIET, **{old: value})
    assert getattr(made, new, None) == arrives


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_a_warning_points_to_the_line_that_used_the_earlier_name(config):
    with pytest.warns(FutureWarning) as caught:
        config(**QUIET, wandb_log_unique_prompts=True)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_copy_does_not_warn_again():
    with pytest.warns(FutureWarning):
        made = GRPOConfig(**QUIET, wandb_log_unique_prompts=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert replace(made).log_unique_prompts is True


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_options_of_checkpointing_are_known(config):
    options = {"use_reentrant": False, "determinism_check": "none"}
    assert config(**QUIET, gradient_checkpointing_kwargs=options).gradient_checkpointing_kwargs == options
    with pytest.raises(ConfigError, match=r"'use_reentrent', which is not one of .*Did you mean .use_reentrant"):
        config(**QUIET, gradient_checkpointing_kwargs={"use_reentrent": False})


@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"preserve_rng_state": False, "use_reentrant": None}])
def test_options_of_checkpointing_do_not_choose_its_older_variant(options):
    made = GRPOConfig(**QUIET, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    assert made.gradient_checkpointing_kwargs == options | {"use_reentrant": False}
    assert replace(made).gradient_checkpointing_kwargs == made.gradient_checkpointing_kwargs
    assert "use_reentrant" not in options or options["use_reentrant"] is None, "the user's own is left alone"
    assert GRPOConfig(**QUIET, gradient_checkpointing_kwargs=None).gradient_checkpointing_kwargs is None
    asked = GRPOConfig(**QUIET, gradient_checkpointing_kwargs={"use_reentrant": True, "early_stop": False})
    assert asked.gradient_checkpointing_kwargs["use_reentrant"] is True


def test_no_tracker_may_be_null():
    assert GRPOConfig(**QUIET | {"report_to": None}).report_to == []


# ---- names of transformers 5.23


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_has_one_value_under_both_names(name: str, asked: bool | None):
    """None means that memory decides; it stays so in a copy. Neither name warns."""
    if not hasattr(GRPOConfig, name):
        pytest.skip("this release of transformers knows the earlier name only")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        made = replace(GRPOConfig(**QUIET, **{name: asked}))
    for each in ("gradient_checkpointing", "activation_checkpointing"):
        assert getattr(made, each, asked) is asked


# ---- the command line


@pytest.mark.parametrize("config", CONFIGS)
def test_the_tables_cover_every_field(config):
    covered = {*SET[config], *ALONE, *ALIASES, *WITH_VLLM, *AHEAD}
    assert set(own_fields(config)) <= covered
    defaults = INHERITED | DEFAULTS[config]
    same = [name for name, value in SET[config].items() if defaults[name] == value]
    assert not same, "these are set to their default, which proves nothing"


@pytest.mark.parametrize("config", CONFIGS)
def test_the_command_line_says_what_keywords_say(config):
    parsed, built = parse(config, QUIET | SET[config]), config(**(QUIET | SET[config]))
    assert parsed == built
    wrong = {n: (getattr(parsed, n), v) for n, v in SET[config].items() if getattr(parsed, n) != v}
    assert not wrong
    kinds = {n: type(getattr(parsed, n)) for n, v in SET[config].items() if type(getattr(parsed, n)) is not type(v)}
    assert not kinds


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mode", [COLOCATE, SERVER], ids=["colocate", "server"])
def test_the_command_line_says_what_keywords_say_of_vllm(config, mode):
    given = mode | (CORRECTION if config is GRPOConfig else {})
    parsed, built = parse(config, QUIET | given), config(**(QUIET | given))
    assert parsed == built
    assert {name: getattr(parsed, name) for name in given} == given
    assert not [name for name, value in given.items() if DEFAULTS[config][name] == value]


@pytest.mark.parametrize(("config", "name"), having(sorted(WITH_VLLM - {"use_vllm"})))
def test_fields_of_vllm_need_it(config, name):
    value = {**COLOCATE, **SERVER, **CORRECTION, "vllm_tensor_parallel_size": 2}[name]
    with pytest.raises(ConfigError, match=f"^{name}=.* needs use_vllm=True"):
        config(**QUIET, **{name: value})


def test_a_generation_can_be_sampled_ahead():
    parsed = parse(GRPOConfig, QUIET | AHEAD)
    assert parsed == GRPOConfig(**QUIET, **AHEAD)
    assert parsed.async_rollouts == 1


def test_both_names_of_vllm_mean_it():
    assert GRPOConfig(**QUIET, use_vllm=True).samples_with_vllm
    assert RLOOConfig(**QUIET, rollout_backend="vllm").samples_with_vllm
    assert not GRPOConfig(**QUIET).samples_with_vllm


def test_engines_are_shared_by_a_whole_number_of_processes(monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 4))
    assert GRPOConfig(**QUIET, use_vllm=True, vllm_tensor_parallel_size=2).vllm_tensor_parallel_size == 2
    with pytest.raises(ConfigError, match="vllm_tensor_parallel_size=3 must divide the number of processes, 4"):
        GRPOConfig(**QUIET, use_vllm=True, vllm_tensor_parallel_size=3)
    for wrong in ({"dynamic_sampling": True}, {"eval_benchmarks": ["gsm8k"]}):
        with pytest.raises(ConfigError, match="cannot work with vllm_tensor_parallel_size=2"):
            GRPOConfig(**QUIET, use_vllm=True, vllm_tensor_parallel_size=2, **wrong)


@pytest.mark.parametrize("config", CONFIGS)
def test_an_empty_command_line_gives_the_defaults(config):
    assert parse(config, QUIET) == config(**QUIET)


def test_a_parser_does_not_loosen_or_tighten_the_types():
    # HfArgumentParser writes into the dataclass fields; what a keyword may hold stays the same.
    HfArgumentParser(GRPOConfig)
    made = GRPOConfig(**QUIET, shuffle_dataset=None, generation_kwargs={"min_new_tokens": 1}, reward_weights=[1])
    assert (made.shuffle_dataset, made.generation_kwargs, made.reward_weights) == (None, {"min_new_tokens": 1}, [1])
    with pytest.raises(ConfigError, match="reward_weights='1' must be a list of numbers"):
        GRPOConfig(**QUIET, reward_weights="1")


# ---- batches


@pytest.mark.parametrize(
    ("given", "batch", "steps"),
    [
        ({}, 8, 1),
        ({"gradient_accumulation_steps": 4}, 32, 4),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 16, 2),
        ({"gradient_accumulation_steps": 4, "generation_batch_size": 64}, 64, 8),
        ({"generation_batch_size": 64, "steps_per_generation": 8}, 64, 8),
        ({"per_device_train_batch_size": 2, "generation_batch_size": 8}, 8, 4),
    ],
)
def test_generation_batch_and_steps_follow_from_each_other(given, batch, steps):
    made = GRPOConfig(**QUIET, **given)
    assert (made.generation_batch_size, made.steps_per_generation) == (batch, steps)


def test_generation_batch_counts_all_processes(monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 4))
    made = GRPOConfig(**QUIET, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert (made.generation_batch_size, made.steps_per_generation) == (24, 3)
    made = GRPOConfig(**QUIET, per_device_train_batch_size=2, generation_batch_size=32)
    assert (made.generation_batch_size, made.steps_per_generation) == (32, 4)


@pytest.mark.parametrize(
    ("accumulation", "steps", "iterations", "stays"),
    [(4, 2, 1, True), (2, 4, 1, False), (4, 4, 1, True), (4, 4, 2, False), (8, 4, 2, True)],
)
def test_when_rollouts_stay_on_policy(accumulation, steps, iterations, stays):
    made = GRPOConfig(
        **QUIET, gradient_accumulation_steps=accumulation, steps_per_generation=steps, num_iterations=iterations
    )
    assert made.micro_steps_per_generation == steps * iterations
    assert made.rollouts_stay_on_policy is stays


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_with_derived_batches_can_be_copied(config):
    made = config(**QUIET, gradient_accumulation_steps=4)
    copied = replace(made, learning_rate=0.5)
    assert copied.learning_rate == 0.5
    assert (copied.generation_batch_size, copied.steps_per_generation) == (32, 4)
    assert replace(copied, learning_rate=made.learning_rate) == made


def test_batches_that_contradict_each_other_are_an_error():
    with pytest.raises(ConfigError, match=r"generation_batch_size=32 means steps_per_generation=4.*=3 is set too"):
        GRPOConfig(**QUIET, generation_batch_size=32, steps_per_generation=3)
    with pytest.raises(ConfigError, match=r"Set one of them \(None for the other\)"):
        replace(GRPOConfig(**QUIET), per_device_train_batch_size=4)
    wider = replace(GRPOConfig(**QUIET), per_device_train_batch_size=4, steps_per_generation=None)
    assert (wider.generation_batch_size, wider.steps_per_generation) == (8, 2)


# ---- benchmarks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_benchmarks": "gsm8k"}, r"eval_benchmarks='gsm8k' must be a list of names, such as \['gsm8k:200'"),
        ({"eval_benchmarks": ["gsm8k", 7]}, "must be a list of names"),
        ({"eval_benchmarks_dir": "data"}, "eval_benchmarks_dir='data' needs eval_benchmarks"),
        ({"eval_benchmarks_settings": {"shots": 4}}, r"eval_benchmarks_settings=\{'shots': 4\} needs eval_benchmarks"),
        (
            {"eval_benchmarks": ["gsm8k"], "eval_benchmarks_settings": {"max_tokens": 9}},
            "eval_benchmarks_settings has no field `max_tokens`. Did you mean `max_new_tokens`",
        ),
        (
            {"eval_benchmarks": ["gsm8k"], "eval_benchmarks_settings": {"shots": "4"}},
            r"eval_benchmarks_settings\['shots'\]='4' must be a whole number",
        ),
        (
            {"eval_benchmarks": ["gsm8k"], "eval_benchmarks_settings": {"temperature": True}},
            r"eval_benchmarks_settings\['temperature'\]=True must be a number",
        ),
    ],
)
def test_benchmarks_that_cannot_be_meant(given, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**QUIET, **given)


def test_evaluation_batches_matter_only_where_there_may_be_a_set():
    """Benchmarks have no groups."""
    odd = {"eval_strategy": "steps", "eval_steps": 1, "num_generations": 6, "per_device_train_batch_size": 6}
    with pytest.raises(ConfigError, match="must be divisible by the evaluation group size 6"):
        GRPOConfig(**QUIET, **odd)
    assert GRPOConfig(**QUIET, **odd, eval_benchmarks=["gsm8k"]).eval_group_size == 6


# ---- names


@pytest.mark.parametrize(
    ("config", "wrong", "nearest"),
    [
        (GRPOConfig, "num_generation", "num_generations"),
        (GRPOConfig, "max_completions_length", "max_completion_length"),
        (GRPOConfig, "learning_rat", "learning_rate"),
        (RLOOConfig, "normalise_advantages", "normalize_advantages"),
    ],
)
def test_an_unknown_field_names_the_nearest(config, wrong, nearest):
    with pytest.raises(TypeError, match=f"{config.__name__} has no field `{wrong}`. Did you mean `{nearest}`"):
        config(**QUIET, **{wrong: 1})


def test_fields_of_one_recipe_are_unknown_to_the_other():
    with pytest.raises(ConfigError, match="RLOOConfig has no field `loss_type`"):
        RLOOConfig(**QUIET, loss_type="grpo")
    with pytest.raises(ConfigError, match="GRPOConfig has no field `reward_clip_range`"):
        GRPOConfig(**QUIET, reward_clip_range=[-1.0, 1.0])


# ---- every field is read


def read_from_args(tree: ast.AST) -> set[str]:
    """Names x that the code reads as `args.x`, `….args.x` or `getattr(args, "x")`."""

    def is_args(node: ast.AST) -> bool:
        return (isinstance(node, ast.Name) and node.id == "args") or (
            isinstance(node, ast.Attribute) and node.attr == "args"
        )

    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_args(node.value):
            names.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            target, *rest = node.args
            if is_args(target) and rest and isinstance(rest[0], ast.Constant):
                names.add(rest[0].value)
    return names


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_is_read_outside_the_config(config):
    root = Path(gruppo.__file__).parent
    sources = [path for path in root.rglob("*.py") if root / "config" not in path.parents]
    sources.append(root / "config" / "recipe.py")  # what trainers compute with
    read = set().union(*(read_from_args(ast.parse(path.read_text(encoding="utf-8"))) for path in sources))
    # Fields that are read through a property of the config.
    properties = (
        ("upper_clip", "epsilon_high"),
        ("eval_group_size", "num_generations_eval"),
        ("parity_interval", "parity_check"),
        ("samples_with_vllm", "use_vllm"),
    )
    for through, name in properties:
        assert through in read
        read.add(name)
    assert set(own_fields(config)) - read - ALIASES.keys() == set()


def test_a_bound_that_is_infinite_is_none() -> None:
    assert GRPOConfig(**base_args("unused", epsilon_high=math.inf, delta=math.inf)).epsilon_high == math.inf
    assert RLOOConfig(**base_args("unused", reward_clip_range=[-math.inf, 1.0])).reward_clip_range[0] == -math.inf


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("learning_rat", " Did you mean `learning_rate`?"),
        ("learning_rate", ""),  # the very name
        ("xyzzy", ""),
        ("save_every", ""),  # 0.61 alike to save_strategy
    ],
)
def test_only_what_may_have_been_meant_is_named(name: str, said: str) -> None:
    assert nearest(name, ["learning_rate", "beta", "save_strategy"]) == said


# ---- values that other libraries give


@pytest.mark.parametrize("config", CONFIGS)
def test_numbers_of_numpy_become_those_of_python(config):
    given = {
        "seed": np.int64(3), "beta": np.float32(0.5), "max_completion_length": np.int32(9), "max_steps": np.int64(2),
        "weight_decay": np.float64(0.5), "log_completions": np.bool_(True), "reward_weights": [np.float32(0.5), 1.0],
    }  # fmt: skip
    made = config(**QUIET, **given)
    for name, value in given.items():
        now = getattr(made, name)
        assert now == value
        assert type(now) in (int, float, bool, list)
    assert [type(weight) for weight in made.reward_weights] == [float, float]
    assert json.loads(made.to_json_string())["seed"] == 3


@pytest.mark.parametrize("config", CONFIGS)
def test_no_largest_norm_means_no_clipping(config):
    assert config(**QUIET, max_grad_norm=None).max_grad_norm == 0.0
