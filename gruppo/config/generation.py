"""Checks of `generation_kwargs`."""

from typing import Any

from gruppo.config.hints import nearest
from gruppo.errors import ConfigError

# Fields of GenerationConfig that would break what the trainer relies on, and what to do instead.
REFUSED = {
    "num_return_sequences": "the group size is set by num_generations",
    "eos_token_id": "what ends a completion is set by tokenizer.eos_token and model.generation_config.eos_token_id",
    "pad_token_id": "it is the tokenizer's: set tokenizer.pad_token",
    "return_dict_in_generate": "only the sampled tokens are read",
    "output_scores": "only the sampled tokens are read",
    "output_logits": "only the sampled tokens are read",
    "output_attentions": "only the sampled tokens are read",
    "output_hidden_states": "only the sampled tokens are read",
    "prompt_lookup_num_tokens": "transformers' assisted decoding takes one prompt at a time",
    "assistant_early_exit": "transformers' assisted decoding takes one prompt at a time",
    "token_healing": "it changes the prompts, which the loss must see as they were",
    "dola_layers": "transformers runs it as code from the hub only",
    "force_words_ids": "transformers runs it as code from the hub only",
    "constraints": "transformers runs them as code from the hub only",
    "max_length": "the limit counts new tokens only: set max_completion_length",
}
# Lower and upper bound, and whether the lower bound itself is allowed; None is no bound.
RANGES: dict[str, tuple[float, float | None, bool]] = {
    "temperature": (0, None, False),
    "top_p": (0, 1, False),
    "top_k": (0, None, True),
    "min_p": (0, 1, True),
    "typical_p": (0, 1, False),
    "epsilon_cutoff": (0, 1, True),
    "eta_cutoff": (0, 1, True),
    "repetition_penalty": (0, None, False),
    "max_new_tokens": (1, None, True),
    "min_new_tokens": (0, None, True),
    "num_beams": (1, None, True),
}


def check_generation_kwargs(kwargs: dict[str, Any]) -> None:
    """Raise for an unknown name, and for a value that a sampler would fail on or silently ignore."""
    from transformers import GenerationConfig

    known = GenerationConfig().to_dict().keys()
    for name, value in kwargs.items():
        if name in REFUSED:
            raise ConfigError(f"generation_kwargs[{name!r}]={value!r} cannot be set: {REFUSED[name]}.")
        if name not in known:
            raise ConfigError(f"generation_kwargs has no field `{name}`.{nearest(name, known)}")
        if name in RANGES:
            _check_range(name, value)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        _check_ids(name, kwargs.get(name))
    words = kwargs.get("bad_words_ids")
    if words is not None:
        if not isinstance(words, list | tuple) or not words:
            raise ConfigError(f"generation_kwargs['bad_words_ids']={words!r} must be a list of lists of token ids.")
        for word in words:
            _check_ids("bad_words_ids", word)
    _check_stop_strings(kwargs)


def _check_ids(name: str, ids: Any) -> None:
    if ids is not None and not (isinstance(ids, list | tuple) and all(isinstance(token, int) for token in ids)):
        raise ConfigError(f"generation_kwargs[{name!r}]={ids!r} must be a list of token ids.")


def _check_range(name: str, value: Any) -> None:
    low, high, inclusive = RANGES[name]
    if value is None and name != "max_new_tokens":  # None would mean transformers' limit, not the config's
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (value >= low if inclusive else value > low) and (high is None or value <= high):
        return
    bounds = f"at least {low}" if inclusive else f"greater than {low}"
    bounds += "" if high is None else f" and at most {high}"
    raise ConfigError(f"generation_kwargs[{name!r}]={value!r} must be a number {bounds}.")


def _check_stop_strings(kwargs: dict[str, Any]) -> None:
    strings = kwargs.get("stop_strings")
    if strings is None:
        return
    listed = [strings] if isinstance(strings, str) else strings
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(s, str) and s for s in listed):
        raise ConfigError(
            f"generation_kwargs['stop_strings']={strings!r} must be a string or a list of them, not empty."
        )
    if (kwargs.get("num_beams") or 1) > 1:
        raise ConfigError(
            f"generation_kwargs['stop_strings'] with num_beams={kwargs['num_beams']}: beams change places, so it is "
            "unknown which one a string ended. Remove one of the two."
        )
