"""Which prompts a generation consists of.

sampler     p3 p3 p3 p3 p7 p7 p7 p7 | p3 …          indices, see `sampler`
stream      generation 0: [p3 ×4, p7 ×4]             the rows of one generation, this process's share
cursor      p3 p7 | p1 p4 | p0 …                     the same prompts one by one, if some of them get replaced
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
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

    `rows` returns this process's share of a generation that begins after `first` prompts of an epoch, one row per
    completion, and `indices` the epoch and the index in the dataset of each of its prompts. `prompt` returns the
    prompt at a position, counted from 0, in one sequence of `per_epoch` prompts of each epoch, and `index` its epoch
    and index. An endless stream is one epoch, and its indices are positions.
    """

    generations: int | None  # per epoch; None for an endless stream
    prompts: int  # per generation
    available: int | None  # prompts of an epoch that generations may use; None for an endless stream
    per_epoch: int  # 0 for an endless stream

    def rows(self, epoch: int, first: int) -> Sequence[Row]: ...

    def indices(self, epoch: int, first: int) -> list[tuple[int, int]]: ...

    def prompt(self, position: int) -> Row: ...

    def index(self, position: int) -> tuple[int, int]: ...


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
        self.per_epoch = self.generations * self.prompts
        ours = type(sampler) is RepeatSampler and sampler.chunks == (self.prompts, group_size, copies)
        self.available: int | None = sampler.num_samples if ours else self.per_epoch
        self._orders: dict[int, Order] = {}  # of the last two epochs

    def rows(self, epoch: int, first: int) -> Sequence[Row]:
        indices = self._part(epoch, first, self.share)
        read = {index: NumberedRow(self.dataset[index], index) for index in dict.fromkeys(indices)}
        return [read[index] for index in indices]

    def indices(self, epoch: int, first: int) -> list[tuple[int, int]]:
        groups = self._part(epoch, first, range(self.rows_per_generation))[:: self.group_size]
        return [(epoch, index) for index in groups]

    def prompt(self, position: int) -> Row:
        index = self.index(position)[1]
        return NumberedRow(self.dataset[index], index)

    def index(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, self.per_epoch)
        return epoch, self._part(epoch, place, range(1))[0]

    def _part(self, epoch: int, first: int, rows: range) -> list[int]:
        """The indices at `rows`, counted from the rows of the epoch's prompt `first`."""
        order, size, found = self._order(epoch), self.rows_per_generation, list[int]()
        begin, end = (first * self.group_size + row for row in (rows.start, rows.stop))
        while begin < end:  # the sampler repeats whole generations
            generation, place = divmod(begin, size)
            together = min(size - place, end - begin)
            found += order.part(generation, range(place, place + together))
            begin += together
        return found

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

    Prompts at its end that do not fill a generation are completed by the first ones of the next pass. Every process
    reads the whole stream and keeps its share, so that a group may span processes.
    """

    def __init__(self, dataset: Iterable[Row], *, prompts: int, group_size: int, rank: int, world: int):
        self.dataset = dataset
        self.generations: int | None = None
        self.available: int | None = None
        self.per_epoch = 0
        self.prompts, self.group_size = prompts, group_size
        self.rank, self.world = rank, world
        # Looking ahead reads up to a generation too far.
        self._kept: deque[Row] = deque(maxlen=2 * prompts)
        self._start_over()

    def _start_over(self) -> None:
        self._kept.clear()
        self._read = 0
        self._rows = self._passes()

    def _passes(self) -> Iterator[Row]:
        for number in count():
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(number)
            length = 0
            for row in self.dataset:
                length += 1
                yield row
            if length < self.prompts:
                raise DataError(
                    f"The iterable dataset ended after fewer than {self.prompts} prompts, the number that one "
                    "generation batch needs. Lower the generation batch size or provide more prompts."
                )

    def rows(self, epoch: int, first: int) -> list[Row]:
        chunk = [self.prompt(position) for position in range(first, first + self.prompts)]
        return split_for_rank([row for row in chunk for _ in range(self.group_size)], self.rank, self.world)

    def indices(self, epoch: int, first: int) -> list[tuple[int, int]]:
        return [self.index(position) for position in range(first, first + self.prompts)]

    def prompt(self, position: int) -> Row:
        if position < self._read - len(self._kept):  # a resumed run goes back if a generation takes more this time
            self._start_over()
        while self._read <= position:
            self._kept.append(next(self._rows))
            self._read += 1
        return self._kept[position - self._read]

    def index(self, position: int) -> tuple[int, int]:
        return 0, position


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

    def begin_again(self) -> None:
        """Let the next generation begin where the current one did."""
        if self._next is not None:
            self._next, self._go_on_at = self._begun, None

    def state_dict(self) -> dict[str, int]:
        return {"generation_began_at": self._begun, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._begun, self._next = state["generation_began_at"], state["consumed"]
