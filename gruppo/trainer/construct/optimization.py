"""Optimizer and learning rate schedule, tried before the model is loaded: transformers makes them in `train()`.

What their options must be is known only to the optimizers and schedules themselves, so each is made, for one weight.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from transformers import Trainer, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from gruppo.errors import ConfigError
from gruppo.trainer.hooks import overridden

logger = logging.getLogger(__name__)

STEPS = 8  # of the schedule that is tried
OF_THE_MODEL = ("galore", "apollo", "lomo", "layerwise")  # optimizers that are made for the layers of a model
MISTAKES = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)  # what wrong options end in
# The fields that an optimizer reads, and a word of the messages about each; any may be about `optim_args`.
OPTIMIZER_FIELDS = {
    "optim_args": "",
    "learning_rate": "learning rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta",
    "adam_beta2": "beta",
    "adam_epsilon": "eps",
}


def check_optimization(trainer: Any, args: Any, optimizers: tuple[Any, Any]) -> None:
    """Raise for settings of the optimizer and the schedule that these do not take; those that were passed are kept."""
    optimizer, schedule = optimizers or (None, None)
    made_by_user = overridden(trainer, ["create_optimizer", "create_optimizer_and_scheduler"])
    if optimizer is None and not made_by_user and not args.deepspeed:
        try_optimizer(args)
    if schedule is None and not overridden(trainer, ["create_scheduler", "create_optimizer_and_scheduler"]):
        try_schedule(args)


def try_optimizer(args: Any) -> None:
    """Make the optimizer of these settings for one weight."""
    name = getattr(args.optim, "value", args.optim)
    if any(part in name for part in OF_THE_MODEL):
        return
    with _as_config_error(args, [field for field in OPTIMIZER_FIELDS if _is_set(args, field)], f"optim={name!r}"):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        kind([torch.zeros(1, requires_grad=True)], **options)
    if args.optim_args and options == Trainer.get_optimizer_cls_and_kwargs(_without_options(args))[1]:
        logger.warning(f"optim_args={args.optim_args!r} has no effect: optim={name!r} reads nothing in it.")


def try_schedule(args: Any) -> None:
    """Make the learning rate schedule of these settings, and run it to its end."""
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    about = f"lr_scheduler_type={name!r}, which takes {', '.join(_options_of(args.lr_scheduler_type)) or 'no options'}"
    with _as_config_error(args, ["lr_scheduler_kwargs"], about):
        schedule = get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=min(args.get_warmup_steps(STEPS), STEPS // 2),
            num_training_steps=STEPS,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        for function in getattr(schedule, "lr_lambdas", ()):
            for step in range(STEPS):
                function(step)


def _options_of(kind: Any) -> list[str]:
    """The names that a schedule takes in `lr_scheduler_kwargs`."""
    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs"}
    return [name for name in inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[kind]).parameters if name not in given]


def _is_set(args: Any, name: str) -> bool:
    return bool(getattr(args, name) != type(args).__dataclass_fields__[name].default)


def _without_options(args: Any) -> Any:
    plain = copy(args)
    plain.optim_args = None
    return plain


@contextmanager
def _as_config_error(args: Any, fields: list[str], about: str) -> Iterator[None]:
    try:
        yield
    except MISTAKES as error:
        said = str(error).lower()
        if isinstance(error.__context__, ImportError) or "install" in said:  # a missing package, whatever the options
            raise ConfigError(f"{about}: {error}") from error
        named = [name for name in fields if OPTIMIZER_FIELDS.get(name, "") in said]
        given = ", ".join(f"{name}={getattr(args, name)!r}" for name in named or fields)
        raise ConfigError(f"{given or 'The settings'} cannot work with {about}: {error}") from error
