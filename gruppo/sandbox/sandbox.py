"""The public interface of the sandbox."""

import functools
import logging
from collections.abc import Collection

from gruppo.errors import ConfigError, SandboxError
from gruppo.sandbox.capabilities import PROTECTIONS, Capabilities, capabilities
from gruppo.sandbox.host import execute
from gruppo.sandbox.jail.kernel import MechanismError
from gruppo.sandbox.spec import Execution, Limits

logger = logging.getLogger(__name__)


class Sandbox:
    """Runs model-written Python code, each time in a new, isolated process that leaves nothing behind.

    The code sees an empty working directory, the interpreter with its installed packages, and its stdin. It has no
    network, no other files, none of this process's environment variables, and the resources of `limits`. If the
    machine cannot enforce a protection, the constructor raises `SandboxError`, unless `allow_unconfined` names it.

    Example:
        Sandbox(Limits(seconds=2)).run("print(6 * 7)").stdout == "42\\n"

    Runs are independent: one sandbox may be used from many threads.
    """

    def __init__(self, limits: Limits | None = None, *, allow_unconfined: Collection[str] = ()):
        if isinstance(allow_unconfined, str):
            allow_unconfined = {allow_unconfined}
        unknown = sorted(set(allow_unconfined) - set(PROTECTIONS))
        if unknown:
            raise ConfigError(
                f"allow_unconfined={unknown!r} is unknown; the protections are {', '.join(PROTECTIONS)}."
            )
        self.limits = limits or Limits()
        found = capabilities()
        refused = sorted(set(found.missing) - set(allow_unconfined))
        if refused:
            raise SandboxError(
                f"This machine cannot confine model-written code:\n{found}\n"
                f"Run on one that can, or accept the risk with allow_unconfined={set(refused)!r}."
            )
        _say_what_is_missing(found)

    @staticmethod
    def capabilities() -> Capabilities:
        """The protections that this machine enforces, and how; `print` shows them as a table."""
        return capabilities()

    def run(self, code: str, *, stdin: str = "", show_last: bool = False) -> Execution:
        """Run a program until it ends or hits a limit. `show_last` prints the value of a trailing expression."""
        try:
            return execute(code, stdin, show_last, self.limits, capabilities().mechanisms)
        except MechanismError as refusal:
            raise SandboxError(f"The sandbox did not start, though it did before: {refusal}") from None


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def _say_what_is_missing(found: Capabilities) -> None:
    if found.missing:
        _say_once(f"Model-written code runs without some protections, as allow_unconfined permits:\n{found}")
