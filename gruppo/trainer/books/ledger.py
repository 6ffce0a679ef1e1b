"""Where the tokens and the seconds of an update went, and how much of the device they used.

Tokens go through the model in two phases: the rollout reads prompts and samples completions, the update runs both
again. A token that is sampled and trained on counts in each. What is spent on tokens that teach nothing is named:

    prompt           read, not written
    zero_advantage   of completions whose advantage is 0
    truncated        of completions that did not end by themselves
    padding          places that were computed and held no token
    stale            trained on after the weights that sampled them had changed

A completion may be in several of these classes; useful is what is in none. Everything is counted from numbers that the
host has anyway: no process waits, for its device or for another process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gruppo.plan import ModelShape, peak_flops
from gruppo.policy.adapters import is_peft_model
from gruppo.policy.sharding import shape_of

CLASSES = ("prompt", "zero_advantage", "truncated", "padding", "stale")
Flags = Sequence[bool] | None  # one per row; None: it is true of none


@dataclass
class _Completions:
    """Completion tokens, by what is known of their rows."""

    tokens: int = 0
    zero_advantage: int = 0
    truncated: int = 0
    stale: int = 0
    useful: int = 0

    def add(self, lengths: Sequence[int], zero_advantage: Flags, truncated: Flags, stale: Flags = None) -> None:
        columns = [[False] * len(lengths) if flags is None else flags for flags in (zero_advantage, truncated, stale)]
        for length, without, cut, old in zip(lengths, *columns, strict=True):
            self.tokens += length
            self.zero_advantage += length * without
            self.truncated += length * cut
            self.stale += length * old
            self.useful += length * (not (without or cut or old))


@dataclass
class _Phase:
    """What a phase ran, and how long it took."""

    seconds: float = 0.0
    prompt: int = 0
    completion: int = 0
    padding: int = 0
    flops: float = 0.0
    known: _Completions = field(default_factory=_Completions)

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion + self.padding

    def of_class(self, name: str) -> float:
        """Tokens of a class, or useful ones.

        Of completions, the share among those whose rows are known: a hook that asks for several turns has rows that
        are not what was sampled at any one time.
        """
        if name in ("prompt", "padding"):
            return float(getattr(self, name))
        if not self.known.tokens:
            return float(self.completion) if name == "useful" else 0.0
        return self.completion * float(getattr(self.known, name)) / self.known.tokens


class Ledger:
    """Counts the tokens and seconds of one update, of this process.

    An update with a rollout of two completions, one of them truncated, of a prompt of 10 tokens:
        ledger.sampled(prompts=[10, 10], completions=[20, 30], prompt_tokens=10, seconds=2.0)
        ledger.scored_rows([20, 30], zero_advantage=[False, False], truncated=[False, True])
        ledger.ran(prompts=[10, 10], completions=[19, 29], prompt_tokens=10, scored=50, truncated=[False, True])
        ledger.took(1.0)
        ledger.metrics()["ledger/tokens/truncated"] == (30 + 29) / (60 + 58)

    Without a shape (see `countable_shape`) or on a device whose peak is not known there is no utilisation. `dtype` is
    that of the matrix products: autocast's where it is on, else the weights'. With `adapters` most weights get no
    gradient, which is half of the work of a backward pass.
    """

    def __init__(self, shape: ModelShape | None, device_name: str | None, dtype: Any, *, adapters: bool = False):
        self.shape = shape
        self.peak = peak_flops(device_name, dtype)
        self.passes = 2 if adapters else 3  # operations of forward and backward, in forward passes
        self.forget()

    def forget(self) -> None:
        """Begin anew: after an update, or after one that was interrupted."""
        self._rollout, self._update = _Phase(), _Phase()
        self._speed_is_logged = False

    def sampled(
        self,
        *,
        prompts: Sequence[int],
        completions: Sequence[int],
        seconds: float,
        prompt_tokens: int | None = None,
        padding_tokens: int = 0,
        speed_is_logged: bool = False,
    ) -> None:
        """A call of the backend: tokens of the prompt and of the completion of each row, and how long it took.

        `prompt_tokens` were read if rows share their prompts, all of them by default. `padding_tokens` were computed
        for nothing. `speed_is_logged`: the backend knows its tokens per second better.
        """
        self._add(self._rollout, prompts, completions, prompt_tokens, padding_tokens, sum(completions), passes=1)
        self._rollout.seconds += seconds
        self._speed_is_logged |= speed_is_logged

    def scored_rows(
        self, completions: Sequence[int], *, zero_advantage: Flags = None, truncated: Flags = None
    ) -> None:
        """What the rewards said about sampled rows: once for each row, also for those that are not trained on."""
        self._rollout.known.add(completions, zero_advantage, truncated)

    def ran(
        self,
        *,
        prompts: Sequence[int],
        completions: Sequence[int],
        scored: int,
        prompt_tokens: int | None = None,
        padding_tokens: int = 0,
        zero_advantage: Flags = None,
        truncated: Flags = None,
        stale: Flags = None,
        backward: bool = True,
    ) -> None:
        """A pass of the update, such as a pack: tokens of each row that went through the model.

        The head saw `scored` of them. `prompt_tokens` and `padding_tokens` are as in `sampled`; `backward` False is a
        pass without gradients.
        """
        passes = self.passes if backward else 1
        self._add(self._update, prompts, completions, prompt_tokens, padding_tokens, scored, passes)
        self._update.known.add(completions, zero_advantage, truncated, stale)

    def took(self, seconds: float) -> None:
        """Seconds of the update's passes, in parts or at once; a single pass cannot be timed without a wait for it."""
        self._update.seconds += seconds

    @property
    def update_tokens(self) -> int:
        """Tokens that went through the model in the passes of the update."""
        return self._update.prompt + self._update.completion

    def metrics(self) -> dict[str, float]:
        """Of the update that just ended, which is then forgotten. Keys about a phase are missing if it did nothing."""
        rollout, update = self._rollout, self._update
        values = self._shares() | self._use("rollout", rollout) | self._use("update", update)
        if rollout.seconds and rollout.tokens and not self._speed_is_logged:
            values["rollout/tokens_per_second"] = rollout.completion / rollout.seconds
        if update.seconds and update.tokens:
            values["update/tokens_per_second"] = (update.prompt + update.completion) / update.seconds
        self.forget()
        return values

    def _add(
        self,
        phase: _Phase,
        prompts: Sequence[int],
        completions: Sequence[int],
        prompt_tokens: int | None,
        padding_tokens: int,
        scored: int,
        passes: int,
    ) -> None:
        read = sum(prompts) if prompt_tokens is None else prompt_tokens
        tokens = read + sum(completions)
        phase.prompt += read
        phase.completion += sum(completions)
        phase.padding += padding_tokens
        if self.shape is not None and tokens:
            context = keys_seen(prompts, completions, read) / tokens
            phase.flops += passes * self.shape.forward_flops(tokens, context, scored)

    def _shares(self) -> dict[str, float]:
        phases = [phase for phase in (self._rollout, self._update) if phase.tokens]
        tokens, seconds = sum(phase.tokens for phase in phases), sum(phase.seconds for phase in phases)
        values = {}
        for name in CLASSES if tokens else ():
            values[f"ledger/tokens/{name}"] = sum(phase.of_class(name) for phase in phases) / tokens
            if seconds:
                spent = sum(phase.seconds * phase.of_class(name) / phase.tokens for phase in phases)
                values[f"ledger/seconds/{name}"] = spent / seconds
        if tokens:
            values["ledger/useful_tokens"] = sum(phase.of_class("useful") for phase in phases) / tokens
        return values

    def _use(self, name: str, phase: _Phase) -> dict[str, float]:
        """Seconds, and the share of the device's peak that the model needed."""
        if not (phase.seconds and phase.tokens):
            return {}
        values = {f"{name}/seconds": phase.seconds}
        if self.shape is not None and self.peak is not None:
            values[f"{name}/mfu"] = phase.flops / (phase.seconds * self.peak)
        return values


def keys_seen(prompts: Sequence[int], completions: Sequence[int], prompt_tokens: int) -> float:
    """Keys that the tokens of these rows see, all together.

    A prompt's tokens see those up to themselves, a completion's their prompt as well. Rows that share prompts have
    read `prompt_tokens` of them; which is not known, so the mean is taken.

    Example, two completions of 2 tokens of one prompt of 3:
        keys_seen([3, 3], [2, 2], 3) == (1 + 2 + 3) + 2 * (4 + 5)
    """
    once = prompt_tokens / max(sum(prompts), 1)
    of_prompts = sum(length * (length + 1) / 2 for length in prompts)
    rows = zip(prompts, completions, strict=True)
    return once * of_prompts + sum(length * before + length * (length + 1) / 2 for before, length in rows)


def countable_shape(model: nn.Module) -> ModelShape | None:
    """The shape of a transformers model if its operations follow from it, else None.

    They do if all of its matrices are those that the shape knows of: not with experts, of which a token sees a few,
    nor with MLPs of another kind. Adapters may add a tenth.
    """
    try:
        shape = ModelShape.from_config(model.config)
    except AttributeError:  # not a decoder with attention
        return None
    modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    matrices = [p for module in modules for p in module.parameters(recurse=False) if len(shape_of(p)) > 1]
    weights = shape.layer_weights + shape.hidden * shape.vocabulary
    return shape if abs(sum(shape_of(p).numel() for p in matrices) / weights - 1) < 0.1 else None


def make_ledger(accelerator: Any, model: nn.Module, autocast_dtype: Any) -> Ledger:
    """The ledger of a run on this process's device."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    weights = next(p for p in model.parameters() if p.is_floating_point())
    return Ledger(countable_shape(model), name, autocast_dtype or weights.dtype, adapters=is_peft_model(model))
