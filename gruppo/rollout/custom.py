"""Rollouts from a user's own function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gruppo.data.copying import copy_of
from gruppo.errors import ConfigError, RolloutError
from gruppo.types import Completion, StopReason

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
# Fields with a fixed meaning; all others are passed to the reward functions.
RESERVED = {*REQUIRED, "logprob_token_ids", "env_mask"}


class CustomRollout:
    """Calls a `rollout_func` with the arguments it takes and checks what it returns.

    Two signatures are known: `f(prompts, trainer)` and the older `f(prompts, args, processing_class)`.
    """

    def __init__(self, function: Callable[..., Mapping[str, Any]], trainer: Any, vocabulary_size: int | None = None):
        if not callable(function):
            raise ConfigError(f"rollout_func={function!r} is not callable; pass a function of (prompts, trainer).")
        self.function = function
        self.trainer = trainer
        self.vocabulary_size = vocabulary_size
        self.takes_trainer = _number_of_arguments(function) == 2

    def __call__(self, prompts: Sequence[Any]) -> tuple[list[list[int]], list[Completion], list[dict[str, Any]]]:
        """Prompt ids, completions and extra fields, one of each per prompt."""
        copies = [copy_of(prompt) for prompt in prompts]  # one by one: members of a group share their prompt
        if self.takes_trainer:
            output = self.function(copies, self.trainer)
        else:
            output = self.function(copies, self.trainer.args, self.trainer.processing_class)
        _check(output, len(prompts))
        self._check_vocabulary(output["prompt_ids"], output["completion_ids"])
        completions = [_completion(output, i) for i in range(len(prompts))]
        extra = {name: value for name, value in output.items() if name not in RESERVED}
        return (
            [list(ids) for ids in output["prompt_ids"]],
            completions,
            [{name: _entry(value, i) for name, value in extra.items()} for i in range(len(prompts))],
        )

    def _check_vocabulary(self, *parts: Sequence[Sequence[int]]) -> None:
        """Raise for ids outside the vocabulary, which would fail much later, and on a GPU without a clear error."""
        if self.vocabulary_size is None:
            return
        for i, ids in ((i, ids) for part in parts for i, ids in enumerate(part)):
            for token in ids:
                if not 0 <= token < self.vocabulary_size:
                    raise RolloutError(
                        f"rollout_func returned the token id {token} in row {i}, but the model's vocabulary has "
                        f"{self.vocabulary_size} tokens."
                    )


def _number_of_arguments(function: Callable[..., Any]) -> int:
    """2 for `f(prompts, trainer)`, 3 for the older `f(prompts, args, processing_class)`."""
    signature = inspect.signature(function)
    for count in (2, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    raise ConfigError(
        f"rollout_func takes {signature}; it is called as f(prompts, trainer), or f(prompts, args, processing_class)."
    )


def _check(output: Any, expected: int) -> None:
    """Raise for an output that is not one completion per prompt."""
    if not isinstance(output, Mapping):
        raise RolloutError(f"rollout_func must return a dict, not {type(output).__name__}.")
    missing = [name for name in REQUIRED if name not in output or (output[name] is None and name != "logprobs")]
    if missing:
        raise ValueError(f"rollout_func must return {', '.join(REQUIRED)}; missing: {', '.join(missing)}.")
    for name, value in output.items():
        # Other fields may be anything, but if one is a list, it must have one entry per prompt.
        per_prompt = isinstance(value, list | tuple) or (name in RESERVED and value is not None)
        if per_prompt and len(value) != expected:
            raise RolloutError(
                f"rollout_func returned {len(value)} entries in {name!r} for {expected} prompts. It gets one prompt "
                "per completion and must return exactly one entry for each."
            )
    for i, ids in enumerate(output["prompt_ids"]):
        if not len(ids):
            raise RolloutError(f"rollout_func: prompt_ids[{i}] is empty, so nothing predicts the first token.")
    for name in ("logprobs", "env_mask", "logprob_token_ids"):
        for i, values in enumerate(output.get(name) or []):
            if values is not None and len(values) != len(output["completion_ids"][i]):
                raise RolloutError(
                    f"rollout_func: {name}[{i}] has {len(values)} entries for {len(output['completion_ids'][i])} "
                    "completion tokens."
                )


def _completion(output: Mapping[str, Any], i: int) -> Completion:
    ids = [int(token) for token in output["completion_ids"][i]]
    logps = output["logprobs"][i] if output["logprobs"] is not None else None
    candidates = output.get("logprob_token_ids")
    if logps is not None and len(logps) and isinstance(logps[0], list | tuple):
        named = candidates[i] if candidates is not None and candidates[i] is not None else [None] * len(ids)
        logps = [_sampled_logp(values, tokens, token) for values, tokens, token in zip(logps, named, ids, strict=True)]
    mask = output.get("env_mask")
    return Completion(ids, StopReason.UNKNOWN, logps, None if mask is None or mask[i] is None else list(mask[i]))


def _sampled_logp(values: Sequence[float | None], tokens: Sequence[int] | None, sampled: int) -> float | None:
    """The log-prob of the sampled token among the top-k an engine returned; the first if their ids are not given."""
    if tokens is None:
        return values[0] if values else None
    return next((value for value, token in zip(values, tokens, strict=True) if token == sampled), None)


def _entry(value: Any, i: int) -> Any:
    """Entry i of a list; anything else is the same for all."""
    return value[i] if isinstance(value, list | tuple) else value
