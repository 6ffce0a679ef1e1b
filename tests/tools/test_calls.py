import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gruppo.tools.calls import Outcome, answer, read_call, shown
from gruppo.tools.functions import make_tool
from tests.tools.test_functions import add, fetch

TOOLS = {"add": make_tool(add), "fetch": make_tool(fetch)}


def function(name: Any = "add", arguments: Any = None, **rest: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **rest}


@pytest.mark.parametrize("arguments", [{"a": 1, "b": 5}, '{"a": 1, "b": 5}'])
def test_a_call_is_read(arguments: Any) -> None:
    call = read_call(function(arguments=arguments), TOOLS)
    assert call.problem is None
    assert call.function is not None
    assert call.function(**call.arguments) == 6
    assert read_call(function("fetch", {"url": "x"}), TOOLS).is_async


@pytest.mark.parametrize(
    ("raw", "name", "problem"),
    [
        (function("mul", {}), "mul", "Tool mul not found."),
        ({"function": {"name": "add", "arguments": {}}}, "add", "The type of the tool call is missing"),
        (function(type="retrieval"), "add", "is 'retrieval'; it must be 'function'"),
        (function(None, {}), "unknown", "does not name a tool"),
        ({"type": "function", "function": {}}, "unknown", "does not name a tool"),
        ({"type": "function", "function": "add(1)"}, "unknown", "is an object with a name and arguments, not 'add"),
        ("add", "unknown", "is an object with a name"),
        (function(arguments='{"a": 1'), "add", "The arguments of add are not valid JSON: Expecting"),
        (function(arguments="[1, 2]"), "add", "The arguments of add must be an object .* not list"),
        (function(arguments=3), "add", "not int"),
        (function(arguments={}, error="It is broken."), "add", "It is broken."),
        (function("", {}, error="It is broken."), "unknown", "It is broken."),
    ],
)
def test_what_is_wrong_with_a_call_is_told(raw: Any, name: str, problem: str) -> None:
    call = read_call(raw, TOOLS)
    assert call.name == name
    assert call.function is None
    assert call.problem is not None
    assert re.search(problem, call.problem)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (None, "None"),
        ("text", "text"),
        ([1, 2], "[1, 2]"),
        ([], "[]"),
        ({"a": 1}, "{'a': 1}"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("half \ud800 a pair", "half \\ud800 a pair"),
    ],
)
def test_results_are_shown_as_text(value: Any, text: str) -> None:
    assert shown(value) == text


async def letters() -> AsyncIterator[str]:
    yield "a"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"bytes", "returned bytes"),
        (bytearray(b"bytes"), "returned bytes"),
        ([{"type": "image", "image": None}], "Content of type 'image'"),
        (fetch("x"), "async def"),
        ((letter for letter in "ab"), "returned a generator"),
        (letters(), "returned a generator"),
    ],
)
def test_results_that_cannot_be_shown(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        shown(value)


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "content"),
    [
        (ValueError("nope"), "{'error': 'nope'}"),
        (SystemExit(), "{'error': 'SystemExit'}"),
        (SilentError(), "{'error': 'SilentError'}"),
    ],
)
def test_errors_are_told(error: BaseException, content: str) -> None:
    call = read_call(function(arguments={}), TOOLS)
    assert answer(call, Outcome(error=error)) == {"role": "tool", "name": "add", "content": content}
