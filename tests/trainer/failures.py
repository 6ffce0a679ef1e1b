"""Ways to break a real trainer so that it continues as if nothing had happened, and the checks that must detect each.

A failure is a function that changes a trainer before it trains; its name says what goes wrong.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import gruppo.engine.reference
import gruppo.engine.work
import gruppo.trainer.losses
from gruppo import GRPOTrainer
from gruppo.data.sampler import RepeatSampler
from gruppo.engine.shadow import Shadow
from gruppo.types import Completion, StopReason
from tests.helpers import tiny_model
from tests.trainer.runs import make, token_ids

Inject = Callable[[Any, pytest.MonkeyPatch], None]

PATIENCE = 20  # generations without an end or a signal before a check reports; norms needed to detect an outlier


def by_place(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs within every group, whatever the completions are."""
    return [float(i) for i in range(len(completions))]


@dataclass(frozen=True)
class Failure:
    """How to break a trainer, the settings of its run, and the expected outcome."""

    inject: Inject
    checks: frozenset[str]
    settings: dict[str, Any]
    policy: Callable[[], Any]
    ends_with: type[Exception] | None  # the error that ends the run after a warning, if any

    def trainer(self, folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> Any:
        """A broken trainer."""
        usual = {"trainer_class": GRPOTrainer, "parity_check": "off", "rewards": by_place, "model": self.policy()}
        trainer = make(folder, **(usual | self.settings | settings))
        self.inject(trainer, patch)
        return trainer


FAILURES: dict[str, Failure] = {}


def seen_by(
    *checks: str, policy: Callable[[], Any] = tiny_model, ends_with: type[Exception] | None = None, **settings: Any
) -> Callable[[Inject], Inject]:
    """Register a failure with the checks that detect it; no other check may report anything."""

    def enter(inject: Inject) -> Inject:
        FAILURES[inject.__name__] = Failure(inject, frozenset(checks), settings, policy, ends_with)
        return inject

    return enter


# ---- helpers for injecting failures


class After(TrainerCallback):
    """Calls `action` at the end of an update."""

    def __init__(self, update: int, action: Callable[[], Any]):
        self.update, self.action = update, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.update:
            self.action()


def change_completions(trainer: Any, patch: pytest.MonkeyPatch, change: Callable[[Completion], Completion]) -> None:
    """Apply `change` to every completion that the backend samples."""
    sample = trainer.backend.sample
    patch.setattr(trainer.backend, "sample", lambda requests: [change(one) for one in sample(requests)])


def change_loss(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the loss of every pack."""
    policy_loss = gruppo.trainer.losses.policy_loss

    def changed(*args: Any) -> Any:
        output = policy_loss(*args)
        return output._replace(loss=change(output.loss))

    patch.setattr(gruppo.trainer.losses, "policy_loss", changed)


def spread_out(factor: float = 60.0) -> Any:
    """A model that prefers some tokens: with a uniform distribution, a wrong temperature would not be visible."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    return model


def written(text: str) -> Completion:
    return Completion(token_ids(text), StopReason.EOS if text.endswith("<eos>") else StopReason.LENGTH)


# ---- the sampler


@seen_by("duplicates")
def one_noise_for_a_whole_group(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    noise_key = gruppo.engine.work._noise_key
    patch.setattr(gruppo.engine.work, "_noise_key", lambda request, number, sample: noise_key(request, number, 0))


@seen_by("duplicates", per_device_train_batch_size=16, num_generations=8, max_completion_length=20, top_k=5)
def one_noise_for_a_whole_group_with_top_k(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    one_noise_for_a_whole_group(trainer, patch)


WIDE = {"per_device_train_batch_size": 16, "max_completion_length": 16, "max_steps": 5}


@seen_by("entropy", policy=spread_out, **WIDE)
def draws_are_colder_than_their_log_probs_say(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    gumbel = gruppo.engine.reference.gumbel
    patch.setattr(gruppo.engine.reference, "gumbel", lambda words: gumbel(words) * 0.7)


@seen_by("entropy", policy=spread_out, **WIDE)
def draws_are_hotter_than_their_log_probs_say(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    gumbel = gruppo.engine.reference.gumbel
    patch.setattr(gruppo.engine.reference, "gumbel", lambda words: gumbel(words) * 1.4)


@seen_by("drift", policy=spread_out)
def colder_settings_than_asked(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    settings = trainer.backend._settings
    patch.setattr(trainer.backend, "_settings", lambda: replace(settings(), temperature=0.7))


@seen_by("drift", policy=spread_out)
def hotter_settings_than_asked(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    settings = trainer.backend._settings
    patch.setattr(trainer.backend, "_settings", lambda: replace(settings(), temperature=1.5))


@seen_by("stale_weights", bf16=True, max_steps=3)
def cast_weights_are_not_refreshed(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    refresh = Shadow.refresh
    patch.setattr(Shadow, "refresh", lambda shadow: refresh(shadow) if shadow._copied_at is None else None)


@seen_by("stale_weights", max_steps=3)
def an_update_never_reached_the_sampler(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    sample, first = trainer.backend.sample, []

    def sample_as_before(requests: Any) -> list[Completion]:
        completions: list[Completion] = sample(requests)
        first.append(trainer.backend.weights_version)
        trainer.backend.weights_version = first[0]
        return completions

    patch.setattr(trainer.backend, "sample", sample_as_before)


@seen_by("impossible_logps", "drift")
def log_probs_above_0(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_completions(trainer, patch, lambda one: replace(one, plain_logps=[0.1] * len(one.ids)))


@seen_by("impossible_logps")
def log_probs_are_nan(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_completions(trainer, patch, lambda one: replace(one, plain_logps=[math.nan] * len(one.ids)))


@seen_by("drift")
def log_probs_are_shifted(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_completions(
        trainer, patch, lambda one: replace(one, plain_logps=[logp - 0.3 for logp in one.plain_logps or ()])
    )


def with_log_probs(logps: list[float]) -> Callable[..., dict[str, Any]]:
    """A rollout function that always returns the same completion, with these log-probs."""

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(texts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [token_ids("ab<eos>")] * len(ids), "logprobs": [logps] * len(ids)}

    return rollout


@seen_by("impossible_logps", "drift", rollout_func=with_log_probs([0.3, 0.5, 0.9]))
def a_rollout_function_returns_probabilities(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """The function is the failure."""


@seen_by("impossible_logps", rollout_func=with_log_probs([math.nan] * 3))
def a_rollout_function_returns_nan(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """The function is the failure."""


class OtherVocabulary(GRPOTrainer):
    """A trainer whose sampling hook returns ids of a larger vocabulary."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return [[7, 5000, 1]] * len(prompt_ids), None


@seen_by("bad_tokens", trainer_class=OtherVocabulary, ends_with=IndexError)
def ids_that_the_vocabulary_does_not_have(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """The hook is the failure."""


@seen_by("bad_tokens")
def text_behind_the_end(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_completions(trainer, patch, lambda one: Completion([*token_ids("so<eos>"), *one.ids], one.stop))


@seen_by("empty")
def nothing_is_written(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_completions(trainer, patch, lambda one: Completion([], StopReason.NO_ROOM))


@seen_by("empty")
def nothing_but_the_end_is_written(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_completions(trainer, patch, lambda one: written("<eos>"))


@seen_by("no_end", max_steps=PATIENCE)
def no_completion_ever_ends(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_completions(trainer, patch, lambda one: written("and so on"))


@seen_by("nan_logits", "empty", max_steps=3)
def a_weight_becomes_nan(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    def poison() -> None:
        with torch.no_grad():
            trainer.model.lm_head.weight[0, 0] = math.nan

    trainer.add_callback(After(1, poison))


# ---- rewards


def always_no(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def says_nothing(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None] * len(completions)


def one_of_two(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None if i % 2 else float(i) for i in range(len(completions))]


def by_prompt(prompts: list[str], **kwargs: Any) -> list[float]:
    return [float(prompt.strip("p:")) for prompt in prompts]


@seen_by("no_signal", rewards=always_no, max_steps=PATIENCE)
def a_reward_without_spread(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """The reward is the failure."""


@seen_by("no_signal", rewards=one_of_two, max_steps=PATIENCE)
def a_reward_that_scores_one_of_each_group(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """The reward is the failure."""


@seen_by("no_signal", rewards=by_prompt, scale_rewards="batch", max_steps=PATIENCE)
def a_reward_that_differs_between_groups_only(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """The reward is the failure."""


@seen_by("unscored", rewards=says_nothing)
def a_reward_that_never_says_anything(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """The reward is the failure."""


# ---- the update


@seen_by("nonfinite_loss", "nonfinite_gradient")
def the_loss_is_nan(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_loss(patch, lambda loss: loss * math.nan)


@seen_by("nonfinite_loss", "nonfinite_gradient")
def an_advantage_is_infinite(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    estimate = trainer.estimate_advantages

    def with_infinity(*args: Any) -> Any:
        advantages = estimate(*args)
        advantages.advantages_B[0] = math.inf
        return advantages

    patch.setattr(trainer, "estimate_advantages", with_infinity)


@seen_by("nonfinite_gradient")
def the_gradient_is_nan(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)


@seen_by("nonfinite_gradient")
def the_gradient_is_infinite(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    trainer.model.model.norm.weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))


@seen_by("zero_gradient")
def the_loss_is_cut_off_from_the_weights(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_loss(patch, lambda loss: loss * 0.0)


@seen_by("exploding_gradient", max_steps=PATIENCE + 1)
def one_gradient_is_1000_times_the_usual(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    change_loss(patch, lambda loss: loss * (1000.0 if trainer.state.global_step == PATIENCE else 1.0))


@seen_by("frozen_weights", policy=lambda: tiny_model().bfloat16(), learning_rate=1e-9, max_steps=5)
def steps_are_rounded_away(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    """Nothing needs to be changed: bfloat16 weights are too coarse for this learning rate."""


@seen_by("entropy_collapse", max_steps=7)
def the_policy_becomes_certain(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    def sharpen() -> None:
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(1e4)

    trainer.add_callback(After(5, sharpen))


@seen_by("length_collapse", max_steps=7, max_completion_length=70)
def completions_become_short(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    def write(one: Completion) -> Completion:
        return written("a" * (65 if trainer.state.global_step < 5 else 1) + "<eos>")

    change_completions(trainer, patch, write)


@seen_by("stale_rows", max_steps=3)
def rows_are_older_than_they_may_be(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    to_tensors = trainer.to_tensors

    def aged(rollouts: Any) -> Any:
        batch = to_tensors(rollouts)
        return replace(batch, sampled_at=batch.sampled_at - 2)

    patch.setattr(trainer, "to_tensors", aged)


# ---- the data


def second_instead_of_first(patch: pytest.MonkeyPatch) -> None:
    order = RepeatSampler.order
    patch.setattr(RepeatSampler, "order", lambda *asked: torch.cat([(whole := order(*asked))[1:2], whole[1:]]))


@seen_by("prompt_repeated", "prompt_skipped", max_steps=5)
def a_prompt_is_taken_twice(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    second_instead_of_first(patch)


@seen_by("prompt_skipped", max_steps=5)
def prompts_are_left_out(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    trainer.add_callback(After(1, lambda: next(trainer._epoch_iterator)))


@seen_by("prompt_unknown")
def a_prompt_that_the_books_do_not_know(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    stream = gruppo.trainer.feeding.SampledStream
    indices = stream.indices
    patch.setattr(stream, "indices", lambda *place: [(epoch, 1000) for epoch, _ in indices(*place)])
