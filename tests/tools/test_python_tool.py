from collections.abc import Callable

import pytest
from transformers.utils import get_json_schema

from gruppo.errors import ConfigError, SandboxError, ToolError
from gruppo.sandbox import Limits, Sandbox, capabilities
from gruppo.tools.python_tool import python_tool, shorten


@pytest.fixture(scope="module")
def accepted() -> set[str]:
    """What the machine under the tests cannot enforce; most can all."""
    return set(Sandbox.capabilities().missing)


@pytest.fixture(scope="module")
def python(accepted: set[str]) -> Callable[[str], str]:
    return python_tool(Limits(seconds=20), allow_unconfined=accepted)


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("x = 6\nx * 7", "42"),
        ("print('a')\n'b'", "a\n'b'"),
        ("print('a')", "a"),
        ("x = 1", "(no output)"),
        ("", "(no output)"),
        ("import sys; print('warning', file=sys.stderr); 1", "1"),
        ("print('grüß 🐍')", "grüß 🐍"),
        ("import sys; sys.exit(3)", "Exit code 3."),
        ("for i in range(2): i", "(no output)"),
        ("# a comment\n[1,\n 2] # another", "[1, 2]"),
    ],
)
def test_results(python: Callable[[str], str], code: str, result: str) -> None:
    assert python(code) == result


def test_an_exception_is_a_result_with_the_end_of_its_traceback(python: Callable[[str], str]) -> None:
    result = python("print('before')\ndef f(n):\n    return f(n - 1) if n else 1 / 0\nf(50)")
    assert result.startswith("before\n")
    assert result.endswith("ZeroDivisionError: division by zero")
    assert len(result.splitlines()) <= 1 + 12
    assert "SyntaxError" in python("1 +")


@pytest.mark.parametrize(
    ("code", "limits", "message"),
    [
        ("while True: pass", Limits(seconds=0.5), "stopped after 0.5 seconds"),
        ("while True: pass", Limits(seconds=60, cpu_seconds=1), "1 seconds of processor time"),
        ("a = bytearray(1 << 29)", Limits(memory=128 << 20), "more memory than the 128 MiB"),
        ("while True: print('x' * 1000)", Limits(output=5000), "wrote more than 5000"),
        ("import os; os.abort()", None, "killed by signal 6"),
    ],
)
def test_a_limit_is_a_failed_call(accepted: set[str], code: str, limits: Limits | None, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        python_tool(limits, allow_unconfined=accepted)(code)


def test_an_argument_of_another_type_is_a_failed_call(python: Callable[[str], str]) -> None:
    with pytest.raises(ToolError, match="must be a string, not int"):
        python(5)  # type: ignore[arg-type]


def test_the_model_sees_one_argument(python: Callable[[str], str]) -> None:
    schema = get_json_schema(python)["function"]
    assert schema["name"] == "python"
    assert schema["parameters"] == {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python code to run."}},
        "required": ["code"],
    }
    assert schema["description"].startswith("Run Python code")


def test_calls_share_nothing(python: Callable[[str], str]) -> None:
    assert python("x = 1; open('f', 'w').write('x')") == "1"
    assert "NameError" in python("x")
    assert python("import os; os.listdir()") == "[]"


def test_long_results_lose_their_middle(accepted: set[str]) -> None:
    result = python_tool(max_characters=200, allow_unconfined=accepted)("print('a' * 1000 + 'b' * 1000)")
    assert len(result) == 200
    assert result.startswith("a" * 50)
    assert result.endswith("b" * 50)
    assert "1800 characters left out" in result
    assert shorten("x" * 200, 200) == "x" * 200


def test_it_refuses_where_code_cannot_be_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "candidates", lambda: ())
    capabilities.capabilities.cache_clear()
    try:
        with pytest.raises(SandboxError, match=r"network +NOT ENFORCED"):
            python_tool()
        # Nothing runs here: it only shows that naming what is missing is enough.
        python_tool(allow_unconfined=Sandbox.capabilities().missing)
    finally:
        capabilities.capabilities.cache_clear()


@pytest.mark.parametrize("wrong", [0, 99, True, 1.5, "200"])
def test_the_length_of_results_is_checked(wrong: object) -> None:
    with pytest.raises(ConfigError, match="max_characters"):
        python_tool(max_characters=wrong)  # type: ignore[arg-type]
