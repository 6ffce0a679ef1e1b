"""In which order rows are taken: the sampler, the shares of processes, the loaders."""

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.data.sampler import RepeatSampler, eval_loader, micro_step_loader, split_for_rank
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_goes_on_by_itself(copied):
    sampler = RepeatSampler(range(8), mini_repeat_count=1, batch_size=8, seed=42)
    orders = permutations(8, 42, 4)
    list(sampler)
    other = copied(sampler)
    assert [list(other), list(other)] == orders[1:3]
    assert list(sampler) == orders[1]


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


# ---- shares and loaders


@given(count=st.integers(0, 40), world=st.integers(1, 6))
def test_shares_are_contiguous_and_within_one_row_of_each_other(count, world):
    shares = [split_for_rank(list(range(count)), rank, world) for rank in range(world)]
    assert [i for share in shares for i in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


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
