"""What a trainer asks of its backend: groups, their random numbers, and what it makes of the answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GenerationConfig

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.data.sampler import split_for_rank
from gruppo.rollout.base import RolloutBackend
from gruppo.types import Completion, SampleRequest, StopReason
from tests.helpers import prompts, scripted_completion, timeless
from tests.trainer.runs import SaveAt, logs, make
from tests.trainer.test_batching import RESUMED, stream

Stream = tuple[int, int]  # noise key and sample number of one completion


class Asked(RolloutBackend):
    """A backend that answers from a script and writes down what it was asked."""

    name = "asked"

    def __init__(self, config: Any, **fields: Any):
        self.config = config
        self.fields = fields
        self.calls: list[list[SampleRequest]] = []

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self.calls.append(list(requests))
        ids = [scripted_completion(r.prompt_ids, r.first_sample + i) for r in requests for i in range(r.count)]
        return [
            Completion(row, StopReason.EOS, **{name: [value] * len(row) for name, value in self.fields.items()})
            for row in ids
        ]

    @property
    def streams(self) -> list[list[Stream]]:
        return [[(r.noise_key, r.first_sample + i) for r in call for i in range(r.count)] for call in self.calls]


def asking(folder: Path, trainer_class: Any = GRPOTrainer, logps: float | None = None, **settings: Any) -> Any:
    """A trainer whose backend is such a one."""
    trainer = make(folder, trainer_class, **settings)
    fields = {} if logps is None else {"logps": logps, "plain_logps": logps - 1, "entropies": 0.5}
    trainer.backend = Asked(trainer.backend.config, **fields)
    return trainer


def asked(folder: Path, trainer_class: Any = GRPOTrainer, **settings: Any) -> Any:
    trainer = asking(folder, trainer_class, **settings)
    trainer.train()
    return trainer


# ---- groups


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_a_group_is_one_request(trainer_class: Any, tmp_path: Path) -> None:
    trainer = asked(tmp_path, trainer_class, num_generations=4, per_device_train_batch_size=8, max_steps=2)
    assert [[(r.count, r.first_sample) for r in call] for call in trainer.backend.calls] == [[(4, 0), (4, 0)]] * 2


def test_equal_prompts_are_groups_of_their_own(tmp_path: Path) -> None:
    same = prompts(4).map(lambda row: {"prompt": "same"})
    (call,) = asked(tmp_path, dataset=same, per_device_train_batch_size=8, max_steps=1).backend.calls
    assert [r.count for r in call] == [2, 2, 2, 2]
    assert len({r.noise_key for r in call}) == 4


def test_every_completion_of_a_run_has_its_own_stream(tmp_path: Path) -> None:
    trainer = asked(
        tmp_path, max_steps=6, eval_dataset=prompts(4), eval_strategy="steps", eval_steps=2, num_iterations=2
    )
    streams = [stream for call in trainer.backend.streams for stream in call]
    assert len(streams) == len(set(streams)) == 3 * 4 + 3 * 8  # generations of 4, evaluations of 8


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_ask_for_their_share_of_one_batch(
    world: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of unequal size, as a ragged evaluation batch has them; groups lie on two processes."""
    rows = [{"prompt": f"p{i}:"} for i in range(4) for _ in range(3)]
    together = asking(tmp_path, num_generations=3, num_generations_eval=3, per_device_train_batch_size=3)
    together.mode = mode
    together.rollout(rows)
    apart: list[Stream] = []
    for rank in range(world):
        trainer = asking(tmp_path, num_generations=3, num_generations_eval=3, per_device_train_batch_size=3)
        trainer.mode = mode
        counts = torch.tensor([len(split_for_rank(rows, r, world)) for r in range(world)])
        with monkeypatch.context() as patch:
            patch.setattr(trainer.accelerator, "gather", lambda tensor, counts=counts: counts)
            patch.setattr(type(trainer.accelerator), "process_index", rank)
            trainer.rollout(split_for_rank(rows, rank, world))
        apart += trainer.backend.streams[0]
    assert apart == together.backend.streams[0]


# ---- the same in every run


def test_streams_follow_from_the_seed(tmp_path: Path) -> None:
    first, again, other = (asked(tmp_path, seed=seed, shuffle_dataset=False) for seed in (1, 1, 2))
    assert first.backend.streams == again.backend.streams
    shared = {s for call in first.backend.streams for s in call} & {s for call in other.backend.streams for s in call}
    assert not shared


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "source"),
    [*((case, prompts) for case in RESUMED), ("in epoch 2", stream), ("inside a generation", stream)],
)
def test_a_resumed_run_draws_the_random_numbers_of_a_straight_one(case: str, source: Any, tmp_path: Path) -> None:
    settings, step = RESUMED[case]
    settings = settings | {"dataset": source(12 if "out" in case else 8), "max_steps": 9}
    straight = asked(tmp_path, callbacks=[SaveAt(step)], **settings).backend.streams
    resumed = asking(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    later = resumed.backend.streams
    assert later
    assert later == straight[len(straight) - len(later) :]


class OwnLoader(GRPOTrainer):
    """Brings its rows itself, two groups at a time."""

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        rows = [row for row in self.train_dataset for _ in range(2)]
        return DataLoader(rows, batch_size=4, collate_fn=list)


def test_rows_of_an_own_loader_have_streams_that_survive_a_resume(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 4, "dataset": prompts(16)}
    straight = asked(tmp_path, OwnLoader, callbacks=[SaveAt(2)], **settings).backend.streams
    assert len(straight) == 8
    assert len({stream for call in straight for stream in call}) == 8 * 4
    resumed = asking(tmp_path / "resumed", OwnLoader, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.backend.streams == straight[4:]


# ---- evaluation


def evaluated(trainer: Any, **kwargs: Any) -> list[list[Stream]]:
    before = len(trainer.backend.calls)
    trainer.evaluate(**kwargs)
    return trainer.backend.streams[before:]


def test_streams_of_an_evaluation_follow_from_its_update_set_and_batch(tmp_path: Path) -> None:
    trainer = asking(tmp_path, eval_dataset=prompts(8), per_device_eval_batch_size=4)
    first, again = evaluated(trainer), evaluated(trainer)
    assert first == again
    assert len({stream for call in first for stream in call}) == 16
    other_set = evaluated(trainer, metric_key_prefix="eval_other")
    trainer.state.global_step += 1
    later = evaluated(trainer)
    assert len({stream for calls in (first, other_set, later) for call in calls for stream in call}) == 3 * 16


def test_evaluating_does_not_change_the_streams_of_training(tmp_path: Path) -> None:
    plain = asked(tmp_path, max_steps=4)
    watched = asked(tmp_path, max_steps=4, eval_dataset=prompts(4), eval_strategy="steps", eval_steps=1)
    of_training = [stream for stream in watched.backend.streams if len(stream) == 4]
    assert of_training == plain.backend.streams


# ---- hooks


def test_a_hook_that_asks_again_gets_other_completions(tmp_path: Path) -> None:
    class Twice(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            first, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            second, _ = super()._generate_single_turn(prompt_ids[1:2])
            return [first[0], *second, *first[2:]], None

    trainer = asked(tmp_path, Twice, max_steps=3)
    streams = [stream for call in trainer.backend.streams for stream in call]
    assert len(streams) == len(set(streams)) == 3 * (4 + 1)
    again = asked(tmp_path, Twice, max_steps=3)
    assert again.backend.streams == trainer.backend.streams


def test_a_hook_may_give_the_rows_of_a_group_prompts_of_their_own(tmp_path: Path) -> None:
    class Hinted(GRPOTrainer):
        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            ids, *rest = super()._tokenize_prompts(prompts)
            return [[*row, 20 + i % 2] for i, row in enumerate(ids)], *rest

        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            hinted = [[*row, 30 + i % 2] for i, row in enumerate(prompt_ids)]
            return super()._generate_single_turn(hinted, *args, **kwargs)

    (call,) = asked(tmp_path, Hinted, max_steps=1).backend.calls
    assert [(r.prompt_ids[-1], r.count, r.first_sample) for r in call] == [(30, 1, 0), (31, 1, 1)] * 2
    assert call[0].noise_key == call[1].noise_key != call[2].noise_key


# ---- what comes back


@pytest.mark.parametrize("steps", [1, 2], ids=["on-policy", "off-policy"])
def test_log_probs_of_a_backend_have_no_part_in_the_loss(steps: int, tmp_path: Path) -> None:
    settings = {"steps_per_generation": steps, "off_policy_mask_threshold": 0.1, "max_steps": 2 * steps}
    settings["parity_check"] = "off"  # it would stop at once: the log-probs are made up
    plain, knowing = (asked(tmp_path, logps=logps, **settings) for logps in (None, -9.0))
    for a, b in zip(plain.model.parameters(), knowing.model.parameters(), strict=True):
        assert torch.equal(a, b)
    # The sampler's drift, and its entropies of rows that the update leaves out, are metrics and only that.
    skipped = ("sampling/", "entropy", "ledger/", "audit/")
    metrics = [
        [{k: v for k, v in timeless(log).items() if not any(word in k for word in skipped)} for log in logs(trainer)]
        for trainer in (plain, knowing)
    ]
    assert metrics[0] == metrics[1]
    assert logs(knowing)[0]["sampling/sampling_logp_difference/mean"] > 1


def test_log_probs_of_a_backend_do_not_pass_through_a_hook(tmp_path: Path) -> None:
    class Passing(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            ids, logps = super()._generate_single_turn(*args, **kwargs)
            assert logps is None
            return ids, logps

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            assert "sampling_per_token_logps" not in inputs
            return super()._compute_loss(model, inputs)

    assert asked(tmp_path, Passing, logps=-9.0, max_steps=1).state.global_step == 1


def test_a_rollout_keeps_what_the_backend_knows_of_it(tmp_path: Path) -> None:
    trainer = asking(tmp_path, logps=-2.0)
    (first, *_) = trainer.rollout([{"prompt": "p0:"}] * 4)
    assert set(first.completion.plain_logps) == {-3.0}
    assert set(first.completion.entropies) == {0.5}


class Passing(GRPOTrainer):
    """Says nothing about where completions ended."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return super()._generate_single_turn(*args, **kwargs)


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, Passing])
@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_a_stop_string_is_an_end(backend: str, trainer_class: Any, tmp_path: Path) -> None:
    """The model writes at random; any digit or letter ends it, so that nearly all completions end early."""
    strings = [chr(c) for c in (*range(48, 58), *range(65, 91), *range(97, 123))]
    settings = {
        "rollout_backend": backend,
        "generation_kwargs": {"stop_strings": strings},
        "mask_truncated_completions": True,
        "max_completion_length": 24,
        "max_steps": 1,
    }
    seen: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    trainer = make(tmp_path, trainer_class, rewards=reward, **settings)
    trainer.train()
    (log,) = logs(trainer)
    assert log["completions/clipped_ratio"] == 0
    assert 0 < log["completions/mean_terminated_length"] == log["completions/mean_length"] < 20
    assert log["grad_norm"] > 0, "they are not masked"
    assert sum(text[-1] in strings for text in seen if text) >= 2
    assert not any(character in strings for text in seen for character in text[:-1])


@pytest.mark.parametrize("stop", list(StopReason))
def test_which_completions_count_as_truncated(stop: StopReason, tmp_path: Path) -> None:
    trainer = asking(tmp_path, mask_truncated_completions=True)
    rollouts = trainer.rollout([{"prompt": "p0:"}] * 4)
    object.__setattr__(rollouts[0].completion, "stop", stop)
    assert bool(trainer.to_tensors(rollouts).completion_mask[0].any()) is stop.ended


def test_settings_of_a_run_are_those_of_its_backend(tmp_path: Path) -> None:
    trainer = asking(tmp_path)
    trainer.generation_config = GenerationConfig(max_new_tokens=3)
    assert trainer.backend.config.max_new_tokens == 3
    trainer.temperature = 0.5
    assert trainer.backend.config.temperature == 0.5
