"""Which prompts a generation is made of: the sampler, the streams, the batches of an evaluation."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.data.sampler import (
    IterableStream,
    PromptCursor,
    RepeatSampler,
    SampledStream,
    eval_loader,
    micro_step_loader,
    split_for_rank,
)
from gruppo.errors import DataError

ROWS = [{"prompt": f"p{i}"} for i in range(10)]


def permutations(n: int, seed: int, count: int) -> list[list[int]]:
    """What one generator gives, permutation after permutation."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(n, generator=generator).tolist() for _ in range(count)]


def names(rows: Any) -> str:
    return " ".join(row["prompt"] for row in rows)


# ---- the sampler


def test_repeats_indices_and_chunks_and_drops_the_ragged_one():
    sampler = RepeatSampler(range(5), mini_repeat_count=2, batch_size=2, repeat_count=3, shuffle=False)
    first, second = [0, 0, 1, 1] * 3, [2, 2, 3, 3] * 3
    assert list(sampler) == first + second
    assert len(sampler) == 24


def test_defaults_visit_every_index_once():
    sampler = RepeatSampler(range(7), mini_repeat_count=1, seed=3)
    assert sorted(sampler) == list(range(7))


@given(
    n=st.integers(0, 30),
    mini=st.integers(1, 4),
    batch=st.integers(1, 8),
    repeat=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_shape_and_length(n, mini, batch, repeat, shuffle, seed):
    sampler = RepeatSampler(range(n), mini, batch, repeat, shuffle, seed)
    order = permutations(n, seed, 1)[0] if shuffle else list(range(n))
    chunks = [order[i : i + batch] for i in range(0, n, batch)]
    expected = [
        i for chunk in chunks if len(chunk) == batch for _ in range(repeat) for i in chunk for _ in range(mini)
    ]
    assert list(sampler) == expected
    assert len(sampler) == len(expected) == n // batch * batch * mini * repeat


def test_each_pass_is_the_next_permutation_of_one_generator():
    sampler = RepeatSampler(range(8), mini_repeat_count=1, batch_size=8, seed=42)
    assert [list(sampler) for _ in range(3)] == permutations(8, 42, 3)


def test_set_epoch_goes_to_any_permutation_and_on_from_there():
    sampler = RepeatSampler(range(8), mini_repeat_count=1, batch_size=8, seed=42)
    orders = permutations(8, 42, 4)
    sampler.set_epoch(2)
    assert [list(sampler), list(sampler)] == orders[2:]
    sampler.set_epoch(0)
    assert list(sampler) == orders[0]


def test_seeds_differ_and_no_seed_differs_from_run_to_run():
    one, other = (list(RepeatSampler(range(50), 1, seed=seed)) for seed in (0, 1))
    assert one != other
    unseeded = [RepeatSampler(range(50), 1) for _ in range(2)]
    assert list(unseeded[0]) != list(unseeded[1])


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    list(RepeatSampler(range(8), 2, seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- a stream over a dataset


def worked_example(rank: int, rows: Any = ROWS, **changes: Any) -> SampledStream:
    """2 processes × 2 rows × 3 steps per generation = 12 rows, groups of 4, 2 passes over each generation."""
    sampler = RepeatSampler(rows, mini_repeat_count=4, batch_size=3, repeat_count=6, **({"shuffle": False} | changes))
    return SampledStream(rows, sampler, rows_per_generation=12, group_size=4, copies=6, rank=rank, world=2)


def test_the_worked_example():
    assert len(worked_example(0).sampler) == 216
    streams = [worked_example(rank) for rank in (0, 1)]
    assert [stream.generations for stream in streams] == [3, 3]
    assert [[names(stream.rows(0, g)) for stream in streams] for g in range(3)] == [
        ["p0 p0 p0 p0 p1 p1", "p1 p1 p2 p2 p2 p2"],  # the group of p1 spans both processes
        ["p3 p3 p3 p3 p4 p4", "p4 p4 p5 p5 p5 p5"],
        ["p6 p6 p6 p6 p7 p7", "p7 p7 p8 p8 p8 p8"],  # p9 is dropped
    ]


def test_a_stream_goes_to_any_epoch_and_generation():
    orders = permutations(10, 7, 3)
    straight = worked_example(0, shuffle=True, seed=7)
    visited = {(e, g): names(straight.rows(e, g)) for e in range(3) for g in range(3)}
    for (epoch, generation), seen in visited.items():
        a, b = orders[epoch][3 * generation : 3 * generation + 2]
        assert seen == names([ROWS[a]] * 4 + [ROWS[b]] * 2)
        assert names(worked_example(0, shuffle=True, seed=7).rows(epoch, generation)) == seen  # a resumed run


def test_each_row_of_a_generation_is_read_once():
    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return dict(super().__getitem__(index))

    rows = Counting(ROWS)
    read = worked_example(0, rows).rows(0, 0)
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
    assert [names(stream.rows(epoch, 0)) for epoch in (0, 0, 1)] == ["p0 p0", "p0 p0", "p1 p1"]


@given(count=st.integers(0, 40), world=st.integers(1, 6))
def test_shares_are_contiguous_and_within_one_row_of_each_other(count, world):
    shares = [split_for_rank(list(range(count)), rank, world) for rank in range(world)]
    assert [i for share in shares for i in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


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
    assert [names(stream.rows(0, g)) for g in range(2)] == ["p0 p0 p1 p1 p2 p2", "p3 p3 p4 p4 p5 p5"]


def test_it_is_read_again_when_it_ends_without_its_ragged_tail():
    dataset = Stream(7)
    stream = iterable(dataset)
    assert [names(stream.rows(0, g))[:2] for g in range(5)] == ["p0", "p3", "p0", "p3", "p0"]
    assert dataset.epochs == [0, 1, 2]


def test_processes_share_the_rows_of_a_generation():
    streams = [iterable(Stream(7), rank=rank, world=2) for rank in (0, 1)]
    assert [names(stream.rows(0, 0)) for stream in streams] == ["p0 p0 p1", "p1 p2 p2"]


def test_a_resumed_run_reads_past_what_it_has_seen():
    straight = iterable(Stream(7))
    expected = [names(straight.rows(0, g)) for g in range(5)]
    assert names(iterable(Stream(7)).rows(0, 4)) == expected[4]
    skipping = iterable(Stream(7))
    assert [names(skipping.rows(0, g)) for g in (1, 3)] == [expected[1], expected[3]]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_iterable_too_short_for_one_generation_is_an_error(count):
    with pytest.raises(DataError, match="fewer than 3 prompts"):
        iterable(Stream(count)).rows(0, 0)


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
    sequence = [ROWS[i] for i in (0, 1, 2, 3, 4, 5) * 3]  # the seventh is dropped
    stream = iterable(Stream(7))
    assert [stream.prompt(position) for position in positions] == [sequence[position] for position in positions]


def test_an_iterable_that_goes_back_begins_with_its_first_epoch_again():
    dataset = Stream(7)
    stream = iterable(dataset)
    stream.prompt(12)
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


# ---- loaders


def test_the_micro_step_loader_counts():
    loader = micro_step_loader(5)
    assert (list(loader), len(loader)) == ([0, 1, 2, 3, 4], 5)


def test_the_endless_micro_step_loader_counts_on():
    steps = iter(micro_step_loader(None))
    assert [next(steps) for _ in range(4)] == [0, 1, 2, 3]


def eval_batches(rows: int, group: int, world: int, per_batch: int, sampled: bool) -> list[list[list[str]]]:
    """For each process, the prompts of its batches."""
    dataset = [{"prompt": f"p{i}"} for i in range(rows)]
    sampler = RepeatSampler(dataset, mini_repeat_count=group, seed=1) if sampled else None
    return [
        [
            [row["prompt"] for row in batch]
            for batch in eval_loader(
                dataset, sampler, group_size=group, rows_per_batch=per_batch, rank=rank, world=world
            )
        ]
        for rank in range(world)
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2])
@given(rows=st.integers(1, 13), groups=st.integers(1, 4), sampled=st.booleans())
@settings(max_examples=30)
def test_nothing_is_dropped_or_repeated_in_evaluation(world, group, rows, groups, sampled):
    if rows * group < world:
        with pytest.raises(DataError, match=f"gives {rows * group} rows for {world} processes"):
            eval_batches(rows, group, world, groups * group, sampled)
        return
    per_process = eval_batches(rows, group, world, groups * group, sampled)
    assert len({len(batches) for batches in per_process}) == 1  # as many collectives everywhere
    assert all(batch for batches in per_process for batch in batches)
    seen = Counter(prompt for batches in per_process for batch in batches for prompt in batch)
    assert seen == {f"p{i}": group for i in range(rows)}
    for parts in zip(*per_process, strict=True):
        whole = [prompt for part in parts for prompt in part]
        assert set(Counter(whole).values()) == {group}  # groups are whole within a batch
        assert whole == sorted(whole, key=whole.index)  # and in one piece


def test_every_evaluation_has_the_same_order():
    dataset = [{"prompt": f"p{i}"} for i in range(20)]
    sampler = RepeatSampler(dataset, mini_repeat_count=1, seed=1)
    loader = eval_loader(dataset, sampler, group_size=1, rows_per_batch=4, rank=0, world=1)
    first, second = [[row["prompt"] for batch in loader for row in batch] for _ in range(2)]
    assert first == second
    assert first != [f"p{i}" for i in range(20)]


def test_an_eval_row_is_read_once_per_group():
    reads: list[int] = []

    class Counting:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            reads.append(index)
            return ROWS[index]

    sampler = RepeatSampler(Counting(), mini_repeat_count=4, shuffle=False)
    loader = eval_loader(Counting(), sampler, group_size=4, rows_per_batch=8, rank=0, world=1)
    assert [len(batch) for batch in loader] == [8, 4]
    assert reads == [0, 1, 2]
