"""RLOOConfig."""

from dataclasses import dataclass

from gruppo.config import validate
from gruppo.config.base import PolicyConfig
from gruppo.config.fields import option
from gruppo.config.objective import RLOOObjectiveConfig
from gruppo.config.vllm import check_vllm


@validate.rejects_unknown_fields
@dataclass
class RLOOConfig(RLOOObjectiveConfig, PolicyConfig):
    """Settings of an RLOO run: TrainingArguments plus sampling, batching, objective and logging."""

    num_generations: int | None = option(2, "G: completions sampled per prompt.")
    beta: float = option(0.05, "Weight of the KL penalty in the reward; 0 means that no reference model is kept.")

    # Not fields: how code that reads both configs sees the settings that only GRPOConfig has.
    loss_type = importance_sampling_level = None
    multi_objective_aggregation = "sum_then_normalize"
    top_entropy_quantile = 1.0
    use_adaptive_entropy = False
    entropy_coef = 0.0
    off_policy_mask_threshold = None
    vllm_importance_sampling_correction = None  # there is none that could be on or off
    cast_lm_head_to_fp32 = False
    log_completions_hub_repo = None

    def _validate(self) -> None:
        super()._validate()
        validate.check_rloo(self)
        check_vllm(self)
