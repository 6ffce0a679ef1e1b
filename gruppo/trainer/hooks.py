"""Hooks: methods that subclasses of TRL's trainers override, and which of them a given trainer overrides.

Hooks that are called are under a heading in their files, and have a row in docs/extending.md.
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
    """The methods among `names` that user code replaces: in a subclass, or by patching a class or the trainer."""
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
