"""Calls the reward functions and turns what they return into numbers."""

import asyncio
import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ConfigError, RewardError
from gruppo.rewards.models import load_reward_model, load_reward_tokenizer, score_with_model, scored_text

logger = logging.getLogger(__name__)

# Columns that reward functions get under a name of their own, or not at all.
OWN_COLUMNS = ("prompt", "completion", "completion_ids")

LARGEST = torch.finfo(torch.float32).max  # rewards are kept in float32


@dataclass(frozen=True)
class RewardInputs:
    """What reward functions are shown, one entry per completion of this process.

    Example:
        RewardInputs(
            rows=[{"prompt": "2+2=", "answer": "4"}], prompts=["2+2="], completions=[" 4"], completion_ids=[[4, 2]]
        )
    """

    rows: Sequence[dict[str, Any]]
    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.prompts)

    def columns(self) -> dict[str, list[Any]]:
        """Every further column of the rows; None where a row lacks one."""
        names = dict.fromkeys(name for row in self.rows for name in row if name not in OWN_COLUMNS)
        return {name: [row.get(name) for row in self.rows] for name in names}


def function_name(function: Any) -> str:
    """The name under which a reward is logged."""
    if isinstance(function, nn.Module):
        config = getattr(function, "config", None)
        return (getattr(config, "_name_or_path", "") or type(function).__name__).rstrip("/").split("/")[-1]
    while isinstance(function, functools.partial):
        function = function.func
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
    """Whether calling the reward gives a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def resolve_rewards(
    functions: Any, tokenizers: Any, weights: Sequence[float] | None, *, trust_remote_code: bool
) -> tuple[list[Any], list[Any], Tensor]:
    """Reward functions, their tokenizers (None for callables) and weights, from what the user passed.

    The user's own lists are not touched.
    """
    functions = [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]
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


class RewardRunner:
    """Scores completions with every reward function; sync ones in order, async ones together."""

    def __init__(
        self,
        functions: Sequence[Any],
        names: Sequence[str],
        tokenizers: Sequence[Any],
        *,
        device: torch.device,
        batch_size: int,
        chat_template_kwargs: dict[str, Any] | None = None,
        timer: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ):
        self.functions, self.names, self.tokenizers = functions, names, tokenizers
        self.device = device
        self.batch_size = batch_size
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.timer = timer
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, batch: RewardInputs, **shared: Any) -> Tensor:
        """Rewards (B, R) in float32, NaN where a function abstained. `shared` goes to every function."""
        kwargs = {
            **batch.columns(),
            **shared,
            "prompts": list(batch.prompts),
            "completions": list(batch.completions),
            "completion_ids": [list(ids) for ids in batch.completion_ids],
        }
        results: dict[int, list[float]] = {}
        waiting: dict[int, Coroutine[Any, Any, Any]] = {}
        for i, (function, name) in enumerate(zip(self.functions, self.names, strict=True)):
            if is_reward_model(function):
                with self.timer(name):
                    results[i] = self._score_with_model(function, self.tokenizers[i], batch)
            elif is_async(function):
                waiting[i] = self._timed(function, name, kwargs)
            else:
                with self.timer(name):
                    results[i] = checked(function(**kwargs), name, len(batch))
        if waiting:
            for i, output in zip(waiting, self._gather(list(waiting.values())), strict=True):
                results[i] = checked(output, self.names[i], len(batch))
        rewards_RB = [results[i] for i in range(len(self.functions))]
        rewards_BR = torch.tensor(rewards_RB, dtype=torch.float32, device=self.device).T.contiguous()
        self._warn_unscorable(rewards_BR, batch)
        return rewards_BR

    def _score_with_model(self, model: nn.Module, tokenizer: Any, batch: RewardInputs) -> list[float]:
        texts = [
            scored_text(tokenizer, prompt, completion, self.chat_template_kwargs)
            for prompt, completion in zip(batch.prompts, batch.completions, strict=True)
        ]
        return score_with_model(model, tokenizer, texts, batch_size=self.batch_size, device=self.device)

    async def _timed(self, function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Any:
        with self.timer(name):
            return await function(**kwargs)

    def _gather(self, coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        # One loop for the whole run, because clients that a reward keeps between calls are bound to their loop.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="gruppo-async-rewards").start()

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*coroutines)

        return asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()

    def _warn_unscorable(self, rewards_BR: Tensor, batch: RewardInputs) -> None:
        unscorable = rewards_BR.isnan().all(dim=1).nonzero()
        if len(unscorable):
            i = int(unscorable[0])
            logger.warning(
                f"{len(unscorable)} of {len(batch)} completions were scored by no reward function; they are left out "
                f"of the baseline. The first one: prompt {batch.prompts[i]!r}, completion {batch.completions[i]!r}, "
                f"columns {dict(batch.rows[i])!r}."
            )


def checked(output: Any, name: str, expected: int) -> list[float]:
    """The floats that a reward function returned, NaN for None; anything else is an error that names the function."""
    try:
        values = None if isinstance(output, str | bytes | Mapping | Set) else list(output)
    except TypeError:
        values = None
    if values is None:
        raise RewardError(
            f"The reward function '{name}' returned {type(output).__name__}; it must return a list with one number "
            "(or None) per completion."
        )
    if len(values) != expected:
        raise RewardError(
            f"The reward function '{name}' returned {len(values)} rewards for {expected} completions; it must return "
            "exactly one per completion."
        )
    return [_number(value, name, i) for i, value in enumerate(values)]


def _number(value: Any, name: str, i: int) -> float:
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST:
        raise RewardError(
            f"The reward function '{name}' returned {value!r} for completion {i}; rewards are finite numbers, or None "
            "where the function does not apply."
        )
    return number


def is_reward_model(function: Any) -> bool:
    """Whether a reward is a model, compiled ones included, which the trainer prepares for its device."""
    return isinstance(function, nn.Module)
