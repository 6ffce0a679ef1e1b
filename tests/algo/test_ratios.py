import math

import pytest
import torch

from gruppo.algo.ratios import log_ratio

LOGPS = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])
OLD = torch.tensor([[-1.1, -0.9, -1.5], [-0.7, -1.6, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[0.1, 0.4, -0.5], [0.0, 0.4, 0.0]]),
        # (0.1 + 0.4 − 0.5) / 3 and (0 + 0.4) / 2
        ("sequence_mean", [[0.0], [0.2]]),
        ("sequence_sum", [[0.0], [0.4]]),
    ],
)
def test_golden(level, expected):
    torch.testing.assert_close(log_ratio(LOGPS, OLD, MASK, level), torch.tensor(expected))


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_positions_are_exactly_zero(level, junk):
    logps = LOGPS.clone()
    logps[1, 2] = junk
    old = OLD.clone()
    old[1, 2] = junk
    logps.requires_grad_()
    out = log_ratio(logps, old, MASK, level)
    torch.testing.assert_close(out, log_ratio(LOGPS, OLD, MASK, level))
    out.sum().backward()
    assert logps.grad[1, 2] == 0
    assert (logps.grad[MASK.bool()] > 0).all()


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
def test_a_row_without_tokens_has_ratio_one(level):
    out = log_ratio(LOGPS, OLD, torch.zeros(2, 3), level)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_old_log_probs_as_row_sums(shape):
    # Row 1: −3.5 − (−3.5); row 2: −1.9 − (−2.3), the masked token left out.
    sums = torch.tensor([-3.5, -2.3]).view(shape)
    torch.testing.assert_close(log_ratio(LOGPS, sums, MASK, "sequence_sum"), torch.tensor([[0.0], [0.4]]))
    emptied = log_ratio(LOGPS, torch.full(shape, math.nan), torch.zeros(2, 3), "sequence_sum")
    assert torch.equal(emptied, torch.zeros(2, 1))


def test_row_sums_at_another_level_are_refused():
    with pytest.raises(ValueError, match="row sums are accepted at level 'sequence_sum' only"):
        log_ratio(LOGPS, torch.zeros(2), MASK, "token")
    with pytest.raises(ValueError, match=r"old log-probs of shape \(3,\)"):
        log_ratio(LOGPS, torch.zeros(3), MASK, "sequence_sum")


def test_unknown_level():
    with pytest.raises(ValueError, match="not 'sequence'"):
        log_ratio(LOGPS, OLD, MASK, "sequence")


def test_half_precision_is_widened_before_the_difference():
    logps = torch.full((1, 300), -1.0, dtype=torch.bfloat16)
    old = torch.full((1, 300), -1.0078125, dtype=torch.bfloat16)
    out = log_ratio(logps, old, torch.ones(1, 300), "sequence_sum")
    assert out.dtype == torch.float32
    assert out.item() == 300 * 0.0078125
