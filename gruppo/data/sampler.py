"""Which prompts a generation is made of, and in which order.

sampler     p3 p3 p3 p3 p7 p7 p7 p7 | p3 …          indices, each repeated once per completion of its group
stream      generation 0: [p3 ×4, p7 ×4]             the rows of one generation, this process's share
cursor      p3 p7 | p1 p4 | p0 …                     the same prompts one by one, where some are sampled in vain
loader      0 1 2 3 4 5 …                            micro-steps; `Trainer` counts and skips them
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from gruppo.errors import DataError

Row = Mapping[str, Any]


class NumberedRow(dict[str, Any]):
    """A row that knows its index in the dataset."""

    def __init__(self, row: Row, index: int):
        super().__init__(row)
        self.index = index


class RepeatSampler(Sampler[int]):
    """Indices in chunks of `batch_size`, each index repeated in a row, each chunk repeated as a whole.

    The ragged last chunk is dropped. Every pass draws the next permutation of one generator, and `set_epoch` goes to
    the permutation of any epoch.

    Example:
        list(RepeatSampler(range(5), mini_repeat_count=2, batch_size=2, repeat_count=2, shuffle=False))
        == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    """

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ):
        self.data_source = data_source
        self.mini_repeat_count = mini_repeat_count
        self.batch_size = batch_size
        self.repeat_count = repeat_count
        self.shuffle = shuffle
        self.num_samples = len(data_source)
        self.seed = torch.Generator().seed() if seed is None else seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass use the permutation of `epoch`."""
        self.epoch = epoch

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(epoch):
            torch.randperm(self.num_samples, generator=generator)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        order = self._order(self.epoch)
        self.epoch += 1
        for start in range(0, self.num_samples - self.batch_size + 1, self.batch_size):
            chunk = order[start : start + self.batch_size]
            for _ in range(self.repeat_count):
                for index in chunk:
                    for _ in range(self.mini_repeat_count):
                        yield index

    def __len__(self) -> int:
        chunks = self.num_samples // self.batch_size
        return chunks * self.batch_size * self.mini_repeat_count * self.repeat_count


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
        self.rank, self.world = rank, world
        self.generations: int | None = len(sampler) // (rows_per_generation * copies)
        self._orders: dict[int, list[list[int]]] = {}  # indices by generation, of the last two epochs

    def rows(self, epoch: int, generation: int) -> Sequence[Row]:
        indices = split_for_rank(self._order(epoch)[generation], self.rank, self.world)
        read = {index: NumberedRow(self.dataset[index], index) for index in dict.fromkeys(indices)}
        return [read[index] for index in indices]

    def prompt(self, position: int) -> Row:
        index = self.index(position)[1]
        return NumberedRow(self.dataset[index], index)

    def index(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, (self.generations or 0) * self.prompts)
        generation, group = divmod(place, self.prompts)
        return epoch, self._order(epoch)[generation][group * self.group_size]

    def _order(self, epoch: int) -> list[list[int]]:
        if epoch not in self._orders:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            stride = self.rows_per_generation * self.copies
            flat = list(self.sampler)
            order = [flat[i * stride : i * stride + self.rows_per_generation] for i in range(self.generations or 0)]
            # A generation may reach into the next epoch; a sampler of the user's may not be able to go back.
            before = self._orders.get(epoch - 1)
            self._orders = {epoch: order} if before is None else {epoch - 1: before, epoch: order}
        return self._orders[epoch]


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


def split_for_rank(rows: list[Any], rank: int, world: int) -> list[Any]:
    """The contiguous share of `rows` of one process; shares differ by at most one row."""
    return rows[len(rows) * rank // world : len(rows) * (rank + 1) // world]


class _Steps(Dataset[int]):
    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class _EndlessSteps(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        index = 0
        while True:
            yield index
            index += 1


def micro_step_loader(count: int | None) -> "DataLoader[int]":
    """A loader of micro-step numbers: `Trainer` takes its length and skips in it, the rows come from the stream."""
    steps: Dataset[int] = _EndlessSteps() if count is None else _Steps(count)
    return DataLoader(steps, batch_size=1, collate_fn=lambda batch: batch[0])


class _EvalBatches(IterableDataset[list[Row]]):
    """One pass over the evaluation prompts, in batches of whole groups; this process's share of each."""

    def __init__(self, dataset: Any, sampler: Any, group_size: int, rows_per_batch: int, rank: int, world: int):
        self.dataset, self.sampler = dataset, sampler
        self.group_size = group_size
        self.rows_per_batch = max(rows_per_batch, -(-world // group_size) * group_size)  # a row for every process
        self.rank, self.world = rank, world

    def _rows(self) -> Iterator[Row]:
        if self.sampler is None:
            for row in self.dataset:
                yield from [row] * self.group_size
            return
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(0)  # every evaluation sees the same order
        last: tuple[int, Row] | None = None
        for index in self.sampler:
            if last is None or last[0] != index:
                last = (index, self.dataset[index])
            yield last[1]

    def __iter__(self) -> Iterator[list[Row]]:
        rows = self._rows()
        batch = list(islice(rows, self.rows_per_batch))
        while batch:
            following = list(islice(rows, self.rows_per_batch))
            if len(following) < self.world:  # too few to go round: no process may be left without a row
                batch, following = batch + following, []
            if len(batch) < self.world:
                raise DataError(f"The evaluation set gives {len(batch)} rows for {self.world} processes; add prompts.")
            yield split_for_rank(batch, self.rank, self.world)
            batch = following


def eval_loader(
    dataset: Any, sampler: Any, *, group_size: int, rows_per_batch: int, rank: int, world: int
) -> "DataLoader[Any]":
    """A loader of row batches for evaluation; nothing is dropped, nothing is padded with rows seen before."""
    return DataLoader(_EvalBatches(dataset, sampler, group_size, rows_per_batch, rank, world), batch_size=None)
