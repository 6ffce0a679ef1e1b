"""Sampling settings from a GenerationConfig, and which of its fields the engine supports.

The reference is `model.generate(generation_config=config)`. It fills every field that is None from the model's own
generation config, then from transformers' defaults (`top_k=50` among them); `merged_config` does the same. Every field
is listed in one of the first three tables below; a field that is in none of them must be unset.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from gruppo.config.validate import in_range
from gruppo.errors import ConfigError

HONOURED = frozenset(
    {
        "max_new_tokens",
        "max_length",  # ignored if max_new_tokens is set; see `_length_reasons`
        "min_new_tokens",
        "min_length",  # likewise with min_new_tokens
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "eos_token_id",
        "pad_token_id",
        "stop_strings",
    }
)

OUTPUTS = ("attentions", "hidden_states", "scores", "logits")  # what generate can return besides tokens

# Fields that do not affect what is sampled, and why.
IRRELEVANT = {
    "bos_token_id": "starts an empty prompt, and prompts are never empty",
    "decoder_start_token_id": "encoder-decoder models",
    "early_stopping": "beam search",
    "length_penalty": "beam search",
    "num_assistant_tokens": "assisted decoding, which is refused",
    "num_assistant_tokens_schedule": "assisted decoding, which is refused",
    "assistant_confidence_threshold": "assisted decoding, which is refused",
    "assistant_lookbehind": "assisted decoding, which is refused",
    "target_lookbehind": "assisted decoding, which is refused",
    "max_matching_ngram_size": "prompt lookup, which is refused",
    "cache_config": "belongs to cache_implementation, which is refused",
    "max_cache_len": "belongs to cache_implementation, which is refused",
    "prefill_chunk_size": "how the prompt is encoded, not what comes of it",
    "num_return_sequences": "a request has its own count",
    **{f"output_{what}": "what else is returned" for what in OUTPUTS},
    "return_dict_in_generate": "what else is returned",
    "compile_config": "how the model is run, not what comes of it",
    "disable_compile": "how the model is run, not what comes of it",
    "_from_model_config": "metadata",
    "transformers_version": "metadata",
}

# Fields that the engine does not support: the values (besides None) at which they have no effect, and what they do.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "beam search"),
    "num_beam_groups": ((1,), "diverse beam search"),
    "diversity_penalty": ((0,), "diverse beam search"),
    "low_memory": ((False,), "sequential beam search"),
    "constraints": ((), "constrained beam search"),
    "force_words_ids": ((), "constrained beam search"),
    "penalty_alpha": ((0,), "contrastive search"),
    "dola_layers": ((), "DoLa decoding"),
    "use_mtp": ((False,), "multi-token prediction"),
    "is_assistant": ((False,), "assisted decoding"),
    "assistant_early_exit": ((), "assisted decoding"),
    "assistant_ensemble_weight": ((), "assisted decoding"),
    "speculation_type": ((), "assisted decoding"),
    "prompt_lookup_num_tokens": ((), "prompt lookup decoding"),
    "use_cache": ((True,), "sampling without a cache"),
    "cache_implementation": ((), "another kind of cache"),
    "continuous_batching_config": ((), "transformers' continuous batching"),
    "typical_p": ((1,), "typical decoding"),
    "epsilon_cutoff": ((0,), "the epsilon cutoff"),
    "eta_cutoff": ((0,), "the eta cutoff"),
    "top_h": ((), "top-H sampling"),
    "encoder_repetition_penalty": ((1,), "a repetition penalty on the prompt alone"),
    "no_repeat_ngram_size": ((0,), "a ban on repeated n-grams"),
    "encoder_no_repeat_ngram_size": ((0,), "a ban on n-grams of the prompt"),
    "bad_words_ids": ((), "a list of banned words"),
    "sequence_bias": ((), "a bias on sequences"),
    "exponential_decay_length_penalty": ((), "a length penalty"),
    "guidance_scale": ((1,), "classifier-free guidance"),
    "watermarking_config": ((), "a watermark"),
    "remove_invalid_values": ((False,), "the replacement of NaN and inf (they end a completion here)"),
    "renormalize_logits": ((False,), "renormalised scores"),
    "token_healing": ((False,), "token healing"),
    "max_time": ((), "a time limit"),
}

# Values at which the honoured fields have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_k": (0,),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "do_sample": (False,),
}

# Fields that control when a completion ends or how it is computed, but not which distribution its tokens come from.
NO_FILTER = frozenset(
    {
        *("max_new_tokens", "max_length", "eos_token_id", "stop_strings", "max_time", "do_sample"),
        *("use_cache", "cache_implementation", "continuous_batching_config", "use_mtp"),
        *("is_assistant", "assistant_early_exit", "assistant_ensemble_weight", "speculation_type"),
        *("prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits"),
    }
)

# generate looks at these only with do_sample=True.
SAMPLING_ONLY = frozenset({"typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"})

# Below this, logits divided by the temperature leave the range in which float32 can distinguish them.
SMALLEST_TEMPERATURE = 1e-6
LARGEST_FLOAT32 = 3.4e38


def with_plain_output(config: Any) -> Any:
    """A copy of `config` that asks for tokens only, one row for each, whatever the model's own config says."""
    config = copy.copy(config)
    for name in ("return_dict_in_generate", *(f"output_{what}" for what in OUTPUTS)):
        setattr(config, name, False)
    config.num_return_sequences = 1
    return config


def merged_config(config: Any, model_config: Any | None) -> Any:
    """A copy of `config` with its gaps filled as `generate` fills them; `model_config` is model.generation_config.

    One thing is decided here that generate decides later: if no length is set, transformers' default `max_length` of
    20 means 20 *new* tokens, so `max_new_tokens` becomes 20.
    """
    if model_config is None:
        model_config = GenerationConfig()
    no_length = all(c.max_new_tokens is None and c.max_length is None for c in (config, model_config))
    merged = with_plain_output(copy.deepcopy(config))
    defaults = merged._get_default_generation_params()
    merged.update(**model_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    merged.update(**defaults, defaults_only=True)
    if merged.cache_implementation == "hybrid":  # found in old checkpoints; generate always drops it
        merged.cache_implementation = None
    if no_length:
        merged.max_new_tokens = defaults["max_length"]
    return merged


def in_effect(config: Any) -> dict[str, Any]:
    """The fields of a config that affect what is sampled, if their values have an effect; not padding."""
    off = NEUTRAL | {name: values for name, (values, _) in UNSUPPORTED.items()}
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in IRRELEVANT and name != "pad_token_id"
        if value is not None and value != [] and value not in off.get(name, ())
    }


def filters(config: Any, temperature: float) -> dict[str, Any]:
    """The fields of a merged config that make the sampling distribution differ from the policy's.

    The policy's distribution is the one at `temperature`, which the loss takes into account.

    Example:
        filters(merged_config(GenerationConfig(do_sample=True, temperature=0.7, top_k=0), model_config), 0.7)
        -> {"min_p": 0.1}, if the model's own config has it
    """
    known = (HONOURED | UNSUPPORTED.keys()) - NO_FILTER - {"temperature"}
    found = {name: value for name, value in in_effect(config).items() if name in known}
    if config.temperature != temperature:
        found["temperature"] = config.temperature
    return found if config.do_sample else {"do_sample": False, **found}


def unsupported(config: Any) -> list[str]:
    """Why the engine cannot sample with `config`: one reason per field, empty if it can.

    To take the model's own defaults into account, pass the result of `merged_config`.
    """
    reasons = _length_reasons(config)
    for name, value in config.to_dict().items():
        if value is None or name in HONOURED or name in IRRELEVANT:
            continue
        if name not in UNSUPPORTED:
            reasons.append(f"{name}={value!r} is not known to the built-in engine; remove it.")
            continue
        off, what = UNSUPPORTED[name]
        if value in off or (name in SAMPLING_ONLY and not config.do_sample):
            continue
        reasons.append(f"{name}={value!r}: the built-in engine has no support for {what}; unset `{name}`.")
    return reasons


def _length_reasons(config: Any) -> list[str]:
    """Reject lengths that include the prompt: generate counts its padding too, so they vary between batches."""
    reasons = []
    if config.max_new_tokens is None and config.max_length is not None:
        reasons.append(f"max_length={config.max_length} counts the tokens of the prompt; set max_new_tokens.")
    if config.min_new_tokens is None and config.min_length:
        reasons.append(f"min_length={config.min_length} counts the tokens of the prompt; set min_new_tokens.")
    return reasons


@dataclass(frozen=True)
class SamplingSettings:
    """How one completion is sampled. Hashable; checked at construction."""

    max_new_tokens: int
    greedy: bool = False
    temperature: float = 1.0  # with greedy: affects only the reported log-probs
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None  # forced by generate after a prompt of one token, and only then
    forced_eos_token_id: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()  # every token that ends a completion
    stop_strings: tuple[str, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_integer("max_new_tokens", self.max_new_tokens, 1)
        _check_integer("min_new_tokens", self.min_new_tokens, 0)
        in_range(self, "repetition_penalty", above=0, high=LARGEST_FLOAT32)
        for name in ("stop_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"):
            _check_tokens(name, getattr(self, name))
        if self.forced_bos_token_id is not None:
            _check_tokens("forced_bos_token_id", [self.forced_bos_token_id])
        if self.greedy:
            return  # the rest shapes a distribution, and greedy decoding has none
        _check_temperature(self.temperature)
        _check_integer("top_k", self.top_k, 0)
        in_range(self, "top_p", above=0, high=1)
        in_range(self, "min_p", 0, 1)

    @classmethod
    def from_generation_config(
        cls, config: Any, *, stop_ids: Sequence[int], vocab_size: int | None = None
    ) -> "SamplingSettings":
        """The settings of a config, preferably the result of `merged_config`; otherwise None means the default.

        `stop_ids` is the full set of tokens that end a completion; the config's `eos_token_id` must be part of it.
        """
        config = merged_config(config, None)
        reasons = unsupported(config)
        if reasons:
            raise ConfigError("The built-in engine cannot sample with these settings:\n  " + "\n  ".join(reasons))
        missing = [token for token in _ids(config.eos_token_id) if token not in stop_ids]
        if missing:
            raise ConfigError(
                f"eos_token_id={config.eos_token_id!r} would end completions at {missing}, which are not among the "
                f"stop tokens {list(stop_ids)}; add them to model.generation_config.eos_token_id or unset them."
            )
        greedy = not config.do_sample
        # temperature=0 is a common way to ask for greedy decoding, but the log-probs need a usable temperature.
        usable = not greedy or _temperature_is_usable(config.temperature)
        strings = config.stop_strings or ()
        settings = cls(
            max_new_tokens=config.max_new_tokens,
            greedy=greedy,
            temperature=config.temperature if usable else 1.0,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=0.0 if config.min_p is None else config.min_p,
            repetition_penalty=config.repetition_penalty,
            min_new_tokens=config.min_new_tokens or 0,
            suppress_tokens=_ids(config.suppress_tokens),
            begin_suppress_tokens=_ids(config.begin_suppress_tokens),
            forced_bos_token_id=config.forced_bos_token_id,
            forced_eos_token_id=_ids(config.forced_eos_token_id),
            stop_ids=tuple(stop_ids),
            stop_strings=(strings,) if isinstance(strings, str) else tuple(strings),
            pad_token_id=config.pad_token_id,
        )
        if vocab_size is not None:
            settings.check_vocabulary(vocab_size)
        return settings

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise if a token to suppress or force is outside the model's vocabulary.

        A stop token outside the vocabulary is not an error: it is never sampled, just as in generate.
        """
        bos = () if self.forced_bos_token_id is None else (self.forced_bos_token_id,)
        for name, tokens in (
            ("suppress_tokens", self.suppress_tokens),
            ("begin_suppress_tokens", self.begin_suppress_tokens),
            ("forced_bos_token_id", bos),
            ("forced_eos_token_id", self.forced_eos_token_id),
        ):
            outside = [token for token in tokens if not 0 <= token < vocab_size]
            if outside:
                raise ConfigError(
                    f"{name} has tokens outside the vocabulary of {vocab_size}: {outside}; remove them or use ids "
                    f"from 0 to {vocab_size - 1}."
                )
        if len(set(self.suppress_tokens)) >= vocab_size:
            raise ConfigError(f"suppress_tokens has all {vocab_size} tokens of the vocabulary; leave one to sample.")


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) else (value,)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integer(name: str, value: Any, low: int) -> None:
    if not _is_integer(value) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number, at least {low}.")


def _check_tokens(name: str, tokens: Iterable[Any]) -> None:
    wrong = [token for token in tokens if not _is_integer(token)]
    if wrong:
        raise ConfigError(f"{name} has entries that are not token ids: {wrong}; use whole numbers.")


def _temperature_is_usable(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= SMALLEST_TEMPERATURE


def _check_temperature(value: Any) -> None:
    if not _temperature_is_usable(value):
        raise ConfigError(
            f"temperature={value!r} must be a finite number, at least {SMALLEST_TEMPERATURE}; for greedy decoding set "
            "do_sample=False."
        )
