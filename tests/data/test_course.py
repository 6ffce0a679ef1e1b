"""Where a run is in its prompts: micro-steps of any batches, before and after it is resumed."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.data.course import Batches, Course, SavedCourse, Spot, left_over


class Run(NamedTuple):
    """Settings of a run."""

    prompts: int
    slices: int
    passes: int
    accumulation: int

    @property
    def batches(self) -> Batches:
        return Batches(self.prompts, 2, self.slices, self.slices * self.passes)


def updates(course: Course, accumulation: int, epochs: int) -> Iterator[list[tuple[int, int]]]:
    """Walk through a run as Trainer does: for each update the prompts of the generations that begin in it."""
    for epoch in range(course.began.epoch, epochs):
        course.enter(epoch)
        step = course.resumed_at if epoch == course.began.epoch else 0
        steps = course.steps(epoch)
        assert steps is not None
        while step < steps:
            begun: list[tuple[int, int]] = []
            for _ in range(min(accumulation, steps - step)):
                generation, phase = course.locate(epoch, step)
                assert course.begins(epoch, generation) == step - phase
                if phase == 0:
                    first = course.first(epoch, generation)
                    begun += [(epoch, first + i) for i in range(course.batches.prompts)]
                course.took(epoch, step)
                step += 1
            assert course.epoch_is_over == (step == steps)
            yield begun
        course.resumed_at = 0


RUNS = st.builds(
    Run,
    prompts=st.integers(1, 6),
    slices=st.integers(1, 4),
    passes=st.integers(1, 2),
    accumulation=st.integers(1, 5),
)


@given(available=st.integers(6, 40), before=RUNS, after=RUNS, stop=st.integers(1, 40))
def test_each_prompt_once_in_each_epoch_whatever_the_batches(
    available: int, before: Run, after: Run, stop: int
) -> None:
    course, taken, done = Course(before.batches, available), [], 0
    for begun in updates(course, before.accumulation, 2):
        taken += begun
        done += 1
        if done == stop:
            break
    saved = SavedCourse(course.next, before.batches, done, before.accumulation, available, available, None)
    saved = SavedCourse.from_json(saved.to_json())
    if saved.starts_over(after.batches):
        taken = taken[: -before.prompts]
    resumed = Course(after.batches, available)
    resumed.resume(saved.spot_for(after.batches, has_cursor=False), 0, after.accumulation)
    epochs, most = resumed.length(done, accumulation=after.accumulation, epochs=3, max_steps=0)
    assert (epochs, resumed.resumed_at % after.accumulation) == (3, 0)
    left = list(updates(resumed, after.accumulation, epochs))
    assert len(left) == most - done
    taken += [prompt for begun in left for prompt in begun]
    assert len(taken) == len(set(taken))
    per_epoch = [sorted(place for number, place in taken if number == epoch) for epoch in range(3)]
    for epoch, places in enumerate(per_epoch):
        assert places == list(range(len(places))), "none is left out in between"
        assert available - len(places) < (before.prompts if epoch < saved.spot.epoch else max(before[0], after[0]))


@given(before=RUNS, after=RUNS, stop=st.integers(1, 20), more=st.integers(1, 20))
def test_an_endless_stream_goes_on_too(before: Run, after: Run, stop: int, more: int) -> None:
    course, taken = Course(before.batches, None), []
    for step in range(stop * before.accumulation):
        generation, phase = course.locate(0, step)
        if phase == 0:
            taken.append((course.first(0, generation), before.prompts))
        course.took(0, step)
    saved = SavedCourse(course.next, before.batches, stop, before.accumulation, None, 0, None)
    if saved.starts_over(after.batches):
        taken.pop()
    resumed, at = Course(after.batches, None), stop * after.accumulation
    resumed.resume(saved.spot_for(after.batches, has_cursor=False), at, after.accumulation)
    for step in range(at, at + more * after.accumulation):
        generation, phase = resumed.locate(0, step)
        if phase == 0:
            taken.append((resumed.first(0, generation), after.prompts))
        resumed.took(0, step)
    ends = [first + count for first, count in taken]
    assert [first for first, _ in taken] == [0, *ends[:-1]]


@given(run=RUNS, available=st.integers(6, 40), stop=st.integers(1, 40))
def test_a_run_that_keeps_its_batches_resumes_where_trainer_does(run: Run, available: int, stop: int) -> None:
    course = Course(run.batches, available)
    walked = list(zip(range(1, stop + 1), updates(course, run.accumulation, 3), strict=False))
    done = walked[-1][0]
    per_epoch = math.ceil((course.whole or 0) / run.accumulation)
    resumed = Course(run.batches, available)
    resumed.resume(course.next, 0, run.accumulation)
    assert (resumed.began.epoch, resumed.resumed_at) == (done // per_epoch, done % per_epoch * run.accumulation)
    assert resumed.steps(resumed.began.epoch) == course.whole
    assert resumed.length(done, accumulation=run.accumulation, epochs=3, max_steps=0) == (3, 3 * per_epoch)


@pytest.mark.parametrize(
    ("spot", "max_steps", "epochs"), [(Spot(0, 2, 4), 4, 1), (Spot(0, 2, 4), 5, 2), (Spot(1, 2, 4), 9, 4)]
)
def test_there_are_enough_epochs_for_the_updates_asked_for(spot: Spot, max_steps: int, epochs: int) -> None:
    course = Course(Run(4, 1, 1, 1).batches, 12)
    course.resume(spot, 0, 1)
    assert course.length(2, accumulation=1, epochs=1.0, max_steps=max_steps) == (epochs, max_steps)


def test_what_is_left_over_is_named() -> None:
    assert left_over(9, 3, shuffled=True) is None
    assert "2 of 11 prompts" in str(left_over(11, 3, shuffled=False))
