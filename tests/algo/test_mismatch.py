import math

import pytest
import torch

from gruppo.algo.mismatch import importance_weights

LN = math.log
# ρ per token: 2, ¼ | 4, (masked) ; products: ½, 4
OLD = torch.tensor([[LN(0.4), LN(0.1)], [LN(0.8), 5.0]], dtype=torch.float64)
SAMPLER = torch.tensor([[LN(0.2), LN(0.4)], [LN(0.2), -math.inf]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 3.0, [[2, 0.25], [3, 1]]),
        ("token_truncate", 0.5, None, [[2, 0.5], [4, 1]]),
        ("token_truncate", None, None, [[2, 0.25], [4, 1]]),
        ("token_mask", None, 3.0, [[2, 0.25], [0, 1]]),
        ("token_mask", 0.5, 3.0, [[2, 0], [0, 1]]),
        ("sequence_truncate", None, 3.0, [[0.5], [3]]),
        ("sequence_truncate", 0.6, None, [[0.6], [4]]),
        ("sequence_mask", None, 3.0, [[0.5], [0]]),
        ("sequence_mask", 0.6, 5.0, [[0], [4]]),
    ],
)
def test_golden(mode, low, high, expected):
    out = importance_weights(OLD, SAMPLER, MASK, mode, low, high)
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))


def test_the_band_is_closed():
    old, sampler = torch.tensor([[0.0]]), torch.tensor([[0.0]])
    assert importance_weights(old, sampler, torch.ones(1, 1), "token_mask", 1.0, 1.0).item() == 1.0


def test_unknown_sampler_log_probs_count_as_no_mismatch():
    sampler = torch.tensor([[math.nan, LN(0.4)], [LN(0.2), 0.0]], dtype=torch.float64)
    assert importance_weights(OLD, sampler, MASK, "token_mask", None, 3.0)[0].tolist() == pytest.approx([1, 0.25])
    assert importance_weights(OLD, sampler, MASK, "sequence_mask", None, 3.0)[0].item() == pytest.approx(0.25)


def test_an_infinite_ratio_is_cut_or_dropped():
    old, sampler, mask = torch.tensor([[-1.0]]), torch.tensor([[-math.inf]]), torch.ones(1, 1)
    assert importance_weights(old, sampler, mask, "token_truncate", None, 3.0).item() == 3.0
    assert importance_weights(old, sampler, mask, "sequence_mask", None, 3.0).item() == 0.0


def test_no_gradient_and_half_precision():
    old = OLD.to(torch.bfloat16).requires_grad_()
    out = importance_weights(old, SAMPLER.to(torch.bfloat16), MASK, "token_truncate", None, 3.0)
    assert not out.requires_grad
    assert out.dtype == torch.float32


def test_unknown_mode():
    with pytest.raises(ValueError, match="not 'mask'"):
        importance_weights(OLD, SAMPLER, MASK, "mask", None, 3.0)
