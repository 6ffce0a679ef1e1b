"""A table of the algorithms: one recipe per published name."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["LOSS_TYPES", "RECIPES", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """An algorithm as one choice per field; the defaults are GRPO without its KL term."""

    advantage: Literal["group", "leave_one_out"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    ratio: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    objective: str = "clip"
    kl: Literal["loss", "reward", "none"] = "none"
    reduction: str = "sequence"


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(kl="loss"),
    "dr_grpo": Recipe(scale="none", reduction="constant"),
    "bnpo": Recipe(reduction="micro_batch"),
    "dapo": Recipe(reduction="tokens"),
    "gspo": Recipe(ratio="sequence_mean"),
    "luspo": Recipe(ratio="sequence_mean", reduction="length_weighted"),
    "cispo": Recipe(objective="cispo", reduction="tokens"),
    "sapo": Recipe(objective="sapo"),
    "vespo": Recipe(objective="vespo", reduction="tokens"),
    "rloo": Recipe(advantage="leave_one_out", scale="none", ratio="sequence_sum", kl="reward", reduction="rows"),
}
"""The recipe behind each paper's name. `LOSS_TYPES` uses two of its fields, a replay (`recipe=dapo`) all of them.

In the config these fields are separate settings that combine freely; `gruppo.config.recipe.recipe_of` reads them.
"""

# No loss types: GSPO is GRPO's loss with a sequence-level ratio, and RLOO has a separate trainer.
_NO_LOSSES = ("gspo", "rloo")

LOSS_TYPES: dict[str, tuple[str, str]] = {
    name: (recipe.objective, recipe.reduction) for name, recipe in RECIPES.items() if name not in _NO_LOSSES
}
"""`loss_type` to (objective, reduction)."""
