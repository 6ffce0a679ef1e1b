"""The tools and environments of a run, and their assignment to the rows of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.data.prompts import read_prompt, require_conversation
from gruppo.errors import ConfigError
from gruppo.tools.environments import Environments, add_observation
from gruppo.tools.executor import ToolExecutor
from gruppo.tools.functions import Tool, by_name, make_tool

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Started:
    """Rows whose episodes have begun, with observations in their prompts, and their environments."""

    rows: Sequence[Row]
    environments: Sequence[Any] = ()  # one per row, or none at all
    tools: Sequence[Mapping[str, Tool]] = field(default_factory=list)  # for each row, by name

    def extra(self, row: int) -> dict[str, Any]:
        """Arguments of reward functions in addition to the columns of the dataset."""
        return {"environments": self.environments[row]} if self.environments else {}


class Toolset:
    """The tools that the model may call.

    Example:
        toolset = Toolset([add], None)
        started = toolset.start(rows, "train")
        started.tools[0]["add"].function(1, 2) == 3
    """

    def __init__(
        self, tools: Any, environment_factory: Any, *, timeout: float | None = None, max_parallel: int = 32
    ) -> None:
        if tools is not None and not isinstance(tools, list | tuple):
            raise ConfigError(f"tools={tools!r} must be a list of functions.")
        self.tools = by_name(make_tool(function) for function in tools or [])
        self.executor = ToolExecutor(timeout=timeout, max_parallel=max_parallel)
        self.environments = None
        if environment_factory is not None:
            self.environments = Environments(environment_factory, self.executor)
            for kind in self.environments.kinds.values():
                self._check_names(kind.cls.__name__, kind.tools)

    def _check_names(self, owner: str, methods: Sequence[Tool]) -> None:
        if both := [tool.name for tool in methods if tool.name in self.tools]:
            raise ConfigError(
                f"`{both[0]}` is a tool and a method of the environment {owner}, so a call of it would be ambiguous. "
                "Rename one of them."
            )

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """Every function that can be called, including those of the environments' first instances."""
        kinds = self.environments.kinds.values() if self.environments else ()
        return [tool.function for tool in (*self.tools.values(), *(tool for kind in kinds for tool in kind.tools))]

    @property
    def schemas(self) -> Any:
        """The tool schemas for prompts: a list or, with several environments, a dict of lists by environment name."""
        own = [tool.schema for tool in self.tools.values()]
        if self.environments is None:
            return own
        shown = {name: [*own, *(tool.schema for tool in kind.tools)] for name, kind in self.environments.kinds.items()}
        return shown if self.environments.several else shown[None]

    def start(self, rows: Sequence[Row], mode: str) -> Started:
        """Begin an episode for each row: reset its environment and add the observation to the prompt."""
        for row in rows:
            require_conversation(row)
        if self.environments is None:
            return Started(rows, tools=[self.tools] * len(rows))
        instances = self.environments.take(rows, mode)
        seen = self.environments.reset(instances, rows)
        return Started(
            _with_observations(rows, seen),
            instances,
            [self._tools_of(env, row) for env, row in zip(instances, rows, strict=True)],
        )

    def _tools_of(self, instance: Any, row: Row) -> dict[str, Tool]:
        assert self.environments is not None
        methods = self.environments.kinds[self.environments.name_of(row)].tools
        return {**self.tools, **{tool.name: tool.of(instance) for tool in methods}}

    def close(self) -> None:
        """Close the environments at the end of a run."""
        if self.environments is not None:
            self.environments.close()


def _with_observations(rows: Sequence[Row], seen: Sequence[Any]) -> list[Row]:
    """Rows with observations in their prompts; equal observations of the same row share one new row object."""
    made: dict[tuple[int, str], Row] = {}
    result: list[Row] = []
    for row, observed in zip(rows, seen, strict=True):
        if not observed:
            result.append(row)
            continue
        key = (id(row), repr(observed))
        if key not in made:
            made[key] = {**row, "prompt": add_observation(read_prompt(row), observed)}  # type: ignore[arg-type]
        result.append(made[key])
    return result
