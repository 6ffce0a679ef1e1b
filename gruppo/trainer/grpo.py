"""GRPOTrainer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gruppo.algo import masks, objectives
from gruppo.config.grpo import GRPOConfig
from gruppo.trainer.construct.arguments import explains_unknown_arguments
from gruppo.trainer.core import PolicyTrainer
from gruppo.trainer.hooks import known
from gruppo.trainer.processes.collectives import gather_rows


@known
class GRPOTrainer(PolicyTrainer):
    """Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300) and its family.

    Example:
        trainer = GRPOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=accuracy_reward,
            args=GRPOConfig(output_dir="run"),
            train_dataset=dataset,  # a `prompt` column; every other column goes to the reward
        )
        trainer.train()
    """

    algorithm = "grpo"
    config_class = GRPOConfig

    @explains_unknown_arguments
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ):
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
            rollout_func,
            tools,
            environment_factory,
        )

    # ---- formulas that subclasses call by these names

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """The tokens whose entropy is in the top (1 − threshold) share, over all processes."""
        gathered = gather_rows(self.accelerator, entropies.detach()[mask.bool()])
        return masks.top_entropy_mask(entropies, mask, masks.entropy_threshold(gathered, 1 - threshold))

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """1 for sequences to keep, 0 for those to drop, (B, 1)."""
        keep = masks.off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold)
        return keep.to(mask.dtype)

    @staticmethod
    def get_gamma_weights(
        advantages: Tensor,
        log_ratio_per_token: Tensor,
        mask: Tensor,
        importance_sampling_ratio: Tensor | None = None,
        k_pos: float = 2.0,
        lambda_pos: float = 3.0,
        k_neg: float = 3.0,
        lambda_neg: float = 2.0,
    ) -> Tensor:
        """VESPO's sequence weights φ, (B, 1)."""
        return objectives.gamma_weights(
            advantages, log_ratio_per_token, mask, importance_sampling_ratio, k_pos, lambda_pos, k_neg, lambda_neg
        )
