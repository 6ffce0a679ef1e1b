"""Checks of what was loaded from a checkpoint, before any of it is computed with.

torch checks little itself: moments of another shape than their weight make a fused optimizer read beyond them.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gruppo.errors import CheckpointError
from gruppo.types import LOSS_TOKENS, TrainBatch

__all__ = ["bare_optimizer", "check_flight", "check_optimizer", "check_queue", "check_schedule", "fits", "reading"]

# What libraries raise for content that does not make sense to them.
_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError, EOFError),
    *(OSError, UnpicklingError, SafetensorError),
)
# Moments that have the shape of their weight, in every optimizer that has them.
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum"),
    *("acc_delta", "ax", "prev", "step_size"),
}
# What torch's optimizers keep of each weight; the step of one that lacks some of it fails, or reads what is not there.
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_KEEPS: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: {*_ADAM, "mu_product"},
    torch.optim.RAdam: _ADAM,
    torch.optim.Adamax: {"step", "exp_avg", "exp_inf"},
    torch.optim.Adagrad: {"step", "sum"},
    torch.optim.Adadelta: {"step", "square_avg", "acc_delta"},
    torch.optim.RMSprop: {"step", "square_avg"},
    torch.optim.ASGD: {"step", "eta", "mu", "ax"},
    torch.optim.Rprop: {"step", "prev", "step_size"},
    torch.optim.SGD: set(),
}
_IF_SET = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
_OURS = {field.name for field in fields(TrainBatch)}
_OF_ROWS = ("completion_ids", "completion_mask", "prompt_ids", "prompt_mask", "advantages")


@contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """Turn what loading a part of a checkpoint raises into a CheckpointError that names the part."""
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except _ERRORS as error:
        raise CheckpointError(
            f"The {what} in {folder} cannot be loaded ({type(error).__name__}: {error}). It is damaged, or was not "
            "written by this run: resume from another checkpoint."
        ) from error


def _refuse(what: str, why: str) -> None:
    raise CheckpointError(f"The checkpoint's {what}: {why}. It is damaged: resume from another checkpoint.")


def fits(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, if it has the shape and the kind of values that `like` has."""
    if tensor.shape != like.shape or tensor.is_floating_point() != like.is_floating_point():
        _refuse(name, f"{tuple(tensor.shape)} of {tensor.dtype}, not {tuple(like.shape)} of {like.dtype}")
    return tensor


# ---- the optimizer and the schedule


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def check_optimizer(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Raise for a state that does not belong to these weights; `before` has the groups as they were made.

    Only where the step is one of torch's own: what another optimizer keeps, in which shapes, is its own affair.
    """
    keeps = _kept_by(optimizer)
    if keeps is None:
        return
    for group, made in zip(optimizer.param_groups, before, strict=True):
        for name, value in made.items():
            if name != "params" and not _same_kind(group.get(name), value):
                _refuse("optimizer", f"{name} is {group.get(name)!r:.60}, not like {value!r:.60}")
        for weight in group["params"]:
            _check_weight(optimizer.state.get(weight), keeps, group, weight)


def _kept_by(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """What the optimizer's step keeps of a weight; None for a step that is not torch's."""
    step = inspect.unwrap(type(optimizer).step)  # torch wraps it when the first optimizer of a class is made
    return next((keeps for kind, keeps in _KEEPS.items() if inspect.unwrap(kind.step) is step), None)


def _check_weight(state: Mapping[str, Any] | None, keeps: set[str], group: Mapping[str, Any], weight: Tensor) -> None:
    if not state:  # it had no gradient yet
        return
    needed = keeps | {name for setting, name in _IF_SET.items() if keeps and group.get(setting)}
    if missing := needed - state.keys():
        _refuse("optimizer", f"{min(missing)} of a weight is missing")
    for name, value in state.items():
        if name in _MOMENTS:
            _check_moment(name, value, weight)
        elif not _same_kind(value, 0):
            _refuse("optimizer", f"{name} of a weight is {value!r:.60}, not a number")


def _check_moment(name: str, moment: Any, weight: Tensor) -> None:
    if moment is None and name == "momentum_buffer":
        return
    if not isinstance(moment, Tensor) or moment.layout != torch.strided:
        _refuse("optimizer", f"{name} is no dense tensor")
    if moment.shape != weight.shape or moment.dtype.is_complex != weight.dtype.is_complex:
        _refuse("optimizer", f"{name} has the shape {tuple(moment.shape)}, its weight {tuple(weight.shape)}")
    if moment.stride() != weight.stride() and not moment.is_contiguous():
        _refuse("optimizer", f"{name} of shape {tuple(moment.shape)} has the strides {moment.stride()}")


def _same_kind(value: Any, like: Any) -> bool:
    """Whether a setting is of the same type as the one it replaces, and a number again where that is one."""
    if like is None or value is None or isinstance(like, bool) or isinstance(value, bool):
        return isinstance(value, bool | None) and isinstance(like, bool | None)
    if isinstance(like, int | float | Tensor):
        number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
        return number and (math.isfinite(float(value)) or float(value) == float(like))
    if isinstance(like, Sequence) and not isinstance(like, str):
        same = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == len(like)
        return same and all(_same_kind(one, other) for one, other in zip(value, like, strict=True))
    return type(value) is type(like)


def check_schedule(schedule: Any, before: Mapping[str, Any]) -> None:
    """Raise for a state that took the place of a method, or of an attribute of another kind that there was `before`.

    A user's own schedule may keep what it likes in its attributes.
    """
    library = type(schedule).__module__.partition(".")[0] in ("torch", "transformers")
    for name, value in vars(schedule).items():
        if name not in before:
            wrong = callable(getattr(type(schedule), name, None))
        else:
            wrong = library and name != "_initial_step" and not _unchanged_kind(value, before[name])
        if wrong:
            _refuse("schedule", f"{name} is {value!r:.60}, where it was {before.get(name)!r:.60}")


def _unchanged_kind(value: Any, like: Any) -> bool:
    if isinstance(like, bool | int | float | list | tuple | None):
        return like is None or _same_kind(value, like)
    return value is like or type(value) is type(like)


# ---- micro-batches that are not trained on yet


def check_queue(batches: Sequence[Mapping[str, Any]], vocabulary: int) -> None:
    """Raise for micro-batches that are no rows of token ids with what belongs to each of them.

    What a subclass has added to them is not looked at.
    """
    for batch in batches:
        if missing := [name for name in _OF_ROWS if name not in batch]:
            _refuse("micro-batches", f"{missing[0]} is missing")
        rows = len(batch["completion_ids"]) if batch["completion_ids"].ndim else 0
        prompts, completions = batch["prompt_ids"].shape[-1:], batch["completion_ids"].shape[-1:]
        widths = {1, *prompts, *completions, sum(prompts) + sum(completions)}
        for name, value in ((name, value) for name, value in batch.items() if name in _OURS):
            if isinstance(value, Tensor) and value.ndim and (len(value) != rows or not rows):
                _refuse("micro-batches", f"{name} has {len(value)} rows, the others {rows}")
            if isinstance(value, Tensor) and (value.ndim > 2 or (value.ndim == 2 and value.shape[1] not in widths)):
                _refuse("micro-batches", f"{name} has the shape {tuple(value.shape)}")
        for kind in ("prompt", "completion"):
            _check_tokens(batch[f"{kind}_ids"], batch[f"{kind}_mask"], vocabulary)
        if LOSS_TOKENS in batch and batch[LOSS_TOKENS].ndim:
            _refuse("micro-batches", f"{LOSS_TOKENS} has the shape {tuple(batch[LOSS_TOKENS].shape)}")
        if not batch["advantages"].is_floating_point():
            _refuse("micro-batches", f"advantages are {batch['advantages'].dtype}")


def check_flight(flight: Any, vocabulary: int) -> None:
    """Raise for a generation requested ahead whose prompts or completions have tokens that do not exist."""
    rows = [*(request.prompt_ids for request in flight.requests), *(one.ids for one in flight.known or ())]
    wrong = [token for ids in rows for token in ids if not 0 <= token < vocabulary]
    if wrong:
        _refuse("generation requested ahead", f"it has token {wrong[0]}, with {vocabulary} in all")


def _check_tokens(ids: Tensor, mask: Tensor, vocabulary: int) -> None:
    if ids.shape != mask.shape or ids.ndim != 2 or ids.is_floating_point() or mask.is_floating_point():
        _refuse("micro-batches", f"ids {tuple(ids.shape)} of {ids.dtype} with a mask {tuple(mask.shape)}")
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        _refuse("micro-batches", f"token ids from {int(ids.min())} to {int(ids.max())}, with {vocabulary} in all")
    if mask.numel() and not (int(mask.min()) >= 0 and int(mask.max()) <= 1):
        _refuse("micro-batches", "a mask with other values than 0 and 1")
