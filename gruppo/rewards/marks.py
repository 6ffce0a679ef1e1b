"""What a reward function says about how it may be run, in attributes of the function or of its class.

gruppo_worker = True   run in a worker even without `reward_timeout`
whole_batch = True     ask about all completions at once or not at all, never about one of them
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
    """What a functools.partial calls in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def wants_worker(function: Any) -> bool:
    return bool(getattr(innermost(function), "gruppo_worker", False))


def wants_whole_batch(function: Any) -> bool:
    return bool(getattr(innermost(function), "whole_batch", False))


def names_environments(function: Any) -> bool:
    """Whether the reward asks for the environments, which live in this process."""
    try:
        return "environments" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
