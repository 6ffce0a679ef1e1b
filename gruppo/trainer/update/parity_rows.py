"""The choice of rows for the parity check."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gruppo.plan.budgets import PARITY_TOKENS
from gruppo.policy.packing import prompts_of
from gruppo.types import TrainBatch


def choose(batch: TrainBatch, count: int) -> TrainBatch | None:
    """Short and long rows of at most two prompts, if possible several per prompt; None if no row has a loss."""
    names = ("completion_ids", "completion_mask", "tool_mask", "engine_logps")
    cut = {name: value[:, :PARITY_TOKENS] for name, value in batch.to_dict().items() if name in names}
    batch = TrainBatch(batch.prompt_ids, batch.prompt_mask, **cut)
    lengths, scored = batch.completion_mask.sum(1).tolist(), batch.loss_mask_BT.any(1).tolist()
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts_of(batch)):
        if scored[row]:
            groups.setdefault(prompt.tobytes(), []).append(row)
    if not groups:
        return None
    first, *others = sorted(groups.values(), key=lambda members: len(members) < 2)
    second = others[0] if others else []
    chosen = _from_longest(first, lengths, count - min(len(second), count // 2))
    chosen += _from_longest(second, lengths, count - len(chosen))
    return batch.rows(torch.tensor(chosen, device=batch.completion_ids.device))


def _from_longest(members: Sequence[int], lengths: Sequence[int], count: int) -> list[int]:
    """Up to `count` of these rows, spread evenly from the longest to the shortest."""
    by_length = sorted(members, key=lambda row: lengths[row])
    count = min(count, len(by_length))
    return [by_length[-1 - i * (len(by_length) - 1) // max(count - 1, 1)] for i in range(count)]


def with_short_prompts(batch: TrainBatch) -> TrainBatch:
    """The batch with only the ends of its prompts, for when memory is short.

    The engine's log-probs are left out, because they are conditioned on the whole prompt.
    """
    ids, mask = (tensor[:, -PARITY_TOKENS:] for tensor in (batch.prompt_ids, batch.prompt_mask))
    return replace(batch, prompt_ids=ids, prompt_mask=mask, engine_logps=None)
