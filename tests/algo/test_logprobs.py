import math

import pytest
import torch

from gruppo.algo.logprobs import entropy_from_logits, selective_log_softmax

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)


def random_logits(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def test_log_softmax_worked_by_hand():
    # softmax(ln 1, ln 3) = (1/4, 3/4)
    logits = torch.tensor([[0.0, LN3], [0.0, 0.0]], dtype=torch.float64)
    out = selective_log_softmax(logits, torch.tensor([1, 0]))
    torch.testing.assert_close(out.tolist(), [LN3 - LN4, -LN2])


def test_temperature_divides_the_logits():
    # (ln 9, 0) / 2 = (ln 3, 0): softmax (3/4, 1/4)
    logits = torch.tensor([[2 * LN3, 0.0]], dtype=torch.float64)
    assert selective_log_softmax(logits, torch.tensor([0]), temperature=2.0).item() == pytest.approx(math.log(0.75))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        selective_log_softmax(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), temperature)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 2, 3, 5), (300, 5), (2, 300, 5)])
@pytest.mark.parametrize("k", [None, 1, 4])
def test_any_shape_and_several_indices_per_row(shape, k):
    logits = random_logits(*shape)
    index = torch.randint(5, (*shape[:-1], *([] if k is None else [k])), generator=torch.Generator().manual_seed(1))
    picked = index.unsqueeze(-1) if k is None else index
    expected = (logits / 0.7).log_softmax(-1).gather(-1, picked).view(index.shape)
    torch.testing.assert_close(selective_log_softmax(logits, index, 0.7), expected, rtol=1e-12, atol=1e-12)


def test_gradient_is_that_of_log_softmax():
    logits = random_logits(2, 3, 7).requires_grad_()
    index = torch.tensor([[[1, 2], [3, 3], [0, 6]], [[5, 5], [2, 1], [0, 0]]])  # 3, 3: contributions of one row add up
    assert torch.autograd.gradcheck(lambda x: selective_log_softmax(x, index, 0.6), (logits,))
    assert torch.autograd.gradcheck(lambda x: selective_log_softmax(x, index[..., 0]), (logits,))


def test_a_slice_that_is_not_contiguous():
    full = random_logits(2, 5, 7).requires_grad_()
    index = torch.zeros(2, 4, dtype=torch.long)
    selective_log_softmax(full[:, :-1], index).sum().backward()
    ours = full.grad.clone()
    full.grad = None
    full[:, :-1].log_softmax(-1)[..., 0].sum().backward()
    torch.testing.assert_close(ours, full.grad)


def test_masked_rows_are_zero_in_value_and_gradient_whatever_they_hold():
    logits = random_logits(2, 2, 4)
    logits[0, 1] = math.nan
    logits.requires_grad_()
    mask = torch.tensor([[True, False], [True, True]])
    out = selective_log_softmax(logits, torch.zeros(2, 2, dtype=torch.long), row_mask=mask)
    out.sum().backward()
    assert out[0, 1] == 0
    assert torch.equal(logits.grad[0, 1], torch.zeros(4, dtype=torch.float64))
    assert logits.grad.isfinite().all()
    assert (out != 0).sum() == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    logits = random_logits(4, 1000, dtype=dtype)
    index = torch.arange(4)
    exact = logits.float().log_softmax(-1)[torch.arange(4), index]
    out = selective_log_softmax(logits, index)
    # In float32 it stays: summed over a completion, log-probs rounded to bfloat16 would be off by whole nats.
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact)
    p = logits.float().softmax(-1)
    entropy = entropy_from_logits(logits)
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy, -(p * p.log()).sum(-1))


def test_entropy_is_that_of_the_tempered_distribution():
    logits = random_logits(3, 7, dtype=torch.float64).requires_grad_()
    weights = torch.arange(3.0, dtype=torch.float64)
    (entropy_from_logits(logits, temperature=0.7) * weights).sum().backward()
    found, logits.grad = logits.grad, None
    p = (logits / 0.7).softmax(-1)
    slow = -(p * p.log()).sum(-1)
    (slow * weights).sum().backward()
    torch.testing.assert_close(entropy_from_logits(logits, temperature=0.7), slow)
    torch.testing.assert_close(found, logits.grad)


def test_entropy_worked_by_hand():
    # Uniform over 4: ln 4. (1/4, 3/4): ¼·ln 4 + ¾·(ln 4 − ln 3) = ln 4 − ¾·ln 3. Certain: 0.
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert entropy_from_logits(logits).item() == pytest.approx(LN4)
    inf = math.inf
    logits = torch.tensor([[0.0, LN3, -inf, -inf], [5.0, -inf, -inf, -inf]], dtype=torch.float64)
    torch.testing.assert_close(entropy_from_logits(logits).tolist(), [LN4 - 0.75 * LN3, 0.0])


@pytest.mark.parametrize("chunk_size", [1, 2, 128])
def test_entropy_gradient(chunk_size):
    logits = random_logits(2, 3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, chunk_size), (logits,))


def test_entropy_gradient_by_hand_with_an_impossible_token():
    # ∂H/∂z_j = −p_j (ln p_j + H); for (1/4, 3/4): H = ln 4 − ¾ ln 3, so −¼(−¾ ln 3) and −¾(¼ ln 3).
    logits = torch.tensor([0.0, LN3, -math.inf], dtype=torch.float64, requires_grad=True)
    entropy_from_logits(logits).backward()
    torch.testing.assert_close(logits.grad.tolist(), [3 / 16 * LN3, -3 / 16 * LN3, 0.0])


def test_only_a_block_of_rows_is_widened_at_a_time(monkeypatch):
    import gruppo.algo.logprobs as module

    widest = []
    widen = module.widen
    monkeypatch.setattr(module, "widen", lambda x: (widest.append(x.numel()), widen(x))[1])
    logits = random_logits(4, 512, 16, dtype=torch.bfloat16).requires_grad_()
    out = selective_log_softmax(logits, torch.zeros(4, 512, dtype=torch.long)) + entropy_from_logits(logits)
    out.sum().backward()
    assert max(widest) == 128 * 16
