"""The sampling settings of a run, as every backend reads them."""

from collections.abc import Collection, Sequence
from typing import Any

from transformers import GenerationConfig

from gruppo.rollout.vllm.requests import EXTRA, in_two


def generation_config(
    args: Any,
    *,
    pad_token_id: int,
    bos_token_id: int | None,
    stop_ids: Sequence[int],
    never: Collection[int] = (),
) -> Any:
    """The sampling settings of a config; `generation_kwargs` override the config's own fields.

    `never` are tokens that no completion may contain: the placeholders of images.
    """
    settings = {
        "max_new_tokens": args.max_completion_length,
        "do_sample": True,
        "pad_token_id": pad_token_id,
        "bos_token_id": bos_token_id,
        "eos_token_id": list(stop_ids),
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "cache_implementation": args.cache_implementation,
        "use_cache": True,
        "disable_compile": True,
    }
    kwargs, extra = args.generation_kwargs or {}, None
    if args.samples_with_vllm:
        kwargs, extra = in_two(kwargs, args.vllm_structured_outputs_regex)
    settings |= kwargs
    if never:
        settings["suppress_tokens"] = sorted({*never, *(settings.get("suppress_tokens") or ())})
    config = GenerationConfig(**settings)
    if extra is not None:
        setattr(config, EXTRA, extra)
    return config
