"""Shipped rewards. Each is a callable over lists, like a reward function of your own.

accuracy_reward                 1 if the mathematical answer equals the solution (needs math-verify)
reasoning_accuracy_reward       the same, on the text after the reasoning
think_format_reward             1 if the text begins with one <think>…</think> block
get_cosine_scaled_reward        accuracy, scaled by length
get_repetition_penalty_reward   a penalty on repeated n-grams
get_soft_overlong_punishment    a penalty that grows towards the length limit
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "accuracy",
    "think_format_reward": "format",
    "get_cosine_scaled_reward": "shaping",
    "get_repetition_penalty_reward": "shaping",
    "get_soft_overlong_punishment": "shaping",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
