import math

import pytest
import torch

from gruppo.algo.reduce import REDUCTIONS, UpdateSize, reduce_loss

TERMS = torch.tensor([[1.0, 2.0, 6.0], [4.0, 8.0, math.nan]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
SIZE = UpdateSize(rows=4, tokens=10, micro_batches=2)

# Row sums 9 and 12, lengths 3 and 2.
GOLDEN = {
    "sequence": (9 / 3 + 12 / 2) / 4,
    "micro_batch": 21 / 5 / 2,
    "constant": 21 / (4 * 7),
    "tokens": 21 / 10,
    "length_weighted": 21 / 4,
}


@pytest.mark.parametrize("how", GOLDEN)
def test_golden(how):
    assert reduce_loss(TERMS, MASK, how, SIZE, 7).item() == pytest.approx(GOLDEN[how])


# Terms 1 and 4 per row, weighted by lengths 3 and 2 where tokens are summed.
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sequence", (1 + 4) / 4),
        ("micro_batch", (3 + 8) / 5 / 2),
        ("constant", (3 + 8) / (4 * 7)),
        ("tokens", (3 + 8) / 10),
        ("length_weighted", (3 + 8) / 4),
        ("rows", (1 + 4) / 4),
    ],
)
def test_one_term_per_row(how, expected):
    assert reduce_loss(TERMS[:, :1], MASK, how, SIZE, 7).item() == pytest.approx(expected)


def test_rows_counts_a_row_without_tokens_and_the_others_do_not():
    terms, mask = TERMS[:, :1], torch.tensor([[1, 1, 1], [0, 0, 0]])
    assert reduce_loss(terms, mask, "rows", SIZE).item() == pytest.approx(5 / 4)
    assert reduce_loss(terms, mask, "sequence", SIZE).item() == pytest.approx(1 / 4)
    with pytest.raises(ValueError, match=r"one term per row, \(B, 1\), not \(2, 3\)"):
        reduce_loss(TERMS, MASK, "rows", SIZE)


@pytest.mark.parametrize("how", GOLDEN)
def test_nothing_leaks_from_under_the_mask(how):
    terms = TERMS.clone().requires_grad_()
    reduce_loss(terms, MASK, how, SIZE, 7).backward()
    assert terms.grad[1, 2] == 0
    assert (terms.grad[MASK.bool()] > 0).all()
    empty = reduce_loss(TERMS, torch.zeros(2, 3), how, UpdateSize(4, 0, 2), 7)
    assert empty.item() == 0


@pytest.mark.parametrize("how", [*GOLDEN, "rows"])
def test_contributions_add_up_however_the_update_is_cut(how):
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 5, generator=g) < 0.6
    terms = torch.randn(8, 1 if how == "rows" else 5, generator=g, dtype=torch.float64)

    def total(*cuts: int) -> float:
        size = UpdateSize(rows=8, tokens=mask.sum(), micro_batches=len(cuts))
        parts = zip(terms.split(cuts), mask.split(cuts), strict=True)
        return sum(reduce_loss(t, m, how, size, 5).item() for t, m in parts)

    if how == "micro_batch":  # its definition is the cut: a mean of means
        assert total(4, 4) != pytest.approx(total(8), abs=1e-6)
        halves = [(terms[h] * mask[h]).sum().item() / mask[h].sum().item() for h in (slice(0, 4), slice(4, 8))]
        assert total(4, 4) == pytest.approx(sum(halves) / 2)
    else:
        assert total(8) == pytest.approx(total(4, 4), abs=1e-12) == pytest.approx(total(1, 5, 2), abs=1e-12)


@pytest.mark.parametrize("how", [*GOLDEN, "rows"])
def test_sizes_may_be_tensors(how):
    terms = TERMS[:, :1] if how == "rows" else TERMS
    tensors = UpdateSize(*(torch.tensor(float(x)) for x in (4, 10, 2)))
    assert reduce_loss(terms, MASK, how, tensors, 7).item() == reduce_loss(terms, MASK, how, SIZE, 7).item()


def test_wrong_names_and_missing_length():
    with pytest.raises(ValueError, match="not 'mean'"):
        reduce_loss(TERMS, MASK, "mean", SIZE)
    with pytest.raises(ValueError, match="max_completion_length, which is None"):
        reduce_loss(TERMS, MASK, "constant", SIZE)
    assert set(REDUCTIONS) == {*GOLDEN, "rows"}
