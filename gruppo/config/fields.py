"""The one way a config field is declared: a default and a help text."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *names: str) -> Any:
    """Declare a dataclass field; lists and dicts get a fresh copy per instance. `names` are others for its flag."""
    metadata: dict[str, Any] = {"help": help}
    if names:
        metadata["aliases"] = [f"--{name}" for name in names]
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
