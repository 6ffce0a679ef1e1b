"""Attributes of a reward function, or of its class, that declare how it must be run.

gruppo_worker = True   run in a worker even without `reward_timeout`
whole_batch = True     call it with all completions at once, never with one of them
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def in_worker(function: F) -> F:
    """Decorator: mark a reward function as one that always runs in a worker."""
    function.gruppo_worker = True  # type: ignore[attr-defined]
    return function


def innermost(function: Any) -> Any:
    """The function at the core of nested functools.partial objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def wants_worker(function: Any) -> bool:
    return bool(getattr(innermost(function), "gruppo_worker", False))


def wants_whole_batch(function: Any) -> bool:
    return bool(getattr(innermost(function), "whole_batch", False))


def names_environments(function: Any) -> bool:
    """Whether the reward has a parameter `environments`; these exist only in this process."""
    try:
        return "environments" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
