"""The limits of a run, its result, and the message from the host to the jail."""

import math
from dataclasses import dataclass, fields
from typing import Literal, TypedDict

from gruppo.errors import ConfigError

MIB = 1 << 20
LEAST_MEMORY = 64 * MIB

Reason = Literal["ok", "error", "timeout", "cpu", "memory", "output", "killed"]


@dataclass(frozen=True)
class Limits:
    """Resource limits of one run. Sizes are in bytes.

    Example:
        Limits(seconds=2, memory=256 << 20)
    """

    seconds: float = 10.0  # of wall-clock time
    cpu_seconds: int = 10  # of one process, all its threads together
    memory: int = 1024 * MIB  # address space of one process; several have several times as much
    processes: int = 16  # concurrent processes and threads together
    output: int = MIB  # of stdout and of stderr each
    file_size: int = 32 * MIB
    disk: int = 64 * MIB  # all files of the working directory

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = "a number" if field.name == "seconds" else "a whole number"
            kinds = (int, float) if field.name == "seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                raise ConfigError(f"Limits({field.name}={value!r}): give {wanted} above 0.")
        if self.memory < LEAST_MEMORY:
            raise ConfigError(f"Limits(memory={self.memory}): the interpreter alone needs {LEAST_MEMORY} bytes.")


@dataclass(frozen=True)
class Execution:
    """The result of a run.

    Example, of the code `print(1 / 0)`:
        Execution(stdout="", stderr="Traceback …", exit_code=1, reason="error", seconds=0.01)

    `reason` says why it ended: "ok" (exit code 0), "error" (another exit code), "timeout" (wall-clock time), "cpu"
    (processor time), "memory" (an uncaught MemoryError), "output" (it printed or stored too much), "killed" (a signal;
    `exit_code` is then minus its number). Output up to that moment is kept.
    """

    stdout: str
    stderr: str
    exit_code: int
    reason: Reason
    seconds: float  # of wall-clock time, from the start of the code to its end


class Spec(TypedDict):
    """The description of one run that the jail receives."""

    code: str
    show_last: bool
    path: list[str]  # sys.path of the code
    readable: list[str]  # paths that the code may read besides its working directory
    work: str  # the working directory
    root: str  # an empty directory, in which a mount namespace builds its root
    mechanisms: list[str]
    search: bool  # the code must traverse directories that its uid may not enter
    seconds: float
    cpu_seconds: int
    memory: int
    processes: int
    file_size: int
    disk: int
