"""Convert ragged rows to padded tensors, and join, trim and split those."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gruppo.types import LAYOUTS, Layout, Rollout, Span, TrainBatch


def pad(
    tensors: Sequence[Tensor],
    padding_value: float = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> Tensor:
    """Stack tensors of different shapes, padded to the largest size of each dimension.

    The first dimension (the sequence) may be rounded up to a multiple.

    Example:
        pad([torch.tensor([1, 2]), torch.tensor([3])]) == [[1, 2], [3, 0]]
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side={padding_side!r} must be 'left' or 'right'.")
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    if pad_to_multiple_of is not None:
        shape[0] = -(-shape[0] // pad_to_multiple_of) * pad_to_multiple_of
    first = tensors[0]
    stacked = torch.full((len(tensors), *shape), padding_value, dtype=first.dtype, device=first.device)
    for row, tensor in zip(stacked, tensors, strict=True):
        start = shape[0] - len(tensor) if padding_side == "left" else 0
        row[(slice(start, start + len(tensor)), *(slice(0, size) for size in tensor.shape[1:]))] = tensor
    return stacked


def _places(rows: Sequence[Sequence[Any]], side: str, multiple: int | None) -> Tensor:
    """Bool (B, T): where the values of each row go. T is at least 1, since models need at least one column."""
    lengths_B = torch.tensor([len(row) for row in rows])[:, None]
    width = max(int(lengths_B.max()), 1)
    width = width if multiple is None else -(-width // multiple) * multiple
    place_T = torch.arange(width)
    return place_T >= width - lengths_B if side == "left" else place_T < lengths_B


def _ragged(
    rows: Sequence[Sequence[Any]], value: float, side: str, dtype: torch.dtype, multiple: int | None
) -> Tensor:
    """Rows of different lengths as one tensor, filled in one operation: row by row takes ten times as long."""
    places_BT = _places(rows, side, multiple)
    kind = np.int64 if dtype is torch.long else np.float32
    values = np.fromiter(chain.from_iterable(rows), kind, count=sum(map(len, rows)))
    padded_BT = torch.full(places_BT.shape, value, dtype=dtype)
    padded_BT[places_BT] = torch.from_numpy(values).to(dtype)
    return padded_BT


def collate(
    rollouts: Sequence[Rollout],
    pad_token_id: int,
    device: torch.device,
    pad_to_multiple_of: int | None = None,
) -> TrainBatch:
    """Pad prompts on the left and completions on the right.

    Example, pad id 0:
        prompts [5, 6] and [7, 8, 9], completions [3, 4, 2] and [3, 2]
        -> prompt_ids [[0, 5, 6], [7, 8, 9]], completion_ids [[3, 4, 2], [3, 2, 0]]
    """
    prompts = [rollout.prompt.ids for rollout in rollouts]
    completions = [rollout.completion.ids for rollout in rollouts]
    multiple = pad_to_multiple_of

    batch = TrainBatch(
        prompt_ids=_ragged(prompts, pad_token_id, "left", torch.long, multiple),
        prompt_mask=_places(prompts, "left", multiple).long(),
        completion_ids=_ragged(completions, pad_token_id, "right", torch.long, multiple),
        completion_mask=_places(completions, "right", multiple).long(),
    )
    if any(rollout.completion.model_mask is not None for rollout in rollouts):
        masks = [r.completion.model_mask or [1] * len(r.completion.ids) for r in rollouts]
        batch.tool_mask = _ragged(masks, 1, "right", torch.long, multiple)
    if any(rollout.completion.logps is not None for rollout in rollouts):
        logps = [_known_logps(rollout) for rollout in rollouts]
        batch.sampling_per_token_logps = _ragged(logps, float("nan"), "right", torch.float32, multiple)
    for name, kind in (("engine_logps", "plain_logps"), ("engine_entropies", "entropies")):
        values = [getattr(rollout.completion, kind) for rollout in rollouts]
        if all(value is not None for value in values):
            setattr(batch, name, _ragged(values, 0.0, "right", torch.float32, multiple))
    batch = replace(batch, **{name: tensor.to(device) for name, tensor in batch.to_dict().items()})
    if any(rollout.prompt.vision is not None for rollout in rollouts):
        batch.vision = [rollout.prompt.vision for rollout in rollouts]  # on the CPU, shared by the rows of a prompt
    return batch


def _known_logps(rollout: Rollout) -> list[float]:
    completion = rollout.completion
    if completion.logps is None:
        return [float("nan")] * len(completion.ids)
    return [float("nan") if logp is None else logp for logp in completion.logps]


def join(batches: Sequence[TrainBatch]) -> TrainBatch:
    """The rows of several batches in one batch, as wide as the widest.

    Batches of different generations need not have the same tensors: a rollout that used a tool has a mask that others
    lack, and a reward may have scored steps in only one of them.

    Example, of which the second has a mask:
        completion_ids [[3, 4]] and [[5]], tool_mask None and [[0]]
        -> completion_ids [[3, 4], [5, 0]], tool_mask [[1, 1], [0, 1]]
    """
    widths = {
        Span.PROMPT: max(batch.prompt_ids.shape[1] for batch in batches),
        Span.COMPLETION: max(batch.completion_ids.shape[1] for batch in batches),
    }
    joined: dict[str, Any] = {name: _joined(name, layout, batches, widths) for name, layout in LAYOUTS.items()}
    return TrainBatch(**joined)


def _joined(name: str, layout: Layout, batches: Sequence[TrainBatch], widths: Mapping[Span, int]) -> Any:
    """One field of all rows; None if no batch has it."""
    values = [getattr(batch, name) for batch in batches]
    known = [value for value in values if value is not None]
    span, absent = layout.span, layout.absent
    if not known or (len(known) < len(values) and layout.droppable):
        return None
    if span is Span.BATCH:
        return known[0]
    if span is Span.LIST:
        return [row for batch, value in zip(batches, values, strict=True) for row in value or [None] * len(batch)]
    own_widths = [batch.completion_ids.shape[1] for batch in batches]
    if len(known) < len(values):
        if absent is None:
            raise ValueError(f"{name} is known for the rows of some generations of an update, but not of others.")
        sizes = [(len(batch), width) for batch, width in zip(batches, own_widths, strict=True)]
        values = [known[0].new_full(sizes[i], absent) if v is None else v for i, v in enumerate(values)]
    # Whether each tensor has one value per row, (B,) or (B, 1), rather than one per token.
    single = [
        value.dim() == 1 or (span is Span.COMPLETION and value.shape[1] == 1 < width)
        for value, width in zip(values, own_widths, strict=True)
    ]
    if all(single):
        return torch.cat(values)
    return torch.cat([_widened(value, widths[span], layout, one) for value, one in zip(values, single, strict=True)])


def _widened(values: Tensor, width: int, layout: Layout, single: bool) -> Tensor:
    """The same rows with `width` columns: a single value is repeated, several are padded."""
    if single:
        return values.reshape(-1, 1).expand(-1, width)
    missing = width - values.shape[1]
    sides = (missing, 0) if layout.span is Span.PROMPT else (0, missing)
    return functional.pad(values, sides, value=layout.absent or 0)


def trim(tensors: dict[str, Any], pad_to_multiple_of: int | None = None) -> dict[str, Any]:
    """Cut the columns that are padding in every row: a slice need not be as wide as the batch it came from.

    A 2-D tensor that a subclass added is cut like the completions if it has their width.
    """
    prompt_width = _used_width(tensors["prompt_mask"].flip(1), pad_to_multiple_of)
    width = _used_width(tensors["completion_mask"], pad_to_multiple_of)
    full_width = tensors["completion_ids"].shape[1]
    cut = dict(tensors)
    for name, value in tensors.items():
        span = LAYOUTS[name].span if name in LAYOUTS else Span.COMPLETION
        if span is Span.PROMPT:
            cut[name] = value[:, value.shape[1] - prompt_width :]
        elif span is Span.COMPLETION and isinstance(value, Tensor) and value.dim() == 2:
            cut[name] = value[:, :width] if value.shape[1] == full_width else value
    return cut


def _used_width(mask: Tensor, multiple: int | None) -> int:
    """Number of columns up to the last one that any row uses; a mask may have gaps before it."""
    used = mask.any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    if multiple is not None:
        width = min(-(-width // multiple) * multiple, mask.shape[1])
    return width


def split_tensor_dict(tensors: dict[str, Any], num_chunks: int) -> list[dict[str, Any]]:
    """Cut a dict of tensors (or lists) into equal slices along dim 0; None stays None, 0-d tensors are copied."""
    length = next(len(v) for v in tensors.values() if v is not None and not _is_scalar(v))
    size = length // num_chunks

    def part(value: Any, i: int) -> Any:
        return value if value is None or _is_scalar(value) else value[i * size : (i + 1) * size]

    return [{name: part(value, i) for name, value in tensors.items()} for i in range(num_chunks)]


def shuffle_sequence_dict(tensors: dict[str, Any]) -> dict[str, Any]:
    """Apply one random permutation to every entry; None and 0-d tensors are left as they are."""
    length = next(len(v) for v in tensors.values() if v is not None and not _is_scalar(v))
    order = torch.randperm(length)

    def permuted(value: Any) -> Any:
        if value is None or _is_scalar(value):
            return value
        if isinstance(value, Tensor):
            return value[order.to(value.device)]
        return [value[i] for i in order.tolist()]

    return {name: permuted(value) for name, value in tensors.items()}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
