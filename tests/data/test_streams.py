"""Which prompts a generation is made of: the streams and the cursor, and what they cost."""

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gruppo.data.sampler import RepeatSampler, split_for_rank
from gruppo.data.streams import IterableStream, PromptCursor, SampledStream
from gruppo.errors import DataError
from tests.data.test_sampler import ROWS, names, permutations


def rows_of(stream: Any, epoch: int, generation: int) -> Any:
    return stream.rows(epoch, generation * stream.prompts)


# ---- a stream over a dataset


def worked_example(rank: int, rows: Any = ROWS, **changes: Any) -> SampledStream:
    """2 processes × 2 rows × 3 steps per generation = 12 rows, groups of 4, 2 passes over each generation."""
    sampler = RepeatSampler(rows, mini_repeat_count=4, batch_size=3, repeat_count=6, **({"shuffle": False} | changes))
    return SampledStream(rows, sampler, rows_per_generation=12, group_size=4, copies=6, rank=rank, world=2)


def test_the_worked_example():
    assert len(worked_example(0).sampler) == 216
    streams = [worked_example(rank) for rank in (0, 1)]
    assert [stream.generations for stream in streams] == [3, 3]
    assert [[names(rows_of(stream, 0, g)) for stream in streams] for g in range(3)] == [
        ["p0 p0 p0 p0 p1 p1", "p1 p1 p2 p2 p2 p2"],  # the group of p1 spans both processes
        ["p3 p3 p3 p3 p4 p4", "p4 p4 p5 p5 p5 p5"],
        ["p6 p6 p6 p6 p7 p7", "p7 p7 p8 p8 p8 p8"],  # p9 is dropped
    ]


def test_a_stream_goes_to_any_epoch_and_generation():
    orders = permutations(10, 7, 3)
    straight = worked_example(0, shuffle=True, seed=7)
    visited = {(e, g): names(rows_of(straight, e, g)) for e in range(3) for g in range(3)}
    for (epoch, generation), seen in visited.items():
        a, b = orders[epoch][3 * generation : 3 * generation + 2]
        assert seen == names([ROWS[a]] * 4 + [ROWS[b]] * 2)
        assert names(rows_of(worked_example(0, shuffle=True, seed=7), epoch, generation)) == seen  # a resumed run


def test_each_row_of_a_generation_is_read_once():
    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return dict(super().__getitem__(index))

    rows = Counting(ROWS)
    read = rows_of(worked_example(0, rows), 0, 0)
    assert rows.reads == 2
    assert read[0] is read[3]
    assert read[0] is not read[4]


def test_a_sampler_without_set_epoch_is_asked_again_each_epoch():
    class Forwards:
        passes = 0

        def __len__(self):
            return 4

        def __iter__(self):
            self.passes += 1
            yield from [self.passes - 1] * 4

    stream = SampledStream(ROWS, Forwards(), rows_per_generation=2, group_size=2, copies=2, rank=0, world=1)
    assert [names(rows_of(stream, epoch, 0)) for epoch in (0, 0, 1)] == ["p0 p0", "p0 p0", "p1 p1"]


class Theirs:
    """A sampler that is not ours: it can be iterated, and has a length."""

    def __init__(self, sampler: RepeatSampler):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


@given(
    prompts=st.integers(1, 30),
    mini=st.integers(1, 3),
    batch=st.integers(1, 4),
    repeat=st.integers(1, 3),
    groups=st.integers(1, 4),
    copies=st.integers(1, 3),
    world=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_what_is_computed_and_what_is_kept_is_what_the_sampler_yields(
    prompts, mini, batch, repeat, groups, copies, world, shuffle
):
    """Also where its chunks are not those of the generations."""
    rows = groups * mini
    dataset = [{"prompt": f"p{i}"} for i in range(prompts)]
    sampler = RepeatSampler(dataset, mini, batch, repeat, shuffle, seed=3)
    passes = [list(sampler) for _ in range(2)]
    for rank in range(world):
        for either in (RepeatSampler(dataset, mini, batch, repeat, shuffle, seed=3), Theirs(sampler)):
            sampler.set_epoch(0)
            stream = SampledStream(
                dataset, either, rows_per_generation=rows, group_size=mini, copies=copies, rank=rank, world=world
            )
            assert stream.generations == len(sampler) // (rows * copies)
            for epoch, flat in enumerate(passes):
                for generation in range(stream.generations):
                    first = generation * rows * copies
                    wanted = split_for_rank(flat[first : first + rows], rank, world)
                    assert rows_of(stream, epoch, generation) == [dataset[index] for index in wanted]


def test_the_way_to_an_epoch_is_not_gone_twice(monkeypatch):
    drawn = []
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: drawn.append(1) or randperm(*a, **k))
    stream = worked_example(0, shuffle=True, seed=7)
    for epoch in range(20):
        rows_of(stream, epoch, 0)
    assert len(drawn) == 20


def test_millions_of_prompts_are_neither_repeated_nor_walked_through(monkeypatch):
    """10 million prompts, 16 completions of each, 64 copies: a list of them all has 10 billion entries."""

    def walked(sampler: RepeatSampler) -> Iterator[int]:
        raise AssertionError("the sampler was walked through")

    monkeypatch.setattr(RepeatSampler, "__iter__", walked)
    rows = range(10_000_000)
    sampler = RepeatSampler(rows, mini_repeat_count=16, batch_size=128, repeat_count=64, seed=0)
    dataset = Numbers()
    stream = SampledStream(dataset, sampler, rows_per_generation=2048, group_size=16, copies=64, rank=0, world=1)
    tracemalloc.start()
    try:
        taken = [rows_of(stream, 0, generation) for generation in (0, 40_000, 78_124)]
        assert stream.index(128)[0] == 0
        assert tracemalloc.get_traced_memory()[1] < 2**20  # the permutation itself is a tensor, and not Python's
    finally:
        tracemalloc.stop()
    order = sampler.order(0)
    for generation, read in zip((0, 40_000, 78_124), taken, strict=True):
        prompts = order[128 * generation : 128 * generation + 128].tolist()
        assert [row["prompt"] for row in read] == [f"p{i}" for i in prompts for _ in range(16)]


class Numbers:
    """As many prompts as one likes."""

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"prompt": f"p{index}"}


def test_of_a_sampler_of_the_users_only_the_first_copies_are_kept():
    sampler = Theirs(RepeatSampler(range(4000), mini_repeat_count=4, batch_size=1000, repeat_count=16, seed=0))
    stream = SampledStream(Numbers(), sampler, rows_per_generation=4000, group_size=4, copies=16, rank=0, world=1)
    tracemalloc.start()
    try:
        stream.index(0)
        kept, at_most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4000 * 8 + 16_000  # one index of each group
    assert at_most < 2**19, "256,000 indices: a list of them has 2 MiB, and the numbers in it as much again"


def test_a_group_of_a_sampler_of_the_users_need_not_be_of_one_prompt():
    order = [3, 3, 1, 2, 3, 3, 1, 2, 4, 4, 5, 5, 4, 4, 5, 5]
    stream = SampledStream(ROWS, order, rows_per_generation=4, group_size=2, copies=2, rank=0, world=1)
    assert [names(rows_of(stream, 0, generation)) for generation in range(2)] == ["p3 p3 p1 p2", "p4 p4 p5 p5"]


@pytest.mark.parametrize("convert", [torch.tensor, np.int32], ids=["torch", "numpy"])
def test_indices_may_be_of_any_kind_of_integer(convert):
    order = [convert(i) for i in (3, 3, 1, 1)]
    stream = SampledStream(ROWS, order, rows_per_generation=2, group_size=2, copies=1, rank=0, world=1)
    assert stream.index(1) == (0, 1)
    assert type(rows_of(stream, 0, 0)[0].index) is int


def test_a_sampler_is_read_before_anything_else_draws_from_its_generator():
    """Processes draw differently while they sample; their orders must not come apart."""

    class Drawing:
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[int]:
            return (random.randrange(10) for _ in range(8))

    orders = []
    for drawn_in_between in range(2):
        random.seed(0)
        stream = SampledStream(ROWS, Drawing(), rows_per_generation=1, group_size=1, copies=1, rank=0, world=1)
        first = stream.index(0)
        [random.random() for _ in range(drawn_in_between)]
        orders.append([first, *(stream.index(i) for i in range(1, 8))])
    assert orders[0] == orders[1]


def test_a_sampler_that_ends_early_is_an_error():
    class Short(list):
        def __len__(self) -> int:
            return 12

    def stream(count: int) -> SampledStream:
        return SampledStream(ROWS, Short(range(count)), rows_per_generation=2, group_size=1, copies=2, rank=0, world=1)

    for count, generation in ((0, 0), (4, 1), (7, 2), (9, 2)):
        with pytest.raises(
            DataError, match=f"before generation {generation} was complete.* 3 generations of 2 rows, each 2"
        ):
            rows_of(stream(count), 0, 0)
    assert names(rows_of(stream(10), 0, 1)) == "p4 p5", "only copies are missing"


@given(
    prompts=st.integers(1, 4),
    group=st.integers(1, 3),
    copies=st.integers(1, 2),
    world=st.integers(1, 3),
    first=st.integers(0, 9),
)
def test_a_generation_may_begin_anywhere(prompts, group, copies, world, first):
    """As in a run that was resumed with other batches; the last prompts of the dataset are in reach then."""
    sampler = RepeatSampler(ROWS, group, prompts, copies, shuffle=True, seed=5)
    place = {"rows_per_generation": prompts * group, "group_size": group, "copies": copies, "world": world}
    streams = [SampledStream(ROWS, sampler, rank=rank, **place) for rank in range(world)]
    assert streams[0].available == 10
    first = min(first, 10 - prompts)
    expected = permutations(10, 5, 2)[1][first : first + prompts]
    rows = [row for stream in streams for row in stream.rows(1, first)]
    assert [row.index for row in rows] == [index for index in expected for _ in range(group)]
    assert streams[0].indices(1, first) == [(1, index) for index in expected]


# ---- a stream over an iterable dataset


class Stream:
    """An iterable dataset of p0 … that counts what is taken from it and knows its epoch."""

    def __init__(self, count: int):
        self.count = count
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(ROWS[: self.count])


def iterable(dataset: Any, rank: int = 0, world: int = 1, prompts: int = 3, group: int = 2) -> IterableStream:
    return IterableStream(dataset, prompts=prompts, group_size=group, rank=rank, world=world)


def test_an_iterable_is_read_in_order_each_prompt_once_per_completion():
    stream = iterable(Stream(7))
    assert stream.generations is None
    assert [names(rows_of(stream, 0, g)) for g in range(2)] == ["p0 p0 p1 p1 p2 p2", "p3 p3 p4 p4 p5 p5"]


def test_it_is_read_again_when_it_ends_and_its_ragged_tail_begins_the_next_generation():
    dataset = Stream(7)
    stream = iterable(dataset, group=1)
    generations = [names(rows_of(stream, 0, g)) for g in range(5)]
    assert generations == ["p0 p1 p2", "p3 p4 p5", "p6 p0 p1", "p2 p3 p4", "p5 p6 p0"]
    assert dataset.epochs == [0, 1, 2]


def test_processes_share_the_rows_of_a_generation():
    streams = [iterable(Stream(7), rank=rank, world=2) for rank in (0, 1)]
    assert [names(rows_of(stream, 0, 0)) for stream in streams] == ["p0 p0 p1", "p1 p2 p2"]


def test_a_resumed_run_reads_past_what_it_has_seen():
    straight = iterable(Stream(7))
    expected = [names(rows_of(straight, 0, g)) for g in range(5)]
    assert names(rows_of(iterable(Stream(7)), 0, 4)) == expected[4]
    skipping = iterable(Stream(7))
    assert [names(rows_of(skipping, 0, g)) for g in (1, 3)] == [expected[1], expected[3]]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_iterable_too_short_for_one_generation_is_an_error(count):
    with pytest.raises(DataError, match="fewer than 3 prompts"):
        rows_of(iterable(Stream(count)), 0, 0)


# ---- prompts one by one


def test_prompts_of_a_dataset_are_those_of_its_generations_in_one_sequence():
    orders = permutations(10, 7, 3)
    sequence = [ROWS[index] for order in orders for index in order[:9]]  # the tenth is dropped
    stream = worked_example(0, shuffle=True, seed=7)
    assert stream.prompts == 3
    assert [stream.prompt(position) for position in range(27)] == sequence
    assert [stream.prompt(position) for position in (26, 3, 12, 0)] == [sequence[i] for i in (26, 3, 12, 0)]


@pytest.mark.parametrize("positions", [range(14), (0, 5, 6, 13), (7, 2, 8, 0)], ids=["all", "some", "back and forth"])
def test_prompts_of_an_iterable_are_those_of_its_generations_in_one_sequence(positions):
    sequence = ROWS[:7] * 2
    stream = iterable(Stream(7))
    assert [stream.prompt(position) for position in positions] == [sequence[position] for position in positions]


def test_an_iterable_that_goes_back_begins_with_its_first_epoch_again():
    dataset = Stream(7)
    stream = iterable(dataset)
    stream.prompt(14)
    stream.prompt(0)
    assert dataset.epochs == [0, 1, 2, 0]


def cursor(group: int = 2, rows: int = 10, generation: int = 4) -> PromptCursor:
    sampler = RepeatSampler(range(rows), mini_repeat_count=group, batch_size=generation // group, shuffle=False)
    stream = SampledStream(ROWS, sampler, rows_per_generation=generation, group_size=group, copies=1, rank=0, world=1)
    return PromptCursor(stream, group)


def test_a_cursor_takes_one_prompt_for_each_group():
    taken = cursor()
    taken.begin()
    assert names(taken.take([0, 1], places=range(4))) == "p0 p0 p1 p1"
    assert names(taken.take([1], places=[2, 3])) == "p2 p2"
    assert taken.consumed == 3
    taken.begin()
    assert names(taken.take([0, 1], places=range(4))) == "p3 p3 p4 p4"


@given(
    group=st.integers(1, 4),
    world=st.integers(1, 4),
    rounds=st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=4),
)
def test_processes_take_their_share_of_the_same_prompts(group, world, rounds):
    rounds = [range(6), *map(sorted, rounds)]
    shares = [split_for_rank(list(range(6 * group)), rank, world) for rank in range(world)]
    cursors = [cursor(group, rows=6, generation=6 * group) for _ in shares]
    for taken in cursors:
        taken.begin()
    consumed = 0
    for groups in rounds:
        rows = []
        for taken, share in zip(cursors, shares, strict=True):
            rows += taken.take(groups, [place for place in share if place // group in groups])
        expected = [ROWS[(consumed + i) % 6] for i in range(len(groups)) for _ in range(group)]
        consumed += len(groups)
        assert rows == expected
        assert {taken.consumed for taken in cursors} == {consumed}


def test_a_cursor_that_is_loaded_goes_on_or_takes_the_generation_under_way_again():
    saved = cursor()
    saved.begin()
    saved.take([0, 1], range(4))
    saved.begin()
    saved.take([0, 1], range(4))
    saved.take([0], [0, 1])
    state = saved.state_dict()
    assert state == {"generation_began_at": 2, "consumed": 5}

    going_on = cursor()
    going_on.load_state_dict(state)
    going_on.begin(100)
    assert names(going_on.take([0, 1], range(4))) == "p5 p5 p6 p6"

    again = cursor()
    again.load_state_dict(state)
    again.begin(100, anew=True)
    assert names(again.take([0, 1], range(4))) == "p2 p2 p3 p3"
    assert names(again.take([0, 1], range(4))) == "p4 p4 p5 p5", "more than the first time"
    assert again.state_dict() == state, "a second checkpoint in the same generation"
    again.begin()
    assert names(again.take([0, 1], range(4))) == "p5 p5 p6 p6", "where it would have begun"
    assert again.consumed == 7


def test_a_cursor_that_knows_nothing_begins_where_it_is_told():
    taken = cursor()
    assert taken.consumed == 0
    taken.begin(4, anew=True)
    assert names(taken.take([0, 1], range(4))) == "p4 p4 p5 p5"
    taken.begin(100)
    assert names(taken.take([0, 1], range(4))) == "p6 p6 p7 p7"
