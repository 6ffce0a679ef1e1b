"""The argument parser of commands with their own options: examples in --help, hints about unknown flags."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from gruppo.config.hints import nearest

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """An argument parser that keeps the line breaks of its texts and suggests the flag that was probably meant.

    Example:
        parser = CommandParser(prog="gruppo demo", description="…", epilog="examples:\\n  gruppo demo --steps 10")
        parser.add_argument("--steps", type=int)
        parser.parse_args(["--stepz", "3"])    # gruppo demo: error: unknown option --stepz. Did you mean `--steps`?
    """

    def __init__(self, **kwargs: Any) -> None:
        # With abbreviations, a new option could break scripts that abbreviate an older one.
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, but with a hint for unknown options."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return options

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error about strings that no option takes."""
        flags = [string.partition("=")[0] for string in unknown if string.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}")
        known = [string for action in self._actions for string in action.option_strings]
        self.error(" ".join(f"unknown option {flag}.{nearest(flag, known)}" for flag in flags))
