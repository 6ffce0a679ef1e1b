"""Sampling with transformers' continuous batching: a paged KV cache, in which a finished row frees its pages.

It samples from the training weights directly. If training uses autocast in half precision, sampling does too, and the
KV cache is stored in that dtype; the weights are not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousMixin

from gruppo.engine.settings import in_effect
from gruppo.errors import ConfigError, RolloutError
from gruppo.policy.modes import sampling_mode
from gruppo.policy.unwrap import inner_model
from gruppo.rollout.base import RolloutBackend, with_limits_of
from gruppo.types import Completion, SampleRequest, StopReason

# The fields of a GenerationConfig that continuous batching reads. It ignores all others, some of them silently.
_READ = {"do_sample", "eos_token_id", "max_new_tokens", "temperature", "top_k", "top_p"}
# Fields of ContinuousBatchingConfig that set the size of the paged cache and of the buffers beside it.
_SIZES = {"max_batch_tokens", "max_memory_percent", "num_blocks"}
_MEMORY_SHARE = 0.5  # of the free memory of a GPU
_TOKENS_PER_PASS = 512  # on a CPU, where the attention mask is a dense tensor with this many rows


class ContinuousBatchingBackend(RolloutBackend):
    """Generates with the training module through `generate_batch`, with one request per completion.

    `settings` are fields of ContinuousBatchingConfig.
    """

    policy: Callable[[], Any]
    name = "transformers_continuous_batching"
    timer = "transformers.generate_batch"

    def __init__(
        self,
        policy: Callable[[], PreTrainedModel],
        config: GenerationConfig,
        *,
        stop_ids: Sequence[int],
        settings: Mapping[str, Any] | None = None,
        autocast_dtype: torch.dtype | None = None,
    ):
        self.policy = policy  # called each time: wrapping for training replaces the module
        self.config = config
        self.stop_ids = set(stop_ids)
        self.settings = dict(settings or {})
        self.autocast_dtype = autocast_dtype
        self._check(policy())

    def config_in_effect(self) -> Any:
        """Continuous batching does not read the model's own generation config."""
        return self.config

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """`count` completions for each request, flat and in order."""
        if not requests:
            return []
        policy = self.policy()
        self._check(policy)
        model = inner_model(policy)
        prompts = [list(request.prompt_ids) for request in requests for _ in range(request.count)]
        runner = model if self.autocast_dtype is None else _Autocast(model, self.autocast_dtype)
        with sampling_mode(policy), _paged_attention(model):
            outputs = runner.generate_batch(
                prompts,
                generation_config=with_limits_of(requests, self.config),
                continuous_batching_config=ContinuousBatchingConfig(**self._batching(model, prompts)),
                progress_bar=False,
            )
        # generate_batch omits lost requests, which would shift rows, and returns failed ones, cut short.
        if len(outputs) != len(prompts):
            raise RolloutError(
                f"Continuous batching returned {len(outputs)} of {len(prompts)} completions; its log says why."
            )
        if errors := [output.error for output in outputs.values() if output.error is not None]:
            raise RolloutError(f"Continuous batching failed for {len(errors)} of {len(prompts)} prompts: {errors[0]}")
        limits = [request.max_new_tokens for request in requests for _ in range(request.count)]
        return [self._completion(output, limit) for output, limit in zip(outputs.values(), limits, strict=True)]

    def _check(self, policy: Any) -> None:
        """Raise for settings and adapters that continuous batching would ignore."""
        config = self.config
        if unread := [f"{name}={value!r}" for name, value in in_effect(config).items() if name not in _READ]:
            raise ConfigError(
                f"transformers' continuous batching does not support {', '.join(unread)}; remove it, or set "
                "use_transformers_continuous_batching=False."
            )
        if config.max_new_tokens is None:
            raise ConfigError("max_new_tokens=None: continuous batching needs a limit; set max_completion_length.")
        cap = getattr(inner_model(policy).config.get_text_config(), "attn_logit_softcapping", None)
        if cap:
            raise ConfigError(
                f"transformers' continuous batching ignores the soft cap of this model's attention ({cap}) and would "
                "sample from another distribution; set use_transformers_continuous_batching=False."
            )
        adapters = getattr(policy, "peft_config", {}).values()
        if virtual := [a for a in adapters if getattr(a, "is_prompt_learning", False)]:
            raise ConfigError(
                f"{type(virtual[0]).__name__} puts virtual tokens before the prompt, which continuous batching "
                "ignores; set use_transformers_continuous_batching=False."
            )

    def _batching(self, model: Any, prompts: list[list[int]]) -> dict[str, Any]:
        # disable_nccl_graph_mixing is for tensor parallelism, but when True it sets an environment variable in every
        # run with several processes.
        settings = {"return_logprobs": True, "disable_nccl_graph_mixing": False} | self.settings
        if _can_refuse_flash() and not _is_half(model):
            settings.setdefault("auto_switch_to_flash", False)
        if _SIZES & settings.keys():
            return settings
        if model.device.type != "cpu":
            return settings | {"max_memory_percent": _MEMORY_SHARE}
        # By default a share of the machine's memory would be zeroed each time; ask only for what the completions need.
        page = settings.get("page_size") or settings.get("block_size") or 256
        blocks = sum(-(-(len(prompt) + self.config.max_new_tokens) // page) + 1 for prompt in prompts)
        return settings | {"num_blocks": blocks, "max_batch_tokens": max(_TOKENS_PER_PASS, len(prompts))}

    def _completion(self, output: Any, limit: int | None) -> Completion:
        if limit is not None and limit <= 0:
            return Completion([], StopReason.NO_ROOM)
        ids, logps = output.generated_tokens[:limit], output.logprobs[:limit]
        # If the model itself wrote a padding token last, that counts as an end, too.
        ended = bool(ids) and (ids[-1] in self.stop_ids or ids[-1] == self.config.pad_token_id)
        stop = StopReason.EOS if ended else StopReason.LENGTH
        return Completion(ids, stop, logps if len(logps) == len(ids) else None)


class _Autocast(ContinuousMixin):
    """A model wrapped for continuous batching: activations and KV cache in `dtype`, the weights unchanged.

    Continuous batching runs its loop in a separate thread, to which an autocast around the call does not extend.
    """

    def __init__(self, model: Any, dtype: torch.dtype):
        self.model = model
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def eval(self) -> "_Autocast":
        return self

    def __call__(self, *, cache: Any, **batch: Any) -> Any:
        if "update" not in vars(cache):
            cache.update = _casting(cache.update, self.dtype)
        with torch.autocast(self.model.device.type, self.dtype):
            return self.model(cache=cache, **batch)


def _casting(update: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Cast keys and values to the dtype of the cache: under autocast, rotary embedding makes the keys float32."""

    def cast_and_update(*, key_states: Tensor, value_states: Tensor, **kwargs: Any) -> Any:
        return update(key_states=key_states.to(dtype), value_states=value_states.to(dtype), **kwargs)

    return cast_and_update


@contextmanager
def _paged_attention(model: Any) -> Iterator[None]:
    """Allow attention to be switched to a paged implementation; the previous one is always restored."""
    found = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    kept = [(c, c._attn_implementation) for config in found.values() for c in _with_parts(config)]
    try:
        # Versions without auto_switch_to_flash keep an implementation that is already paged; flash attention cannot
        # compute in float32.
        if not _can_refuse_flash() and not _is_half(model) and model.config._attn_implementation in ("sdpa", "eager"):
            model.set_attn_implementation(f"paged|{model.config._attn_implementation}")
        yield
    finally:
        for config, attention in kept:
            config._attn_implementation = attention


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _with_parts(part)


def _can_refuse_flash() -> bool:
    return any(f.name == "auto_switch_to_flash" for f in fields(ContinuousBatchingConfig))


def _is_half(model: Any) -> bool:
    return model.dtype in (torch.bfloat16, torch.float16)
