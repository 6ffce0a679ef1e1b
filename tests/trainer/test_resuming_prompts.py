"""A run resumed with other batches goes on after the prompts that it has finished."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from gruppo.runs import manifests
from tests.helpers import prompts
from tests.trainer.runs import SaveAt, make, run
from tests.trainer.test_batching import numbers, stream

ROWS = {"per_device_train_batch_size": 4, "num_generations": 2, "shuffle_dataset": False}  # two prompts an update
EPOCH = {"max_steps": -1, "num_train_epochs": 1}


def prompts_of(trainer: Any) -> list[int]:
    return [number for generation in trainer.generations for number in numbers(generation)]


class StopAt(SaveAt):
    """Saves at an update and ends the run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        control.should_training_stop = state.global_step == self.step


def begun(folder: Path, step: int, **settings: Any) -> Any:
    return run(folder, callbacks=[StopAt(step)], **settings)


def resumed(folder: Path, step: int, **settings: Any) -> Any:
    trainer = make(folder / "resumed", resume_allow_changes=["*"], **settings)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return trainer


# the changed settings, the updates of the resumed run in the epoch, and the updates of the second epoch
CHANGES: dict[str, tuple[dict[str, Any], int, int]] = {
    "larger": ({"per_device_train_batch_size": 8}, 4, 6),
    "smaller": ({"per_device_train_batch_size": 2}, 16, 24),
    "other size that does not divide": ({"per_device_train_batch_size": 10}, 3, 4),
    "larger groups": ({"num_generations": 4}, 16, 24),
    "fewer generations": ({"steps_per_generation": 2}, 8, 12),
    "more accumulation": ({"gradient_accumulation_steps": 2}, 4, 6),
    "two passes": ({"num_iterations": 2}, 16, 24),
    "one generation for several updates": ({"steps_per_generation": 4, "per_device_train_batch_size": 2}, 16, 24),
    "updates of several generations": ({"gradient_accumulation_steps": 3, "steps_per_generation": 1}, 3, 4),
    "as before": ({}, 8, 12),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("case", CHANGES)
def test_every_prompt_of_the_epoch_once(case: str, shuffled: bool, tmp_path: Path) -> None:
    changes, updates, _ = CHANGES[case]
    settings = ROWS | EPOCH | {"shuffle_dataset": shuffled, "dataset": prompts(24)}
    first = begun(tmp_path, 4, **settings)
    second = resumed(tmp_path, 4, **(settings | changes))
    left = 16 % second.args.prompts_per_generation
    taken = prompts_of(first) + prompts_of(second)
    assert len(taken) == len(set(taken)) == 24 - left
    assert second.state.global_step == 4 + updates
    assert second.state.epoch == 1.0
    whole = run(tmp_path / "whole", **settings)
    assert taken == prompts_of(whole)[: len(taken)], "and in the order of a run that is not resumed"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CHANGES)
def test_the_epochs_after_it_are_whole(case: str, tmp_path: Path) -> None:
    changes, updates, more = CHANGES[case]
    settings = ROWS | {"max_steps": -1, "num_train_epochs": 3, "dataset": prompts(24), "shuffle_dataset": True}
    begun(tmp_path, 12 + 4, **settings)  # in the second epoch
    second = resumed(tmp_path, 12 + 4, **(settings | changes))
    assert second.state.global_step == 12 + 4 + updates + more
    assert second.state.epoch == 3.0
    size = second.args.prompts_per_generation
    last = prompts_of(second)[-(24 // size * size) :]
    assert len(last) == len(set(last))
    given = make(tmp_path / "given", **(settings | changes), resume_allow_changes=["*"])
    given.args.max_steps = 16 + updates + more
    given.train(resume_from_checkpoint=str(tmp_path / "checkpoint-16"))
    assert given.generations == second.generations, "as many updates as were asked for"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("case", [case for case in CHANGES if "divide" not in case])
def test_prompts_of_an_iterable_too(case: str, shuffled: bool, tmp_path: Path) -> None:
    changes, updates, _ = CHANGES[case]
    settings = ROWS | {"shuffle_dataset": shuffled, "dataset": stream(24)}
    first = begun(tmp_path, 4, max_steps=4 + updates, **settings)
    second = resumed(tmp_path, 4, max_steps=4 + updates, **(settings | changes))
    taken = prompts_of(first) + prompts_of(second)
    assert Counter(taken[:24]) == Counter(range(24))
    assert len(taken) - 24 < second.args.prompts_per_generation * second.args.gradient_accumulation_steps


@pytest.mark.parametrize("source", [prompts, stream])
def test_a_generation_under_way_begins_again_and_is_named(
    source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ROWS | {"dataset": source(24), "steps_per_generation": 3, "max_steps": 8}  # six prompts, three updates
    first = begun(tmp_path, 4, **settings)
    second = resumed(tmp_path, 4, **(settings | {"steps_per_generation": 2}))
    assert [numbers(g) for g in first.generations] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert [numbers(g) for g in second.generations] == [[6, 7, 8, 9], [10, 11, 12, 13]]
    assert len(second.slices) == 4, "all rows of both"
    assert "6 prompts are trained on again: 1 of the 3 micro-steps" in caplog.text


def test_prompts_that_do_not_fill_a_generation_any_more_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ROWS | EPOCH | {"dataset": prompts(24)}
    begun(tmp_path, 11, **settings)
    second = resumed(tmp_path, 11, **(settings | {"per_device_train_batch_size": 8}))
    assert prompts_of(second) == []
    assert second.state.global_step == 11
    assert "last 2 prompts of this epoch do not fill a generation" in caplog.text


@pytest.mark.parametrize("source", [prompts, stream])
@pytest.mark.parametrize("again", [{}, {"per_device_train_batch_size": 2}], ids=["same", "changed again"])
def test_a_resumed_run_is_resumed(source: Any, again: dict[str, Any], tmp_path: Path) -> None:
    settings = ROWS | {"dataset": source(24), "max_steps": 9}
    first = begun(tmp_path, 3, **settings)
    larger = settings | {"per_device_train_batch_size": 8, "steps_per_generation": 2}  # eight prompts, two updates
    second = make(tmp_path / "second", **larger, resume_allow_changes=["*"], callbacks=[SaveAt(7)])
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    third = resumed(tmp_path / "second", 7, **(larger | again))
    if again:
        taken = prompts_of(first) + [n for g in second.generations if g.step < 7 for n in numbers(g)]
        assert taken == list(range(22))
        assert prompts_of(third)[:2] == [22, 23]
    else:
        assert third.generations == [g for g in second.generations if g.step >= 7]
        assert third.slices == second.slices[4:]


def test_the_place_is_that_of_an_epoch_that_was_ended_early(tmp_path: Path) -> None:
    class EndsEpoch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 2

    settings = ROWS | {"dataset": prompts(8), "max_steps": 6, "shuffle_dataset": True}
    for step in (2, 3):
        folder = tmp_path / str(step)
        straight = run(folder, callbacks=[EndsEpoch(), SaveAt(step)], **settings)
        second = resumed(folder, step, **settings)
        after = [g for g in straight.generations if g.step >= step]
        assert second.generations[: len(after)] == after


@pytest.mark.parametrize("source", [prompts, stream])
def test_a_checkpoint_without_the_place_is_gone_on_from_by_updates(
    source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As releases before it wrote them."""
    settings = ROWS | {"dataset": source(24), "max_steps": 8}
    straight = run(tmp_path, callbacks=[SaveAt(4)], **settings)
    forget_place(tmp_path / "checkpoint-4")
    assert resumed(tmp_path, 4, **settings).generations == [g for g in straight.generations if g.step >= 4]
    assert "does not say how many prompts" not in caplog.text
    other = resumed(tmp_path, 4, **(settings | {"per_device_train_batch_size": 8, "max_steps": 5}))
    assert prompts_of(other) == [16, 17, 18, 19]
    assert "does not say how many prompts" in caplog.text


def forget_place(folder: Path) -> None:
    path = folder / "run_state-00000.json"
    state = json.loads(path.read_text())
    state.pop("course", None)
    path.write_text(json.dumps(state))
    written = manifests.manifest(folder)
    assert written is not None
    manifests.write(folder, manifests.describe(folder, written.about))


# ---- prompts one by one


def spread(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(i % 2) for i, _ in enumerate(completions)]


@pytest.mark.parametrize("case", ["larger", "smaller", "other size that does not divide", "larger groups"])
def test_dynamic_sampling_goes_on_in_its_own_order(case: str, tmp_path: Path) -> None:
    changes = CHANGES[case][0]
    settings = ROWS | {"dataset": prompts(23), "max_steps": 8, "dynamic_sampling": True, "rewards": spread}
    first = begun(tmp_path, 4, **settings)
    second = resumed(tmp_path, 4, **(settings | changes))
    taken = prompts_of(first) + prompts_of(second)
    assert taken == [n % 22 for n in range(len(taken))], "one pass after the other, each without the last prompt"


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("source", [prompts, stream])
def test_dynamic_sampling_may_be_turned_on_and_off(before: bool, source: Any, tmp_path: Path) -> None:
    settings = ROWS | {"dataset": source(24), "max_steps": 8, "rewards": spread}
    first = begun(tmp_path, 4, dynamic_sampling=before, **settings)
    second = resumed(tmp_path, 4, dynamic_sampling=not before, **settings)
    assert second.state.global_step == 8
    taken = prompts_of(first) + prompts_of(second)
    assert taken == [n % 24 for n in range(len(taken))]


# ---- prompts that no generation takes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": prompts(5)}, "1 of 5 prompts are left out of every epoch.* in every epoch the same"),
        ({"dataset": prompts(5), "shuffle_dataset": True}, "1 of 5 prompts .* others in each epoch"),
        ({"dataset": prompts(4)}, None),
        ({"dataset": prompts(5), "max_steps": 1}, None),
        ({"dataset": stream(5)}, None),
    ],
    ids=["in order", "shuffled", "none", "the run ends before", "iterable"],
)
def test_prompts_that_never_fill_a_generation_are_named_once(
    settings: dict[str, Any], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, **(ROWS | {"max_steps": 4} | settings))
    found = [record.message for record in caplog.records if "do not fill a generation" in record.message]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


def test_every_prompt_of_an_iterable_is_trained_on(tmp_path: Path) -> None:
    trainer = run(tmp_path, **ROWS, dataset=stream(3), max_steps=3)
    assert prompts_of(trainer) == [0, 1, 2, 0, 1, 2]
