"""Closes environments. `close` runs in a thread under a time limit, so that it cannot block a run."""

import inspect
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gruppo.tools.calls import Call, reason, unchanged
from gruppo.tools.executor import ToolExecutor
from gruppo.tools.threads import NoThreadError

logger = logging.getLogger(__name__)

CLOSE_TIME = 10.0  # seconds; used if tool_timeout is not set


def has_close(instance: Any) -> bool:
    return callable(getattr(instance, "close", None))


def close_all(pools: Mapping[Any, list[Any]], executor: ToolExecutor) -> None:
    """Close and drop every instance, without waiting for those in which a call may still be running."""
    instances = [env for pool in pools.values() for env in pool]
    for pool in pools.values():
        pool.clear()
    if executor.coordinates_here:  # the garbage collector may run in any thread
        close_unheard(instances, executor)
        return
    close_unheard([env for env in instances if id(env) in executor.given_up], executor)
    close([env for env in instances if id(env) not in executor.given_up], executor)


def close_unheard(instances: Sequence[Any], executor: ToolExecutor) -> None:
    """Close instances without waiting for the result."""
    closable = [env for env in instances if has_close(env)]
    if not closable:
        return
    if executor.in_callers_thread and not executor.coordinates_here:
        close(closable, executor)
        return
    try:
        threading.Thread(target=close, args=[closable, executor], daemon=True, name="gruppo-close").start()
    except RuntimeError as error:  # the program is about to end
        for env in closable:
            _warn(env, error)


def close(instances: Sequence[Any], executor: ToolExecutor) -> None:
    """Call `close` of the instances that have it; a failure does not prevent closing the others."""
    waiting = [env for env in instances if has_close(env)]
    outcomes = executor.run([[_call(env)] for env in waiting], read=unchanged, timeout=CLOSE_TIME)
    errors = [outcome.error for (outcome,) in outcomes]
    # During interpreter shutdown no thread can be started; the remaining calls run one by one on an existing thread.
    left = [i for i, error in enumerate(errors) if isinstance(error, NoThreadError)]
    if left and len(left) < len(waiting):
        (again,) = executor.run([[_call(waiting[i]) for i in left]], read=unchanged, timeout=CLOSE_TIME)
        for i, outcome in zip(left, again, strict=True):
            errors[i] = outcome.error
    for env, error in zip(waiting, errors, strict=True):
        if error is not None:
            _warn(env, error)


def _call(instance: Any) -> Call:
    # Without an owner, since the executor refuses calls of given-up environments, and these must be closed too.
    return Call("close", instance.close, {}, inspect.iscoroutinefunction(instance.close))


def _warn(instance: Any, error: BaseException) -> None:
    logger.warning(f"{type(instance).__name__}.close failed: {reason(error)}")
