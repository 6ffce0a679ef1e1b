"""Groups without spread are replaced by the next prompts: which ones, how often, and what a run says of it."""

import json
import math
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.data.sampler import RepeatSampler
from gruppo.errors import ConfigError
from gruppo.rollout.base import RolloutBackend, group_requests
from gruppo.trainer.collect.generation import Generation, put
from gruppo.trainer.collect.resampling import groups_without_spread, runs
from gruppo.types import Completion, SampleRequest, StopReason
from tests.helpers import base_args, prompts, timeless
from tests.processes import run_together
from tests.trainer.runs import RecordedGRPO, SaveAt, logs, make, std, token_ids
from tests.trainer.test_batching import stream

# ---- runs whose prompts are known to have spread or not


class Numbered(RolloutBackend):
    """A backend whose completion of sample i is i + 1 times the letter a; it writes down what it was asked."""

    name = "numbered"

    def __init__(self, config: Any):
        self.config = config
        self.calls: list[list[SampleRequest]] = []

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        assert requests, "nobody asks for nothing"
        self.calls.append(list(requests))
        samples = [request.first_sample + i for request in requests for i in range(request.count)]
        return [Completion(token_ids("a" * (sample + 1) + "<eos>"), StopReason.EOS) for sample in samples]

    @property
    def streams(self) -> dict[tuple[int, int], str]:
        """Noise key and sample number of every completion, and the number of its prompt."""
        return {
            (r.noise_key or 0, r.first_sample + i): "".join(chr(id - 6 + 32) for id in r.prompt_ids)
            for call in self.calls
            for r in call
            for i in range(r.count)
        }


class Lengths:
    """A reward: the length of the completion, or 1 for every completion of the prompts named."""

    __name__ = "lengths"

    def __init__(self, flat: Sequence[int]):
        self.flat = set(flat)
        self.calls: list[list[int]] = []

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        assert prompts, "nobody scores nothing"
        numbers = [number(prompt) for prompt in prompts]
        self.calls.append(numbers)
        return [1.0 if n in self.flat else float(len(c)) for n, c in zip(numbers, completions, strict=True)]


def number(prompt: str) -> int:
    return int(prompt.strip("p:"))


class Watched:
    """Mixin for a trainer: the rows that each generation ends up with, and their advantages."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.final: list[list[int]] = []
        self.advantages: list[list[float]] = []
        super().__init__(*args, **kwargs)

    def to_tensors(self, rollouts: Any) -> Any:
        if self.mode == "train":  # type: ignore[attr-defined]
            self.final.append([number(rollout.prompt.text) for rollout in rollouts])
        return super().to_tensors(rollouts)  # type: ignore[misc]

    def collect(self, rows: Any) -> Any:
        batch = super().collect(rows)  # type: ignore[misc]
        self.advantages.append(batch.advantages.tolist())
        return batch

    @property
    def groups(self) -> list[list[int]]:
        """The prompts of each generation, without repetition."""
        size = self.group_size  # type: ignore[attr-defined]
        return [rows[::size] for rows in self.final]


class WatchedGRPO(Watched, GRPOTrainer):
    pass


class WatchedRLOO(Watched, RLOOTrainer):
    pass


def dynamic(folder: Path, flat: Sequence[int], trainer_class: Any = WatchedGRPO, **settings: Any) -> Any:
    """A trainer with 2 groups of 2 per generation, in the order of the dataset; `flat` prompts have no spread."""
    defaults: dict[str, Any] = {"dynamic_sampling": True, "shuffle_dataset": False, "rewards": Lengths(flat)}
    trainer = make(folder, trainer_class, **(defaults | settings))
    trainer.backend = Numbered(trainer.backend.config)
    return trainer


def trained(folder: Path, flat: Sequence[int], trainer_class: Any = WatchedGRPO, **settings: Any) -> Any:
    trainer = dynamic(folder, flat, trainer_class, **settings)
    trainer.train()
    return trainer


def rounds(trainer: Any) -> list[list[int]]:
    """The prompts of each call of the reward, without repetition."""
    size = trainer.args.num_generations
    return [call[::size] for call in trainer.reward_funcs[0].calls]


def expected(sequence: Sequence[int], flat: set[int], generations: int, places: int, most: int) -> list[list[int]]:
    """What the generations end up with, worked out prompt by prompt."""
    position, ends = count(), []
    for _ in range(generations):
        batch = [sequence[next(position)] for _ in range(places)]
        for _ in range(most):
            empty = [place for place in range(places) if batch[place] in flat]
            for place in empty:
                batch[place] = sequence[next(position)]
        ends.append(batch)
    return ends


# ---- which prompts


def test_a_group_without_spread_is_replaced_by_the_next_prompts_in_order(tmp_path: Path) -> None:
    trainer = trained(tmp_path, flat=[1, 2], max_steps=2)
    assert rounds(trainer) == [[0, 1], [2], [3], [4, 5]], "one call a round, with that round's rows only"
    assert trainer.final == [[0, 0, 3, 3], [4, 4, 5, 5]], "in the place of what it replaces"
    assert all(value != 0 for batch in trainer.advantages for value in batch)


def test_several_groups_are_replaced_together(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 8, "dataset": prompts(16), "max_steps": 2}
    trainer = trained(tmp_path, flat=[0, 2, 5, 9], **settings)
    assert rounds(trainer) == [[0, 1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [11]]
    assert trainer.groups == [[4, 1, 6, 3], [7, 8, 11, 10]]


@pytest.mark.parametrize("most", [1, 2, 4])
def test_rounds_are_bounded_and_what_is_left_is_kept(most: int, tmp_path: Path) -> None:
    trainer = trained(tmp_path, flat=range(64), dataset=prompts(64), max_resample_rounds=most, max_steps=2)
    per_generation = 2 * (1 + most)
    assert len(rounds(trainer)) == 2 * (1 + most)
    assert trainer.groups == [[per_generation * g - 2, per_generation * g - 1] for g in (1, 2)]
    assert trainer.advantages == [[0.0] * 4] * 2
    for log in logs(trainer):
        assert log["dynamic_sampling/rounds"] == most
        assert log["dynamic_sampling/left_without_spread"] == 1.0
        assert log["frac_reward_zero_std"] == 1.0


@pytest.mark.parametrize(("count", "batch", "flat"), [(5, 4, [1]), (7, 6, [2, 3, 6]), (4, 8, [0]), (8, 4, range(7))])
def test_the_stream_goes_on_into_the_next_permutation(count: int, batch: int, flat: Any, tmp_path: Path) -> None:
    trainer = trained(
        tmp_path,
        flat,
        dataset=prompts(count),
        per_device_train_batch_size=batch,
        shuffle_dataset=True,
        seed=5,
        max_steps=6,
        max_resample_rounds=3,
    )
    places = batch // 2
    sampler = RepeatSampler(range(count), mini_repeat_count=1, batch_size=places, seed=5)
    sequence = [index for _ in range(100) for index in sampler]
    assert trainer.groups == expected(sequence, set(flat), 6, places, 3)
    consumed = sum(len(call) for call in rounds(trainer))
    assert consumed > len(sampler), "it did wrap"
    assert logs(trainer)[-1]["dynamic_sampling/epoch"] == pytest.approx(consumed / len(sampler))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 2},
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "num_iterations": 2},
    ],
    ids=["two passes", "slices", "both"],
)
def test_passes_and_slices(settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = trained(tmp_path, flat=[1, 3, 8], dataset=prompts(20), max_steps=4, **settings)
    places = trainer.args.generation_batch_size // 2
    generations = math.ceil(4 * trainer.args.gradient_accumulation_steps / trainer.args.micro_steps_per_generation)
    sequence = list(range(20 // places * places)) * 3
    assert trainer.groups == expected(sequence, {1, 3, 8}, generations, places, 4)
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("source", [prompts, stream])
def test_the_number_of_updates_is_that_of_a_run_without_it(source: Any, tmp_path: Path) -> None:
    length = {"max_steps": -1, "num_train_epochs": 2} if source is prompts else {"max_steps": 8}
    trainer = trained(tmp_path, flat=[1, 2, 3], dataset=source(8), **length)
    assert trainer.state.global_step == 8
    assert trainer.groups == expected(list(range(8)) * 8, {1, 2, 3}, 8, 2, 4)


def test_an_iterable_dataset_starts_again_after_its_last_prompt(tmp_path: Path) -> None:
    trainer = trained(tmp_path, flat=[1], dataset=stream(7), max_steps=5)
    assert trainer.groups == [[0, 2], [3, 4], [5, 6], [0, 2], [3, 4]]
    assert "dynamic_sampling/epoch" not in logs(trainer)[-1], "nobody knows how long it is"


def test_a_second_call_of_train_starts_over(tmp_path: Path) -> None:
    trainer = trained(tmp_path, flat=[1], max_steps=2)
    first = list(trainer.final)
    trainer.train()
    assert trainer.final == first * 2


# ---- what stays as it was


def test_without_it_prompts_and_noise_are_those_of_the_plain_stream(tmp_path: Path) -> None:
    settings = {"dataset": prompts(6), "shuffle_dataset": True, "seed": 3, "max_steps": 5}
    trainer = trained(tmp_path, flat=[0, 1], dynamic_sampling=False, **settings)
    sampler = RepeatSampler(range(6), mini_repeat_count=1, batch_size=2, seed=3)
    orders = [list(sampler) for _ in range(2)]
    places = [(epoch, generation) for epoch in range(2) for generation in range(3)][:5]
    assert trainer.groups == [orders[epoch][2 * generation : 2 * generation + 2] for epoch, generation in places]
    for (epoch, generation), call in zip(places, trainer.backend.calls, strict=True):
        rows = [list(request.prompt_ids) for request in call for _ in range(request.count)]
        assert call == group_requests(rows, group_size=2, key=[3, 0, 0, 0, epoch, generation])
    assert not any("dynamic" in key for log in logs(trainer) for key in log)


@pytest.mark.parametrize("source", [prompts, stream])
def test_where_every_group_has_spread_a_run_is_the_same_with_it(source: Any, tmp_path: Path) -> None:
    settings = {"dataset": source(7), "shuffle_dataset": True, "max_steps": 8}
    plain, watchful = (trained(tmp_path, [], dynamic_sampling=on, **settings) for on in (False, True))
    assert watchful.final == plain.final
    assert watchful.backend.calls == plain.backend.calls
    for a, b in zip(plain.model.parameters(), watchful.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ours = {"rounds": 0.0, "prompts_sampled": 2.0, "prompts_replaced": 0.0, "left_without_spread": 0.0}
    for old, new in zip(logs(plain), logs(watchful), strict=True):
        assert {key: new[f"dynamic_sampling/{key}"] for key in ours} == ours
        assert "dynamic_sampling/reward_of_replaced" not in new
        assert timeless(old) == pytest.approx({key: new[key] for key in timeless(old)}, rel=1e-12)


def test_evaluation_replaces_nothing(tmp_path: Path) -> None:
    trainer = dynamic(tmp_path, flat=range(8), eval_dataset=prompts(4), per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    assert sorted(n for call in rounds(trainer) for n in call) == [0, 1, 2, 3]
    assert len(rounds(trainer)) == 2
    assert metrics["eval_frac_reward_zero_std"] == 1.0
    assert not any("dynamic" in key for key in metrics)


# ---- what is learned from


def test_advantages_are_those_of_the_final_groups(tmp_path: Path) -> None:
    """Groups of 3 have the rewards 1, 2, 3, wherever they come from: mean 2, deviation 1."""
    trainer = trained(tmp_path, flat=[0, 2], num_generations=3, per_device_train_batch_size=6, max_steps=1)
    assert trainer.final == [[3, 3, 3, 1, 1, 1]]
    step = 1 / (1 + 1e-4)
    assert trainer.advantages[0] == pytest.approx([-step, 0.0, step] * 2)


def test_advantages_of_rloo(tmp_path: Path) -> None:
    """Rewards 1, 2, 3 against the mean of the other two: 1 − 2.5, 2 − 2, 3 − 1.5."""
    settings = {"num_generations": 3, "per_device_train_batch_size": 6, "beta": 0.0, "max_steps": 1}
    trainer = trained(tmp_path, [0, 2], WatchedRLOO, **settings)
    assert trainer.final == [[3, 3, 3, 1, 1, 1]]
    assert trainer.advantages[0] == pytest.approx([-1.5, 0.0, 1.5] * 2)


def test_rloo_with_kl_in_the_reward_looks_at_the_rewards_alone(tmp_path: Path) -> None:
    trainer = trained(tmp_path, [1], WatchedRLOO, beta=0.05, max_steps=2)
    assert trainer.groups == [[0, 2], [3, 4]]
    assert "kl" in logs(trainer)[0]


def test_rewards_that_a_clip_makes_equal_have_no_spread(tmp_path: Path) -> None:
    settings = {"beta": 0.0, "reward_clip_range": [0.0, 1.0], "max_resample_rounds": 1, "max_steps": 1}
    trainer = trained(tmp_path, [], WatchedRLOO, **settings)
    assert rounds(trainer) == [[0, 1], [2, 3]], "1 and 2 are 1 and 1 after it"
    assert logs(trainer)[0]["dynamic_sampling/left_without_spread"] == 1.0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    ("aggregation", "factor"), [("sum_then_normalize", -0.5), ("normalize_then_sum", -1.0)], ids=["sum", "normalized"]
)
def test_the_weighted_sum_decides_however_advantages_are_scaled(
    aggregation: str, factor: float, scale: str, tmp_path: Path
) -> None:
    """In p1 the second reward takes back what the first one gives."""

    def against(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [factor * len(c) if number(p) == 1 else 0.0 for p, c in zip(prompts, completions, strict=True)]

    trainer = trained(
        tmp_path,
        [],
        rewards=[Lengths([]), against],
        reward_weights=[1.0, -1 / factor],
        multi_objective_aggregation=aggregation,
        scale_rewards=scale,
        max_steps=1,
    )
    assert trainer.groups == [[0, 2]]
    assert logs(trainer)[0]["frac_reward_zero_std"] == 0.0
    assert trainer.advantages[0][:2] == pytest.approx(trainer.advantages[0][2:])


def test_a_sum_without_spread_stays_where_rewards_are_standardised_first(tmp_path: Path) -> None:
    """In p1 the weighted sum is 0, but the second reward has twice the weight once both have the same deviation."""

    def against(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [-0.5 * len(c) if number(p) == 1 else 0.0 for p, c in zip(prompts, completions, strict=True)]

    trainer = trained(
        tmp_path,
        [],
        rewards=[Lengths([]), against],
        reward_weights=[1.0, 2.0],
        multi_objective_aggregation="normalize_then_sum",
        max_steps=1,
    )
    assert trainer.groups == [[0, 1]]
    assert all(value != 0 for value in trainer.advantages[0])


class EqualLengths(WatchedGRPO):
    """Compares rows by what the rewards are, rounded up to even numbers."""

    def estimate_advantages(self, rewards_NR: Any, group_size: int, kl_penalty_N: Any) -> Any:
        return super().estimate_advantages((rewards_NR / 2).ceil() * 2, group_size, kl_penalty_N)


def test_a_subclass_that_estimates_advantages_decides_what_has_spread(tmp_path: Path) -> None:
    # Completions of 1 and 2 letters are equal to it, so that every group of two is: all rounds are used up.
    trainer = trained(tmp_path, flat=(), trainer_class=EqualLengths, max_resample_rounds=1, max_steps=1)
    assert len(rounds(trainer)) == 2
    assert logs(trainer)[0]["dynamic_sampling/left_without_spread"] == 1


def test_log_probs_are_computed_once_and_for_the_final_rows(tmp_path: Path) -> None:
    scored: list[int] = []

    class Scoring(Watched, RecordedGRPO):
        def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() and not kwargs.get("compute_entropy"):
                scored.append(len(ids))
            return super()._get_per_token_logps_and_entropies(model, ids, *args, **kwargs)

    def reward(prompts: list[str], **kwargs: Any) -> list[float]:
        return [float(number(p) > 3 and i % 2) for i, p in enumerate(prompts)]

    make(
        tmp_path,
        Scoring,
        rewards=reward,
        dynamic_sampling=True,
        shuffle_dataset=False,
        num_iterations=2,
        beta=0.1,
        max_steps=1,
    ).train()
    assert scored == [4, 4], "under the policy and under the reference"


def test_a_rollout_function_is_asked_for_the_replacements(tmp_path: Path) -> None:
    asked: list[list[int]] = []

    def rollout(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
        asked.append([number(prompt) for prompt in prompt_list])
        texts = ["a" * (1 + i % 2) + "<eos>" for i in range(len(prompt_list))]
        return {
            "prompt_ids": trainer.processing_class(prompt_list)["input_ids"],
            "completion_ids": [token_ids(text) for text in texts],
            "logprobs": None,
            "turn": list(range(len(prompt_list))),
        }

    turns: list[list[int]] = []

    def extra(turn: list[int], **kwargs: Any) -> list[float]:
        turns.append(turn)
        return [0.0] * len(turn)

    trainer = trained(tmp_path, flat=[0], rewards=[Lengths([0]), extra], rollout_func=rollout, max_steps=2)
    assert asked == [[0, 0, 1, 1], [2, 2], [3, 3, 4, 4]]
    assert turns == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    assert trainer.groups == [[2, 1], [3, 4]]


def test_a_hook_is_asked_for_the_replacements(tmp_path: Path) -> None:
    class Hooked(WatchedGRPO):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            super()._generate_single_turn(prompt_ids[:1])  # for its own use
            return ids, logps

    trainer = trained(tmp_path, [0, 1], Hooked, max_steps=2)
    assert trainer.groups == [[2, 3], [4, 5]]
    assert len(trainer.backend.streams) == 3 * 5, "each with random numbers of its own"


# ---- noise


def test_a_replacement_draws_numbers_of_its_own(tmp_path: Path) -> None:
    trainer = trained(tmp_path, flat=range(12), dataset=prompts(32), max_steps=3, max_resample_rounds=3)
    sampled = sum(request.count for call in trainer.backend.calls for request in call)
    assert sampled > 3 * 4
    assert len(trainer.backend.streams) == sampled


def test_its_numbers_do_not_depend_on_what_else_is_replaced(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 8, "dataset": prompts(16), "max_steps": 1}
    one, three = (trained(tmp_path, flat, **settings).backend.calls for flat in ([2], [0, 2, 3]))
    assert [request.noise_key for request in one[1]] == [three[1][1].noise_key]
    assert len(three[1]) == 3
    assert one[0] == three[0]


# ---- what is said about it


def test_metrics(tmp_path: Path) -> None:
    """p1, p2 and p3 are sampled in vain; completions of 2 and 3 tokens, prompts of 3."""
    trainer = trained(tmp_path, flat=[1, 2, 3], max_steps=1)
    (log,) = logs(trainer)
    assert {key.partition("/")[2]: value for key, value in log.items() if key.startswith("dynamic_sampling/")} == {
        "rounds": 3.0,
        "prompts_sampled": 5.0,
        "prompts_replaced": 3.0,
        "left_without_spread": 0.0,
        "reward_of_replaced": 1.0,
        "epoch": 5 / 8,
    }
    assert log["reward"] == 1.5, "of the final rows"
    assert log["reward_std"] == pytest.approx(std([1.0, 2.0, 1.0, 2.0]))
    assert log["frac_reward_zero_std"] == 0.0
    assert log["num_tokens"] == 5 * (3 + 2 + 3 + 3), "of everything that was sampled"
    assert log["completions/mean_length"] == 2.5


def test_lengths_are_those_of_everything_that_was_sampled(tmp_path: Path) -> None:
    class Longer(WatchedGRPO):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            long = len(prompt_ids) == 2  # a replacement
            return [token_ids("a" * (5 if long else 1 + i % 2)) for i in range(len(prompt_ids))], None

    reward = Lengths([1])
    trainer = trained(tmp_path, [], Longer, rewards=[reward], max_resample_rounds=1, max_steps=1)
    (log,) = logs(trainer)
    assert log["completions/mean_length"] == pytest.approx((1 + 2 + 1 + 2 + 5 + 5) / 6)
    assert log["completions/max_length"] == 5
    assert log["num_tokens"] == 6 * 3 + 16


def test_the_epoch_is_the_latest_not_an_average(tmp_path: Path) -> None:
    trainer = trained(tmp_path, flat=[1, 2], max_steps=4, logging_steps=4)
    (log,) = logs(trainer)
    assert log["dynamic_sampling/epoch"] == sum(map(len, rounds(trainer))) / 8
    assert log["dynamic_sampling/prompts_sampled"] == sum(map(len, rounds(trainer))) / 4


def test_the_table_shows_the_final_rows_and_what_rewards_said_of_them(tmp_path: Path) -> None:
    def talking(prompts: list[str], completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> Any:
        numbers = [number(prompt) for prompt in prompts]
        log_extra("seen", [10 * n for n in numbers])
        if 1 in numbers:
            log_extra("first", ["yes"] * len(numbers))
        else:
            log_extra("later", ["yes"] * len(numbers))
        log_metric("rows", len(numbers))
        return [1.0 if n == 1 else float(len(c)) for n, c in zip(numbers, completions, strict=True)]

    settings = {"log_completions": True, "num_completions_to_print": 0, "max_steps": 1}
    trainer = trained(tmp_path, [], rewards=talking, **settings)
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert table["prompt"] == ["p0:", "p0:", "p2:", "p2:"]
    assert table["seen"] == [0, 0, 20, 20]
    assert table["first"] == ["yes", "yes", None, None]
    assert table["later"] == [None, None, "yes", "yes"]
    assert table["talking"] == [1.0, 2.0, 1.0, 2.0]
    assert logs(trainer)[0]["rows"] == 3.0, "the mean of all values it was called with: 4 and 2"


# ---- resuming

RESUMED: dict[str, tuple[dict[str, Any], int]] = {  # settings, the step of the checkpoint
    "between generations": ({}, 2),
    "in the second epoch": ({}, 5),
    "inside a generation": ({"steps_per_generation": 2, "num_iterations": 2}, 6),
    "slices and updates out of step": ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 2),
    "more slices than a generation has": ({"steps_per_generation": 2, "gradient_accumulation_steps": 3}, 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", [prompts, stream])
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_sees_the_prompts_and_numbers_of_a_straight_one(case: str, source: Any, tmp_path: Path) -> None:
    settings, step = RESUMED[case]
    settings = settings | {"dataset": source(13), "shuffle_dataset": True, "max_steps": 12}
    flat = [1, 2, 5, 7, 8, 11]
    straight = trained(tmp_path, flat, callbacks=[SaveAt(step)], **settings)
    resumed = dynamic(tmp_path / "resumed", flat, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    later = len(resumed.final)
    assert 0 < later < len(straight.final)
    assert resumed.final == straight.final[-later:]
    asked = resumed.backend.calls
    assert asked == straight.backend.calls[-len(asked) :]
    metrics = ("dynamic_sampling/epoch", "num_tokens", "reward")
    assert [logs(resumed)[-1].get(key) for key in metrics] == [logs(straight)[-1].get(key) for key in metrics]


def without_queue(folder: Path) -> Path:
    """As if a subclass had put things into it that cannot be saved."""
    path = folder / "run_state-00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"queue": None}))
    (folder / "manifest.json").unlink()
    return folder


@pytest.mark.parametrize("source", [prompts, stream])
@pytest.mark.parametrize("flat_before", [[1], [1, 2, 3, 4, 5]])
def test_a_generation_that_is_sampled_anew_may_need_more_or_fewer_prompts(
    flat_before: list[int], source: Any, tmp_path: Path
) -> None:
    """Its rewards come from other weights; the generation after it begins where it did in the straight run."""

    class Changing(Lengths):
        def __call__(self, prompts: list[str], completions: list[str], trainer_state: Any, **kwargs: Any) -> Any:
            self.flat = set(flat_before if trainer_state.global_step == 0 else [1, 2])
            return super().__call__(prompts, completions)

    settings = {"steps_per_generation": 2, "dataset": source(24), "max_steps": 6}
    straight = trained(tmp_path, [], rewards=Changing([]), callbacks=[SaveAt(1)], **settings)
    resumed = dynamic(tmp_path / "resumed", [], rewards=Changing([]), callbacks=[SaveAt(2)], **settings)
    resumed.train(resume_from_checkpoint=str(without_queue(tmp_path / "checkpoint-1")))
    assert resumed.groups[0] == [0, 4, 5, 3]
    assert resumed.groups[0] != straight.groups[0]
    assert resumed.groups[1:] == straight.groups[1:]
    saved = json.loads((tmp_path / "resumed" / "checkpoint-2" / "run_state-00000.json").read_text())
    assert saved["parts"]["prompts"] == {"generation_began_at": 0, "consumed": straight.groups[1][0]}


@pytest.mark.parametrize("trainer_class", [WatchedGRPO, WatchedRLOO])
def test_a_resumed_run_ends_with_the_weights_of_a_straight_one(trainer_class: Any, tmp_path: Path) -> None:
    """Truly sampled, by the built-in engine; about half of the groups have no spread."""

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(any(character.isdigit() for character in text)) for text in completions]

    settings = {"rewards": reward, "dynamic_sampling": True, "dataset": prompts(10), "max_steps": 6}
    straight = make(tmp_path, trainer_class, callbacks=[SaveAt(3)], **settings)
    straight.train()
    resumed = make(tmp_path / "resumed", trainer_class, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert straight.backend.name == "builtin"
    assert sum(log["dynamic_sampling/prompts_replaced"] for log in logs(straight)[:3]) > 0
    assert resumed.final == straight.final[3:]
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    keys = [key for key in logs(straight)[-1] if key.startswith(("dynamic", "reward", "num_tokens", "completions"))]
    assert len(keys) > 10
    assert [logs(resumed)[-1][key] for key in keys] == [logs(straight)[-1][key] for key in keys]


@pytest.mark.parametrize("phase", [0, 1])
def test_a_checkpoint_from_a_run_without_it_goes_on_where_that_was(phase: int, tmp_path: Path) -> None:
    settings = {"steps_per_generation": 2, "dataset": prompts(16), "max_steps": 8}
    trained(tmp_path, [5], dynamic_sampling=False, callbacks=[SaveAt(2 + phase)], **settings)
    resumed = dynamic(tmp_path / "resumed", [5], resume_allow_changes=["dynamic_sampling"], **settings)
    resumed.train(resume_from_checkpoint=str(without_queue(tmp_path / f"checkpoint-{2 + phase}")))
    assert resumed.groups == [[4, 8, 6, 7], [9, 10, 11, 12], [13, 14, 15, 0]]


# ---- settings


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic_sampling": True, "max_resample_rounds": 0}, "max_resample_rounds=0 must be at least 1"),
        ({"max_resample_rounds": 3}, "max_resample_rounds=3 needs dynamic_sampling=True"),
        ({"dynamic_sampling": "yes"}, "dynamic_sampling"),
        ({"dynamic_sampling": True, "max_resample_rounds": 2.5}, "max_resample_rounds"),
    ],
)
def test_settings_that_cannot_be_meant(config: Any, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**base_args(tmp_path, **settings))
    assert config(**base_args(tmp_path, dynamic_sampling=True, max_resample_rounds=1)).max_resample_rounds == 1
    assert config(**base_args(tmp_path)).max_resample_rounds == 4


def test_a_loader_of_ones_own_has_no_next_prompts(tmp_path: Path) -> None:
    class OwnLoader(WatchedGRPO):
        def get_train_dataloader(self: Any) -> DataLoader[Any]:
            return DataLoader([{"prompt": f"p{i // 2}:"} for i in range(16)], batch_size=4, collate_fn=list)

    with pytest.raises(ConfigError, match="OwnLoader has its own data loader"):
        trained(tmp_path, [], OwnLoader)


def test_a_sampler_of_ones_own_is_followed(tmp_path: Path) -> None:
    class Backwards(WatchedGRPO):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return [7 - i for i in super()._get_train_sampler(dataset)]

    assert trained(tmp_path, [6, 0], Backwards, max_steps=4).groups == [[7, 5], [4, 3], [2, 1], [5, 7]]


# ---- parts


@pytest.mark.parametrize(
    ("rewards", "groups"),
    [
        ([[1.0], [1.0], [1.0], [2.0]], [0]),
        ([[0.1], [0.1], [0.3], [0.3]], [0, 1]),
        ([[1.0], [math.nan], [2.0], [2.0]], [1]),  # one scorable row has no deviation, as in frac_reward_zero_std
        ([[math.nan], [math.nan], [0.0], [1.0]], []),
    ],
)
def test_groups_without_spread(rewards: list[list[float]], groups: list[int]) -> None:
    assert groups_without_spread(torch.tensor(rewards).flatten(), 2) == groups


@pytest.mark.parametrize(
    ("trainer_class", "settings", "weights", "groups"),
    [
        (GRPOTrainer, {}, [1.0, 2.0], [0]),
        (GRPOTrainer, {}, [1.0, 1.0], []),
        (RLOOTrainer, {}, [1.0, 1.0], []),
        (RLOOTrainer, {"reward_clip_range": [0.0, 5.0]}, [1.0, 1.0], [0]),
        (GRPOTrainer, {"multi_objective_aggregation": "normalize_then_sum"}, [1.0, 1.0], [0]),
        (GRPOTrainer, {"multi_objective_aggregation": "normalize_then_sum"}, [1.0, 2.0], []),
    ],
)
def test_spread_is_that_of_what_the_recipe_compares(
    trainer_class: Any, settings: dict[str, Any], weights: list[float], groups: list[int], tmp_path: Path
) -> None:
    """Of the first group the second reward says the opposite of the first, with half its deviation."""
    trainer = make(tmp_path, trainer_class, rewards=[Lengths([]), Lengths([])], reward_weights=weights, **settings)
    rewards = torch.tensor([[1.0, 4.0], [3.0, 3.0], [1.0, 1.0], [2.0, 1.0]])
    if "multi_objective_aggregation" in settings:
        rewards *= 1e6  # or the 1e-4 beside the deviations would show
    assert groups_without_spread(trainer.compared_rewards(rewards, 2), 2) == groups


def test_the_row_that_nobody_scored_is_left_out(tmp_path: Path) -> None:
    unscorable = torch.tensor([[math.nan, math.nan], [1.0, math.nan], [1.0, math.nan]])
    trainer = make(tmp_path, rewards=[Lengths([]), Lengths([])])
    assert groups_without_spread(trainer.compared_rewards(unscorable, 3), 3) == [0]


def test_runs_and_put() -> None:
    assert runs([2, 3, 6, 7, 8]) == [slice(0, 2), slice(2, 5)]
    assert runs(range(4, 9)) == [slice(0, 5)]
    assert runs([]) == []
    assert put("abcd", [1, 3], "xy") == ["a", "x", "c", "y"]


def test_a_round_takes_the_place_of_rows_and_adds_to_counts() -> None:
    """The second of two processes: rows 3, 4, 5 of three groups of two, of which groups 0 and 2 are replaced."""
    generation = Generation(
        ["d", "e", "f"],
        torch.arange(6.0)[:, None],
        torch.ones(6, 4),
        {"c": [3, 4, 5]},
        {"m": [1.0]},
        torch.zeros(6, 1),
        places=[3, 4, 5],
        indices=[30, 31, 31],
        rounds=[0, 0, 0],
    )  # type: ignore[list-item]
    rewards_MR = torch.tensor([[10.0], [11.0], [12.0], [13.0]])
    by = Generation(
        ["x", "y"], rewards_MR, torch.zeros(4, 4), {"c": [8, 9]}, {"m": [2.0], "n": [3.0]}, torch.ones(4, 1)
    )  # type: ignore[list-item]
    by.steps, by.indices, by.rounds = [[[(0, 1.0)]], [None]], [40, 40], [1, 1]
    generation.replace([0, 2], [1, 2], by, 2)
    assert generation.rollouts == ["d", "x", "y"]
    assert generation.rewards_NR[:, 0].tolist() == [10.0, 11.0, 2.0, 3.0, 12.0, 13.0]
    assert generation.lengths_N4.shape == (10, 4)
    assert generation.columns == {"c": [3, 8, 9]}
    assert generation.metrics == {"m": [1.0, 2.0], "n": [3.0]}
    assert generation.kinds_NR[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert generation.counted_kinds_NR[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert (generation.places, generation.indices, generation.rounds) == ([3, 4, 5], [30, 40, 40], [0, 1, 1])
    assert generation.steps == [[None], [[(0, 1.0)]], [None]]
    gone = generation.replaced[0]
    assert gone.rewards_NR[:, 0].tolist() == [0.0, 1.0, 4.0, 5.0]
    assert (gone.rollouts, gone.places, gone.indices, gone.columns) == (["e", "f"], [4, 5], [31, 31], {"c": [4, 5]})


# ---- two processes

RANK = int(os.environ.get("RANK", "0"))
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
SHARED: dict[str, list[int]] = {  # three groups of 4 a generation, the second of which lies on both processes
    "only on process 0": [0],
    "only on process 1": [2],
    "on both": [1],
    "one after the other": [0, 3, 4, 5],
    "all": list(range(9)),
}


class Talking(Lengths):
    """Says which rows it saw."""

    def __call__(self, prompts: list[str], completions: list[str], log_extra: Any, log_metric: Any, **kw: Any) -> Any:
        log_extra("number", [number(prompt) for prompt in prompts])
        log_metric("rows", len(prompts))
        return super().__call__(prompts, completions)


def shared(folder: Path, case: str, **settings: Any) -> Any:
    return dynamic(
        folder,
        [],
        rewards=Talking(SHARED[case]),
        dataset=prompts(12),
        num_generations=4,
        per_device_train_batch_size=4 // PROCESSES,
        gradient_accumulation_steps=3,
        max_steps=4,
        **settings,
    )


def seen(trainer: Any) -> dict[str, Any]:
    """What a run of one process of several saw; JSON has no tuples."""
    own = ("ledger/", "update/", "rollout/")  # what each process says of itself
    final = [{k: v for k, v in timeless(log).items() if not k.startswith(own)} for log in logs(trainer)]
    streams = [[key, sample, prompt] for (key, sample), prompt in trainer.backend.streams.items()]
    table = list(trainer.completion_logs["train"].columns["extra"]["number"])
    rows = {"final": trainer.final, "advantages": trainer.advantages, "table": table}
    return {**rows, "streams": sorted(streams), "logs": final}


def main(folder: Path) -> None:
    results = {}
    for case in SHARED:
        straight = shared(folder / case, case, callbacks=[SaveAt(2)])
        straight.train()
        resumed = shared(folder / case / "resumed", case)
        if not transformers.__version__.startswith("5.17."):  # which cannot resume on several CPU processes
            resumed.train(resume_from_checkpoint=str(folder / case / "checkpoint-2"))
        results[case] = [seen(straight), seen(resumed)]
    (folder / f"rank{RANK}.json").write_text(json.dumps(results))


@pytest.mark.medium
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    run_together(2, __name__, tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for case in SHARED:
        trainer = shared(tmp_path / "alone" / case, case)
        trainer.train()
        alone = seen(trainer)
        (zero, resumed_zero), (one, resumed_one) = (rank[case] for rank in ranks)
        assert [a + b for a, b in zip(zero["final"], one["final"], strict=True)] == alone["final"], case
        joined = [a + b for a, b in zip(zero["advantages"], one["advantages"], strict=True)]
        assert joined == [pytest.approx(batch) for batch in alone["advantages"]], case
        assert sorted(map(tuple, zero["streams"] + one["streams"])) == list(map(tuple, alone["streams"])), case
        assert zero["table"] == one["table"] == alone["table"] == alone["final"][-1], case
        assert zero["logs"] == one["logs"], "every process knows the same metrics"
        for ours, theirs in zip(zero["logs"], alone["logs"], strict=True):
            kept = {
                k: v for k, v in theirs.items() if k.startswith(("dynamic", "reward", "completions", "num_tokens"))
            }
            assert {k: ours[k] for k in kept} == pytest.approx(kept), case
        for straight, resumed in ((zero, resumed_zero), (one, resumed_one)):
            if resumed["final"]:
                assert resumed["final"] == straight["final"][2:], case
