"""Check that values have the types that their fields declare."""

import inspect
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args

import numpy as np

from gruppo.errors import ConfigError

JSON = dict[str, Any]
WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list[float]: "a list of numbers",
    JSON: "a dict (or a JSON object as a string that starts with '{')",
}


def check_types(config: Any, names: Collection[str]) -> None:
    """Raise for a value of the wrong type, which would fail late or, like the string "false" for a bool, not at all.

    Types that are not in `WORDS` (for example of fields that a subclass adds) are not checked.
    """
    # Not `f.type`, because HfArgumentParser modifies it.
    declared = {k: v for cls in reversed(type(config).__mro__) for k, v in inspect.get_annotations(cls).items()}
    for f in fields(config):
        value, kind = getattr(config, f.name), declared[f.name]
        if f.name not in names or value is f.default:
            continue
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if value is None and NoneType in kinds:
            continue
        kinds = tuple(k for k in kinds if k is not NoneType and not (k is str and JSON in kinds))  # already parsed
        if all(k in WORDS and not _is_a(value, k) for k in kinds):
            raise ConfigError(f"{f.name}={value!r} must be {' or '.join(WORDS[k] for k in kinds)}.")


def plain_numbers(config: Any) -> None:
    """Replace numbers and switches of numpy, alone or in a list, by Python's: JSON and YAML know no others."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, np.generic):
            setattr(config, f.name, value.item())
        elif isinstance(value, list | tuple) and any(isinstance(item, np.generic) for item in value):
            plain = [item.item() if isinstance(item, np.generic) else item for item in value]
            setattr(config, f.name, type(value)(plain))


def numbers_and_switches(config_class: type) -> list[str]:
    """Names of the fields of a class that hold a number, True or False."""
    kinds = {name: {kind, *get_args(kind)} for name, kind in inspect.get_annotations(config_class).items()}
    return [name for name, each in kinds.items() if each & {int, float, bool}]


def check_dicts(config: Any, names: Collection[str]) -> None:
    """Raise for a value that is neither a dict nor a string (a path, or JSON), such as a list of pairs."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None and not isinstance(value, str | Mapping) and not is_dataclass(value):
            raise ConfigError(f"{name}={value!r} must be {WORDS[JSON]}.")


def _is_a(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        return number and bool(value == value)  # a NaN is not equal to itself
    if kind == list[float]:
        return isinstance(value, list | tuple) and all(_is_a(item, float) for item in value)
    return isinstance(value, dict if kind == JSON else kind)


# Bounds: an infinite one means no bound.
MAY_BE_INFINITE = ("epsilon", "epsilon_high", "delta", "reward_clip_range")


def check_finite(config: Any, names: Collection[str]) -> None:
    """Raise for an infinite number, alone or in a list: it would make every loss NaN."""
    for name in names:
        value = getattr(config, name)
        numbers = value if isinstance(value, list | tuple) else [value]
        if name not in MAY_BE_INFINITE and any(isinstance(n, float) and math.isinf(n) for n in numbers):
            raise ConfigError(f"{name}={value!r} must be finite.")


def check_json(config: Any, names: Collection[str]) -> None:
    """Raise for a string that starts like a JSON object but is not valid JSON."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, str) and value.startswith("{"):
            try:
                json.loads(value)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{name}={value!r} is not valid JSON: {error}.") from None
