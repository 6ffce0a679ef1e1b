"""Copies of dataset rows and conversations."""

import copy
from typing import Any


def copy_of(value: Any) -> Any:
    """A deep copy, except that images are shared.

    Rows and conversations are mostly dicts and lists of strings, for which this takes a fifth of `copy.deepcopy`'s
    time. Images are shared because all rows of a group have the same ones, and copies would duplicate their pixels.

    Example:
        message = {"role": "user", "content": "2+2="}
        copy_of([message])[0] == message and copy_of([message])[0] is not message
    """
    kind = type(value)
    if kind is str or kind is int or kind is float or value is None:
        return value
    if kind is list:
        return [copy_of(each) for each in value]
    if kind is dict:
        return {key: copy_of(each) for key, each in value.items()}
    if any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in kind.__mro__):
        return value  # recognised by name, as PIL need not be installed
    return copy.deepcopy(value)
