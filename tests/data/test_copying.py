"""Copies of rows."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gruppo.data.copying import copy_of

rows = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@dataclass
class Custom:
    parts: list[int] = field(default_factory=list)


class Named(dict[str, Any]):
    """A dict with a type of its own, which a copy keeps."""


def changeable(value: Any) -> list[Any]:
    """All lists and dicts within."""
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
    found = [each for part in inner for each in changeable(part)]
    return [value, *found] if isinstance(value, list | dict) else found


@given(rows)
def test_a_copy_is_equal_and_shares_nothing_that_can_be_changed(row: Any) -> None:
    copied = copy_of(row)
    assert copied == row
    assert type(copied) is type(row)
    assert not {id(each) for each in changeable(copied)} & {id(each) for each in changeable(row)}


def test_what_is_neither_list_nor_dict_is_copied_too() -> None:
    row = {"custom": Custom([1]), "named": Named(a=[2]), "text": "same"}
    copied = copy_of(row)
    copied["custom"].parts.append(5)
    copied["named"]["a"].append(5)
    assert row["custom"].parts == [1]
    assert row["named"] == {"a": [2]}
    assert type(copied["named"]) is Named
    assert copied["text"] is row["text"]
