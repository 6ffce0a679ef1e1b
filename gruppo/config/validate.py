"""Every check of the configs, run once at construction. Each error names the field, its value and the fix."""

import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, TypeVar

from gruppo.algo.recipes import LOSS_TYPES
from gruppo.config import hints
from gruppo.config.folder import check_output_dir
from gruppo.config.generation import check_generation_kwargs
from gruppo.config.hints import nearest
from gruppo.errors import ConfigError

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=type[Any])

# Fields of TrainingArguments that have no meaning here, so that setting them is an error.
MEANINGLESS = {
    "label_smoothing_factor": "there are no labels to smooth",
    "train_sampling_strategy": "the prompt order is set by shuffle_dataset and seed",
    "batch_eval_metrics": "evaluation reports rewards, not predictions",
}

LOG_LEVELS = ("debug", "detail", "info", "warning", "error", "critical", "passive")

ROLLOUT_BACKENDS = ("auto", "builtin", "transformers", "vllm")

LONGEST_WAIT = 7 * 24 * 3600  # seconds; for longer waits use None

# Inherited fields from which the sizes of generation and evaluation batches are derived.
BATCH_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size")


class UnknownFieldError(ConfigError, TypeError):
    """A keyword that is not a field."""


def rejects_unknown_fields(cls: C) -> C:
    """Class decorator: an unknown keyword raises an error that names the nearest field."""
    original: Callable[..., None] = vars(cls)["__init__"]
    names = [f.name for f in fields(cls)]

    @wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        # A subclass may add fields; its generated __init__ does not call this one.
        for name in kwargs:
            if name not in names:
                hint = hints.field_hint(name) or nearest(name, names)
                raise UnknownFieldError(f"{cls.__name__} has no field `{name}`.{hint}")
        original(self, *args, **kwargs)

    setattr(cls, "__init__", checked)  # noqa: B010  (mypy does not let a class's __init__ be assigned)
    return cls


def one_of(config: Any, name: str, allowed: Collection[str], known: Mapping[str, str] | None = None) -> None:
    """Check that a value is allowed; `known` has hints for some values that are not."""
    value = getattr(config, name)
    if value not in allowed:
        said = (known or {}).get(value.lower()) if isinstance(value, str) else ""
        hint = f" {said}" if said else nearest(value, allowed) if isinstance(value, str) else ""
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(sorted(allowed))}.{hint}")


def in_range(
    config: Any, name: str, low: float | None = None, high: float | None = None, *, above: float | None = None
) -> None:
    """Check low ≤ value ≤ high and value > above; None is allowed if it is the field's default."""
    value = getattr(config, name)
    default = next(f.default for f in fields(config) if f.name == name)
    if value is None and (default is None or default is MISSING):
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise ConfigError(f"{name}={value!r} must be a number.")
    if above is not None and not value > above:
        raise ConfigError(f"{name}={value!r} must be greater than {above}.")
    if low is not None and value < low:
        raise ConfigError(f"{name}={value!r} must be at least {low}.")
    if high is not None and value > high:
        raise ConfigError(f"{name}={value!r} must be at most {high}.")


def check_checkpointing_kwargs(config: Any) -> None:
    """Raise for options of gradient checkpointing that do not exist; torch notices only in the first update."""
    if not config.gradient_checkpointing_kwargs:
        return
    from torch.utils.checkpoint import checkpoint  # here, since ModelConfig does without torch
    from transformers import PreTrainedModel

    known = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"} - {"function", "args", "kwargs"}
    if hasattr(PreTrainedModel, "activation_checkpointing_enable"):  # from transformers 5.23
        known |= {"every_n_layers", "offload"}
    if not isinstance(config.gradient_checkpointing_kwargs.get("use_reentrant", False), bool):
        raise ConfigError(f"{config.gradient_checkpointing_kwargs!r}: use_reentrant must be True or False.")
    for name in config.gradient_checkpointing_kwargs:
        if name not in known:
            raise ConfigError(
                f"gradient_checkpointing_kwargs has {name!r}, which is not one of {', '.join(sorted(known))}."
                f"{nearest(name, known)}"
            )


def check_accelerator_config(config: Any) -> None:
    """Raise for options of accelerate that do not exist, in the dict or in the one inside it."""
    given = config.accelerator_config
    given = json.loads(given) if isinstance(given, str) and given.startswith("{") else given
    if not isinstance(given, Mapping):
        return  # an AcceleratorConfig, or the path of a file
    from accelerate.utils import GradientAccumulationPlugin
    from transformers.trainer_pt_utils import AcceleratorConfig

    inner = given.get("gradient_accumulation_kwargs") or {}
    for options, kind in ((given, AcceleratorConfig), (inner, GradientAccumulationPlugin)):
        known = [f.name for f in fields(kind)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"accelerator_config has {name!r}, which is not one of {', '.join(known)}.{nearest(name, known)}"
                )


def check_inherited(config: Any) -> None:
    """Raise for inherited fields that cannot work here."""
    check_checkpointing_kwargs(config)
    in_range(config, "seed", 0, 2**32 - 1)
    in_range(config, "data_seed", 0)
    in_range(config, "neftune_noise_alpha", 0)
    in_range(config, "weight_decay", 0)
    for name in ("log_level", "log_level_replica"):
        one_of(config, name, LOG_LEVELS)
    for f in fields(config):
        if f.name in MEANINGLESS and getattr(config, f.name) != f.default:
            raise ConfigError(f"{f.name}={getattr(config, f.name)!r} has no meaning here: {MEANINGLESS[f.name]}.")
    check_reports(config)
    if config.auto_find_batch_size:
        raise ConfigError("auto_find_batch_size=True would break up prompt groups; set per_device_train_batch_size.")
    if config.use_liger_kernel and (config.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
        raise ConfigError(
            "liger_kernel_config['fused_linear_cross_entropy']=True computes a loss over labels, which do not exist "
            "here; remove it."
        )
    parallelism = config.parallelism_config
    if isinstance(parallelism, Mapping | str):
        raise ConfigError(f"parallelism_config={parallelism!r} must be an accelerate.ParallelismConfig.")
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
        raise ConfigError(
            "parallelism_config with context or sequence parallelism cannot work: the sequences are sampled after "
            "the batch is drawn. Use data parallelism."
        )
    if parallelism is not None and parallelism.tp_enabled:
        raise ConfigError(
            f"parallelism_config with tp_size={parallelism.tp_size} cannot work: every process draws and samples its "
            "own rows, but the processes that share a model would need the same rows. Use data parallelism; FSDP2 "
            "(recipes/accelerate/fsdp2.yaml) is for models that do not fit on one device."
        )


def check_reports(config: Any) -> None:
    """Raise for a tracker that transformers does not know; transformers itself raises only during loading."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    asked = [config.report_to] if isinstance(config.report_to, str) else config.report_to or []
    for name in asked:
        if name not in (*INTEGRATION_TO_CALLBACK, "none", "all"):
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise ConfigError(
                f"report_to={name!r} is not one of none, all, {known}.{nearest(name, INTEGRATION_TO_CALLBACK)}"
            )


def check_sampling(config: Any) -> None:
    in_range(config, "num_generations", 2)
    in_range(config, "num_generations_eval", 0)
    in_range(config, "max_completion_length", 1)
    in_range(config, "max_prompt_length", 1)
    in_range(config, "temperature", above=0)
    in_range(config, "top_p", high=1, above=0)
    in_range(config, "top_k", 0)
    in_range(config, "min_p", 0, 1)
    in_range(config, "repetition_penalty", above=0)
    check_rollout_backend(config)
    if not config.samples_with_vllm:  # vLLM has its own checks
        check_generation_kwargs(config.generation_kwargs or {})


def check_rollout_backend(config: Any) -> None:
    """Raise if `rollout_backend` and the older switches contradict each other."""
    one_of(config, "rollout_backend", ROLLOUT_BACKENDS)
    backend, continuous = config.rollout_backend, config.use_transformers_continuous_batching
    if config.use_vllm and backend not in ("auto", "vllm"):
        raise ConfigError(f"use_vllm=True contradicts rollout_backend={backend!r}; set one of them.")
    if continuous and config.use_vllm:
        raise ConfigError("use_transformers_continuous_batching=True contradicts use_vllm=True; set one of them.")
    if continuous and backend not in ("auto", "transformers"):
        raise ConfigError(
            f"use_transformers_continuous_batching=True contradicts rollout_backend={backend!r}; set one of them."
        )
    settings = config.transformers_continuous_batching_config
    if settings is None:
        return
    if not continuous:
        raise ConfigError(
            f"transformers_continuous_batching_config={settings!r} needs use_transformers_continuous_batching=True."
        )
    check_continuous_batching_config(settings)


def check_continuous_batching_config(settings: dict[str, Any]) -> None:
    from transformers import ContinuousBatchingConfig

    known = [f.name for f in fields(ContinuousBatchingConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"transformers_continuous_batching_config has no field `{name}`.{nearest(name, known)}")
    if settings.get("seed") is not None:
        raise ConfigError(
            f"transformers_continuous_batching_config['seed']={settings['seed']!r} would draw the same random numbers "
            "in every generation; set `seed`."
        )


def check_batches(config: Any) -> None:
    """Check that the group size divides generation and evaluation batches."""
    in_range(config, "num_iterations", 1)
    in_range(config, "pad_to_multiple_of", 1)
    check_dynamic_sampling(config)
    if config.generation_batch_size % config.num_generations:
        raise ConfigError(
            f"generation_batch_size={config.generation_batch_size} (per_device_train_batch_size × processes × "
            f"steps_per_generation = {config.per_device_train_batch_size} × {config.world_size} × "
            f"{config.steps_per_generation}) must be divisible by num_generations={config.num_generations}, so that "
            f"groups are whole. {hints.whole_groups(config)}"
        )
    if config.do_eval and config.eval_strategy != "no" and not config.eval_benchmarks:
        check_eval_batches(config)  # with benchmarks there may be no evaluation set; the trainer checks


def check_eval_batches(config: Any) -> None:
    group = config.num_generations_eval or config.num_generations
    eval_rows = config.per_device_eval_batch_size * config.world_size
    if eval_rows % group:
        raise ConfigError(
            f"per_device_eval_batch_size × processes = {eval_rows} must be divisible by the evaluation group size "
            f"{group} (num_generations_eval, else num_generations). {hints.whole_eval_groups(config, group)}"
        )


def check_dynamic_sampling(config: Any) -> None:
    in_range(config, "max_resample_rounds", 1)
    default = next(f.default for f in fields(config) if f.name == "max_resample_rounds")
    if not config.dynamic_sampling and config.max_resample_rounds != default:
        raise ConfigError(f"max_resample_rounds={config.max_resample_rounds} needs dynamic_sampling=True.")


def check_objective(config: Any) -> None:
    in_range(config, "beta", 0)
    in_range(config, "epsilon", 0)
    in_range(config, "epsilon_high", 0)
    in_range(config, "ref_model_mixup_alpha", 0, 1)
    in_range(config, "ref_model_sync_steps", 1)
    if config.sync_ref_model and config.beta == 0:
        raise ConfigError("sync_ref_model=True needs a reference model: set beta > 0.")


def check_update(config: Any) -> None:
    in_range(config, "max_tokens_per_micro_batch", 1)
    if not re.fullmatch(r"first|off|every:[1-9][0-9]*", config.parity_check):
        raise ConfigError(
            f"parity_check={config.parity_check!r} must be 'first', 'off' or 'every:N' with N updates between checks."
        )
    if config.parity_check.startswith("every") and not config.packed_update:
        raise ConfigError(f"parity_check={config.parity_check!r} compares packed rows: set packed_update=True.")
    if config.max_tokens_per_micro_batch is not None and not config.packed_update:
        budget = config.max_tokens_per_micro_batch
        raise ConfigError(f"max_tokens_per_micro_batch={budget} needs packed rows: set packed_update=True.")


def check_run(config: Any) -> None:
    check_output_dir(config)
    one_of(config, "record", ("all", "metrics", "off"))
    one_of(config, "audit", ("error", "warn", "off"))
    in_range(config, "max_bad_updates", 1)
    if config.process_timeout is not None:
        in_range(config, "process_timeout", 5, LONGEST_WAIT)
    if config.stop_timeout is not None:
        in_range(config, "stop_timeout", 1, LONGEST_WAIT)
    names = {"*", *(f.name for f in fields(config))}
    for name in config.resume_allow_changes or []:
        if name.partition(".")[0] not in names | set(BEYOND_SETTINGS):
            raise ConfigError(f"resume_allow_changes names {name!r}, which is not a setting.")


# What a checkpoint stores besides the settings, see `trainer/resume/settings.py`.
BEYOND_SETTINGS = ("model", "train_dataset", "rewards", "tools", "processes")


def check_tools(config: Any) -> None:
    in_range(config, "max_tool_calling_iterations", 0)
    in_range(config, "tool_timeout", above=0, high=LONGEST_WAIT)
    in_range(config, "max_parallel_tools", 1)


def check_rewards(config: Any) -> None:
    for name in ("reward_timeout", "reward_sample_timeout"):
        in_range(config, name, above=0, high=LONGEST_WAIT)
    in_range(config, "reward_workers", 1)
    in_range(config, "reward_memory_gb", above=0)
    in_range(config, "reward_concurrency", 1)
    in_range(config, "reward_retries", 0)
    one_of(config, "reward_on_error", ("abstain", "raise"))
    if config.max_reward_failure_rate is not None:
        in_range(config, "max_reward_failure_rate", 0, 1)
    check_worker_env(config.worker_env)
    whole, sample = config.reward_timeout, config.reward_sample_timeout
    if whole is not None and sample is not None and sample > whole:
        raise ConfigError(f"reward_sample_timeout={sample} must not be above reward_timeout={whole}.")


def check_worker_env(names: Any) -> None:
    if names is None:
        return
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"worker_env={names!r} must be a list of names of environment variables, such as ['OPENAI_API_KEY']."
        )
    missing = sorted(set(names) - set(os.environ))
    if missing:
        logger.warning(
            f"worker_env={names!r}: {', '.join(missing)} is not set here, so reward workers will not have it either."
        )


def check_grpo(config: Any) -> None:
    one_of(config, "loss_type", LOSS_TYPES.keys(), hints.LOSSES)
    one_of(config, "importance_sampling_level", ("token", "sequence"))
    one_of(config, "scale_rewards", ("group", "batch", "none"))
    one_of(config, "multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum"))
    in_range(config, "delta", above=0)
    in_range(config, "top_entropy_quantile", 0, 1)
    in_range(config, "sapo_temperature_neg", above=0)
    in_range(config, "sapo_temperature_pos", above=0)
    in_range(config, "entropy_coef_delta", 0)
    if config.entropy_coef_min > config.entropy_coef_max:
        raise ConfigError(
            f"entropy_coef_min={config.entropy_coef_min} is above entropy_coef_max={config.entropy_coef_max}."
        )
    if config.log_completions_hub_repo is not None and not config.log_completions:
        raise ConfigError(f"log_completions_hub_repo={config.log_completions_hub_repo!r} needs log_completions=True.")


def check_vllm_correction(config: Any) -> None:
    one_of(
        config,
        "vllm_importance_sampling_mode",
        ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}."
        )
    if config.vllm_importance_sampling_mode.endswith("truncate") and low is None and high is None:
        raise ConfigError(
            f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r} needs a bound: set "
            "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min."
        )


def check_rloo(config: Any) -> None:
    if config.reward_clip_range is None:
        return
    values = list(config.reward_clip_range)
    if len(values) != 2 or not values[0] < values[1]:
        raise ConfigError(f"reward_clip_range={config.reward_clip_range!r} must be (low, high) with low < high.")
