"""Float32 for a moment: what is computed inside, and that nothing is left of it."""

from typing import Any

import pytest
import torch

from gruppo.policy.modes import weights_version
from gruppo.policy.widening import can_widen, in_float32
from tests.policy.families import family

IDS = torch.tensor([[5, 9, 17, 4, 33, 8, 21, 60]])


@pytest.mark.parametrize("name", ["lfm2", "gemma4", "deepseek_v32", "minimax", "mamba2"])
def test_a_narrow_model_computes_as_its_wide_copy(name: str) -> None:
    model: Any = family(name).bfloat16()
    version = weights_version(model)
    assert can_widen(model)
    with torch.no_grad():
        narrow = model(IDS).logits
        with in_float32(model):
            found = model(IDS).logits
        assert model(IDS).logits.equal(narrow)
        assert weights_version(model) == version
        expected = model.float()(IDS).logits
    assert found.dtype is torch.float32
    assert (found - expected).abs().max() < 1e-5
    assert (narrow - expected).abs().max() > 1e-3


def test_weights_are_as_before_after_a_failure() -> None:
    model: Any = family("lfm2").bfloat16()
    before = {key: (tensor.data_ptr(), tensor.dtype) for key, tensor in model.state_dict().items()}
    model.model.layers[1].conv.forward = None
    with pytest.raises(TypeError), torch.no_grad(), in_float32(model):
        model(IDS)
    assert {key: (tensor.data_ptr(), tensor.dtype) for key, tensor in model.state_dict().items()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
