"""The algorithm that a config describes: its row of the recipe table, its loss settings and its advantages.

Trainers use these functions, and so do tools that analyse a finished run. `args` is a GRPOConfig or a RLOOConfig.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from gruppo.algo.advantages import Advantages, leave_one_out, normalize_then_sum, sum_then_normalize
from gruppo.algo.recipes import LOSS_TYPES, RECIPES, Recipe
from gruppo.algo.types import LossSettings

__all__ = ["estimate_advantages", "loss_settings_of", "recipe_of", "settings_of_recipe"]


def recipe_of(args: Any) -> Recipe:
    """The choice that a config makes in each column of the recipe table.

    If the settings are those of a paper (docs/algorithm.md lists them), the result is a row of the table.
    """
    if args.loss_type is None:  # RLOO
        return replace(RECIPES["rloo"], kl="reward" if args.beta != 0 else "none")
    objective, reduction = LOSS_TYPES[args.loss_type]
    return Recipe(
        advantage="group",
        scale=args.scale_rewards,
        ratio="token" if args.importance_sampling_level == "token" else "sequence_mean",
        objective=objective,
        kl="loss" if args.beta != 0 else "none",
        reduction=reduction,
    )


def settings_of_recipe(name: str) -> dict[str, Any]:
    """The settings that produce a recipe of the table; `trainer` names the trainer whose config has them.

    Example:
        settings_of_recipe("gspo") == {"trainer": "grpo", "loss_type": "grpo", "importance_sampling_level": "sequence",
                                       "scale_rewards": "group"}
    """
    recipe = RECIPES[name]
    if recipe.advantage == "leave_one_out":
        return {"trainer": "rloo"}
    loss_types = [loss for loss, parts in LOSS_TYPES.items() if parts == (recipe.objective, recipe.reduction)]
    return {
        "trainer": "grpo",
        "loss_type": name if name in loss_types else loss_types[0],
        "importance_sampling_level": "token" if recipe.ratio == "token" else "sequence",
        "scale_rewards": recipe.scale,
    }


def loss_settings_of(
    args: Any, recipe: Recipe, *, beta: float, epsilon_low: float, epsilon_high: float
) -> LossSettings:
    """The loss settings of a recipe; the three numbers that may change during a run are passed in."""
    settings = LossSettings(
        objective=recipe.objective,
        ratio=recipe.ratio,
        reduction=recipe.reduction,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        beta=beta if recipe.kl == "loss" else 0.0,
        max_completion_length=args.max_completion_length,
    )
    if recipe.advantage == "leave_one_out":
        return settings
    return replace(
        settings,
        delta=args.delta,
        sapo_temperature_pos=args.sapo_temperature_pos,
        sapo_temperature_neg=args.sapo_temperature_neg,
        vespo_k_pos=args.vespo_k_pos,
        vespo_lambda_pos=args.vespo_lambda_pos,
        vespo_k_neg=args.vespo_k_neg,
        vespo_lambda_neg=args.vespo_lambda_neg,
        use_bias_correction_kl=args.use_bias_correction_kl,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
    )


def estimate_advantages(
    args: Any,
    recipe: Recipe,
    rewards_NR: Tensor,
    weights_R: Tensor,
    group_size: int,
    kl_penalty_N: Tensor | None = None,
) -> Advantages:
    """Compute advantages from rewards of whole groups; the only place where the estimator is chosen."""
    if recipe.advantage == "leave_one_out":
        clip = args.reward_clip_range
        return leave_one_out(
            rewards_NR,
            weights_R,
            group_size,
            kl_penalty_B=kl_penalty_N,
            clip_range=None if clip is None else (clip[0], clip[1]),
            normalize=args.normalize_advantages,
        )
    if args.multi_objective_aggregation == "normalize_then_sum":
        return normalize_then_sum(rewards_NR, weights_R, group_size)
    return sum_then_normalize(rewards_NR, weights_R, group_size, recipe.scale)
