"""The order in which the rows of a dataset are taken, and the data loaders for `Trainer`.

sampler     p3 p3 p3 p3 p7 p7 p7 p7 | p3 …          indices, each repeated once per completion of its group
loader      0 1 2 3 4 5 …                            micro-steps; `Trainer` counts and skips them

`streams` assembles generations from these indices.
"""

from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from gruppo.errors import DataError

Row = Mapping[str, Any]
Shared = TypeVar("Shared", list[Any], range)


class RepeatSampler(Sampler[int]):
    """Indices in chunks of `batch_size`; each index is repeated consecutively, and each chunk as a whole.

    An incomplete last chunk is dropped. Each pass uses the next permutation from one generator; `set_epoch` selects
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
        self._generator = torch.Generator()
        self._drawn: int | None = None  # permutations drawn from the generator so far

    @property
    def chunks(self) -> tuple[int, int, int]:
        """Prompts of a chunk, repeats of each, and repeats of the chunk."""
        return self.batch_size, self.mini_repeat_count, self.repeat_count

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass use the permutation of `epoch`."""
        self.epoch = epoch

    def order(self, epoch: int) -> Tensor:
        """The indices of an epoch, each once."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        if self._drawn is None or self._drawn > epoch:  # else continue from the last permutation drawn
            self._generator.manual_seed(self.seed)
            self._drawn = 0
        for _ in range(self._drawn, epoch):
            torch.randperm(self.num_samples, generator=self._generator)
        self._drawn = epoch + 1
        return torch.randperm(self.num_samples, generator=self._generator)

    def part(self, order: Tensor, places: range) -> list[int]:
        """What a pass in this order yields at `places`, computed without iterating.

        Example:
            list(sampler)[4:9] == sampler.part(sampler.order(0), range(4, 9))
        """
        place_B = torch.arange(places.start, places.stop, places.step)
        per_copy = self.batch_size * self.mini_repeat_count
        first_of_chunk_B = place_B // (per_copy * self.repeat_count) * self.batch_size
        return order[first_of_chunk_B + place_B % per_copy // self.mini_repeat_count].tolist()

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.epoch)
        self.epoch += 1
        for start in range(0, self.num_samples - self.batch_size + 1, self.batch_size):
            chunk = order[start : start + self.batch_size].tolist()
            for _ in range(self.repeat_count):
                for index in chunk:
                    for _ in range(self.mini_repeat_count):
                        yield index

    def __len__(self) -> int:
        chunks = self.num_samples // self.batch_size
        return chunks * self.batch_size * self.mini_repeat_count * self.repeat_count


def split_for_rank(rows: Shared, rank: int, world: int) -> Shared:
    """One process's contiguous share of `rows`; the sizes of shares differ by at most one row."""
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
    """A loader of micro-step numbers: `Trainer` uses its length and skips batches; rows come from the stream."""
    steps: Dataset[int] = _EndlessSteps() if count is None else _Steps(count)
    return DataLoader(steps, batch_size=1, collate_fn=lambda batch: batch[0])


class _EvalBatches(IterableDataset[list[Row]]):
    """One pass over the evaluation prompts in batches of whole groups; yields this process's share of each batch."""

    def __init__(self, dataset: Any, sampler: Any, group_size: int, rows_per_batch: int, rank: int, world: int):
        self.dataset, self.sampler = dataset, sampler
        self.group_size = group_size
        self.rows_per_batch = max(rows_per_batch, -(-world // group_size) * group_size)  # at least one row per process
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
            if len(following) < self.world:  # too few: every process needs a row
                batch, following = batch + following, []
            if len(batch) < self.world:
                raise DataError(f"The evaluation set gives {len(batch)} rows for {self.world} processes; add prompts.")
            yield split_for_rank(batch, self.rank, self.world)
            batch = following


def eval_loader(
    dataset: Any, sampler: Any, *, group_size: int, rows_per_batch: int, rank: int, world: int
) -> "DataLoader[Any]":
    """A loader of row batches for evaluation; no row is dropped, and none is repeated as padding."""
    return DataLoader(_EvalBatches(dataset, sampler, group_size, rows_per_batch, rank, world), batch_size=None)
