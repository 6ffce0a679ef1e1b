"""Reduce per-token terms to one number: for five of the loss types, the only difference between them.

The contract: the values that `reduce_loss` returns for all micro-batches of all ranks *sum* to the loss of the
optimizer update. How the update is split into micro-batches therefore does not matter, except for "micro_batch", which
is defined by that split.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gruppo.algo.tensors import count, masked_sum, widen

__all__ = ["REDUCTIONS", "UpdateSize", "reduce_loss"]

Number = float | Tensor


@dataclass(frozen=True)
class UpdateSize:
    """What an optimizer update contains, over all ranks and micro-batches.

    Two ranks with four micro-batches each, of 8 rows and 100 loss tokens: `UpdateSize(64, 800, 8)`.
    """

    rows: Number
    tokens: Number
    micro_batches: Number
    micro_batch_tokens: Tensor | None = None
    """(B, 1): number of loss tokens in each row's micro-batch; None if the rows form exactly one micro-batch."""
    micro_batch_chosen: Tensor | None = None
    """(B, 1): the number of those tokens that pass the entropy threshold; None as above."""


def _sequence(terms: Tensor, mask_BT: Tensor, size: UpdateSize, max_completion_length: int | None) -> Tensor:
    """Mean over rows of the mean over tokens (GRPO, https://arxiv.org/abs/2402.03300)."""
    return (masked_sum(terms, mask_BT, dim=1) / count(mask_BT, terms, dim=1).clamp(min=1.0)).sum() / size.rows


def _micro_batch(terms: Tensor, mask_BT: Tensor, size: UpdateSize, max_completion_length: int | None) -> Tensor:
    """Mean over the tokens of the micro-batch (BNPO)."""
    tokens = count(mask_BT, terms) if size.micro_batch_tokens is None else size.micro_batch_tokens
    return masked_sum(terms / tokens.clamp(min=1.0), mask_BT) / size.micro_batches


def _constant(terms: Tensor, mask_BT: Tensor, size: UpdateSize, max_completion_length: int | None) -> Tensor:
    """Sum over tokens divided by a constant length, mean over rows (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    if max_completion_length is None:
        raise ValueError("the 'constant' reduction divides by max_completion_length, which is None")
    return masked_sum(terms, mask_BT) / (size.rows * max_completion_length)


def _tokens(terms: Tensor, mask_BT: Tensor, size: UpdateSize, max_completion_length: int | None) -> Tensor:
    """Mean over all tokens of the update (DAPO, https://arxiv.org/abs/2503.14476)."""
    floor = size.tokens.clamp(min=1) if isinstance(size.tokens, Tensor) else max(size.tokens, 1)
    return masked_sum(terms, mask_BT) / floor


def _length_weighted(terms: Tensor, mask_BT: Tensor, size: UpdateSize, max_completion_length: int | None) -> Tensor:
    """Mean over rows of the sum over tokens (LUSPO, https://arxiv.org/abs/2602.05261)."""
    return masked_sum(terms, mask_BT) / size.rows


def _rows(terms: Tensor, mask_BT: Tensor, size: UpdateSize, max_completion_length: int | None) -> Tensor:
    """Mean over rows of one term each (RLOO); a row without loss tokens still counts, with its constant term."""
    if terms.shape[1] != 1:
        raise ValueError(f"the 'rows' reduction takes one term per row, (B, 1), not {tuple(terms.shape)}")
    return widen(terms).sum() / size.rows


REDUCTIONS: dict[str, Callable[[Tensor, Tensor, UpdateSize, int | None], Tensor]] = {
    "sequence": _sequence,
    "micro_batch": _micro_batch,
    "constant": _constant,
    "tokens": _tokens,
    "length_weighted": _length_weighted,
    "rows": _rows,
}


def reduce_loss(
    terms: Tensor, mask_BT: Tensor, how: str, size: UpdateSize, max_completion_length: int | None = None
) -> Tensor:
    """This micro-batch's share (0-d) of the update's loss, from per-token (B, T) or per-row (B, 1) `terms`."""
    if how not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {tuple(REDUCTIONS)}, not {how!r}")
    return REDUCTIONS[how](terms, mask_BT, size, max_completion_length)
