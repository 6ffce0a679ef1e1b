"""Turns the user's `reward_funcs` into functions, names, tokenizers and weights."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ConfigError
from gruppo.rewards.marks import innermost
from gruppo.rewards.models import load_reward_model, load_reward_tokenizer, refuse_shipped_name

__all__ = [
    "function_name",
    "is_async",
    "is_reward_model",
    "listed_rewards",
    "refuse_shipped_name",
    "resolve_rewards",
    "unique_names",
]


def function_name(function: Any) -> str:
    """The name under which a reward is logged."""
    if isinstance(function, nn.Module):
        config = getattr(function, "config", None)
        return (getattr(config, "_name_or_path", "") or type(function).__name__).rstrip("/").split("/")[-1]
    function = innermost(function)
    return getattr(function, "__name__", None) or type(function).__name__


def unique_names(names: Sequence[str]) -> list[str]:
    """Names with _2, _3 … appended to repetitions, so that two rewards never share a metric."""
    unique: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in unique:
            count += 1
            candidate = f"{name}_{count}"
        unique.append(candidate)
    return unique


def is_async(function: Any) -> bool:
    """Whether calling the reward returns a coroutine."""
    function = innermost(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def listed_rewards(functions: Any) -> list[Any]:
    """`reward_funcs` as a new list, whether one reward, several or none were passed."""
    return [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]


def resolve_rewards(
    functions: Any, tokenizers: Any, weights: Sequence[float] | None, *, trust_remote_code: bool
) -> tuple[list[Any], list[Any], Tensor]:
    """Reward functions, their tokenizers (None for callables) and weights, from what the user passed.

    The user's lists are not modified.
    """
    functions = listed_rewards(functions)
    if not functions:
        raise ConfigError("There is no reward: pass at least one function or model in reward_funcs.")
    functions = [load_reward_model(f, trust_remote_code) if isinstance(f, str) else f for f in functions]
    for function in functions:
        if not callable(function):
            raise ConfigError(
                f"reward_funcs contains {function!r}, which is neither a callable, a model nor its name."
            )
    if tokenizers is None:
        tokenizers = [None] * len(functions)
    elif not isinstance(tokenizers, list | tuple):
        tokenizers = [tokenizers]
    if len(tokenizers) != len(functions):
        raise ConfigError(
            f"reward_processing_classes has {len(tokenizers)} entries for {len(functions)} reward functions; "
            "pass one per function (None for callables)."
        )
    tokenizers = [
        load_reward_tokenizer(f, tokenizer, trust_remote_code) if is_reward_model(f) else None
        for f, tokenizer in zip(functions, tokenizers, strict=True)
    ]
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"reward_weights has {len(weights)} entries for {len(functions)} reward functions; pass one per function."
        )
    return functions, tokenizers, torch.tensor(weights or [1.0] * len(functions), dtype=torch.float32)


def is_reward_model(function: Any) -> bool:
    """Whether a reward is a model (compiled ones included), which the trainer prepares for its device."""
    return isinstance(function, nn.Module)
