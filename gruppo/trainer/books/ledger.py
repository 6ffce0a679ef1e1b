"""Accounting of the tokens and seconds of an update, and of how much of the device's peak they used.

Tokens go through the model in two phases: the rollout reads prompts and samples completions, and the update runs both
through the model again. A token that is sampled and trained on counts in both phases. Tokens that contribute nothing
to learning are counted by class:

    prompt           tokens of the prompt, which are read but not sampled
    zero_advantage   tokens of completions whose advantage is 0
    truncated        tokens of completions that did not end by themselves
    padding          positions that were computed but hold no token
    stale            tokens trained on after the weights that sampled them had changed

A completion may be in several of these classes; tokens in none of them are useful. Nothing here waits
for another process, and an update waits for its device once, when its metrics are read anyway.
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
Flags = Sequence[bool] | None  # one per row; None: false for all rows


@dataclass
class _Completions:
    """Counts of completion tokens by class."""

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
    """The tokens and operations of a phase, and how long it took."""

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
        """The number of tokens of a class, or of useful tokens.

        For classes of completion tokens, the share among rows whose flags are known is applied to all completion
        tokens: with a hook that samples several turns, the scored rows differ from what each call sampled.
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

    Utilisation (MFU) is not reported without a shape (see `countable_shape`) or on a device whose peak is not known.
    `dtype` is the dtype of the matrix products: autocast's if it is enabled, else that of the weights. With `adapters`
    most weights need no gradient, which saves half of the work of a backward pass.
    """

    def __init__(self, shape: ModelShape | None, device_name: str | None, dtype: Any, *, adapters: bool = False):
        self.shape = shape
        self.peak = peak_flops(device_name, dtype)
        self.passes = 2 if adapters else 3  # cost of forward plus backward, in units of a forward pass
        self.forget()

    def forget(self) -> None:
        """Reset all counts, after an update has finished or was interrupted."""
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
        """Record a call of the backend: prompt and completion length of each row, and how long the call took.

        `prompt_tokens` is the number of prompt tokens that were actually read, which is smaller than the sum of
        `prompts` if rows share their prompts; it defaults to that sum. `padding_tokens` were computed without holding
        a token. With `speed_is_logged` the backend logs its own, more accurate, tokens per second.
        """
        self._add(self._rollout, prompts, completions, prompt_tokens, padding_tokens, sum(completions), passes=1)
        self._rollout.seconds += seconds
        self._speed_is_logged |= speed_is_logged

    def scored_rows(
        self, completions: Sequence[int], *, zero_advantage: Flags = None, truncated: Flags = None
    ) -> None:
        """Record the flags of sampled rows after scoring, once for each row, including rows not trained on."""
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
        """Record a pass of the update, such as a pack: the tokens of each row that went through the model.

        The LM head was applied to `scored` of them. `prompt_tokens` and `padding_tokens` are as in `sampled`;
        `backward=False` is a pass without gradients.
        """
        passes = self.passes if backward else 1
        self._add(self._update, prompts, completions, prompt_tokens, padding_tokens, scored, passes)
        self._update.known.add(completions, zero_advantage, truncated, stale)

    def took(self, seconds: float) -> None:
        """Add seconds of the update's passes. They need not be timed one by one, which would require a device sync."""
        self._update.seconds += seconds

    @property
    def update_tokens(self) -> int:
        """Tokens that went through the model in the passes of the update."""
        return self._update.prompt + self._update.completion

    def metrics(self) -> dict[str, float]:
        """Metrics of the update that just ended; resets the counts. Keys of a phase are missing if it was idle."""
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
        """Seconds of a phase, and its MFU: the share of the device's peak that the model's operations amount to."""
        if not (phase.seconds and phase.tokens):
            return {}
        values = {f"{name}/seconds": phase.seconds}
        if self.shape is not None and self.peak is not None:
            values[f"{name}/mfu"] = phase.flops / (phase.seconds * self.peak)
        return values


def keys_seen(prompts: Sequence[int], completions: Sequence[int], prompt_tokens: int) -> float:
    """The total number of attention keys that the tokens of these rows attend to.

    A prompt token attends to the prompt up to and including itself, a completion token also to the whole prompt. If
    rows share prompts, only `prompt_tokens` prompt tokens were read. Which ones is not known, so the sum over all
    prompts is scaled by the share that was read.

    Example, two completions of 2 tokens of one prompt of 3:
        keys_seen([3, 3], [2, 2], 3) == (1 + 2 + 3) + 2 * (4 + 5)
    """
    once = prompt_tokens / max(sum(prompts), 1)
    of_prompts = sum(length * (length + 1) / 2 for length in prompts)
    rows = zip(prompts, completions, strict=True)
    return once * of_prompts + sum(length * before + length * (length + 1) / 2 for before, length in rows)


def countable_shape(model: nn.Module) -> ModelShape | None:
    """The shape of a transformers model if its operations can be computed from it, else None.

    This requires that the shape accounts for all of the model's matrices. It does not for mixture-of-experts models,
    where a token uses only a few experts, nor for other kinds of MLPs. A difference of up to 10% is accepted, to allow
    for adapters.
    """
    shape, _ = ModelShape.read(model.config)
    if shape is None:  # not a decoder with attention
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
