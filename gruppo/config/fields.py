"""The one way a config field is declared: a default and a help text."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str) -> Any:
    """Declare a dataclass field; lists and dicts get a fresh copy per instance."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})
