"""The state of a decoding batch on the device, and the step that advances it.

One integer matrix holds a column per row of the batch, so that rows enter, leave and move with single copies.
Results are indexed by completion number, not by row, so they cannot be lost or mixed up when rows move. The step can
be captured in a CUDA graph: no value is read back to the host.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from gruppo.engine.sampling import Choice
from gruppo.types import StopReason


class Field(IntEnum):
    """The rows of the state matrix."""

    TOKEN = 0  # fed to the model next
    PROMPT_START = 1  # of the prompt's prefix in the pool
    PROMPT_LEN = 2  # tokens of that prefix
    TAIL_START = 3
    TAIL_LEN = 4  # tokens in the tail, and tokens sampled so far
    LIMIT = 5  # maximum number of tokens to sample
    KEY = 6  # of the noise
    RESULT = 7  # number of the completion: its row in `Results`
    SEAT = 8  # row of `Runner.seen`, fixed for the lifetime of the completion
    DONE = 9


# The stop codes on the device are indices into this tuple; 0 means that the completion is still running.
STOPS: tuple[StopReason | None, ...] = (None, StopReason.EOS, StopReason.LENGTH, StopReason.NAN)


class Results:
    """The completions of one call: tokens, log-probs, entropies (C, T), lengths and stop codes (C,)."""

    def __init__(self, completions: int, tokens: int, *, entropies: bool, device: torch.device):
        self.completions = completions
        shape = (completions + 1, tokens)  # the last row takes what padding rows write
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logps = torch.zeros(shape, device=device)
        self.plain_logps = torch.zeros(shape, device=device)
        self.entropies = torch.zeros(shape, device=device) if entropies else None
        self.lengths = torch.zeros(completions + 1, dtype=torch.long, device=device)
        self.stops = torch.zeros(completions + 1, dtype=torch.long, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        some = [self.tokens, self.logps, self.plain_logps, self.lengths, self.stops]
        return some if self.entropies is None else [*some, self.entropies]

    def fits(self, completions: int, tokens: int, entropies: bool) -> bool:
        rows, columns = self.tokens.shape
        return completions < rows and tokens <= columns and entropies == (self.entropies is not None)

    def clear(self) -> None:
        self.lengths.zero_()
        self.stops.zero_()


class Rows:
    """The batch: column r of `state` holds row r; the first `count` columns are in use, the rest are padding."""

    def __init__(self, rows: int, results: Results, *, scratch: int, eos: Sequence[int], device: torch.device):
        self.results = results
        self.device = device
        self.capacity = rows
        self.count = 0
        self.padding = torch.zeros(len(Field), dtype=torch.long, device=device)
        self.padding[Field.TAIL_START] = scratch
        self.padding[Field.LIMIT] = 1
        self.padding[Field.RESULT] = len(results.lengths) - 1
        self.padding[Field.SEAT] = rows
        self.padding[Field.DONE] = 1
        # Every row of the matrix is 16-byte aligned: kernels are compiled for such addresses.
        self.state = self.padding[:, None].repeat(1, -(-rows // 2) * 2)
        self.eos = torch.tensor(list(eos), dtype=torch.long, device=device)

    def enter(self, columns: Sequence[Sequence[int]]) -> None:
        """Append rows, each a list of values in the order of `Field`."""
        new = torch.tensor(columns, dtype=torch.long).T
        if self.device.type == "cuda":
            new = new.contiguous().pin_memory()
        self.state[:, self.count : self.count + len(columns)] = new.to(self.device, non_blocking=True)
        self.count += len(columns)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; the others leave."""
        index = torch.tensor(rows, dtype=torch.long)
        if self.device.type == "cuda":
            index = index.pin_memory()
        kept = self.state[:, index.to(self.device, non_blocking=True)]
        self.state[:, : len(rows)] = kept
        self.state[:, len(rows) : self.count] = self.padding[:, None]
        self.count = len(rows)

    def clear(self) -> None:
        self.state.copy_(self.padding[:, None].expand_as(self.state))
        self.count = 0

    def record(self, state: Tensor, choice: Choice) -> None:
        """Store what was sampled for the rows of `state` (a view of the first columns) and advance these rows.

        A finished row keeps its state, so replaying it is harmless until the host removes it: it never writes beyond
        its tail, and its results go to the last row of `Results`, which is never read.
        """
        results = self.results
        fields = state.unbind()
        done, column = fields[Field.DONE].bool(), fields[Field.TAIL_LEN]
        broken = choice.tokens < 0
        token = torch.where(broken, fields[Field.TOKEN], choice.tokens)
        target = fields[Field.RESULT].masked_fill(done, len(results.lengths) - 1)
        results.tokens.index_put_((target, column), token)
        results.logps.index_put_((target, column), choice.logps)
        results.plain_logps.index_put_((target, column), choice.plain_logps)
        if results.entropies is not None:
            assert choice.entropies is not None
            results.entropies.index_put_((target, column), choice.entropies)

        length = column + 1
        ended = (token[:, None] == self.eos).any(1)
        stop = ((length >= fields[Field.LIMIT]) * 2).masked_fill_(ended, 1).masked_fill_(broken, 3)  # as in STOPS
        results.stops.index_put_((target,), stop)
        results.lengths.index_put_((target,), length.sub_(broken.long()))
        stays = done.logical_or_(stop)
        fields[Field.TOKEN].copy_(torch.where(stays, fields[Field.TOKEN], token))
        column.add_(stays.logical_not())
        fields[Field.DONE].copy_(stays)
