"""The results of an update, kept until its end for the record of the run.

Only references are kept while the device works. At the end of the update, after the device has synchronised anyway,
the values of all rows are copied to the host together.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gruppo.runs.updates import UpdateRows
from gruppo.types import TrainBatch, required


class MicroBatchResult(NamedTuple):
    """The results of one micro-batch."""

    loss: Tensor
    logps_BT: Tensor
    entropy_BT: Tensor | None  # if the loss depends on them
    entropy_coef: float
    ran_B: Tensor | None  # None: all rows


class UpdateBuffer:
    """The results of the micro-batches of the current update, in order.

    Example:
        buffer.keep(MicroBatchResult(loss, logps_BT, None, 0.0, None))  # for each micro-batch
        rows = buffer.take(batches, facts, samplers=False)        # once, at the end of the update
    """

    def __init__(self) -> None:
        self._pieces: list[MicroBatchResult] = []

    def forget(self) -> None:
        """Drop the results of an update that was interrupted."""
        self._pieces = []

    def keep(self, piece: MicroBatchResult) -> None:
        self._pieces.append(piece)

    def take(self, batches: Sequence[TrainBatch], facts: dict[str, Any], *, samplers: bool) -> UpdateRows | None:
        """The rows of the update; without log-probs if a subclass has its own loss.

        None if the batches do not say where their rows are in the record, since rows could not be looked up then.
        """
        pieces, self._pieces = self._pieces, []
        if any(batch.generation is None or batch.place is None for batch in batches):
            return None
        return rows_for_record(batches, pieces if len(pieces) == len(batches) else (), facts, samplers=samplers)


def rows_for_record(
    batches: Sequence[TrainBatch], pieces: Sequence[MicroBatchResult], facts: dict[str, Any], *, samplers: bool
) -> UpdateRows:
    """The rows of an update's micro-batches, with the data of each."""
    masks = [batch.completion_mask.bool() for batch in batches]
    ran = [torch.ones_like(mask[:, 0]) if p.ran_B is None else p.ran_B for mask, p in zip(masks, pieces, strict=False)]
    ran_B = torch.cat(ran) if pieces else torch.cat([torch.zeros_like(mask[:, 0]) for mask in masks])
    numbers = [torch.cat([mask.sum(1) for mask in masks]), ran_B.long()]
    numbers += [torch.cat([required(getattr(batch, name)) for batch in batches]) for name in ("generation", "place")]
    lengths, ran_rows, generation, place = torch.stack(numbers).tolist()
    old, of_tokens = _ratios_to(batches)
    if pieces:
        of_tokens["logps"] = [piece.logps_BT for piece in pieces]
        if all(piece.entropy_BT is not None for piece in pieces):
            of_tokens["entropies"] = [required(piece.entropy_BT) for piece in pieces]
    if all(batch.ref_per_token_logps is not None for batch in batches):
        of_tokens["ref_logps"] = [required(batch.ref_per_token_logps) for batch in batches]
    if samplers and all(batch.sampling_per_token_logps is not None for batch in batches):
        of_tokens["sampler_logps"] = [required(batch.sampling_per_token_logps) for batch in batches]
    further: dict[str, Any] = _ragged(of_tokens, masks, lengths)
    logps = further.pop("logps", [None] * len(lengths))
    for name, field in (("old_sum", "old_logps"), ("kl_penalty", "kl_penalty")):
        if all(getattr(batch, field) is not None for batch in batches):
            further[name] = torch.cat([getattr(batch, field) for batch in batches]).tolist()
    sizes = [len(batch) for batch in batches]
    if any(piece.entropy_coef for piece in pieces):
        further["entropy_coef"] = np.repeat([piece.entropy_coef for piece in pieces], sizes)
    return UpdateRows(
        generation=generation,
        row=place,
        micro_batch=np.repeat(np.arange(len(batches)), sizes).tolist(),
        logps=[value if ran else None for value, ran in zip(logps, ran_rows, strict=True)],
        old=old,
        facts={"loss": float(torch.stack([p.loss for p in pieces]).sum()) if pieces else None, **facts},
        further=further,
    )


def _ratios_to(batches: Sequence[TrainBatch]) -> tuple[str, dict[str, list[Tensor]]]:
    """The source of the old log-probs in the ratios of these rows, and those log-probs if no other file has them."""
    if all(batch.old_per_token_logps is not None for batch in batches):
        sampled = [batch.engine_logps for batch in batches]
        old = [required(batch.old_per_token_logps) for batch in batches]
        if all(a is not None and torch.equal(a, b) for a, b in zip(sampled, old, strict=True)):
            return "rollout", {}
        return "row", {"old_logps": old}
    return "sum" if all(batch.old_logps is not None for batch in batches) else "own", {}


def _ragged(
    of_tokens: dict[str, list[Tensor]], masks: Sequence[Tensor], lengths: Sequence[int]
) -> dict[str, list[np.ndarray | None]]:
    """One array for each row, None for a row without completion tokens; copied from the device all at once."""
    if not of_tokens:
        return {}
    # A piece may be wider than its micro-batch: packed rows are as wide as the widest of the update.
    chosen = [v[:, : m.shape[1]][m] for values in of_tokens.values() for v, m in zip(values, masks, strict=True)]
    flat = torch.cat([values.float() for values in chosen]).cpu().numpy()
    bounds = [0, *accumulate(lengths)]
    return {
        name: [flat[first + a : first + b] if b > a else None for a, b in pairwise(bounds)]
        for name, first in zip(of_tokens, range(0, len(flat), bounds[-1] or 1), strict=False)
    }
