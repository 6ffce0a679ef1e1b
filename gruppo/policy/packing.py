"""Packed rows without padding: completions are concatenated, each prompt occurs once for all of its completions.

    prompt  5 6 7      completions  8 9 2  and  3 2            (rows of one group)
    pack    5 6 7 | 8 9 | 3      positions  0 1 2 | 3 4 | 3    (three segments, the first is parent of the others)

A completion's last token is only ever a target, so it is not in the pack. Its first token is predicted from the
prompt's last one, which the group shares.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gruppo.kernels.attention import Segments
from gruppo.types import TrainBatch


@dataclass(frozen=True)
class PackedRows:
    """Some rows of a batch as one sequence of N tokens, with M tokens to score.

    For the example above, rows 0 and 1 of a batch three tokens wide:
        sources  [2, 3, 4, 2, 5]    the token of the pack from which each scored token is predicted
        targets  [8, 9, 2, 3, 2]    those tokens
        places   [0, 1, 2, 3, 4]    where they are in the flattened (2, 3) rows
    """

    rows: tuple[int, ...]
    row_index: Tensor  # the same, on the device of the tokens
    width: int  # T, columns of the padded completions
    input_ids: Tensor  # (N,)
    position_ids: Tensor  # (N,)
    segments: Segments
    sources: Tensor  # (M,)
    targets: Tensor  # (M,)
    places: Tensor  # (M,)
    prompt_tokens: int  # how many of the N belong to prompts
    repeats: Tensor | None = None  # (N,): the number of rows each token belongs to, in packs of whole rows

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    def padded(self, values_M: Tensor) -> Tensor:
        """Scatter scores (M,) to their places, (rows, T), with 0 elsewhere; differentiable."""
        flat = values_M.new_zeros(len(self.rows) * self.width)
        return flat.index_put((self.places,), values_M).view(len(self.rows), self.width)

    def to(self, device: torch.device) -> "PackedRows":
        names = ["row_index", "input_ids", "position_ids", "sources", "targets", "places"]
        names += [] if self.repeats is None else ["repeats"]
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        segments = Segments.of(self.segments.lengths, self.segments.parents, device)
        segments.keep("positions", lambda: moved["position_ids"])
        return replace(self, segments=segments, **moved)


def prompts_of(batch: TrainBatch) -> list[np.ndarray]:
    """The prompt of each row without padding, on the host, copied there in one piece."""
    ids_BT, mask_BT = batch.prompt_ids.cpu().numpy(), batch.prompt_mask.bool().cpu().numpy()
    return [ids[on] for ids, on in zip(ids_BT, mask_BT, strict=True)]


class Packer:
    """Divides the rows of a batch into packs with a limited number of tokens.

    `share=False` gives every row its own copy of the prompt: if a model draws noise in training, the rows of a group
    must not share the prompt's noise. `whole` keeps the last token of each completion: nothing is predicted from it,
    but a router assigns it to experts.
    """

    def __init__(self, batch: TrainBatch, *, share: bool = True, whole: bool = False):
        self.device = batch.completion_ids.device
        self.width = batch.completion_ids.shape[1]
        self.share = share
        self.left_out = 0 if whole else 1  # tokens left out at the end of a completion
        # One copy to the host for the whole batch: slicing row by row would synchronise with a GPU thousands of times.
        # NumPy arrays, and few of them: making several small tensors per row takes longer than running a layer.
        self.completions, self.mask, self.scored = (
            part.cpu().numpy()
            for part in (batch.completion_ids, batch.completion_mask.bool(), batch.loss_mask_BT.bool())
        )
        self.prompts = prompts_of(batch)
        self.lengths = self.mask.sum(1)
        self.tails = np.maximum(self.lengths - self.left_out, 0)
        self.keys: list[Hashable] = [(i if not share else None, ids.tobytes()) for i, ids in enumerate(self.prompts)]

    def packs(self, rows: Sequence[int], budget: int, group_budget: int | None = None) -> list[PackedRows]:
        """These rows in packs of at most `budget` tokens; a row that exceeds it alone is a pack by itself.

        A pack of a single group may have up to `group_budget` tokens.
        """
        prompt_tokens = [len(self.prompts[row]) for row in rows]
        tails = self.tails[rows].tolist() if len(rows) else []
        cut = cut_rows([self.keys[row] for row in rows], prompt_tokens, tails, budget, group_budget)
        return [self._pack([rows[i] for i in part]) for part in cut]

    def _pack(self, rows: Sequence[int]) -> PackedRows:
        groups: dict[Hashable, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(self.keys[row], []).append(i)
        order = np.array([i for members in groups.values() for i in members])  # rows of a group are adjacent
        picked = np.array(rows)[order]
        mask, lengths, tails = self.mask[picked], self.lengths[picked], self.tails[picked]
        firsts = np.cumsum(lengths) - lengths  # where a row begins among all completion tokens of the pack
        completions, scored = self.completions[picked][mask], self.scored[picked][mask]
        of_row, column = np.nonzero(mask)
        kept = completions[np.arange(len(completions)) - firsts[of_row] < tails[of_row]]
        laid = self._lay_out(rows, groups, tails, kept)
        sources = laid.starts[of_row] - 1 + np.arange(len(completions)) - firsts[of_row]
        begun = lengths > 0
        sources[firsts[begun]] = laid.ends_of_prompts[begun]
        host = Segments.of(laid.lengths, laid.parents, torch.device("cpu"))
        return PackedRows(
            rows=tuple(rows),
            row_index=torch.tensor(list(rows)),
            width=self.width,
            input_ids=torch.from_numpy(np.concatenate(laid.ids)),
            position_ids=host.positions(),
            segments=host,
            sources=torch.from_numpy(sources[scored]),
            targets=torch.from_numpy(completions[scored]),
            places=torch.from_numpy((order[of_row] * self.width + column)[scored]),
            prompt_tokens=sum(length for length, parent in zip(laid.lengths, laid.parents, strict=True) if parent < 0),
            repeats=None
            if self.left_out
            else torch.tensor(laid.repeats).repeat_interleave(torch.tensor(laid.lengths)),
        ).to(self.device)

    def _lay_out(
        self, rows: Sequence[int], groups: Mapping[Hashable, Sequence[int]], tails: np.ndarray, kept: np.ndarray
    ) -> "_Layout":
        """Lay out each group's prompt, followed by the kept tokens of its completions."""
        laid = _Layout(np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64))
        start = first = begin = 0  # in the pack; among its rows; among kept tokens
        for members in groups.values():
            prompt, parent, last = self.prompts[rows[members[0]]], len(laid.lengths), first + len(members)
            sizes = tails[first:last]
            ends = np.cumsum(sizes)
            laid.ends_of_prompts[first:last] = start + len(prompt) - 1
            laid.starts[first:last] = start + len(prompt) + ends - sizes
            laid.ids += [prompt, kept[begin : begin + ends[-1]]]
            present = sizes[sizes > 0].tolist()
            laid.lengths += [len(prompt), *present]
            laid.parents += [-1, *(parent for _ in present)]
            laid.repeats += [len(members), *(1 for _ in present)]
            start, first, begin = start + len(prompt) + int(ends[-1]), last, begin + int(ends[-1])
        return laid


@dataclass
class _Layout:
    """Where the parts of a pack are, while it is built."""

    starts: np.ndarray  # of the completion of each row
    ends_of_prompts: np.ndarray  # the last token of each row's prompt
    ids: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of segments
    parents: list[int] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)  # the number of rows each segment belongs to


def idle_pack(device: torch.device) -> PackedRows:
    """A dummy pack, a prompt of one token and a completion of two, for a pass that only keeps processes in step."""
    ids = torch.zeros((1, 2), dtype=torch.long, device=device)
    ones = torch.ones_like(ids)
    batch = TrainBatch(prompt_ids=ids[:, :1], prompt_mask=ones[:, :1], completion_ids=ids, completion_mask=ones)
    (pack,) = Packer(batch).packs([0], budget=8)
    return pack


def cut_rows(
    keys: Sequence[Hashable],
    prompts: Sequence[int],
    tails: Sequence[int],
    budget: int,
    group_budget: int | None = None,
) -> list[list[int]]:
    """Divide rows with these prompt lengths (equal keys: same prompt) and completion lengths into packs in the budget.

    A group stays together unless it alone is larger than `group_budget` (by default the budget); then it is split into
    as few parts as possible, of about equal size.
    Packs are filled evenly, largest part first, so that no small pack is left over.

    Example, two groups with prompts of 10 tokens, within 60:
        cut_rows("aaab", [10] * 4, [20, 20, 20, 5], 60) == [[0, 2], [1, 3]]
    """
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    limit = max(budget, group_budget or 0)
    parts = [part for members in groups.values() for part in _split_group(members, prompts, tails, limit)]

    def size(part: Sequence[int]) -> int:
        return prompts[part[0]] + sum(tails[i] for i in part)

    if not parts:
        return []
    count = -(-sum(map(size, parts)) // budget)
    packs: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for part in sorted(parts, key=size, reverse=True):
        least = min(range(len(packs)), key=filled.__getitem__)
        if packs[least] and filled[least] + size(part) > budget:
            packs.append([])
            filled.append(0)
            least = len(packs) - 1
        packs[least] += part
        filled[least] += size(part)
    return [sorted(pack) for pack in packs if pack]


def _split_group(members: list[int], prompts: Any, tails: Any, budget: int) -> list[list[int]]:
    """Split a group into parts that each fit together with a copy of the prompt."""
    total, room = sum(tails[i] for i in members), max(budget - prompts[members[0]], 1)
    if total <= room:
        return [members]
    fitted = _first_fit(members, tails, room)
    even = _even_parts(members, tails, len(fitted))
    return even if all(sum(tails[i] for i in part) <= room for part in even) else fitted


def _first_fit(members: list[int], tails: Any, room: int) -> list[list[int]]:
    """Assign rows, longest first, to the first part that has room."""
    parts: list[list[int]] = []
    left: list[int] = []
    for i in sorted(members, key=lambda i: -tails[i]):
        place = next((p for p, free in enumerate(left) if free >= tails[i]), len(parts))
        if place == len(parts):
            parts.append([])
            left.append(room)
        parts[place].append(i)
        left[place] -= tails[i]
    return [sorted(part) for part in parts]


def _even_parts(members: list[int], tails: Any, count: int) -> list[list[int]]:
    """Assign rows, longest first, to the part with the fewest tokens; each part is then sorted."""
    parts: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for i in sorted(members, key=lambda i: -tails[i]):
        least = min(range(count), key=lambda p: (filled[p], len(parts[p])))
        parts[least].append(i)
        filled[least] += tails[i]
    return [sorted(part) for part in parts if part]
