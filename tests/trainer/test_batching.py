"""Which prompts are sampled when, how generations become updates, and what a resumed run sees."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from gruppo import GRPOTrainer
from gruppo.trainer.utils import RepeatSampler
from tests.helpers import length_reward, prompts
from tests.trainer.runs import Generation, Recorded, RecordedGRPO, RecordedRLOO, SaveAt, logs, make, run

Steps = list[int]


def numbers(generation: Generation) -> list[int]:
    return [int(text.strip("p:")) for text in generation.prompts]


def stream(count: int) -> IterableDataset:
    def rows() -> Iterator[dict[str, str]]:
        for i in range(count):
            yield {"prompt": f"p{i}:", "answer": str(i)}

    return IterableDataset.from_generator(rows)


EPOCH = {"max_steps": -1, "num_train_epochs": 1, "shuffle_dataset": False}

# settings, number of prompts, number of updates, the update before which each generation happens
CASES: dict[str, tuple[dict[str, Any], int, int, Steps]] = {
    "one generation per update": ({}, 8, 4, [0, 1, 2, 3]),
    "accumulation": ({"gradient_accumulation_steps": 2}, 8, 2, [0, 1]),
    "two generations in an update": ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 8, 1, [0, 0]),
    "a generation over two updates": ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 16, 4, [0, 2]),
    "ragged end": ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, 8, 2, [0, 0]),
    "ragged end, three slices": ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, 18, 5, [0, 1, 3]),
    "batch size given": ({"generation_batch_size": 12}, 18, 9, [0, 3, 6]),
    "two passes": ({"num_iterations": 2}, 8, 8, [0, 2, 4, 6]),
    "two passes in one update": (
        {"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
        8,
        4,
        [0, 1, 2, 3],
    ),
    "a prompt too many is left out": ({}, 9, 4, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_and_generations_of_an_epoch(case: str, tmp_path: Path) -> None:
    settings, count, updates, steps = CASES[case]
    trainer = run(tmp_path, dataset=prompts(count), **EPOCH, **settings)
    assert trainer.state.global_step == updates
    assert [generation.step for generation in trainer.generations] == steps
    seen = [number for generation in trainer.generations for number in numbers(generation)]
    per_generation = trainer.args.generation_batch_size // 2
    assert seen == list(range(count // per_generation * per_generation)), "in order, once each, the rest left out"
    micro_batches = count // per_generation * trainer.args.steps_per_generation * trainer.args.num_iterations
    assert len(trainer.slices) == micro_batches


@pytest.mark.parametrize("case", ["ragged end", "ragged end, three slices", "two passes"])
def test_every_epoch_begins_with_a_generation(case: str, tmp_path: Path) -> None:
    settings, count, updates, steps = CASES[case]
    trainer = run(tmp_path, dataset=prompts(count), **(EPOCH | {"num_train_epochs": 2} | settings))
    assert trainer.state.global_step == 2 * updates
    assert [g.step for g in trainer.generations] == [*steps, *(step + updates for step in steps)]
    assert len(trainer.slices) % trainer.args.steps_per_generation == 0


def test_the_worked_example(tmp_path: Path) -> None:
    """Ten prompts, groups of 4, slices of 4 rows, 3 slices, 2 passes, 2 micro-batches an update."""
    trainer = run(
        tmp_path,
        dataset=prompts(10),
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=3,
        num_iterations=2,
        **EPOCH,
    )
    assert trainer.args.generation_batch_size == 12
    assert len(trainer._get_train_sampler()) == 216
    assert trainer.state.global_step == 9
    assert [(g.step, numbers(g)) for g in trainer.generations] == [(0, [0, 1, 2]), (3, [3, 4, 5]), (6, [6, 7, 8])]
    assert [row["prompt"] for row in trainer.rows[0]] == ["p0:"] * 4 + ["p1:"] * 4 + ["p2:"] * 4
    a, b, c = trainer.slices[:3]
    assert len({a, b, c}) == 3
    assert trainer.slices[:6] == [a, b, c, a, b, c]
    assert trainer.slices[6:12] == trainer.slices[6:9] * 2


def test_the_slices_of_a_generation_are_its_rows_once_each(tmp_path: Path) -> None:
    trainer = run(tmp_path, steps_per_generation=4, max_steps=4, dataset=prompts(8))
    sampled = {tuple(ids) for ids in trainer._generate_single_turn([[6 + ord(c) - 32 for c in "p0:"]] * 2)[0]}
    used = [row for part in trainer.slices for row in part]
    assert len(trainer.generations) == 1
    assert len(used) == 16
    assert sampled <= set(used)
    assert trainer.slices != sorted(trainer.slices), "the rows are shuffled before they are cut"


@pytest.mark.parametrize(("steps", "accumulation", "passes"), [(1, 1, 1), (2, 3, 1), (3, 2, 1), (3, 2, 2), (2, 4, 1)])
def test_a_generation_happens_exactly_when_the_queue_is_dry(
    steps: int, accumulation: int, passes: int, tmp_path: Path
) -> None:
    class Counting(RecordedGRPO):
        collected = 0

        def collect(self, rows: Any) -> Any:
            self.collected += 1
            return super().collect(rows)

    trainer = run(
        tmp_path,
        Counting,
        dataset=prompts(32),
        steps_per_generation=steps,
        gradient_accumulation_steps=accumulation,
        num_iterations=passes,
        max_steps=4,
    )
    assert set(trainer.left_in_queue) == {0}
    assert trainer.collected == len(trainer.generations) == -(-4 * accumulation // (steps * passes))


def test_a_second_epoch_is_the_next_permutation(tmp_path: Path) -> None:
    trainer = run(tmp_path, dataset=prompts(8), max_steps=-1, num_train_epochs=3, seed=7)
    order = [number for generation in trainer.generations for number in numbers(generation)]
    generator = torch.Generator().manual_seed(7)
    expected = [torch.randperm(8, generator=generator).tolist() for _ in range(3)]
    assert order == [index for epoch in expected for index in epoch]
    assert expected[0] != expected[1]


def test_a_second_call_of_train_starts_over(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps_per_generation=3, dataset=prompts(12), max_steps=2)
    trainer.train()
    first = list(trainer.generations)
    trainer.train()
    assert trainer.generations[len(first) :] == first


class StopEpoch(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 1


def test_an_epoch_that_a_callback_stops_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = {"steps_per_generation": 2, "shuffle_dataset": False, "max_steps": -1, "num_train_epochs": 2}
    trainer = run(tmp_path, callbacks=[StopEpoch()], **settings)
    assert [(g.step, numbers(g)[0]) for g in trainer.generations] == [(0, 0), (1, 0), (3, 4)]
    assert len(trainer.slices) == 5


# ---- old log-probs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("accumulation", "steps", "passes", "off_policy"),
    [(1, 1, 1, False), (4, 2, 1, False), (2, 1, 2, False), (2, 4, 1, True), (2, 2, 2, True), (3, 2, 1, True)],
)
@pytest.mark.parametrize(("trainer_class", "beta"), [(RecordedGRPO, 0.0), (RecordedGRPO, 0.1), (RecordedRLOO, 0.0)])
def test_old_log_probs_are_computed_exactly_when_off_policy(
    trainer_class: Any, beta: float, accumulation: int, steps: int, passes: int, off_policy: bool, tmp_path: Path
) -> None:
    trainer = run(
        tmp_path,
        trainer_class,
        dataset=prompts(8),
        beta=beta,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
        num_iterations=passes,
        max_steps=1,
    )
    passes_per_generation = off_policy + (beta != 0)  # the second one is of the reference
    assert trainer.frozen_passes == passes_per_generation * len(trainer.generations)


def test_rloo_with_kl_needs_the_sampling_policy_and_the_reference(tmp_path: Path) -> None:
    trainer = run(tmp_path, RecordedRLOO, beta=0.05, max_steps=2)
    assert trainer.frozen_passes == 2 * len(trainer.generations) == 4


# ---- iterable datasets


def test_an_iterable_dataset_gives_the_same_prompts_as_a_list_in_order(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "shuffle_dataset": False, "steps_per_generation": 2, "gradient_accumulation_steps": 3}
    listed = run(tmp_path, dataset=prompts(24), **settings)
    streamed = run(tmp_path, dataset=stream(24), **settings)
    assert streamed.generations == listed.generations
    assert [len(rows) for rows in streamed.rows] == [8] * len(listed.rows)


def test_an_iterable_dataset_is_shuffled_and_read_again_in_another_order(tmp_path: Path) -> None:
    trainer = run(tmp_path, dataset=stream(8), max_steps=8)
    order = [number for generation in trainer.generations for number in numbers(generation)]
    assert sorted(order[:8]) == sorted(order[8:]) == list(range(8))
    assert order[:8] != list(range(8))
    assert order[:8] != order[8:]


def test_an_iterable_dataset_that_ends_in_the_middle_of_a_generation_goes_on_with_its_first_prompts(
    tmp_path: Path,
) -> None:
    trainer = run(tmp_path, dataset=stream(5), max_steps=4, shuffle_dataset=False)
    assert [numbers(g) for g in trainer.generations] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_an_iterable_eval_set_is_read_to_its_end(tmp_path: Path) -> None:
    trainer = make(tmp_path, eval_dataset=stream(3), per_device_eval_batch_size=4)
    for _ in range(2):
        trainer.generations.clear()
        metrics = trainer.evaluate()
        assert [numbers(g) for g in trainer.generations] == [[0, 1], [2]]
        assert metrics["eval_reward"] is not None


# ---- evaluation


def test_evaluation_during_training_leaves_the_training_order_alone(tmp_path: Path) -> None:
    settings = {"max_steps": 6, "steps_per_generation": 2, "dataset": prompts(12)}
    alone = run(tmp_path, **settings)
    both = run(
        tmp_path,
        **settings,
        eval_dataset=prompts(3),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    assert [g for g in both.generations if g.mode == "train"] == alone.generations
    assert sum(g.mode == "eval" for g in both.generations) == 6 * 2


def test_every_evaluation_sees_every_prompt_in_the_same_order(tmp_path: Path) -> None:
    trainer = make(tmp_path, eval_dataset=prompts(5), per_device_eval_batch_size=4)
    orders = []
    for _ in range(2):
        trainer.generations.clear()
        trainer.evaluate()
        orders.append([number for g in trainer.generations for number in numbers(g)])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(5))


@pytest.mark.parametrize(("group", "rows"), [(4, 4), (1, 1), (None, 2)])
def test_the_group_size_of_evaluation(group: int | None, rows: int, tmp_path: Path) -> None:
    trainer = make(tmp_path, num_generations_eval=group, eval_dataset=prompts(3), per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    assert trainer.num_generations_eval == rows
    assert sum(len(batch) for batch in trainer.rows) == 3 * rows
    assert (metrics["eval_frac_reward_zero_std"] == 1.0) == (rows == 1)


def test_several_eval_sets_have_metrics_of_their_own(tmp_path: Path) -> None:
    def even(prompts: list[str], **kwargs: Any) -> list[float]:
        return [float(int(prompt.strip("p:")) % 2 == 0) for prompt in prompts]

    halves = {
        "even": Dataset.from_dict({"prompt": ["p0:", "p2:"]}),
        "odd": Dataset.from_dict({"prompt": ["p1:", "p3:", "p5:"]}),
    }
    trainer = run(
        tmp_path,
        rewards=even,
        eval_dataset=halves,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=2,
        per_device_eval_batch_size=4,
    )
    assert logs(trainer, "eval_even_reward")[0]["eval_even_reward"] == 1.0
    assert logs(trainer, "eval_odd_reward")[0]["eval_odd_reward"] == 0.0
    metrics = trainer.evaluate()
    assert metrics["eval_even_rewards/even/mean"] == 1.0
    assert metrics["eval_odd_rewards/even/mean"] == 0.0
    assert "eval_odd_loss" in metrics
    assert "eval_reward" not in metrics


@pytest.mark.parametrize(("rows", "batches"), [(3, [2, 2, 2]), (1, [2, 2, 2]), (5, [4, 2])])
def test_an_eval_batch_never_cuts_a_group(rows: int, batches: list[int], tmp_path: Path) -> None:
    """Without eval_strategy the config cannot know that evaluate() will be called."""
    trainer = make(tmp_path, eval_dataset=prompts(3), per_device_eval_batch_size=rows)
    trainer.evaluate()
    assert [len(batch) for batch in trainer.rows] == batches


# ---- resuming

RESUMED: dict[str, tuple[dict[str, Any], int]] = {  # settings, the step of the checkpoint
    "in epoch 1": ({}, 2),
    "in epoch 2": ({}, 5),
    "at the start of epoch 2": ({}, 4),
    "inside a generation": ({"steps_per_generation": 2, "num_iterations": 2}, 3),
    "inside a generation of epoch 2": ({"steps_per_generation": 4}, 7),
    "slices and updates out of step": ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 2),
    "more slices than a generation has": ({"steps_per_generation": 2, "gradient_accumulation_steps": 3}, 1),
}


def resume(folder: Path, step: int, trainer_class: Any = RecordedGRPO, **settings: Any) -> tuple[Any, Any]:
    """A run that saves at `step`, and another that begins there."""
    straight = run(folder, trainer_class, callbacks=[SaveAt(step)], **settings)
    resumed = make(folder / "resumed", trainer_class, **settings)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return straight, resumed


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "source"),
    [
        *((case, prompts) for case in RESUMED),
        ("in epoch 2", stream),
        ("inside a generation", stream),
        ("slices and updates out of step", stream),
    ],
)
def test_a_resumed_run_sees_the_prompts_of_a_straight_one(case: str, source: Any, tmp_path: Path) -> None:
    settings, step = RESUMED[case]
    straight, resumed = resume(tmp_path, step, dataset=source(12 if "out" in case else 8), max_steps=9, **settings)
    assert resumed.state.global_step == 9
    assert resumed.generations == [g for g in straight.generations if g.step >= step]
    before = step * resumed.args.gradient_accumulation_steps
    assert resumed.slices == straight.slices[before:], "micro-batches of a generation under way are in the checkpoint"


def as_plain(folder: Path) -> Path:
    """A checkpoint without anything that other trainers do not write."""
    for path in [folder / "manifest.json", *folder.glob("run_state-*")]:
        path.unlink()
    return folder


def test_a_plain_checkpoint_samples_the_generation_under_way_anew(tmp_path: Path) -> None:
    """Four slices, two used: two are left of it, not four."""

    class Cuts(RecordedGRPO):
        cuts: list[Any]

        def _collect_slices(self, rows: Any) -> Any:
            slices = super()._collect_slices(rows)
            self.cuts = [*getattr(self, "cuts", []), [part["completion_ids"].tolist() for part in slices]]
            return slices

    settings: dict[str, Any] = {"steps_per_generation": 4, "dataset": prompts(16), "max_steps": 6}
    straight = run(tmp_path, callbacks=[SaveAt(2)], **settings)
    resumed = make(tmp_path / "resumed", Cuts, **settings)
    resumed.train(resume_from_checkpoint=str(as_plain(tmp_path / "checkpoint-2")))
    assert [g.step for g in straight.generations] == [0, 4]
    assert [g.step for g in resumed.generations] == [2, 4]
    assert resumed.generations[0].prompts == straight.generations[0].prompts
    assert sorted(resumed.slices[2:4]) != sorted(resumed.slices[0:2])
    used = [[list(row) for row in part] for part in resumed.slices[:2]]
    cut = [[[token for token in row if token] for row in part] for part in resumed.cuts[0]]  # 0 is padding
    assert used == cut[2:], "those that the run had not come to"
    assert used != cut[:2]


@pytest.mark.parametrize("step", [2, 4], ids=["mid-epoch", "epoch boundary"])
def test_a_run_resumed_between_generations_ends_with_the_same_weights(step: int, tmp_path: Path) -> None:
    class Sampling(RecordedGRPO):
        _generate_single_turn = GRPOTrainer._generate_single_turn  # truly sampled

    straight, resumed = resume(tmp_path, step, Sampling, max_steps=6)
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) == 0.0
    assert [r["reward"] for r in logs(straight)] == [r["reward"] for r in logs(resumed)]


def test_counters_survive_a_resume(tmp_path: Path) -> None:
    straight, resumed = resume(tmp_path, 2, max_steps=4)
    assert resumed.state.num_input_tokens_seen == straight.state.num_input_tokens_seen
    assert logs(resumed)[-1]["num_tokens"] == logs(straight)[-1]["num_tokens"]


# ---- what subclasses may override


class OwnSampler(RecordedGRPO):
    """Prompts from last to first."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        backwards = list(reversed(range(len(self.train_dataset))))
        inner = RepeatSampler(
            backwards,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=False,
        )
        return [backwards[i] for i in inner]


def test_a_train_sampler_of_ones_own(tmp_path: Path) -> None:
    trainer = run(tmp_path, OwnSampler, steps_per_generation=2, **EPOCH)
    assert [numbers(g) for g in trainer.generations] == [[7, 6, 5, 4], [3, 2, 1, 0]]
    assert trainer.state.global_step == 4


class OwnEvalSampler(RecordedGRPO):
    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return RepeatSampler(eval_dataset, mini_repeat_count=self.num_generations_eval, shuffle=False)


def test_an_eval_sampler_of_ones_own(tmp_path: Path) -> None:
    trainer = make(tmp_path, OwnEvalSampler, eval_dataset=prompts(4), per_device_eval_batch_size=4)
    trainer.evaluate()
    assert [numbers(g) for g in trainer.generations] == [[0, 1], [2, 3]]


class OwnLoader(Recorded):
    """A loader of rows, as trainers of this kind have always had it: one batch per micro-step."""

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size * self.args.steps_per_generation,
            sampler=self._get_train_sampler(),
            collate_fn=self.data_collator,
        )


class OwnLoaderGRPO(OwnLoader, RecordedGRPO):
    pass


@pytest.mark.parametrize(
    ("accumulation", "steps", "passes"),
    [
        (1, 1, 1),
        (2, 2, 1),
        (1, 2, 2),
        (2, 3, 1),
        (3, 2, 1),
    ],
)
def test_a_loader_of_ones_own(accumulation: int, steps: int, passes: int, tmp_path: Path) -> None:
    settings = {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": steps,
        "num_iterations": passes,
        "dataset": prompts(24),
        "max_steps": 4,
    }
    own = run(tmp_path, OwnLoaderGRPO, **settings)
    ours = run(tmp_path, **settings)
    assert own.generations == ours.generations
    assert own.slices == ours.slices


def test_an_eval_loader_of_ones_own(tmp_path: Path) -> None:
    class OwnEvalLoader(RecordedGRPO):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
            rows = [{"prompt": "p7:"}] * 4
            return DataLoader(rows, batch_size=4, collate_fn=self.data_collator)

    trainer = make(tmp_path, OwnEvalLoader, eval_dataset=prompts(2))
    trainer.evaluate()
    assert [g.prompts for g in trainer.generations] == [("p7:",)]


# ---- columns


@pytest.mark.parametrize(
    ("source", "removed"),
    [(prompts, False), (prompts, True), (stream, False), (stream, True)],
)
def test_remove_unused_columns_decides_what_rewards_see(source: Any, removed: bool, tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def spy(completions: list[str], **kwargs: Any) -> list[float]:
        seen.append(set(kwargs))
        return length_reward(completions)

    run(tmp_path, rewards=spy, dataset=source(8), remove_unused_columns=removed, max_steps=1)
    assert ("answer" not in seen[0]) == removed
    assert {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"} <= seen[0]
