"""GRPOConfig."""

from dataclasses import dataclass

from gruppo.config import validate
from gruppo.config.base import PolicyConfig
from gruppo.config.loading import HeadConfig
from gruppo.config.logging import HubLoggingConfig
from gruppo.config.objective import EntropyConfig, GRPOObjectiveConfig
from gruppo.config.vllm import VLLMCorrectionConfig, check_vespo, check_vllm


@validate.rejects_unknown_fields
@dataclass
class GRPOConfig(
    GRPOObjectiveConfig,
    EntropyConfig,
    HeadConfig,
    VLLMCorrectionConfig,
    HubLoggingConfig,
    PolicyConfig,
):
    """Settings of a GRPO run: TrainingArguments plus sampling, batching, objective and logging.

    `loss_type` selects objective and reduction; every other column of the recipe has its own field and default.
    """

    def _normalize(self) -> None:
        super()._normalize()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        elif str(self.scale_rewards).lower() in ("true", "false"):
            self.scale_rewards = "group" if self.scale_rewards.lower() == "true" else "none"

    def _validate(self) -> None:
        super()._validate()
        validate.check_grpo(self)
        validate.check_vllm_correction(self)
        check_vllm(self)
        check_vespo(self)
