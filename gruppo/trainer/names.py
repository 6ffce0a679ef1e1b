"""Names that subclasses and callbacks written for TRL 1.16 use."""

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gruppo.config.base import own_fields
from gruppo.errors import ConfigError
from gruppo.rewards.resolve import is_reward_model
from gruppo.trainer.books.metrics import Metrics
from gruppo.trainer.stepping import Stepping

# Attributes of TRL's trainers that are copies of settings and that nothing here reads: the config is read instead.
COPIES = frozenset(
    (
        *("max_completion_length", "max_prompt_length", "num_generations", "num_generations_eval", "num_iterations"),
        *("top_p", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs", "pad_to_multiple_of"),
        *("use_transformers_continuous_batching", "use_transformers_paged", "use_liger_kernel", "use_liger_loss"),
        *("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
        *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        *("loss_type", "importance_sampling_level", "off_policy_mask_threshold", "mask_truncated_completions"),
        *("multi_objective_aggregation", "scale_rewards", "normalize_advantages", "reward_clip_range"),
        *("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "aux_loss_enabled", "shuffle_dataset"),
        *("log_completions", "log_multimodal", "log_unique_prompts", "num_completions_to_print"),
    )
)
FIELDS = {"aux_loss_enabled": "router_aux_loss_coef"}  # where a copy has another name


@cache
def _settings_of(config_class: type) -> frozenset[str]:
    """The settings whose value the trainer has as an attribute too."""
    return frozenset(own_fields(config_class)) | (COPIES & {field.name for field in fields(config_class)})


def _is_copy(trainer: Any, name: str) -> bool:
    return name in COPIES and FIELDS.get(name, name) in _settings_of(trainer.config_class)


class KnownNames(Stepping):
    """The part of the trainer that exposes settings and state under TRL's names."""

    if not TYPE_CHECKING:  # for type checkers, a name that is not declared stays an error

        def __getattr__(self, name: str) -> Any:
            """A setting of the config under its own name, of which TRL's trainers keep a copy."""
            if "args" in vars(self) and name in _settings_of(type(self.args)):
                return getattr(self.args, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            """Raise for a copy of a setting that would read back changed and change nothing."""
            if not _is_copy(self, name):
                return super().__setattr__(name, value)
            if "args" not in vars(self):
                return None  # a subclass's constructor, too early: TRL's own replaces the value by the config's
            now = getattr(self, name)
            if value == now or (now is None and value == {}):
                return None
            raise ConfigError(
                f"trainer.{name} = {value!r} would have no effect, as this trainer reads the config: set "
                f"{FIELDS.get(name, name)} in the {type(self.args).__name__} that the trainer is made with."
            )

    @property
    def pad_token_id(self) -> int:
        return int(self._tokenizer.pad_token_id)

    @property
    def generation_config(self) -> Any:
        """The sampling settings of the backend, which reads them at every generation."""
        return self.backend.config

    @generation_config.setter
    def generation_config(self, config: Any) -> None:
        self.backend.config = config

    @property
    def reward_funcs(self) -> list[Any]:
        """The reward functions; may be set to another list of the same length."""
        return list(self.rewards.runner.functions)

    @reward_funcs.setter
    def reward_funcs(self, functions: list[Any]) -> None:
        if len(functions) != len(self.rewards.runner.names):
            raise ConfigError(
                f"{len(functions)} reward functions cannot take the place of {len(self.rewards.runner.names)}: "
                "weights, metrics and tables have one entry per function. Make a new trainer."
            )
        for new, old in zip(functions, self.rewards.runner.functions, strict=True):
            if is_reward_model(new) and new is not old:
                raise ConfigError(
                    "A reward model cannot be replaced in a run: it needs a tokenizer and a device. Pass it to a new "
                    "trainer, or call it in a reward function."
                )
        self.rewards.runner.functions = list(functions)

    @property
    def reward_func_names(self) -> list[str]:
        return self.rewards.names

    @property
    def reward_processing_classes(self) -> list[Any]:
        return self.rewards.processing_classes

    @property
    def reward_weights(self) -> Tensor:
        """One for each reward; a callback may change them during a run."""
        return self.rewards.weights

    @reward_weights.setter
    def reward_weights(self, weights: Tensor) -> None:
        self.rewards.weights = weights

    @property
    def num_generations(self) -> int:
        return self.args.num_generations

    @property
    def num_generations_eval(self) -> int:
        return self.args.eval_group_size

    @property
    def num_iterations(self) -> int:
        return self.args.num_iterations

    @property
    def _metrics(self) -> dict[str, Metrics]:
        return self.metrics.values

    @property
    def _logs(self) -> dict[str, Any]:
        return self.completion_logs[self.mode].columns

    @property
    def _buffered_inputs(self) -> list[dict[str, Any]]:
        return list(self._queue)
