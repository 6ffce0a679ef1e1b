import math

import pytest
import torch

from gruppo.algo.entropy import active_entropy_coef, entropy_bonus, next_entropy_coef


def test_entropy_bonus_is_the_mean_over_loss_tokens():
    entropy = torch.tensor([[1.0, 2.0, 0.5], [1.5, 0.2, math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    out = entropy_bonus(entropy, mask)
    out.backward()
    assert out.item() == pytest.approx(5.2 / 5)
    torch.testing.assert_close(entropy.grad, mask / 5)


def test_entropy_bonus_without_tokens():
    entropy = torch.ones(1, 2, requires_grad=True)
    out = entropy_bonus(entropy, torch.zeros(1, 2))
    out.backward()
    assert out.item() == 0
    assert entropy.grad.tolist() == [[0, 0]]


def test_active_entropy_coef():
    assert active_entropy_coef(0.1, 5.0, target=0.2, adaptive=False) == 0.1
    assert active_entropy_coef(0.1, math.inf, target=0.2, adaptive=True) == 0.0  # the first update
    assert active_entropy_coef(0.1, 0.2, target=0.2, adaptive=True) == 0.1
    assert active_entropy_coef(0.1, 0.21, target=0.2, adaptive=True) == 0.0


def test_next_entropy_coef():
    step = {"target": 0.2, "delta": 0.005, "low": 0.0, "high": 1.0}
    assert next_entropy_coef(0.1, 0.2, **step) == pytest.approx(0.105)
    assert next_entropy_coef(0.1, 0.3, **step) == pytest.approx(0.095)
    assert next_entropy_coef(0.998, 0.1, **step) == 1.0
    assert next_entropy_coef(0.002, 0.3, **step) == 0.0
