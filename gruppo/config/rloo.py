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

    def _validate(self) -> None:
        super()._validate()
        validate.check_rloo(self)
        check_vllm(self)
