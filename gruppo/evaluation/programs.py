"""The programs of a transcript: extract them from the text, assemble them, and run them.

    text ─ python_blocks ─► blocks ─ program ─► code ─ run_program ─► result ─ output_block ─► what the model reads

A program is all code the model has written so far. The blocks before the last one run again for the names that they
define, without their `print` lines. Comments and docstrings stay: the sandbox decides what code may do, and nothing
here searches the text for forbidden calls.
"""

import ast
import platform
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata

from gruppo.sandbox import Execution, Limits, Sandbox
from gruppo.tools.python_tool import NO_OUTPUT

__all__ = [
    "LIMITS",
    "NO_PROGRAM",
    "OUTPUT_STOP",
    "ProgramResult",
    "inside_block",
    "make_sandbox",
    "output_block",
    "program",
    "python_blocks",
    "run_program",
    "shorten",
    "tool_versions",
    "without_prints",
]

LIMITS = Limits(seconds=10, cpu_seconds=10, memory=1 << 30, output=64 << 10)
LONGEST_OUTPUT = 100  # characters of stdout that the model reads
# Characters of an error message. The paper allows 100 tokens, about 400 characters; counting characters does not
# depend on the tokenizer, so two models that make the same mistake read the same message.
LONGEST_ERROR = 400
OUTPUT_STOP = "```output"  # what a model writes where it expects an output
CLOSING = "```"
FAILED = "Runtime errors: "
FENCE = re.compile(r"( {0,3})```([^`]*)")
# Package paths carry no information for the model and differ between machines.
PACKAGE_PATH = re.compile(r'File "[^"\n]*/(?:(?:site|dist)-packages|lib/python3\.[0-9]+)/')
CARETS = re.compile(r"\n[ ~^]+(?=\n)")  # the marks under a line of code


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program.

    Example, of `print(6 * 7)`:
        ProgramResult("42", stdout="42\\n")
    """

    text: str  # what the model reads
    stdout: str | None  # all of it; None: the program failed
    failed: bool = False
    timeout: bool = False  # it failed because it took too long


NO_PROGRAM = ProgramResult(f"{FAILED}there is no program to run", None, failed=True)


# ---- finding programs


def python_blocks(text: str) -> list[str]:
    """The code of all complete ```python blocks.

    A fence is alone on its line, indented by at most three spaces. A block that is not closed before the next one
    begins, or before the text ends, is left out.

    Example:
        python_blocks("So:\\n```python\\nx = 1\\n```\\nand\\n```python\\nx =") == ["x = 1"]
    """
    return _scan(text)[0]


def program(text: str, earlier: Sequence[str] = ()) -> str | None:
    """The code to run for a text that ends with a python block; None for any other text.

    `earlier` are blocks that come before those of the text. They are passed separately if outputs lie between them
    and the text: an output may contain a fence, and the text after that would be taken for code.

    Example:
        program("```python\\nx = 6\\nprint(x)\\n```\\nthen\\n```python\\nprint(x * 7)\\n```\\n")
        == "x = 6\\npass\\nprint(x * 7)"
    """
    blocks, ends_with_one = _scan(text)
    if not ends_with_one:
        return None
    *replayed, last = [*earlier, *blocks]
    return "\n".join([*map(without_prints, replayed), last])


def _scan(text: str) -> tuple[list[str], bool]:
    """The complete python blocks of a text, and whether it ends with one of them."""
    blocks: list[str] = []
    kind: str | None = None  # of the block that is open; None: there is none
    lines: list[str] = []
    indent, ends_with_one = 0, False
    for line in text.rstrip().split("\n"):
        fence = FENCE.fullmatch(line.rstrip())
        ends_with_one = False
        if fence is None:
            lines.append(line[min(indent, len(line) - len(line.lstrip(" "))) :])
        elif kind is not None and not fence[2]:
            if kind == "python":
                blocks.append("\n".join(lines))
                ends_with_one = True
            kind = None
        else:
            kind, indent, lines = fence[2].strip(), len(fence[1]), []
    return blocks, ends_with_one


def without_prints(code: str) -> str:
    """Replace each unindented call of print, which may span several lines, by `pass`.

    Prints inside functions, loops and conditions stay, as in the paper. Side effects in the arguments of a removed
    print do not happen. Code that does not parse loses its lines that begin with `print(`.

    Example:
        without_prints("x = 1\\nprint(\\n    x,\\n)\\nfor i in range(3): print(i)") ==
        "x = 1\\npass\\nfor i in range(3): print(i)"
    """
    code = code.replace("\r\n", "\n").replace("\r", "\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. the invalid escape "\sqrt" in the model's strings
            statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deeply nested brackets
        return "\n".join(line for line in code.split("\n") if not line.startswith("print("))
    lines = code.encode().split(b"\n")  # column offsets in the AST count bytes
    for node in reversed(statements):
        if _is_print(node):
            assert node.end_lineno is not None
            first, end = node.lineno - 1, node.end_lineno
            line = lines[first][: node.col_offset] + b"pass" + lines[end - 1][node.end_col_offset :]
            lines[first:end] = [line]
    return b"\n".join(lines).decode()


def _is_print(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    called = node.value.func
    return isinstance(called, ast.Name) and called.id == "print"


# ---- running them


def make_sandbox(allow_unconfined: Collection[str] = ()) -> Sandbox:
    """The sandbox for programs: 10 seconds, 1 GiB, 64 KiB of output, no network, an empty folder.

    Raises `SandboxError` on a machine that cannot confine code; see `Sandbox` for `allow_unconfined`.

    Example:
        run_program(make_sandbox(), "print(6 * 7)").text == "42"
    """
    return Sandbox(LIMITS, allow_unconfined=allow_unconfined)


def run_program(sandbox: Sandbox, code: str) -> ProgramResult:
    """Run a program and return its result, including the text that the model reads.

    Output of more than 100 characters loses its middle. For a program that fails the text is the end of the traceback
    instead of what it printed before. Standard input is empty, so a call of `input()` fails.

    Example:
        run_program(sandbox, "print(1 / 0)").text ==
        'Runtime errors: File "<code>", line 1, in <module>\\n    print(1 / 0)\\nZeroDivisionError: division by zero'
    """
    execution = sandbox.run(code)
    if execution.reason == "ok":
        said = shorten(execution.stdout.strip(), LONGEST_OUTPUT)
        return ProgramResult(said or NO_OUTPUT, execution.stdout)
    message = shorten(_message(execution, sandbox.limits), LONGEST_ERROR)
    return ProgramResult(FAILED + message, None, failed=True, timeout=execution.reason in ("timeout", "cpu"))


def _message(execution: Execution, limits: Limits) -> str:
    said = {
        "timeout": f"timeout, the program was stopped after {limits.seconds:g} seconds",
        "cpu": f"timeout, the program was stopped after {limits.cpu_seconds} seconds of processor time",
        "memory": f"the program needs more memory than the {limits.memory >> 20} MiB it has",
        "output": f"the program printed over {limits.output >> 10} KiB, or stored over {limits.disk >> 20} MiB",
        "killed": f"the program was killed by signal {-execution.exit_code}",
    }
    return said.get(execution.reason) or _end_of_traceback(execution.stderr) or f"exit code {execution.exit_code}"


def _end_of_traceback(stderr: str) -> str:
    """The traceback from the program's own last frame on, without the marks under lines of code."""
    start = max(stderr.rfind('File "<code>"'), 0)
    return PACKAGE_PATH.sub('File "', CARETS.sub("", stderr[start:])).strip()


def output_block(said: str) -> str:
    """The block of a transcript in which the model reads a result.

    Example:
        output_block("42") == "```output\\n42\\n```\\n"
    """
    return f"{OUTPUT_STOP}\n{said}\n{CLOSING}\n"


def inside_block(block: str) -> str:
    """The text inside a block, the inverse of `output_block`. Fences that the program itself printed stay.

    Example:
        inside_block("\\n```output\\n42\\n```\\n") == "42"
    """
    return block.strip().removeprefix(OUTPUT_STOP).removesuffix(CLOSING).strip()


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a text of more than `most` characters: half of `most` at each end, dots in between.

    Example:
        shorten("0123456789", 4) == "01...89"
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def tool_versions() -> dict[str, str]:
    """The versions that programs run with: the interpreter and the packages they import most often.

    Example:
        tool_versions() == {"python": "3.11.7", "numpy": "2.4.6", "sympy": "1.14.0"}
    """
    return {"python": platform.python_version(), "numpy": _version("numpy"), "sympy": _version("sympy")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
