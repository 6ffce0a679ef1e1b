"""Generation with vLLM: the fields, and checks that they do not contradict others."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gruppo.config.fields import option
from gruppo.config.generation import check_generation_kwargs
from gruppo.config.hints import nearest
from gruppo.config.validate import LONGEST_WAIT, in_range, one_of
from gruppo.errors import ConfigError

GROUP_PORT = 51216


@dataclass
class VLLMConfig:
    """Where vLLM runs and how it is set up."""

    use_vllm: bool = option(False, "Generate with vLLM; the same as rollout_backend='vllm'.")
    vllm_mode: str = option("colocate", "Engine in this process (colocate) or behind HTTP (server).")
    vllm_model_impl: str = option("vllm", "vLLM's own model code, or its transformers backend.")
    vllm_enable_sleep_mode: bool = option(False, "Release engine weights and KV cache between generations.")
    vllm_structured_outputs_regex: str | None = option(None, "Constrain completions to a regular expression.")
    vllm_server_base_url: str | None = option(None, "URL of the server; overrides host and port.")
    vllm_server_host: str = option("127.0.0.1", "Host of the server.")
    vllm_server_port: int = option(8000, "Port of the server.")
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the server to come up.")
    vllm_request_timeout: float = option(600.0, "Seconds that one call to the server may take, sampling included.")
    vllm_group_port: int = option(GROUP_PORT, "Port of the weight-transfer rendezvous.")
    vllm_gpu_memory_utilization: float = option(0.3, "Share of GPU memory for the colocated engine.")
    vllm_max_model_length: int | None = option(None, "Context length of the colocated engine; None is the model's.")
    vllm_tensor_parallel_size: int = option(1, "Tensor-parallel degree of the colocated engine.")
    vllm_seed_requests: bool = option(
        True, "Give every completion its own seed, so that a run can be repeated; False is faster in vLLM."
    )
    async_rollouts: int = option(
        0, "1: the server samples the next generation while the updates on this one run; 0: one after the other."
    )


@dataclass
class VLLMCorrectionConfig:
    """Correction of the mismatch between trainer and sampler (GRPO)."""

    vllm_importance_sampling_correction: bool = option(True, "Correct the mismatch between trainer and sampler.")
    vllm_importance_sampling_mode: str = option(
        "sequence_mask", "token_truncate, token_mask, sequence_truncate or sequence_mask."
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, "Upper bound of the correction ratio.")
    vllm_importance_sampling_clip_min: float | None = option(None, "Lower bound of the correction ratio.")
    vllm_importance_sampling_cap: float | None = option(None, "Deprecated name of vllm_importance_sampling_clip_max.")


# Fields that only one mode uses; those of colocate with the flag that sets the same on the server.
COLOCATE_ONLY = {
    "vllm_model_impl": "--model-impl",
    "vllm_enable_sleep_mode": "",
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization",
    "vllm_max_model_length": "--max-model-len",
    "vllm_tensor_parallel_size": "--tensor-parallel-size",
}
SERVER_ONLY = (
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_request_timeout", "vllm_group_port"),
)

# generation_kwargs with vLLM: fields of SamplingParams and the names that GenerationConfig has for them, …
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
SHARED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", *RENAMED.values())
# … those that only vLLM has, …
OWN = (
    *("presence_penalty", "frequency_penalty", "ignore_eos", "bad_words", "allowed_token_ids", "logit_bias"),
    *("structured_outputs", "thinking_token_budget", "repetition_detection", "extra_args", "vllm_xargs"),
)
# … and those that would break what the trainer relies on.
REFUSED = {
    "n": "the group size is set by num_generations",
    "seed": "seeds follow from `seed`; see vllm_seed_requests",
    "stop_token_ids": "what ends a completion is set by tokenizer.eos_token and model.generation_config.eos_token_id",
    "logprobs": "the trainer requests those of the sampled tokens",
    "prompt_logprobs": "only the sampled tokens are read",
    "detokenize": "only the sampled tokens are read",
}
# Supported in one mode only; servers before vLLM 0.26 ignore bad_words.
ELSEWHERE = {"bad_words": "colocate", "extra_args": "colocate", "vllm_xargs": "server"}
# Fields that only vLLM has and that change the sampling distribution.
SHAPING = tuple(name for name in OWN if name not in ("ignore_eos", "repetition_detection", "extra_args", "vllm_xargs"))


def check_vllm(config: Any) -> None:
    """All checks of these fields; without vLLM none of them may be set."""
    check_async_rollouts(config)
    changed = [f.name for f in fields(config) if f.name.startswith("vllm_") and getattr(config, f.name) != f.default]
    if not config.samples_with_vllm:
        if changed:
            raise ConfigError(f"{changed[0]}={getattr(config, changed[0])!r} needs use_vllm=True.")
        return
    one_of(config, "vllm_mode", ("colocate", "server"))
    one_of(config, "vllm_model_impl", ("auto", "vllm", "transformers"))
    in_range(config, "vllm_gpu_memory_utilization", high=1, above=0)
    in_range(config, "vllm_max_model_length", 2)
    in_range(config, "vllm_tensor_parallel_size", 1)
    for port in ("vllm_server_port", "vllm_group_port"):
        in_range(config, port, 1, 65535)
    for seconds in ("vllm_server_timeout", "vllm_request_timeout"):
        in_range(config, seconds, above=0, high=LONGEST_WAIT)
    _check_mode(config, changed)
    _check_together(config)
    check_vllm_kwargs(config.generation_kwargs or {}, config.vllm_mode, config.vllm_structured_outputs_regex)


def check_async_rollouts(config: Any) -> None:
    """Sampling during the updates needs a separate server, and a loss that corrects for the sampling weights."""
    in_range(config, "async_rollouts", 0, 1)
    if not config.async_rollouts:
        return
    if not config.samples_with_vllm or config.vllm_mode != "server":
        raise ConfigError(
            f"async_rollouts={config.async_rollouts} samples while updates run, which only a server can do: set "
            "use_vllm=True and vllm_mode='server', or async_rollouts=0."
        )
    corrects = config.vllm_importance_sampling_correction
    if corrects is None:
        raise ConfigError(
            f"async_rollouts={config.async_rollouts} trains on samples of older weights, and RLOO has no correction "
            "for those. Use GRPOConfig, or async_rollouts=0."
        )
    if not corrects:
        raise ConfigError(
            f"async_rollouts={config.async_rollouts} trains on samples of older weights, which "
            "vllm_importance_sampling_correction=False would treat as samples of the current weights. Leave it on, or "
            "set async_rollouts=0."
        )


def _check_mode(config: Any, changed: list[str]) -> None:
    """Raise for fields of the other mode, which would be ignored."""
    if config.vllm_mode == "colocate":
        for name in changed:
            if name in SERVER_ONLY:
                raise ConfigError(f"{name}={getattr(config, name)!r} needs vllm_mode='server'.")
        return
    for name in changed:
        if name in COLOCATE_ONLY:
            flag = COLOCATE_ONLY[name]
            instead = f"start the server with `gruppo vllm-serve MODEL {flag} …`" if flag else "leave it out"
            raise ConfigError(f"{name}={getattr(config, name)!r} needs vllm_mode='colocate'; {instead}.")


def _check_together(config: Any) -> None:
    """Check combinations with other fields."""
    if not 0.01 <= config.temperature <= 2:
        raise ConfigError(f"temperature={config.temperature} is outside of what vLLM samples with, 0.01 to 2.")
    if config.cache_implementation is not None:
        raise ConfigError(
            f"cache_implementation={config.cache_implementation!r} is for transformers; vLLM has its own cache. Leave "
            "it out."
        )
    if not config.ds3_gather_for_generation:
        raise ConfigError(
            "ds3_gather_for_generation=False is for sampling with the policy itself; vLLM holds its own copy of all "
            "weights. Leave it out."
        )
    size = config.vllm_tensor_parallel_size
    if config.world_size % size:
        raise ConfigError(
            f"vllm_tensor_parallel_size={size} must divide the number of processes, {config.world_size}: each engine "
            "is spread over that many of them."
        )
    if size > 1 and (config.dynamic_sampling or config.eval_benchmarks):
        what = "dynamic_sampling=True" if config.dynamic_sampling else f"eval_benchmarks={config.eval_benchmarks!r}"
        raise ConfigError(
            f"{what} cannot work with vllm_tensor_parallel_size={size}: the processes of an engine sample together, "
            "but not all of them have prompts to sample. Use vllm_tensor_parallel_size=1 or vllm_mode='server'."
        )


def check_vllm_kwargs(kwargs: Mapping[str, Any], mode: str, regex: str | None) -> None:
    """Check `generation_kwargs`, which may use vLLM's names, or those of transformers where both have the field."""
    known = {*SHARED, *RENAMED, *OWN}
    for name, value in kwargs.items():
        said = f"generation_kwargs[{name!r}]={value!r}"
        if name in REFUSED:
            raise ConfigError(f"{said} cannot be set: {REFUSED[name]}.")
        if name not in known:
            raise ConfigError(f"generation_kwargs has no field `{name}` with vLLM.{nearest(name, known)}")
        if ELSEWHERE.get(name, mode) != mode:
            raise ConfigError(f"{said} needs vllm_mode={ELSEWHERE[name]!r}.")
        if regex is not None and name in ("structured_outputs", "ignore_eos"):
            raise ConfigError(f"{said} contradicts vllm_structured_outputs_regex={regex!r}; set one of them.")
        if RENAMED.get(name) in kwargs:
            raise ConfigError(f"{said} and generation_kwargs[{RENAMED[name]!r}] mean the same; set one of them.")
    check_generation_kwargs({RENAMED.get(name, name): value for name, value in kwargs.items() if name not in OWN})


def check_vespo(config: Any) -> None:
    """Require a per-token correction for VESPO, which multiplies it into the weight of the sequence."""
    mode = config.vllm_importance_sampling_mode
    corrects = config.samples_with_vllm and config.vllm_importance_sampling_correction
    if config.loss_type == "vespo" and corrects and not mode.startswith("token"):
        raise ConfigError(
            f"loss_type='vespo' needs the correction of each token, not vllm_importance_sampling_mode={mode!r}: set "
            "it to 'token_truncate' or 'token_mask'."
        )
