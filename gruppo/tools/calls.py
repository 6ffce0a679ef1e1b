"""A model's tool calls, their outcomes, and the messages that answer them."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.tools.functions import Tool
from gruppo.types import Message

NAMELESS = "unknown"  # a call that names no tool is answered under this name


@dataclass(frozen=True)
class Call:
    """A function with its arguments, or the reason why it cannot be called.

    Example:
        read_call({"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}, {"add": add})
        -> Call("add", <function add>, {"a": 1, "b": 2})
    """

    name: str
    function: Callable[..., Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_async: bool = False
    problem: str | None = None
    owner: Any = None  # the environment whose method it is


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


def read_call(raw: Any, tools: Mapping[str, Tool]) -> Call:
    """Read a call from a parsed message. Problems are reported to the model instead of raised as exceptions."""
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(raw, Mapping) and raw.get("error"):  # a problem that the parser found
        return Call(name if isinstance(name, str) and name else NAMELESS, problem=str(raw["error"]))
    if not isinstance(function, Mapping) or not isinstance(raw, Mapping):
        return Call(NAMELESS, problem=f"A tool call is an object with a name and arguments, not {function or raw!r}.")
    if not isinstance(name, str) or not name:
        return Call(NAMELESS, problem="The tool call does not name a tool.")
    if raw.get("type") != "function":
        given = f"is {raw['type']!r}" if raw.get("type") is not None else "is missing"
        return Call(name, problem=f"The type of the tool call {given}; it must be 'function'.")
    if name not in tools:
        return Call(name, problem=f"Tool {name} not found.")
    try:
        arguments = _arguments(function.get("arguments"))
    except ValueError as error:
        return Call(name, problem=f"The arguments of {name} {error}")
    tool = tools[name]
    return Call(name, tool.function, arguments, tool.is_async, owner=tool.owner)


def _arguments(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"are not valid JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"must be an object with a value for each name, not {type(given).__name__}.")
    return dict(given)


def unchanged(value: Any) -> Any:
    """Reads a result that is not shown to a model."""
    return value


def shown(value: Any) -> str:
    """The text of a tool's result; raises TypeError for results that have no text form."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("The tool returned bytes; it must return text, for example with .decode().")
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python warns that it was never awaited
        raise TypeError("The tool returned something to await; declare it with `async def`.")
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise TypeError("The tool returned a generator; it must return its values, for example as a list.")
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return printable(text_of_blocks(value))
    return printable(str(value))


def text_of_blocks(blocks: list[Any]) -> str:
    """The text of content blocks: [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] is "ab"."""
    for block in blocks:
        if not isinstance(block, Mapping) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise TypeError(f"Content of type {kind!r} cannot be shown: only text blocks can.")
    return "".join(str(block.get("text", "")) for block in blocks)


def printable(text: str) -> str:
    """The text with lone surrogates escaped, since no tokenizer can encode them."""
    return text.encode("utf-8", "backslashreplace").decode()


def without_tokens(messages: list[Message], tokens: Sequence[str]) -> list[Message]:
    """Answers with these image placeholder tokens broken up into plain text: "<image>" becomes "< image>"."""

    def spelled(text: str) -> str:
        for token in tokens:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    return [{**message, "content": spelled(message["content"])} for message in messages] if tokens else messages


def answer(call: Call, outcome: Outcome) -> Message:
    """The message that reports the outcome of a call to the model."""
    content = outcome.value if outcome.error is None else str({"error": reason(outcome.error)})
    return {"role": "tool", "name": printable(call.name), "content": printable(content)}


def reason(error: BaseException) -> str:
    """The message of an exception, or its class name if it has none."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # `__str__` of a user's exception class may fail
        return type(error).__name__
