"""Hooks: methods that subclasses of TRL's trainers override, and which of them a trainer at hand does.

Those that are called have a heading in their files, and a row in docs/extending.md.
"""

from collections.abc import Sequence
from typing import Any

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


def overridden(trainer: Any, names: Sequence[str]) -> list[str]:
    """Those of these methods that a subclass, or a patch of a class or of the trainer itself, brings from outside."""
    ours = ("gruppo.trainer.", "transformers.")
    return [name for name in names if not str(getattr(trainer, name).__module__).startswith(ours)]


def reject_unused_hooks(trainer: Any) -> None:
    """Raise for overridden methods that are never called here."""
    for name in UNUSED_HOOKS:
        if any(hasattr(cls, name) for cls in type(trainer).__mro__) and overridden(trainer, [name]):
            raise NotImplementedError(
                f"{type(trainer).__name__} overrides `{name}`, which is not called here. Override `_compute_loss`, "
                "`_generate_single_turn` or `_generate_and_score_completions`, or pass a `rollout_func`."
            )
