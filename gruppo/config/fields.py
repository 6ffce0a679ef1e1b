"""How every config field is declared: with a default and a help text."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *names: str) -> Any:
    """Declare a dataclass field; list and dict defaults are copied per instance. `names` are aliases of its flag."""
    metadata: dict[str, Any] = {"help": help}
    if names:
        metadata["aliases"] = [f"--{name}" for name in names]
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
