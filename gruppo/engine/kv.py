"""KV cache storage: one pool of places (token slots) per layer, allocated in contiguous ranges.

A completion's context is two ranges: the prefix of its prompt, which its whole group reads, and its own tail.

    places   0 1 2 3 4 5 | 6 7 8 9 | 10 11 12 13 | …     the last place is scratch, for rows that only pad a batch
             prompt A    | tail A₀ | tail A₁     |
"""

import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gruppo.engine.memory import lent_memory


class RangeAllocator:
    """First-fit allocation of contiguous ranges, neighbours merged when they are freed.

    Example:
        places = RangeAllocator(10)
        places.take(4), places.take(6), places.take(1) == (0, 4, None)
    """

    def __init__(self, size: int):
        self.size = size
        self.used = 0
        self.high_water = 0
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, length), sorted by start
        self._taken: dict[int, int] = {}
        self._shares: dict[int, int] = {}  # additional owners of a range, by its start

    def take(self, length: int) -> int | None:
        """The start of a free range of this length, or None."""
        for i, (start, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[i]
                else:
                    self._free[i] = (start + length, free - length)
                self._taken[start] = length
                self.used += length
                self.high_water = max(self.high_water, self.used)
                return start
        return None

    def share(self, start: int) -> None:
        """Add an owner to a range; it becomes free when every owner has given it back."""
        self._shares[start] = self._shares.get(start, 0) + 1

    def shrink(self, start: int, length: int) -> None:
        """Keep the first `length` places of a range and give back the others."""
        rest = self._taken[start] - length
        if rest:
            self._taken[start] = length
            self._taken[start + length] = rest
            self.give_back(start + length)

    def give_back(self, start: int) -> None:
        if start in self._shares:
            self._shares[start] -= 1
            if not self._shares[start]:
                del self._shares[start]
            return
        length = self._taken.pop(start)
        self.used -= length
        i = bisect.bisect_left(self._free, (start, 0))
        if i < len(self._free) and start + length == self._free[i][0]:
            length += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == start:
            start, before = self._free.pop(i - 1)
            length, i = length + before, i - 1
        self._free.insert(i, (start, length))


class KvPool:
    """The keys (S, Hkv, D) and values (S, Hkv, Dv) of every layer; layers may differ in their heads.

    Its memory is usable inside `held`; outside, other code may use it if the device can lend memory (memory.py).
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], tokens: int, *, dtype: torch.dtype, device: torch.device
    ):
        """`shapes` has (Hkv, D, Dv) of each layer."""
        self.tokens = tokens
        self.shapes = list(shapes)
        self.dtype = dtype
        # One extra place, which padding rows write to.
        sizes = [(tokens + 1, h, width) for h, *widths in shapes for width in widths]
        self.bytes = sum(places * h * width for places, h, width in sizes) * dtype.itemsize
        self._memory = lent_memory(self.bytes, device)
        if self._memory is None:
            self._whole = torch.zeros(self.bytes // dtype.itemsize, dtype=dtype, device=device)
        else:
            self._whole = self._memory.bytes.view(dtype).zero_()
        parts = self._whole.split([places * h * width for places, h, width in sizes])
        tensors = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        self.keys, self.values = tensors[::2], tensors[1::2]

    @property
    def held_bytes(self) -> int:
        """Bytes that are currently unavailable to other code."""
        return self.bytes if self._memory is None or self._memory.held else 0

    @contextmanager
    def held(self, *, stay: bool = False) -> Iterator[None]:
        """Context in which keys and values can be written and read.

        They are valid until the context ends, or with `stay` until the next `lend`.
        """
        if self._memory is not None and not self._memory.held:
            self._memory.take()
            self._whole.zero_()  # unwritten places get weight 0, and 0 · NaN would be NaN
        try:
            yield
        finally:
            if not stay:
                self.lend()

    def lend(self) -> None:
        """Let others use the memory until it is held again."""
        if self._memory is not None:
            self._memory.lend()

    @property
    def scratch(self) -> int:
        """The extra place, which belongs to no sequence."""
        return self.tokens

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        return self.keys[i], self.values[i]
