import functools
from typing import Any

import pytest

from gruppo.errors import ConfigError
from gruppo.tools.functions import by_name, make_tool


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def fetch(url: str) -> str:
    """Fetch a page.

    Args:
        url: where it is
    """
    return url


def without_hint(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Add.

    Args:
        a: the first
        b: the second
    """
    return int(a + b)


def without_docstring(a: int) -> int:
    return a


def without_description(a: int) -> int:
    """Return it."""
    return a


def of_unknown_type(a: "Nowhere") -> int:  # type: ignore[name-defined]  # noqa: F821
    """Return it.

    Args:
        a: something
    """
    return int(a)


class Owner:
    def __init__(self, value: int = 0):
        self.value = value

    def read(self, plus: int) -> int:
        """Read the value.

        Args:
            plus: added to it
        """
        return self.value + plus


def test_a_function_becomes_a_tool() -> None:
    tool = make_tool(add)
    assert (tool.name, tool.is_async, tool.function(1)) == ("add", False, 3)
    parameters = tool.schema["function"]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["b"] == {"type": "integer", "description": "the second"}
    assert make_tool(fetch).is_async


def test_a_method_can_be_that_of_another_object() -> None:
    tool = make_tool(Owner(1).read)
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["plus"]
    assert tool.of(Owner(5)).function(plus=1) == 6


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_hint, "`without_hint`.*Argument a is missing a type hint"),
        (without_docstring, "`without_docstring`.*no docstring"),
        (without_description, "`without_description`.*no description for the argument 'a'"),
        (of_unknown_type, "`of_unknown_type`.*'Nowhere' is not defined"),
        (lambda a: a, "a lambda has neither"),
        (functools.partial(add, 1), "is not a function"),
        (Owner, "is not a function"),
        ("add", "'add' is not a function"),
    ],
)
def test_what_cannot_be_shown_to_a_model(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_tool(function)


def test_two_tools_of_one_name() -> None:
    with pytest.raises(ConfigError, match="Two tools have the name `add`"):
        by_name([make_tool(add), make_tool(add)])
