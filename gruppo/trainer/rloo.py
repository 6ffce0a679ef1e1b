"""RLOOTrainer."""

from collections.abc import Callable
from typing import Any

from gruppo.config.rloo import RLOOConfig
from gruppo.trainer.construct.arguments import explains_unknown_arguments
from gruppo.trainer.core import PolicyTrainer
from gruppo.trainer.hooks import known


@known
class RLOOTrainer(PolicyTrainer):
    """REINFORCE leave-one-out (https://arxiv.org/abs/2402.14740): the baseline is the mean of the other completions.

    Example:
        RLOOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=my_reward, train_dataset=dataset).train()
    """

    algorithm = "rloo"
    config_class = RLOOConfig
    loss_is_scaled_for_ga = False  # as in TRL: Trainer divides the loss, also that of a subclass, by the micro-batches

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
