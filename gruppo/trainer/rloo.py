"""RLOOTrainer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gruppo.algo.advantages import Advantages, leave_one_out
from gruppo.algo.recipes import RECIPES, Recipe
from gruppo.config.rloo import RLOOConfig
from gruppo.trainer.arguments import explains_unknown_arguments
from gruppo.trainer.core import PolicyTrainer


class RLOOTrainer(PolicyTrainer):
    """REINFORCE leave-one-out (https://arxiv.org/abs/2402.14740): the baseline is the mean of the other completions.

    Example:
        RLOOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=my_reward, train_dataset=dataset).train()
    """

    algorithm = "rloo"
    config_class = RLOOConfig

    @explains_unknown_arguments
    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        tools: list[Callable[..., Any]] | None = None,
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
            tools=tools,
            environment_factory=environment_factory,
        )

    def make_recipe(self) -> Recipe:
        return RECIPES["rloo"]

    def compared_rewards(self, rewards_NR: Tensor, group_size: int) -> Tensor:
        rewards_N, clip = super().compared_rewards(rewards_NR, group_size), self.args.reward_clip_range
        return rewards_N if clip is None else rewards_N.clamp(clip[0], clip[1])

    def estimate_advantages(self, rewards_NR: Tensor, group_size: int, kl_penalty_N: Tensor | None) -> Advantages:
        clip = self.args.reward_clip_range
        return leave_one_out(
            rewards_NR,
            self.reward_weights,
            group_size,
            kl_penalty_B=kl_penalty_N,
            clip_range=None if clip is None else (clip[0], clip[1]),
            normalize=self.args.normalize_advantages,
        )
