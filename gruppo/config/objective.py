"""The objective: advantages from rewards, ratios, clipping, KL, reduction."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class ObjectiveConfig:
    """The part of the objective that GRPO and RLOO share."""

    beta: float = option(0.0, "Weight of the KL to the reference; 0 means that no reference model is kept.")
    epsilon: float = option(0.2, "Lower clip width of the ratio.")
    epsilon_high: float | None = option(None, "Upper clip width of the ratio; None copies epsilon, inf is no bound.")
    reward_weights: list[float] | None = option(
        None, "One weight per reward function; None gives all of them the weight 1."
    )
    mask_truncated_completions: bool = option(False, "Leave unfinished completions out of the loss.")


@dataclass
class GRPOObjectiveConfig(ObjectiveConfig):
    """The choices in the recipe table that GRPO leaves open."""

    loss_type: str = option("dapo", "Objective and reduction: grpo, dr_grpo, dapo, bnpo, cispo, sapo, luspo or vespo.")
    importance_sampling_level: str = option("token", "Ratio per token, or one length-averaged ratio per sequence.")
    scale_rewards: str = option("group", "Standard deviation that scales advantages: group, batch or none.")
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "Sum several rewards before (sum_then_normalize) or after normalizing them (normalize_then_sum).",
    )
    delta: float | None = option(None, "Cap on the ratio in the unclipped branch (two-sided clip); None is off.")
    use_bias_correction_kl: bool = option(True, "Multiply the KL term by the ratio (an unbiased gradient off-policy).")
    top_entropy_quantile: float = option(1.0, "Policy loss only on this share of tokens with the highest entropy.")
    off_policy_mask_threshold: float | None = option(
        None, "Drop negative-advantage sequences whose mean log-prob drift exceeds this; None is off."
    )
    sapo_temperature_neg: float = option(1.05, "SAPO gate temperature where the advantage is not positive.")
    sapo_temperature_pos: float = option(1.0, "SAPO gate temperature where the advantage is positive.")
    vespo_k_pos: float = option(2.0, "VESPO exponent for non-negative advantages.")
    vespo_lambda_pos: float = option(3.0, "VESPO decay for non-negative advantages.")
    vespo_k_neg: float = option(3.0, "VESPO exponent for negative advantages.")
    vespo_lambda_neg: float = option(2.0, "VESPO decay for negative advantages.")


@dataclass
class EntropyConfig:
    """The entropy bonus and its controller (GRPO)."""

    entropy_coef: float = option(0.0, "Weight of the entropy bonus (the initial one if adaptive).")
    use_adaptive_entropy: bool = option(False, "Nudge entropy_coef after every optimizer step towards entropy_target.")
    entropy_coef_min: float = option(0.0, "Floor of the adaptive coefficient.")
    entropy_coef_max: float = option(1.0, "Ceiling of the adaptive coefficient.")
    entropy_coef_delta: float = option(0.005, "Step of the adaptive coefficient.")
    entropy_target: float = option(0.2, "Entropy in nats at or below which the bonus applies.")


@dataclass
class RLOOObjectiveConfig(ObjectiveConfig):
    """The choices in the recipe table that RLOO leaves open."""

    normalize_advantages: bool = option(False, "Standardise advantages over the whole generation batch.")
    reward_clip_range: list[float] | None = option(
        None, "Clamp the weighted reward sum to (low, high) before the KL penalty; an infinite bound means no bound."
    )


@dataclass
class ReferenceConfig:
    """The slow update of the reference model."""

    sync_ref_model: bool = option(False, "Blend the policy into the reference at regular intervals.")
    ref_model_mixup_alpha: float = option(0.6, "Weight of the policy in the blend.")
    ref_model_sync_steps: int = option(512, "Optimizer steps between two blends.")
