"""Hooks: methods that subclasses of TRL's trainers override, and which of them a given trainer overrides.

Hooks that are called are under a heading in their files, and have a row in docs/extending.md.
"""

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

# Methods that TRL 1.16 calls but this trainer does not: overriding them would silently do nothing.
UNUSED_HOOKS = (
    "_generate",
    "_tool_call_loop",
    "get_high_entropy_mask",
    "get_off_policy_mask",
    "get_gamma_weights",
)

# Methods that see padded rows, one micro-batch at a time.
PADDED_HOOKS = (
    "_generate_and_score_completions",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "compute_loss",
    "training_step",
    "prediction_step",
    "get_batch_samples",
    "_prepare_inputs",
)


_written: dict[type, dict[str, Any]] = {}  # the attributes of our trainers as they were when the package was imported
T = TypeVar("T", bound=type)


def known(trainer_class: T) -> T:
    """Decorator of our trainers: what their methods are before anyone replaces one."""
    _written[trainer_class] = {name: inspect.getattr_static(trainer_class, name) for name in dir(trainer_class)}
    return trainer_class


def overridden(trainer: Any, names: Sequence[str]) -> list[str]:
    """The methods among `names` that user code replaces: in a subclass, or by patching a class or the trainer.

    Methods are compared, not the modules that they name: a wrapper made with functools.wraps names ours.
    """
    ours = next(_written[cls] for cls in type(trainer).__mro__ if cls in _written)
    now = {name: vars(trainer).get(name, inspect.getattr_static(type(trainer), name, None)) for name in names}
    return [name for name, method in now.items() if method is not ours.get(name)]


def reject_unused_hooks(trainer: Any) -> None:
    """Raise for overridden methods that are never called here."""
    for name in overridden(trainer, UNUSED_HOOKS):
        raise NotImplementedError(
            f"{type(trainer).__name__} overrides `{name}`, which is not called here. Override `_compute_loss`, "
            "`_generate_single_turn` or `_generate_and_score_completions`, or pass a `rollout_func`."
        )
