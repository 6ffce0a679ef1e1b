"""Places and rows: nothing overlaps, nothing is forgotten, and everything gets its turn."""

import random
from collections import deque
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.engine.kv import RangeAllocator
from gruppo.engine.scheduler import PromptWork, Scheduler

# ---- ranges


class Naive:
    """The allocator's twin: a list that says of every place whether it is free."""

    def __init__(self, size: int):
        self.free = [True] * size

    def take(self, length: int) -> int | None:
        for start in range(len(self.free) - length + 1):
            if all(self.free[start : start + length]):
                self.free[start : start + length] = [False] * length
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        assert not any(self.free[start : start + length])
        self.free[start : start + length] = [True] * length


@settings(max_examples=200, deadline=None)
@given(size=st.integers(0, 40), orders=st.lists(st.tuples(st.booleans(), st.integers(1, 15)), max_size=60))
def test_ranges_are_those_of_the_naive_twin(size: int, orders: list[tuple[bool, int]]) -> None:
    places, naive = RangeAllocator(size), Naive(size)
    taken: list[tuple[int, int]] = []
    most = 0
    for frees, number in orders:
        if frees and taken:
            start, length = taken.pop(number % len(taken))
            places.give_back(start)
            naive.give_back(start, length)
        else:
            start_or_none = places.take(number)
            assert start_or_none == naive.take(number)  # the lowest that fits, None only if none does
            if start_or_none is not None:
                taken.append((start_or_none, number))
        used = naive.free.count(False)
        most = max(most, used)
        assert (places.used, places.high_water) == (used, most)
    for start, _ in taken:
        places.give_back(start)
    assert places.used == 0
    assert not size or places.take(size) == 0, "the pool is whole again"


def test_freed_neighbours_become_one_range() -> None:
    places = RangeAllocator(10)
    assert [places.take(n) for n in (4, 3, 3)] == [0, 4, 7]
    places.give_back(0)
    places.give_back(7)
    assert places.take(5) is None, "4 and 3 places are free, but apart"
    places.give_back(4)
    assert places.take(10) == 0
    assert places.high_water == 10


def test_a_range_is_given_back_once() -> None:
    places = RangeAllocator(4)
    start = places.take(2)
    assert start == 0
    places.give_back(start)
    with pytest.raises(KeyError):
        places.give_back(start)


# ---- the scheduler


class Case(NamedTuple):
    """Prompts as (length of the prefix, length of a tail, completions), and the room there is."""

    prompts: list[tuple[int, int, int]]
    size: int
    rows: int
    seed: int  # of the order in which completions end


@st.composite
def cases(draw: st.DrawFn) -> Case:
    prompts = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(0, 6)), max_size=8))
    least = max((prefix + tail for prefix, tail, owed in prompts if owed), default=0)
    return Case(prompts, least + draw(st.integers(0, 25)), draw(st.integers(1, 12)), draw(st.integers(0, 2**16)))


def works(prompts: list[tuple[int, int, int]]) -> list[PromptWork]:
    """Distinct prompts whose completions are numbered in order."""
    found, number = [], 0
    for i, (prefix, tail, owed) in enumerate(prompts):
        found.append(PromptWork(tuple([i] * (prefix + 1)), tail, deque(range(number, number + owed))))
        number += owed
    return found


def places_in_use(scheduler: Scheduler, prompts: list[PromptWork]) -> list[int]:
    """Every place that a live completion or a prompt has, with repetitions if two share one."""
    tails = [(entry.tail_start, entry.prompt.tail_tokens) for entry in scheduler.live.values()]
    prefixes = [(prompt.start, prompt.prefix_length) for prompt in prompts if prompt.start is not None]
    return [place for start, length in (*tails, *prefixes) for place in range(start, start + length)]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_everything_runs_once_within_the_room_there_is(case: Case) -> None:
    prompts = works(case.prompts)
    owed = [number for prompt in prompts for number in prompt.owed]
    places = RangeAllocator(case.size)
    scheduler = Scheduler(prompts, places, case.rows)
    choose = random.Random(case.seed)
    admitted: list[int] = []
    encoded: dict[int, int | None] = {}  # prompt -> where its prefix was encoded
    most = 0
    while not scheduler.finished:
        admission = scheduler.admit()
        assert scheduler.live, "nothing runs and something waits"
        assert len(scheduler.live) <= case.rows
        admitted += [entry.completion for entry in admission.entries]
        encoded |= {id(prompt): prompt.start for prompt in admission.prompts}
        assert all(encoded[id(entry.prompt)] == entry.prompt.start for entry in scheduler.live.values())
        used = places_in_use(scheduler, prompts)
        assert len(used) == len(set(used)) == places.used, "two completions in one place"
        assert all(0 <= place < case.size for place in used)
        most = max(most, len(used))
        live = sorted(scheduler.live)
        for completion in choose.sample(live, choose.randint(1, len(live))):
            scheduler.finish(completion)
    assert admitted == owed, "each once, in order"
    assert scheduler.admit().entries == []
    assert (places.used, places.high_water) == (0, most)


def test_a_group_shares_its_prefix_and_gives_it_back_with_its_last_completion() -> None:
    places = RangeAllocator(20)
    (prompt,) = prompts = works([(6, 4, 4)])
    scheduler = Scheduler(prompts, places, rows=8)
    admission = scheduler.admit()
    assert admission.prompts == [prompt]
    assert [(e.completion, e.tail_start) for e in admission.entries] == [(0, 6), (1, 10), (2, 14)]
    assert places.used == 18

    scheduler.finish(1)
    admission = scheduler.admit()
    assert admission.prompts == [], "its prefix is there"
    assert [(e.completion, e.tail_start) for e in admission.entries] == [(3, 10)]
    for completion in (0, 3):
        scheduler.finish(completion)
    assert places.used == 10, "the prefix stays while completion 2 reads it"
    scheduler.finish(2)
    assert (places.used, places.high_water, scheduler.finished) == (0, 18, True)


def test_a_prefix_in_the_middle_of_the_pool_is_placed_anew() -> None:
    places = RangeAllocator(12)
    _, second = prompts = works([(2, 4, 1), (2, 8, 2)])
    scheduler = Scheduler(prompts, places, rows=4)
    admission = scheduler.admit()
    assert [e.completion for e in admission.entries] == [0]
    assert second.start == 6, "its prefix fits, no tail does"

    scheduler.finish(0)  # six places free to the left of the prefix, four to the right
    admission = scheduler.admit()
    assert admission.prompts == [second], "to be encoded again"
    assert [(e.completion, e.prompt.start, e.tail_start) for e in admission.entries] == [(1, 0, 2)]
    scheduler.finish(1)
    assert [e.completion for e in scheduler.admit().entries] == [2]
    scheduler.finish(2)
    assert (places.used, scheduler.finished) == (0, True)


def test_a_new_prompt_waits_for_more_than_one_free_row() -> None:
    prompts = works([(1, 1, 16), (1, 1, 3)])
    scheduler = Scheduler(prompts, RangeAllocator(100), rows=16)
    assert len(scheduler.admit().entries) == 16
    scheduler.finish(5)
    assert scheduler.admit().entries == [], "one row in sixteen is not worth a pass over a prompt"
    scheduler.finish(6)
    assert [e.completion for e in scheduler.admit().entries] == [16, 17]
    scheduler.finish(7)
    assert [e.completion for e in scheduler.admit().entries] == [18], "its prompt is encoded: no pass is needed"


def test_prompts_of_one_token_have_no_prefix() -> None:
    places = RangeAllocator(5)
    scheduler = Scheduler(works([(0, 2, 3), (0, 1, 1)]), places, rows=9)
    assert [(e.completion, e.prompt.start, e.tail_start) for e in scheduler.admit().entries] == [(0, 0, 0), (1, 0, 2)]
    for completion in (0, 1):
        scheduler.finish(completion)
    assert [e.completion for e in scheduler.admit().entries] == [2, 3]


def test_prompts_that_owe_nothing_need_no_room() -> None:
    scheduler = Scheduler(works([(500, 500, 0)]), RangeAllocator(3), rows=1)
    assert scheduler.finished


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="need 13 places, but there are 12"):
        Scheduler(works([(5, 8, 1)]), RangeAllocator(12), rows=4)
