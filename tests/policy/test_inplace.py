"""Attributes that are swapped for a while: whatever happens in between, they come back."""

from types import SimpleNamespace
from typing import Any

import pytest

from gruppo.policy.inplace import Swap, attention_swaps, swapped
from tests.engine.models import build


def test_swaps_are_undone_in_whatever_order_things_fail() -> None:
    class Picky:
        name = "of the class"

        def __setattr__(self, key: str, value: Any) -> None:
            if value == "refused":
                raise ValueError(value)
            super().__setattr__(key, value)

    owner, picky = SimpleNamespace(a=1), Picky()
    with swapped([Swap(owner, "a", 2), Swap(owner, "b", 3), Swap(picky, "name", "own")]):
        assert (owner.a, owner.b, picky.name) == (2, 3, "own")
        with swapped([Swap(owner, "a", 4)]):
            assert owner.a == 4
        assert owner.a == 2
    assert vars(owner) == {"a": 1}
    assert vars(picky) == {}
    assert picky.name == "of the class"
    with (
        pytest.raises(ValueError, match="refused"),
        swapped([Swap(owner, "a", 2), Swap(picky, "name", "refused"), Swap(owner, "b", 3)]),
    ):
        raise AssertionError("never reached")
    assert vars(owner) == {"a": 1}
    assert vars(picky) == {}
    with pytest.raises(KeyboardInterrupt), swapped([Swap(owner, "a", 2), Swap(owner, "a", 5)]):
        raise KeyboardInterrupt
    assert vars(owner) == {"a": 1}


def test_attention_is_swapped_in_every_config() -> None:
    model = build("llama")
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [config._attn_implementation for config in configs.values()]
    with swapped(attention_swaps(model, "another")):
        assert {config._attn_implementation for config in configs.values()} == {"another"}
    assert [config._attn_implementation for config in configs.values()] == before
    assert "another" not in before
