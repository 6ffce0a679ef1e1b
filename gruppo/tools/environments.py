"""Environments: stateful objects whose methods are tools; each sample has its own."""

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from gruppo.data.copying import copy_of
from gruppo.errors import ConfigError, DataError, RolloutError
from gruppo.tools.calls import Call, printable, reason, text_of_blocks, unchanged
from gruppo.tools.closing import close_all, close_unheard, has_close
from gruppo.tools.executor import ToolExecutor
from gruppo.tools.functions import Tool, make_tool
from gruppo.types import Message

logger = logging.getLogger(__name__)

COLUMN = "environment"  # names the environment of a row if there are several
OWN_METHODS = ("reset", "get_reward", "close")  # called by the trainer, not by the model

Pool = list[Any]


@dataclass(frozen=True)
class Kind:
    """A factory, and the class, tools and `reset` signature of its first instance."""

    name: str | None
    factory: Callable[[], Any]
    cls: type
    tools: tuple[Tool, ...]
    reset: inspect.Signature


class Environments:
    """The environments of a run: a pool for each kind and mode, which grows on demand and is reused.

    Example:
        class Counter:
            def reset(self, **row): self.count = 0
            def increment(self, by: int) -> int:
                '''Count on.

                Args:
                    by: how far
                '''
                self.count += by
                return self.count
            def get_reward(self) -> float: return float(self.count == 3)

        GRPOTrainer(..., environment_factory=Counter)
    """

    def __init__(self, factory: Any, executor: ToolExecutor):
        self.several = isinstance(factory, Mapping)
        if self.several and not factory:
            raise ConfigError("environment_factory is an empty dict; give it a factory for each environment.")
        self.executor = executor
        self.pools: dict[tuple[str, str | None], Pool] = {}
        self.kinds: dict[str | None, Kind] = {}
        for name, make in (factory if self.several else {None: factory}).items():
            first, self.kinds[name] = probe(make, name)
            if self._has(first):
                raise ConfigError(f"{_which(name)} {_SAME}")
            self.pools["train", name] = [first]
            if has_close(first):
                executor.prepare(inspect.iscoroutinefunction(first.close))
        self.unstarted: set[int] = set()  # ids of instances whose latest `reset` failed
        self.failed_reset: BaseException | None = None  # the error of the latest failed `reset`
        self._spoiled: set[int] = set()  # ids of instances that must not be reused
        self._said: set[str] = set()
        weakref.finalize(self, close_all, self.pools, executor)

    def name_of(self, row: Mapping[str, Any]) -> str | None:
        """The name of the environment of a row."""
        if not self.several:
            return None
        if row.get(COLUMN) not in self.kinds:
            raise DataError(
                f"A row has {COLUMN}={row.get(COLUMN)!r}, but environment_factory has "
                f"{', '.join(map(repr, self.kinds))}. Name one of them in the column `{COLUMN}`."
            )
        name: str = row[COLUMN]
        return name

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise for a row whose columns do not fit `reset` of its environment."""
        kind = self.kinds[self.name_of(row)]
        columns = _without(row, self._hidden)
        try:
            kind.reset.bind(**columns)
        except TypeError as error:
            raise DataError(
                f"{kind.cls.__name__}.reset{kind.reset} gets the columns of a row as keyword arguments, and the "
                f"columns of a row, {', '.join(columns)}, do not match: {error}. Change its parameters (`**row` takes "
                "all other columns) or the dataset."
            ) from None

    def take(self, rows: Sequence[Mapping[str, Any]], mode: str) -> list[Any]:
        """An instance for each row; this frees the instances of the previous rows."""
        self._discard_spoiled()
        used: dict[str | None, int] = {}
        taken = []
        for name in map(self.name_of, rows):
            pool, place = self.pools.setdefault((mode, name), []), used.get(name, 0)
            if place == len(pool):
                pool.append(self._make(name))
            taken.append(pool[place])
            used[name] = place + 1
        return taken

    @property
    def _hidden(self) -> Sequence[str]:
        """Columns that are not passed to the environment."""
        return (COLUMN,) if self.several else ()

    def _make(self, name: str | None) -> Any:
        try:
            made = self.kinds[name].factory()
        except Exception as error:
            raise RolloutError(f"{_which(name)} could not make another environment: {reason(error)}") from error
        if self._has(made):
            raise RolloutError(f"{_which(name)} {_SAME}")
        return made

    def _has(self, instance: Any) -> bool:
        return any(instance is env for pool in self.pools.values() for env in pool)

    def reset(self, instances: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Reset instances and return the observation of each, or None.

        An instance that fails is not reused, and its sample is not scored; the run continues.
        """
        # Copies: the rows belong to the dataset, and all samples of a group share one row object.
        given = [_without(copy_of(dict(row)), self._hidden) for row in rows]
        calls = [method_call(env, "reset", columns) for env, columns in zip(instances, given, strict=True)]
        outcomes = [outcome for (outcome,) in self.executor.run([[call] for call in calls], read=observation)]
        for env, outcome in zip(instances, outcomes, strict=True):
            if outcome.error is not None:
                self.unstarted.add(id(env))
                self.failed_reset = outcome.error
                self._note_failure(env, "reset", outcome.error)
        return [outcome.value for outcome in outcomes]

    def spoil(self, instance: Any) -> None:
        """Do not reuse this instance: an abandoned call may still be running in it."""
        self._spoiled.add(id(instance))

    def _note_failure(self, instance: Any, method: str, error: BaseException) -> None:
        self.spoil(instance)
        where = f"{type(instance).__name__}.{method}"
        if where not in self._said:
            self._said.add(where)
            logger.warning(
                f"{where} failed: {reason(error)} Its completion gets no reward, and a new environment takes its "
                "place. Further failures are counted, not shown.",
                exc_info=error,
            )

    def _discard_spoiled(self) -> None:
        spoiled = {*self._spoiled, *self.executor.given_up}
        lost = [env for pool in self.pools.values() for env in pool if id(env) in spoiled]
        for pool in self.pools.values():
            pool[:] = [env for env in pool if id(env) not in spoiled]
        close_unheard(lost, self.executor)
        self.executor.given_up.clear()
        self._spoiled, self.unstarted = set(), set()

    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each class that has `get_reward`."""
        classes = dict.fromkeys(kind.cls for kind in self.kinds.values())
        return [self._reward(cls) for cls in classes if callable(getattr(cls, "get_reward", None))]

    def _reward(self, cls: Any) -> Callable[..., Any]:
        def get_rewards(environments: Sequence[Any], **kwargs: Any) -> list[Any]:
            """None for environments of other classes; NaN, which counts as a failure, for those that fail."""
            asked = [env for env in environments if type(env) is cls and id(env) not in self.unstarted]
            # In the tools' executor, since clients that an environment keeps may be bound to its event loop.
            outcomes = self.executor.run([[method_call(env, "get_reward")] for env in asked], read=unchanged)
            found: dict[int, Any] = {}
            for env, (outcome,) in zip(asked, outcomes, strict=True):
                found[id(env)] = outcome.value
                if outcome.error is not None:
                    found[id(env)] = math.nan
                    self._note_failure(env, "get_reward", outcome.error)
            return [found.get(id(env)) for env in environments]

        get_rewards.__name__ = cls.__name__
        return get_rewards

    def close(self) -> None:
        """Close every instance; new ones are created on demand."""
        close_all(self.pools, self.executor)


def probe(factory: Any, name: str | None) -> tuple[Any, Kind]:
    """Create one instance and inspect its class."""
    which = _which(name)
    if not callable(factory):
        raise ConfigError(f"{which} is {factory!r}; it must be a class or a function that makes an environment.")
    try:
        first = factory()
    except Exception as error:
        raise ConfigError(f"{which} raised when it was called without arguments: {reason(error)}") from error
    cls = type(first)
    if not callable(getattr(cls, "reset", None)):
        raise ConfigError(
            f"{which} made a {cls.__name__}, which has no method `reset`. Add `def reset(self, **row)`: it starts a "
            "new episode, and what it returns, if anything, is added to the prompt."
        )
    parameters = inspect.signature(first.reset).parameters.values()
    if not any(p.name == "prompt" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(
            f"{cls.__name__}.reset{inspect.signature(first.reset)} gets every column of a row as a keyword argument, "
            "including `prompt`. Add `**row` to its parameters."
        )
    methods = [
        attribute
        for attribute in dir(cls)
        if not attribute.startswith("_")
        and attribute not in OWN_METHODS
        # Looked up statically on the class, so that properties are not evaluated and callable objects are not tools.
        and isinstance(inspect.getattr_static(cls, attribute), staticmethod | FunctionType)
    ]
    tools = tuple(make_tool(getattr(first, method), where=cls.__name__) for method in methods)
    return first, Kind(name, factory, cls, tools, inspect.signature(first.reset))


_SAME = "returned an object that it has returned before; it must make a new environment each time it is called."


def _which(name: str | None) -> str:
    return "environment_factory" if name is None else f"environment_factory[{name!r}]"


def _without(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}


def method_call(instance: Any, name: str, arguments: Mapping[str, Any] | None = None) -> Call:
    """A call of a method of an environment."""
    method = getattr(instance, name)
    return Call(name, method, arguments or {}, inspect.iscoroutinefunction(method), owner=instance)


def observation(value: Any) -> str | list[Any] | None:
    """Check the return value of `reset`: None, a text, or content blocks."""
    if value is None or isinstance(value, str):
        return value and printable(value)
    if isinstance(value, list):
        text_of_blocks(value)  # raises for blocks other than text
        return value
    raise TypeError(f"reset must return None, a string or a list of content blocks, not {type(value).__name__}.")


def add_observation(prompt: Sequence[Message], seen: str | list[Any] | None) -> list[Message]:
    """A copy of the prompt with the observation appended to its last message.

    Example:
        add_observation([{"role": "user", "content": "Play. "}], "The board is empty.")
        -> [{"role": "user", "content": "Play. The board is empty."}]
    """
    if not seen:
        return list(prompt)
    content = prompt[-1].get("content") or ""
    if isinstance(content, str):
        content += seen if isinstance(seen, str) else text_of_blocks(seen)
    else:
        content = [*content, *([{"type": "text", "text": seen}] if isinstance(seen, str) else seen)]
    return [*prompt[:-1], {**prompt[-1], "content": content}]
