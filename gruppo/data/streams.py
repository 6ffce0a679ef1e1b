"""Which prompts a generation is made of.

sampler     p3 p3 p3 p3 p7 p7 p7 p7 | p3 …          indices, see `sampler`
stream      generation 0: [p3 ×4, p7 ×4]             the rows of one generation, this process's share
cursor      p3 p7 | p1 p4 | p0 …                     the same prompts one by one, where some are sampled in vain
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

    `rows` are those of generation `generation` of epoch `epoch`, this process's share, one per completion. `prompt` is
    the prompt at a position of the one long sequence that the generations of all epochs make, counted from 0, and
    `index` says to which epoch it belongs and where it is in the dataset, which a stream without end does not know.
    """

    generations: int | None  # per epoch; None for a stream without end
    prompts: int  # per generation

    def rows(self, epoch: int, generation: int) -> Sequence[Row]: ...

    def prompt(self, position: int) -> Row: ...

    def index(self, position: int) -> tuple[int, int] | None: ...


class Order(Protocol):
    """The indices of an epoch, one per completion."""

    def part(self, generation: int, rows: range) -> list[int]: ...


class ComputedOrder:
    """The order of our own sampler: a permutation, from which the rows of a generation are computed when needed."""

    def __init__(self, sampler: RepeatSampler, epoch: int, rows_per_pass: int):
        self.sampler = sampler
        self.permutation = sampler.order(epoch)
        self.rows_per_pass = rows_per_pass  # of a generation and its copies

    def part(self, generation: int, rows: range) -> list[int]:
        first = generation * self.rows_per_pass
        return self.sampler.part(self.permutation, range(first + rows.start, first + rows.stop))


class ReadOrder:
    """The order of a sampler that is not ours.

    It is read from end to end: one that draws as it goes along would draw something else between two generations, and
    not the same in every process. Of the copies of a generation only the first is kept, of a group only one index.
    """

    def __init__(self, sampler: Iterable[int], *, generations: int, rows: int, copies: int, group_size: int):
        self._kept: list[tuple[NDArray[np.int64], int]] = []  # of each generation, and how often each is repeated
        indices = iter(sampler)
        for generation in range(generations):
            row_B = np.fromiter(islice(indices, rows), np.int64)
            if len(row_B) < rows:
                raise DataError(
                    f"The sampler ended before generation {generation} was complete; its length promises "
                    f"{generations} of {rows} rows, each {copies} times. Let it yield as many indices as len() says."
                )
            first_P = row_B[::group_size].copy()
            alike = np.array_equal(np.repeat(first_P, group_size), row_B)
            self._kept.append((first_P, group_size) if alike else (row_B, 1))
            deque(islice(indices, rows * (copies - 1)), maxlen=0)
        deque(indices, maxlen=0)  # some count their passes when one is over

    def part(self, generation: int, rows: range) -> list[int]:
        kept, repeated = self._kept[generation]
        return kept[np.arange(rows.start, rows.stop) // repeated].tolist()


class SampledStream:
    """Prompts of a dataset in the order of a sampler that repeats each chunk once per micro-step.

    Only the first copy of a chunk is read: the copies exist so that lengths count micro-steps.
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
            # A generation may reach into the next epoch; a sampler of the user's may not be able to go back.
            self._orders = {before: order for before, order in self._orders.items() if before == epoch - 1}
            self._orders[epoch] = self._open(epoch)
        return self._orders[epoch]

    def _open(self, epoch: int) -> Order:
        if type(self.sampler) is RepeatSampler:  # of another one nothing is known but what it yields
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
    """Prompts of an iterable dataset, read in order and over again when it ends.

    Every process reads the whole stream and keeps its share, so that a group may straddle processes.
    """

    def __init__(self, dataset: Iterable[Row], *, prompts: int, group_size: int, rank: int, world: int):
        self.dataset = dataset
        self.generations: int | None = None
        self.prompts, self.group_size = prompts, group_size
        self.rank, self.world = rank, world
        self._epoch = 0
        self._first_of_epoch = 0  # each epoch goes on where the last one was left
        self._start_over()

    def _start_over(self) -> None:
        self._chunks_read = 0
        self._chunk: list[Row] = []
        self._chunk_before: list[Row] = []  # a look ahead may reach into the next one
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
        if number < self._chunks_read - 1:  # a resumed run goes back if the generation under way took more this time
            self._start_over()
        return self._read_to(number)[place]

    def _read_to(self, number: int) -> list[Row]:
        """Chunk `number`, or the last one if that is later; a resumed run reads past what it has seen."""
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
    """Where a run is in its stream if some prompts are sampled in vain: positions count prompts, not generations.

    Example, groups of 2 and a stream p0 p1 p2 …, where the second of two groups is replaced:
        cursor.begin()
        cursor.take([0, 1], places=range(4)) == [p0, p0, p1, p1]
        cursor.take([1], places=[2, 3]) == [p2, p2]
        cursor.consumed == 3
    """

    def __init__(self, stream: PromptStream, group_size: int):
        self.stream = stream
        self.group_size = group_size
        self._begun = 0  # where the generation at hand began
        self._next: int | None = None  # not known before the first generation
        self._go_on_at: int | None = None  # where the next generation begins, if not after the one at hand

    @property
    def consumed(self) -> int:
        """Prompts taken so far, resumed parts included."""
        return (self._next or 0) if self._go_on_at is None else self._go_on_at

    def begin(self, position: int = 0, *, anew: bool = False) -> None:
        """Begin a generation: behind the last one, or, in a run that knows of none, at `position`.

        With `anew` the generation that was under way when the run was saved is taken again from its beginning. Its
        rewards may come out differently this time; the generation after it begins where it would have begun.
        """
        if self._next is None:
            self._next = position
        elif anew:
            self._go_on_at, self._next = self._next, self._begun
        elif self._go_on_at is not None:
            self._next, self._go_on_at = self._go_on_at, None
        self._begun = self._next

    def take(self, groups: Sequence[int], places: Sequence[int]) -> list[Row]:
        """The next prompts, one for each of these groups, as rows at these places of the batch of all processes."""
        assert self._next is not None
        rows = self._read(self._next, groups, places)
        self._next += len(groups)
        return rows

    def peek(self, groups: Sequence[int], places: Sequence[int]) -> list[Row]:
        """What `take` will give when the generation at hand is done, if no more of its groups are replaced."""
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
