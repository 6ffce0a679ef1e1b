"""A tool that runs Python code written by the model, in a sandbox."""

from collections.abc import Callable, Collection

from gruppo.errors import ConfigError, ToolError
from gruppo.sandbox import Execution, Limits, Sandbox

__all__ = ["python_tool"]

TRACEBACK_LINES = 12
NO_OUTPUT = "(no output)"


def python_tool(
    limits: Limits | None = None, *, allow_unconfined: Collection[str] = (), max_characters: int = 4000
) -> Callable[[str], str]:
    """A tool `python(code)` for `tools=[python_tool()]`.

    The model sees what its code prints and the value of a trailing expression, as in a notebook; after an exception
    also the end of the traceback. Each call starts fresh: no variables or files remain from the previous one. Code
    that is stopped at one of the `limits` counts as a failed call. The middle of results longer than `max_characters`
    is cut out. On a machine that cannot confine the code this raises `SandboxError`; see `Sandbox` for
    `allow_unconfined`.

    Example:
        python_tool(Limits(seconds=2))("x = 6\\nx * 7") == "42"
    """
    if isinstance(max_characters, bool) or not isinstance(max_characters, int) or max_characters < 100:
        raise ConfigError(f"python_tool(max_characters={max_characters!r}): give a whole number of at least 100.")
    sandbox = Sandbox(limits, allow_unconfined=allow_unconfined)

    def python(code: str) -> str:
        """Run Python code and return what it prints. A last line that is an expression is printed too.

        Every call starts a new interpreter, without network and in an empty folder.

        Args:
            code: The Python code to run.
        """
        if not isinstance(code, str):
            raise ToolError(f"`code` must be a string, not {type(code).__name__}.")
        return shorten(_answer(sandbox.run(code, show_last=True), sandbox.limits), max_characters)

    return python


def _answer(execution: Execution, limits: Limits) -> str:
    """The answer to the model; raises ToolError if a limit was reached."""
    stopped = {
        "timeout": f"The code was stopped after {limits.seconds:g} seconds.",
        "cpu": f"The code was stopped after {limits.cpu_seconds} seconds of processor time.",
        "memory": f"The code needs more memory than the {limits.memory >> 20} MiB it has.",
        "output": f"The code was stopped: it wrote more than {limits.output} characters or {limits.disk >> 20} MiB.",
        "killed": f"The interpreter was killed by signal {-execution.exit_code}.",
    }
    if execution.reason in stopped:
        raise ToolError(stopped[execution.reason])
    text = execution.stdout.strip("\n")
    if execution.reason == "error":
        end = execution.stderr.rstrip().splitlines()[-TRACEBACK_LINES:]
        text = "\n".join([text, *(end or [f"Exit code {execution.exit_code}."])]).lstrip("\n")
    return text or NO_OUTPUT


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a text that is too long: the beginning and the end are the most informative.

    Example: shorten("0123456789" * 100, 100) begins with "0123", ends with "6789" and has 100 characters.
    """
    if len(text) <= most:
        return text
    mark = f"\n… {len(text) - most} characters left out …\n"
    kept = most - len(mark)
    return text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :]
