"""Callbacks for the trainer: reference blending, weight averaging, progress, and tables of completions."""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from gruppo.errors import ConfigError
from gruppo.policy.unwrap import bare_model
from gruppo.trainer.display.completion_callbacks import LogCompletionsCallback, WeaveCallback
from gruppo.trainer.display.rich_progress import RichProgressCallback
from gruppo.trainer.resume.loaded import fits, reading

__all__ = [
    "BEMACallback",
    "LogCompletionsCallback",
    "RichProgressCallback",
    "SyncRefModelCallback",
    "WeaveCallback",
]

logger = logging.get_logger(__name__)

BEMA_FILE = "bema.pt"


class SyncRefModelCallback(TrainerCallback):
    """Blend the policy into the reference: θ_ref ← (1 − α)·θ_ref + α·θ, https://huggingface.co/papers/2404.09656.

    Happens after every step that is a multiple of `args.ref_model_sync_steps`, with α = `args.ref_model_mixup_alpha`.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Accelerator | None = None) -> None:
        self.ref_model = ref_model
        self.accelerator = accelerator

    @staticmethod
    def sync_target_model(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        """Blend `model` into `target_model` in place; the two must have the same parameters in the same order."""
        with _gathered(model, target_model) as writes:
            sources, targets = list(model.named_parameters()), list(target_model.named_parameters())
            _check_same_shapes(sources, targets)
            if not writes:
                return
            with torch.no_grad():
                for (_, source), (_, target) in zip(sources, targets, strict=True):
                    target.mul_(1.0 - alpha).add_(source.to(target.device, target.dtype), alpha=alpha)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps:
            return
        model, reference = kwargs["model"], self.ref_model
        if self.accelerator is not None:
            model, reference = bare_model(self.accelerator, model), bare_model(self.accelerator, reference)
        self.sync_target_model(model, reference, args.ref_model_mixup_alpha)


@contextmanager
def _gathered(*models: nn.Module) -> Iterator[bool]:
    """Under DeepSpeed ZeRO-3, hold whole parameters; yields whether this process is the one that may change them."""
    parameters = [p for model in models for p in model.parameters()]
    if not any(hasattr(p, "ds_id") for p in parameters):
        yield True
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield deepspeed.comm.get_rank() == 0


def _check_same_shapes(sources: list[tuple[str, nn.Parameter]], targets: list[tuple[str, nn.Parameter]]) -> None:
    if len(sources) != len(targets):
        raise ConfigError(
            f"The policy has {len(sources)} parameters and the reference {len(targets)}; only a reference with the "
            "policy's architecture can be blended. Set sync_ref_model=False."
        )
    for (name, source), (_, target) in zip(sources, targets, strict=True):
        if source.shape != target.shape:
            raise ConfigError(
                f"Parameter {name} has the shape {tuple(source.shape)} in the policy and {tuple(target.shape)} in the "
                "reference; only a reference with the policy's architecture can be blended. Set sync_ref_model=False."
            )


class BEMACallback(TrainerCallback):
    """Keep a bias-corrected moving average of the weights (BEMA), https://huggingface.co/papers/2508.00180.

    Every `update_freq` (φ) steps after step `update_after` (τ), with t the step and θ₀ the weights at step τ:
    EMA ← (1 − β)·EMA + β·θ and average = α·(θ − θ₀) + EMA, where β = (ρ + γ·t)^(−κ), at least `min_ema_multiplier`,
    and α = (ρ + γ·t)^(−η); κ = `ema_power`, η = `bias_power`, ρ = `lag`, γ = `multiplier`. The average is
    `running_model`, on `device`; the main process saves it to `output_dir/bema` after training, and its state with
    every checkpoint.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
    ) -> None:
        if update_freq < 1 or update_after < 0:
            raise ConfigError(
                f"update_freq={update_freq} must be at least 1 and update_after={update_after} at least 0."
            )
        self.update_freq = update_freq
        self.ema_power = ema_power
        self.bias_power = bias_power
        self.lag = lag
        self.update_after = update_after
        self.multiplier = multiplier
        self.min_ema_multiplier = min_ema_multiplier
        self.device = device
        self.running_model: Any = None
        self._origin: dict[str, torch.Tensor] = {}
        self._average: dict[str, torch.Tensor] = {}
        self._saved: Path | None = None  # the state file of the checkpoint to resume from

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return  # the weights are the same everywhere; one average is enough
        model = _unwrap(kwargs["model"])
        if any(hasattr(p, "ds_id") or type(p.data).__name__ == "DTensor" for p in model.parameters()):
            raise ConfigError("BEMACallback needs unsharded weights; it does not work with ZeRO-3 or FSDP.")
        self.running_model = copy.deepcopy(model).to(self.device)
        self._snapshot(model)
        saved, self._saved = self._saved or self._state_file(args, state), None
        if saved.exists():
            with reading("averaged weights", saved.parent):
                stored = torch.load(saved, map_location=self.device, weights_only=True)
                self._origin = {n: fits(n, stored["origin"][n], value) for n, value in self._origin.items()}
                self._average = {n: fits(n, stored["average"][n], value) for n, value in self._average.items()}
                self.running_model.load_state_dict(stored["running"], strict=False)
        elif state.global_step > self.update_after:
            logger.warning(f"{saved} is missing; the BEMA average restarts at step {state.global_step}.")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or state.global_step < self.update_after:
            return
        model = _unwrap(kwargs["model"])
        if state.global_step == self.update_after:
            self._snapshot(model)
        elif (state.global_step - self.update_after) % self.update_freq == 0:
            self._update(model, state.global_step)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the state under trainers that do not call `write_state`."""
        target = self._state_file(args, state)
        if state.is_world_process_zero and target.parent.exists() and not target.exists():
            self.write_state(target.parent)

    def write_state(self, folder: Path) -> None:
        """Write the state into a checkpoint folder; the main process calls this while it saves."""
        running = {name: p.detach() for name, p in _trainable(self.running_model)}
        torch.save({"origin": self._origin, "average": self._average, "running": running}, folder / BEMA_FILE)

    def read_state(self, folder: Path) -> None:
        """Set where `on_train_begin` reads the state from; called before training resumes from a checkpoint."""
        self._saved = folder / BEMA_FILE

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.running_model.save_pretrained(Path(args.output_dir) / "bema")

    def _snapshot(self, model: nn.Module) -> None:
        self._origin = {n: p.detach().to(self.device, copy=True) for n, p in _trainable(model)}
        self._average = {n: value.clone() for n, value in self._origin.items()}

    @torch.no_grad()
    def _update(self, model: nn.Module, step: int) -> None:
        alpha, beta = self._correction_weight(step), self._average_rate(step)
        running = dict(_trainable(self.running_model))
        for name, parameter in _trainable(model):
            current = parameter.detach().to(self.device)
            average = self._average[name].mul_(1.0 - beta).add_(current, alpha=beta)
            running[name].copy_(average + alpha * (current - self._origin[name]))

    def _average_rate(self, step: int) -> float:
        return max(math.pow(self.lag + self.multiplier * step, -self.ema_power), self.min_ema_multiplier)

    def _correction_weight(self, step: int) -> float:
        return math.pow(self.lag + self.multiplier * step, -self.bias_power)

    @staticmethod
    def _state_file(args: Any, state: TrainerState) -> Path:
        return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / BEMA_FILE


def _unwrap(model: nn.Module) -> nn.Module:
    unwrapped: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return unwrapped


def _trainable(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
