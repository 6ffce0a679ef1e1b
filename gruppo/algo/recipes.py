"""The algorithms, as the table they are."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["LOSS_TYPES", "RECIPES", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """One published algorithm as a choice in each column; the defaults are GRPO."""

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
"""The papers' recipes. In the config the columns are separate fields; `loss_type` sets only the two below."""

LOSS_TYPES: dict[str, tuple[str, str]] = {
    name: (RECIPES[name].objective, RECIPES[name].reduction)
    for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
}
"""`loss_type` to (objective, reduction)."""
