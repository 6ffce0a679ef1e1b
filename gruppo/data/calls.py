"""Convert tool calls as the model wrote them to one form; a malformed call carries its error message.

    {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    {"type": "function", "function": {"name": "add", "arguments": {}}, "error": "…", "text": '{"name": "add", …'}

A malformed call stays a call, so that it can be answered with its error and the model can try again.
"""

import json
import re
from typing import Any

from gruppo.types import Message

Call = dict[str, Any]

_NO_CALL = "A tool call must be an object with a name and arguments."
_EDGES = ("open", "open_pattern", "close", "close_pattern")
# What a tokenizer's parser may raise on a model's text: invalid JSON, a missing part of the opening, or JSON that is
# nested too deeply.
UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)
# Stand-ins for the text that opens a call: a start, a mark after each captured name, and an end.
_START, _MARK, _END = "\x02", "\x03", "\x04"


def uniform_calls(entry: Any) -> list[Call]:
    """The calls in one entry of `tool_calls`: one, or several where a model wrote a list of calls.

    Example:
        uniform_calls({"name": "add", "arguments": '{"a": 1}'})
        # [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    """
    if not isinstance(entry, dict):
        return [broken_call(entry, _NO_CALL)]
    if "error" in entry:
        return [entry]
    function = entry.get("function", entry)
    rest = {key: value for key, value in entry.items() if key not in ("function", "name", "arguments", "parameters")}
    written = function if isinstance(function, list) and function else [function]
    return [_uniform(item, {"type": "function", **rest}) for item in written]


def _uniform(function: Any, rest: Call) -> Call:
    if not isinstance(function, dict):
        return broken_call(function, _NO_CALL)
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        return broken_call(function, "The tool call has no name.")
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return broken_call(function, f"The arguments of {name!r} must be a JSON object.", name)
    return {**rest, "function": {"name": name, "arguments": arguments}}


def broken_call(written: Any, error: str, name: str = "") -> Call:
    """A call that cannot be made, with the reason and with what the model wrote."""
    try:
        text = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = "…"  # nested too deeply to be written again
    return {"type": "function", "function": {"name": name, "arguments": {}}, "error": error, "text": text}


def read_broken(tokenizer: Any, text: str, prefix: str, tools: list[Any] | None = None) -> Message | None:
    """Parse a response with a malformed call: that call carries its error, the rest is parsed as usual.

    None if the response still cannot be parsed, or if the tokenizer's response template has no tool calls.
    """
    schema = tokenizer.response_template
    fields = schema.get("fields", {}) if isinstance(schema, dict) else {}
    field = fields.get("tool_calls", {})
    if not ("open" in field or "open_pattern" in field):
        return None
    captured = list(re.findall(r"\(\?P<(\w+)>", field.get("open_pattern", "")))
    raw = {key: field[key] for key in _EDGES if key in field} | {
        "repeats": True,
        "content": "text",
        "transform": {"body": "{content}", "captured": {name: f"{{{name}}}" for name in captured}},
    }
    try:
        message: Message = tokenizer.parse_response(
            text, {**schema, "fields": {**fields, "tool_calls": raw}}, prefix=prefix
        )
    except UNREADABLE:
        return None
    calls, words = [], [message.get("content") or ""]
    for region in message.get("tool_calls", []):
        found, left_over = _read(tokenizer, field, region["body"], region["captured"], tools)
        calls += found
        words.append(left_over)
    return {**message, "content": "\n".join(filter(None, words)), "tool_calls": calls}


def _read(
    tokenizer: Any, field: dict[str, Any], body: str, captured: dict[str, str], tools: list[Any] | None
) -> tuple[list[Call], str]:
    """The calls in one region of text, and the text that follows them."""
    rest = ""
    calls = _parsed(tokenizer, field, body, captured, tools)
    if calls is None:
        whole, rest = _object_and_rest(body)
        # Words after a complete object are plain text; brackets and commas indicate that the object is not complete.
        if rest and rest[0] not in "}]),;:":
            calls = _parsed(tokenizer, field, whole, captured, tools) or _named(whole)
        else:
            calls = _named(body)
    if calls:
        return [call for entry in calls for call in uniform_calls(entry)], rest
    name = captured.get("name") or next(iter(re.findall(r'"name"\s*:\s*"([^"]*)"', body)), "")
    return [broken_call(body, _what_is_wrong(body), name)], ""


def _parsed(
    tokenizer: Any, field: dict[str, Any], body: str, captured: dict[str, str], tools: list[Any] | None
) -> list[Any] | None:
    """A body as parsed by the tokenizer's own field definition; None if it cannot be parsed."""
    alone = {key: value for key, value in field.items() if key not in _EDGES}
    alone["open_pattern"] = _START + "".join(f"(?P<{name}>.*?){_MARK}" for name in captured) + _END
    opening = _START + "".join(f"{text}{_MARK}" for text in captured.values()) + _END
    schema = {"start_anchor": _START, "fields": {"tool_calls": alone}}
    try:
        calls = tokenizer.parse_response(opening + body, schema, prefix="", tools=tools).get("tool_calls")
    except UNREADABLE:
        return None
    return calls if isinstance(calls, list) else [calls]


def _object_and_rest(body: str) -> tuple[str, str]:
    """A JSON object at the beginning of a text, and what follows it."""
    body = body.lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        return body, ""
    return body[:end], body[end:].strip()


def _named(body: str) -> list[Call]:
    """A JSON call with its arguments under either usual name, `arguments` or `parameters`; empty if it is no call."""
    call = _decoded(body)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return []
    return [{"name": call["name"], "arguments": call.get("arguments", call.get("parameters"))}]


def _decoded(text: str) -> Any:
    """The value of a JSON text; the text itself if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _what_is_wrong(body: str) -> str:
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return f"The tool call is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."
    except (ValueError, RecursionError) as error:  # thousands of digits in a number, or of nested brackets
        return f"The tool call cannot be read: {error}."
    return _NO_CALL
