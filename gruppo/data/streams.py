"""Which prompts a generation consists of.

sampler     p3 p3 p3 p3 p7 p7 p7 p7 | p3 …          indices, see `sampler`
stream      generation 0: [p3 ×4, p7 ×4]             the rows of one generation, this process's share
cursor      p3 p7 | p1 p4 | p0 …                     the same prompts one by one, if some of them get replaced
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gruppo.data.sampler import RepeatSampler, Row, split_for_rank
from gruppo.errors import DataError


class NumberedRow(dict[str, Any]):
    """A row that knows its index in the dataset."""

    def __init__(self, row: Row, index: int):
        super().__init__(row)
        self.index = index


class PromptStream(Protocol):
    """The prompts of a run.

    `rows` returns this process's share of generation `generation` of epoch `epoch`, one row per completion. `prompt`
    returns the prompt at a position, counted from 0, in the sequence of the generations of all epochs. `index` returns
    the epoch of that prompt and its index in the dataset, or None for an endless stream, where they are unknown.
    """

    generations: int | None  # per epoch; None for an endless stream
    prompts: int  # per generation

    def rows(self, epoch: int, generation: int) -> Sequence[Row]: ...

    def prompt(self, position: int) -> Row: ...

    def index(self, position: int) -> tuple[int, int] | None: ...


class Order(Protocol):
    """The indices of an epoch, one per completion."""

    def part(self, generation: int, rows: range) -> list[int]: ...


class ComputedOrder:
    """The order of a `RepeatSampler`: a permutation, from which a generation's rows are computed when needed."""

    def __init__(self, sampler: RepeatSampler, epoch: int, rows_per_pass: int):
        self.sampler = sampler
        self.permutation = sampler.order(epoch)
        self.rows_per_pass = rows_per_pass  # rows of a generation, including its copies

    def part(self, generation: int, rows: range) -> list[int]:
        first = generation * self.rows_per_pass
        return self.sampler.part(self.permutation, range(first + rows.start, first + rows.stop))


class ReadOrder:
    """The order of a user's sampler.

    The sampler is read to the end at once. If it draws random numbers while it is iterated, reading it in parts would
    give different numbers, depending on what else is drawn between two generations, and not the same ones in every
    process. Only the first copy of a generation is kept, and only one index per group.
    """

    def __init__(self, sampler: Iterable[int], *, generations: int, rows: int, copies: int, group_size: int):
        self._kept: list[tuple[NDArray[np.int64], int]] = []  # per generation: indices, and repeats of each
        indices = iter(sampler)
        for generation in range(generations):
            row_B = np.fromiter(islice(indices, rows), np.int64)
            if len(row_B) < rows:
                raise DataError(
                    f"The sampler ended before generation {generation} was complete; its len() implies {generations} "
                    f"generations of {rows} rows, each {copies} times. Let it yield as many indices as len() returns."
                )
            first_P = row_B[::group_size].copy()
            alike = np.array_equal(np.repeat(first_P, group_size), row_B)
            self._kept.append((first_P, group_size) if alike else (row_B, 1))
            deque(islice(indices, rows * (copies - 1)), maxlen=0)
        deque(indices, maxlen=0)  # some samplers count their passes when one ends

    def part(self, generation: int, rows: range) -> list[int]:
        kept, repeated = self._kept[generation]
        return kept[np.arange(rows.start, rows.stop) // repeated].tolist()


class SampledStream:
    """Prompts of a dataset in the order of a sampler that repeats each chunk once per micro-step.

    Only the first copy of a chunk is read: the copies exist so that the sampler's length counts micro-steps.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Any,
        *,
        rows_per_generation: int,
        group_size: int,
        copies: int,
        rank: int,
        world: int,
    ):
        self.dataset = dataset
        self.sampler = sampler
        self.rows_per_generation = rows_per_generation
        self.group_size = group_size
        self.prompts = rows_per_generation // group_size
        self.copies = copies
        self.share = split_for_rank(range(rows_per_generation), rank, world)
        self.generations: int | None = len(sampler) // (rows_per_generation * copies)
        self._orders: dict[int, Order] = {}  # of the last two epochs

    def rows(self, epoch: int, generation: int) -> Sequence[Row]:
        indices = self._order(epoch).part(generation, self.share)
        read = {index: NumberedRow(self.dataset[index], index) for index in dict.fromkeys(indices)}
        return [read[index] for index in indices]

    def prompt(self, position: int) -> Row:
        index = self.index(position)[1]
        return NumberedRow(self.dataset[index], index)

    def index(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, (self.generations or 0) * self.prompts)
        generation, group = divmod(place, self.prompts)
        first = group * self.group_size
        return epoch, self._order(epoch).part(generation, range(first, first + 1))[0]

    def _order(self, epoch: int) -> Order:
        if epoch not in self._orders:
            # A generation may extend into the next epoch, and a user's sampler may not be able to go back.
            self._orders = {before: order for before, order in self._orders.items() if before == epoch - 1}
            self._orders[epoch] = self._open(epoch)
        return self._orders[epoch]

    def _open(self, epoch: int) -> Order:
        if type(self.sampler) is RepeatSampler:  # of any other type, only what it yields is known
            return ComputedOrder(self.sampler, epoch, self.rows_per_generation * self.copies)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return ReadOrder(
            self.sampler,
            generations=self.generations or 0,
            rows=self.rows_per_generation,
            copies=self.copies,
            group_size=self.group_size,
        )


class IterableStream:
    """Prompts of an iterable dataset, read in order and started again when it ends.

    Every process reads the whole stream and keeps its share, so that a group may span processes.
    """

    def __init__(self, dataset: Iterable[Row], *, prompts: int, group_size: int, rank: int, world: int):
        self.dataset = dataset
        self.generations: int | None = None
        self.prompts, self.group_size = prompts, group_size
        self.rank, self.world = rank, world
        self._epoch = 0
        self._first_of_epoch = 0  # each epoch continues where the previous one stopped
        self._start_over()

    def _start_over(self) -> None:
        self._chunks_read = 0
        self._chunk: list[Row] = []
        self._chunk_before: list[Row] = []  # looking ahead may already have read the next one
        self._passes = 0
        self._iterator: Iterator[Row] = iter(())

    def rows(self, epoch: int, generation: int) -> list[Row]:
        if epoch != self._epoch:
            self._epoch, self._first_of_epoch = epoch, self._chunks_read
        chunk = self._read_to(self._first_of_epoch + generation)
        repeated = [row for row in chunk for _ in range(self.group_size)]
        return split_for_rank(repeated, self.rank, self.world)

    def index(self, position: int) -> None:
        return None

    def prompt(self, position: int) -> Row:
        number, place = divmod(position, self.prompts)
        if number == self._chunks_read - 2:
            return self._chunk_before[place]
        if number < self._chunks_read - 1:  # a resumed run goes back if the repeated generation took more this time
            self._start_over()
        return self._read_to(number)[place]

    def _read_to(self, number: int) -> list[Row]:
        """Chunk `number`, or the last one read if that is later; a resumed run reads over what it has already seen."""
        while self._chunks_read <= number:
            self._chunk_before, self._chunk = self._chunk, self._next_chunk()
            self._chunks_read += 1
        return self._chunk

    def _next_chunk(self) -> list[Row]:
        for _ in range(2):
            chunk = list(islice(self._iterator, self.prompts))
            if len(chunk) == self.prompts:
                return chunk
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self._passes)
            self._passes += 1
            self._iterator = iter(self.dataset)
        raise DataError(
            f"The iterable dataset ended after fewer than {self.prompts} prompts, the number that one generation "
            "batch needs. Lower the generation batch size or provide more prompts."
        )


class PromptCursor:
    """A run's position in its stream if some prompts get replaced: counts prompts, not generations.

    Example, groups of 2 and a stream p0 p1 p2 …, where the second of two groups is replaced:
        cursor.begin()
        cursor.take([0, 1], places=range(4)) == [p0, p0, p1, p1]
        cursor.take([1], places=[2, 3]) == [p2, p2]
        cursor.consumed == 3
    """

    def __init__(self, stream: PromptStream, group_size: int):
        self.stream = stream
        self.group_size = group_size
        self._begun = 0  # where the current generation began
        self._next: int | None = None  # unknown before the first generation
        self._go_on_at: int | None = None  # where the next generation begins, if not after the current one

    @property
    def consumed(self) -> int:
        """Prompts taken so far, including those before the run was resumed."""
        return (self._next or 0) if self._go_on_at is None else self._go_on_at

    def begin(self, position: int = 0, *, anew: bool = False) -> None:
        """Begin a generation: after the previous one, or at `position` if no previous one is known.

        With `anew` the generation that was in progress when the run was saved starts over. Its rewards may differ this
        time, but the generation after it begins where it would have begun.
        """
        if self._next is None:
            self._next = position
        elif anew:
            self._go_on_at, self._next = self._next, self._begun
        elif self._go_on_at is not None:
            self._next, self._go_on_at = self._go_on_at, None
        self._begun = self._next

    def take(self, groups: Sequence[int], places: Sequence[int]) -> list[Row]:
        """The next prompts, one per group in `groups`, as the rows at `places` in the global batch."""
        assert self._next is not None
        rows = self._read(self._next, groups, places)
        self._next += len(groups)
        return rows

    def peek(self, groups: Sequence[int], places: Sequence[int]) -> list[Row]:
        """What `take` will return after the current generation, if no more of its groups are replaced."""
        return self._read(self.consumed, groups, places)

    def _read(self, first: int, groups: Sequence[int], places: Sequence[int]) -> list[Row]:
        position = {group: first + i for i, group in enumerate(groups)}
        wanted = dict.fromkeys(place // self.group_size for place in places)
        read = {group: self.stream.prompt(position[group]) for group in wanted}
        return [read[place // self.group_size] for place in places]

    def upcoming(self, count: int) -> range:
        """The positions of the next prompts."""
        assert self._next is not None
        return range(self._next, self._next + count)

    def state_dict(self) -> dict[str, int]:
        return {"generation_began_at": self._begun, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._begun, self._next = state["generation_began_at"], state["consumed"]
