"""Programs: which code of a text is run, and what the model reads of it."""

import ast
import builtins
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.errors import ConfigError
from gruppo.evaluation import programs
from gruppo.evaluation.programs import (
    LIMITS,
    OUTPUT_STOP,
    inside_block,
    make_sandbox,
    output_block,
    program,
    python_blocks,
    run_program,
    shorten,
    tool_versions,
    without_prints,
)
from gruppo.sandbox import Execution, Limits, Sandbox


def block(code: str) -> str:
    return f"```python\n{code}\n```\n"


# ---- finding programs

# text, its blocks, whether it ends with one, why
TEXTS = [
    ("", [], False, "nothing"),
    ("x = 1", [], False, "code without a fence is prose"),
    ("So:\n```python\nx = 1\n```", ["x = 1"], True, "one block"),
    ("```python\nx = 1\n```\n\n  \n", ["x = 1"], True, "blanks at the end do not count"),
    ("```python\nx = 1\n```\nThen", ["x = 1"], False, "prose follows"),
    ("```python\nx = 1", [], False, "an open block"),
    ("```python\nx = 1```", [], False, "a fence stands on a line of its own"),
    ("Code: ```python\nx = 1\n```", [], False, "the same for the opening one"),
    ("```python\n```", [""], True, "an empty block"),
    ("```\nx = 1\n```", [], False, "not said to be Python"),
    ("```sql\nx = 1\n```", [], False, "said to be something else"),
    ("```\nx\n```\n```python\ny\n```", ["y"], True, "the closing fence of one block does not open another"),
    ("```python\nx\n```output\n1\n```\n```python\ny\n```", ["y"], True, "a block that is never closed is left out"),
    ("```python\nx\n```\n```output\n1\n```\n", ["x"], False, "an output is at the end"),
    ("```python \r\nx\r\n```\r\n", ["x\r"], True, "lines may end in other ways"),
    ("1. So\n   ```python\n   if x:\n     y\n\n   ```", ["if x:\n  y\n"], True, "an indented fence indents its code"),
    ("    ```python\nx\n```", [], False, "four blanks are too many"),
    ("```python\ns = '''\n```x```\n'''\n```", ["s = '''\n```x```\n'''"], True, "backticks inside a line"),
    ("```python\na\n```\n```python\nb\n```", ["a", "b"], True, "two blocks"),
]


@pytest.mark.parametrize(("text", "blocks", "ends", "why"), TEXTS, ids=[row[-1] for row in TEXTS])
def test_blocks_of_a_text(text: str, blocks: list[str], ends: bool, why: str) -> None:
    assert python_blocks(text) == blocks, why
    assert (program(text) is not None) == ends, why


@given(st.lists(st.sampled_from(["a = 1", "  b", "", "é", "# c"]).map(lambda s: s * 2), max_size=5), st.text("xy \n"))
def test_a_block_comes_out_as_it_went_in(lines: list[str], prose: str) -> None:
    code = "\n".join(lines)
    assert python_blocks(f"{prose}\n{block(code)}{prose}") == [code]


# code, the same without prints, why
PRINTS = [
    ("x = 1\nprint(x)\ny = 2", "x = 1\npass\ny = 2", "a line"),
    ("print(\n    'a',\n    f(1),\n)\nx = 1", "pass\nx = 1", "a print over several lines"),
    ("x = 1; print(x); y = 2", "x = 1; pass; y = 2", "what stands beside it on the line stays"),
    ("print('é', x); y = 'é'", "pass; y = 'é'", "positions count bytes"),
    ("print('''a\nprint(1)\nb''')\nx = 1", "pass\nx = 1", "a string over several lines"),
    ("s = '''\nprint(1)\n'''", "s = '''\nprint(1)\n'''", "a print inside a string is none"),
    ("for i in x:\n    print(i)", "for i in x:\n    print(i)", "an indented one stays"),
    ("for i in x: print(i)", "for i in x: print(i)", "so does one behind a colon"),
    ("y = print(1)", "y = print(1)", "its value is used"),
    ("pprint(1)\nprint\nsys.print(1)", "pprint(1)\nprint\nsys.print(1)", "other names"),
    ("print (1)  # here", "pass  # here", "a blank before the bracket"),
    ("print(1)\r\nx = 1\rprint(2)", "pass\nx = 1\npass", "lines may end in other ways"),
    ("print('\\sqrt{2}')", "pass", "a string that Python warns of"),
    ("", "", "nothing"),
    ("x = (\nprint(1)\n  print(2)", "x = (\n  print(2)", "code that does not parse goes by lines"),
    ("print(1)\n\0", "\0", "nor does a null byte"),
    ("print(1)\nx = '\ud800'", "x = '\ud800'", "nor half a character"),
    ("print(1)\n" + "(" * 5000, "(" * 5000, "nor what is nested too deeply"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("code", "expected", "why"), PRINTS, ids=[row[-1] for row in PRINTS])
def test_prints_are_taken_out(code: str, expected: str, why: str) -> None:
    assert without_prints(code) == expected, why


STATEMENTS = [
    "a = 1",
    "print(a)",
    "print(\n a,\n 2\n)",
    "if a:\n  print(a)\n  b = 'é'",
    "'é'; print('é'); c = 3",
    "# d",
]


@given(st.lists(st.sampled_from(STATEMENTS), max_size=8))
def test_what_is_left_does_the_same_without_printing(statements: list[str]) -> None:
    code = "\n".join(statements)
    left = without_prints(code)
    for whole, kept in zip(ast.parse(code).body, ast.parse(left).body, strict=True):
        assert (
            isinstance(kept, ast.Pass)
            if ast.unparse(whole).startswith("print(")
            else ast.dump(whole) == ast.dump(kept)
        )


def test_earlier_blocks_run_again_without_their_prints() -> None:
    text = f"{block('x = 6')}and\n{block('print(x)')}then\n{block('print(x * 7)')}"
    assert program(text) == "x = 6\npass\nprint(x * 7)"
    assert program(block("print(x * 7)"), ["x = 6", "print(x)"]) == "x = 6\npass\nprint(x * 7)"
    assert program("no code", ["x = 6"]) is None


# ---- running them


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return make_sandbox(Sandbox.capabilities().missing)


# code, what the model reads, stdout
GOOD = [
    ("print(6 * 7)", "42", "42\n"),
    ("print('\\n  1 2\\n\\n')", "1 2", "\n  1 2\n\n\n"),
    ("x = 1", "(no output)", ""),
    ("import sys; sys.exit(0)", "(no output)", ""),
    ("print('é' * 100)", "é" * 100, "é" * 100 + "\n"),
    ("print('a' * 51 + 'b' * 50)", "a" * 50 + "..." + "b" * 50, "a" * 51 + "b" * 50 + "\n"),
    ("import sys; print(1, file=sys.stderr); print(2)", "2", "2\n"),
    ("if __name__ == '__main__': print(3)", "3", "3\n"),
    ("print('\\\\sqrt', '\\sqrt')", "\\sqrt \\sqrt", "\\sqrt \\sqrt\n"),
]


@pytest.mark.parametrize(("code", "text", "stdout"), GOOD)
def test_what_the_model_reads(sandbox: Sandbox, code: str, text: str, stdout: str) -> None:
    result = run_program(sandbox, code)
    assert (result.text, result.stdout, result.failed, result.timeout) == (text, stdout, False, False)


# code, the beginning and the end of what the model reads
BAD = [
    (
        "print(1)\nprint(1 / 0)",
        'File "<code>", line 2, in <module>\n    print(1 / 0)\n',
        "\nZeroDivisionError: division by zero",
    ),
    ("def f(:", 'File "<code>", line 1\n', "\nSyntaxError: invalid syntax"),
    ("input()", 'File "<code>", line 1', "\nEOFError: EOF when reading a line"),
    ("import sys; sys.exit('no')", "no", "no"),
    ("import os; os._exit(3)", "exit code 3", "exit code 3"),
    ("import os; os.kill(os.getpid(), 15)", "the program was killed", " by signal 15"),
    ("x = bytearray(2 << 30)", "the program needs more memory", " than the 1024 MiB it has"),
    ("while True: print('x' * 1000)", "the program printed over 64 KiB", " over 64 MiB"),
    ("raise ValueError('a' * 1000)", 'File "<code>", line 1', "a" * 50),
    ("def f(n):\n    return f(n - 1)\nf(1)", 'File "<code>", line 2, in f\n', "maximum recursion depth exceeded"),
    ("import json\njson.loads('[')", "File \"<code>\", line 2, in <module>\n    json.loads('[')\n", "(char 1)"),
]


@pytest.mark.parametrize(("code", "start", "end"), BAD, ids=[row[0][:30] for row in BAD])
def test_failures(sandbox: Sandbox, code: str, start: str, end: str) -> None:
    result = run_program(sandbox, code)
    assert result.text.startswith("Runtime errors: " + start), result.text
    assert result.text.endswith(end), result.text
    assert (result.stdout, result.failed, result.timeout) == (None, True, False)
    assert len(result.text) <= len("Runtime errors: ") + 400 + len("...")
    assert "^" not in result.text.replace("def f(:", ""), "marks under lines of code are of no use"


def test_where_packages_lie_is_not_shown(sandbox: Sandbox) -> None:
    text = run_program(sandbox, "import json\njson.loads('[')").text
    assert 'File "json/' in text
    text = run_program(sandbox, "from numpy.linalg import inv\ninv([[0, 0], [0, 0]])").text
    assert 'File "numpy/' in text
    assert "packages" not in text


@pytest.mark.parametrize("limits", [{"seconds": 1}, {"seconds": 60, "cpu_seconds": 1}])
def test_an_endless_program_is_a_timeout(limits: dict[str, Any]) -> None:
    sandbox = Sandbox(Limits(**limits), allow_unconfined=Sandbox.capabilities().missing)
    result = run_program(sandbox, "print(1)\nwhile True: pass")
    assert result.text.startswith("Runtime errors: timeout, the program was stopped after 1 second")
    assert (result.stdout, result.failed, result.timeout) == (None, True, True)


def test_the_packages_of_programs_fit_in_the_limits(sandbox: Sandbox) -> None:
    code = "import numpy, sympy\nprint(numpy.__version__, sympy.__version__, sympy.sqrt(8), numpy.eye(2).sum())"
    execution = sandbox.run(code)
    versions = tool_versions()
    assert execution.stdout == f"{versions['numpy']} {versions['sympy']} 2*sqrt(2) 2.0\n", execution.stderr
    assert execution.seconds < LIMITS.seconds / 2, "there must be time left to use them"
    assert run_program(sandbox, "import platform; print(platform.python_version())").text == versions["python"]


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert tool_versions()["sympy"] == "not installed"


def test_stdout_is_kept_whole(sandbox: Sandbox) -> None:
    result = run_program(sandbox, "print('x' * 60000)")
    assert result.stdout == "x" * 60000 + "\n", "only what the model reads is short"
    assert len(result.text) == 103


def test_the_limits_are_those_of_the_protocol() -> None:
    assert (LIMITS.seconds, LIMITS.memory, LIMITS.output) == (10, 1 << 30, 64 << 10)
    assert make_sandbox(Sandbox.capabilities().missing).limits == LIMITS
    with pytest.raises(ConfigError, match="the protections are"):
        make_sandbox(["everything"])


class Broken:
    """A sandbox in which every program ends in the same way."""

    limits = LIMITS

    def __init__(self, **execution: Any):
        self.execution = Execution(
            **{"stdout": "", "stderr": "", "exit_code": 1, "reason": "error", "seconds": 0.0, **execution}
        )

    def run(self, code: str) -> Execution:
        return self.execution


def test_the_last_traceback_counts() -> None:
    first = 'Traceback (most recent call last):\n  File "<code>", line 1\nKeyError: 1\n\nDuring handling …\n\n'
    last = 'Traceback (most recent call last):\n  File "<code>", line 3\n    a + b\n    ~~^~~\nValueError: 2\n'
    sandbox: Any = Broken(stderr="<code>:1: SyntaxWarning: …\n" + first + last)
    assert run_program(sandbox, "").text == 'Runtime errors: File "<code>", line 3\n    a + b\nValueError: 2'


@given(st.text(max_size=30), st.integers(1, 10))
def test_shortening(text: str, half: int) -> None:
    short = shorten(text, 2 * half)
    if len(text) <= 2 * half:
        assert short == text
    else:
        assert short == text[:half] + "..." + text[len(text) - half :]


@given(st.text(alphabet="a`\n output", max_size=20), st.sampled_from(["", "\n"]))
def test_what_a_block_says_is_what_was_put_in(said: str, newline: str) -> None:
    block = newline + output_block(said)
    assert block.startswith(f"{newline}{OUTPUT_STOP}\n{said}")
    assert inside_block(block) == said.strip()


def test_finding_programs_executes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("code of a model was executed outside the sandbox")

    monkeypatch.setattr(builtins, "exec", refuse)
    monkeypatch.setattr(builtins, "eval", refuse)
    assert program(block("raise SystemExit") + block("1 / 0")) == "raise SystemExit\n1 / 0"
    assert not hasattr(programs, "torch")
