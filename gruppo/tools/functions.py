"""Tools: Python functions that a model may call."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gruppo.errors import ConfigError


@dataclass(frozen=True)
class Tool:
    """A function with its schema for the chat template.

    Example:
        def add(a: int, b: int) -> int:
            '''Add two numbers.

            Args:
                a: the first number
                b: the second number
            '''
            return a + b

        make_tool(add).schema["function"]["name"] == "add"
    """

    name: str
    function: Callable[..., Any]
    is_async: bool
    schema: dict[str, Any]  # as chat templates expect it: {"type": "function", "function": {"name": …, …}}
    owner: Any = None  # the environment whose method it is

    def of(self, owner: Any) -> "Tool":
        """The same method, bound to another object."""
        return replace(self, function=getattr(owner, self.name), owner=owner)


def make_tool(function: Callable[..., Any], where: str = "tools") -> Tool:
    """A tool from a function with type hints and a docstring that describes each argument.

    `where` names the origin of the function in error messages.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str) or inspect.isclass(function):
        raise ConfigError(
            f"{where}: {function!r} is not a function. Pass a `def` or an `async def` with type hints and a docstring."
        )
    if name == "<lambda>":
        raise ConfigError(f"{where}: a lambda has neither a name nor type hints. Write it as a `def`.")
    return Tool(name, function, inspect.iscoroutinefunction(function), _schema(function, name, where))


def _schema(function: Callable[..., Any], name: str, where: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema = get_json_schema(function)
    # NameError: an undefined name in a quoted type hint. ValueError: choices that are not valid JSON.
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: the tool `{name}` cannot be shown to the model: {str(error).rstrip('.! ')}. Give every "
            "argument a type hint, and write a docstring with a line for each under `Args:`."
        ) from error
    return dict(schema)


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by the name under which the model calls them; raises if two have the same name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            raise ConfigError(f"Two tools have the name `{tool.name}`. Rename one of them.")
        found[tool.name] = tool
    return found
