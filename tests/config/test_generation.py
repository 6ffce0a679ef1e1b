"""What may stand in `generation_kwargs`."""

from typing import Any

import pytest

from gruppo.config.generation import RANGES, check_generation_kwargs
from gruppo.errors import ConfigError

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 2.0}, "'top_p'\\]=2.0 must be a number greater than 0 and at most 1"),
    ({"top_p": 0}, "greater than 0"),
    ({"temperature": 0.0}, "must be a number greater than 0"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_k": -1}, "at least 0"),
    ({"top_k": "5"}, "'top_k'\\]='5' must be a number"),
    ({"min_p": 1.5}, "at least 0 and at most 1"),
    ({"repetition_penalty": 0}, "greater than 0"),
    ({"max_new_tokens": None}, "max_new_tokens"),
    ({"max_new_tokens": 0}, "at least 1"),
    ({"max_new_tokens": True}, "must be a number"),
    ({"max_length": 4}, "set max_completion_length"),
    ({"pad_token_id": None}, "set tokenizer.pad_token"),
    ({"num_return_sequences": 2}, "num_generations"),
    ({"top_q": 1}, "has no field `top_q`. Did you mean"),
    ({"stop_strings": [""]}, "not empty"),
    ({"output_scores": True}, "only the sampled tokens are read"),
    ({"prompt_lookup_num_tokens": 3}, "one prompt at a time"),
    ({"token_healing": True}, "it changes the prompts"),
    ({"dola_layers": "high"}, "code from the hub only"),
    ({"suppress_tokens": 5}, "'suppress_tokens'\\]=5 must be a list of token ids"),
    ({"bad_words_ids": []}, "must be a list of lists of token ids"),
    ({"bad_words_ids": [3]}, "'bad_words_ids'\\]=3 must be a list of token ids"),
]
RIGHT: list[dict[str, Any]] = [
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "temperature": 0.7, "repetition_penalty": 1.1},
    {"top_k": None, "min_p": None},
    {"do_sample": False, "temperature": None},
    {"max_new_tokens": 5, "min_new_tokens": 0},
    {"stop_strings": "end", "suppress_tokens": [3]},
]


@pytest.mark.parametrize(("kwargs", "named"), WRONG, ids=lambda each: str(each))
def test_wrong_values_are_named(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_generation_kwargs(kwargs)


@pytest.mark.parametrize("kwargs", RIGHT, ids=str)
def test_right_values_pass(kwargs: dict[str, Any]) -> None:
    check_generation_kwargs(kwargs)


def test_every_bound_is_one_of_a_field_of_transformers() -> None:
    from transformers import GenerationConfig

    assert set(RANGES) <= set(GenerationConfig().to_dict())
