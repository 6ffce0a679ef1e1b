"""The common base of GRPOConfig and RLOOConfig, combined from one mixin per concern."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from gruppo.config import validate
from gruppo.config.batching import BatchingConfig
from gruppo.config.deprecated import DeprecatedConfig, resolve_aliases
from gruppo.config.evaluation import EvaluationConfig, check_benchmarks
from gruppo.config.fields import option
from gruppo.config.folder import as_given
from gruppo.config.loading import LoadingConfig
from gruppo.config.logging import CompletionLoggingConfig
from gruppo.config.objective import ObjectiveConfig, ReferenceConfig
from gruppo.config.rewards import RewardConfig
from gruppo.config.runs import RunConfig
from gruppo.config.sampling import SamplingConfig
from gruppo.config.tools import ToolConfig
from gruppo.config.types import check_dicts, check_finite, check_json, check_types, numbers_and_switches, plain_numbers
from gruppo.config.update import UpdateConfig
from gruppo.config.vllm import VLLMConfig
from gruppo.errors import ConfigError

# Fields of TrainingArguments, and their names since transformers 5.23.
RENAMED = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
)


@dataclass
class PolicyConfig(
    LoadingConfig,
    SamplingConfig,
    ToolConfig,
    BatchingConfig,
    ObjectiveConfig,
    ReferenceConfig,
    UpdateConfig,
    RewardConfig,
    CompletionLoggingConfig,
    EvaluationConfig,
    RunConfig,
    VLLMConfig,
    DeprecatedConfig,
    TrainingArguments,
):
    """TrainingArguments plus the fields that every critic-free recipe needs."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
        "eval_benchmarks_settings",
    ]

    learning_rate: float = option(1e-6, "Initial learning rate of the optimizer.")
    logging_steps: float = option(10, "Optimizer steps between two logs (a share of the run if below 1).")
    gradient_checkpointing: bool | None = option(
        None,
        "Recompute activations in the backward pass; None: only if the smallest useful micro-batch would not fit.",
    )
    bf16: bool | None = option(
        None, "bfloat16 mixed precision; None turns it on with an accelerator, or use_cpu=True, where fp16 is off."
    )
    remove_unused_columns: bool = option(
        False, "Keep only `prompt` (and images) of the dataset; False lets reward functions see every column."
    )

    def __post_init__(self) -> None:
        self._normalize()
        check_types(self, numbers_and_switches(TrainingArguments))
        check_dicts(self, TrainingArguments._VALID_DICT_FIELDS)
        validate.check_accelerator_config(self)
        self._settle_checkpointing()
        check_types(self, own_fields(type(self)))
        self._derive_generation_batch()
        self._validate()

    def _normalize(self) -> None:
        """Convert all accepted spellings of a value to one form, before anything reads it."""
        plain_numbers(self)
        resolve_aliases(self)
        if (
            getattr(self, "max_grad_norm", None) is None
        ):  # no clipping: 0 for every release of transformers and for DeepSpeed
            self.max_grad_norm = 0.0
        check_json(self, self._VALID_DICT_FIELDS)
        if self.bf16 is None:
            # Without an accelerator the default is float32; bfloat16 must be requested by use_cpu=True.
            self.bf16 = not self.fp16 and (self.use_cpu or is_torch_bf16_gpu_available())
        if isinstance(self.pad_to_multiple_of, str):
            spelled = self.pad_to_multiple_of.lower()
            if spelled not in ("auto", "none", "null") and not spelled.isdigit():
                raise ConfigError(f"pad_to_multiple_of={self.pad_to_multiple_of!r} must be a whole number or None.")
            self.pad_to_multiple_of = int(spelled) if spelled.isdigit() else None
        if self.top_k is None:
            self.top_k = 0
        if getattr(self, "report_to", None) is None:
            self.report_to = "none"
        if self.use_liger_kernel:  # for its layers only: its head computes a loss over labels
            given = getattr(self, "liger_kernel_config", None) or {}
            self.liger_kernel_config = {"fused_linear_cross_entropy": False, **given}

    def _settle_checkpointing(self) -> None:
        """Run TrainingArguments' own checks, but keep `gradient_checkpointing=None` as None.

        transformers 5.23 renames the two fields and turns None into False. Both names are accepted here.
        """
        renamed = [pair for pair in RENAMED if hasattr(self, pair[1])]
        for old, new in renamed:
            if getattr(self, new) is None:
                setattr(self, new, getattr(self, old))
        unset = [name for pair in renamed for name in pair if getattr(self, pair[1]) is None]
        super().__post_init__()
        for name in unset:
            setattr(self, name, None)
        for pair in RENAMED[1:]:  # torch would take options without `use_reentrant` as a request for the older variant
            for name in pair:
                options = getattr(self, name, None)
                if isinstance(options, Mapping) and options.get("use_reentrant") is None:
                    setattr(self, name, {**options, "use_reentrant": False})

    def _derive_generation_batch(self) -> None:
        """Derive steps_per_generation and generation_batch_size from each other.

        Both may be given if they agree, so that a config with derived values can be copied.
        """
        for name in validate.BATCH_SIZES:
            validate.in_range(self, name, 1)
        per_step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is None:
            if self.steps_per_generation is None:
                self.steps_per_generation = self.gradient_accumulation_steps
            validate.in_range(self, "steps_per_generation", 1)
            self.generation_batch_size = per_step * self.steps_per_generation
            return
        validate.in_range(self, "generation_batch_size", 1)
        if self.generation_batch_size % per_step:
            raise ConfigError(
                f"generation_batch_size={self.generation_batch_size} must be divisible by "
                f"per_device_train_batch_size × processes = {per_step}."
            )
        steps = self.generation_batch_size // per_step
        if self.steps_per_generation not in (None, steps):
            raise ConfigError(
                f"generation_batch_size={self.generation_batch_size} means steps_per_generation={steps}, but "
                f"steps_per_generation={self.steps_per_generation} is set too. Set one of them (None for the other)."
            )
        self.steps_per_generation = steps

    def _validate(self) -> None:
        validate.check_inherited(self)
        validate.check_sampling(self)
        validate.check_tools(self)
        validate.check_batches(self)
        validate.check_objective(self)
        validate.check_update(self)
        validate.check_rewards(self)
        validate.check_run(self)
        check_benchmarks(self)
        check_finite(self, [*own_fields(type(self)), "learning_rate"])

    def to_dict(self) -> dict[str, Any]:
        """TrainingArguments' method, which trackers call: without secrets, and output_dir is as the user wrote it."""
        from gruppo.runs.secrets import without_secrets  # here, as the package reads tables

        return without_secrets(super().to_dict() | {"output_dir": as_given(self)})

    @property
    def parity_interval(self) -> int | None:
        """Updates between two parity checks; 0: only before the first update; None: never."""
        kind, _, number = self.parity_check.partition(":")
        return {"off": None, "first": 0}.get(kind, int(number or 0))

    @property
    def samples_with_vllm(self) -> bool:
        """Whether vLLM samples, by either `use_vllm` or `rollout_backend`."""
        return self.use_vllm or self.rollout_backend == "vllm"

    @property
    def upper_clip(self) -> float:
        """Upper clip width: epsilon_high, or epsilon if epsilon_high is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def eval_group_size(self) -> int:
        """Completions per prompt in evaluation."""
        assert self.num_generations is not None
        return self.num_generations_eval or self.num_generations

    @property
    def prompts_per_generation(self) -> int:
        """Prompts of a generation, over all processes."""
        assert self.generation_batch_size is not None
        assert self.num_generations is not None
        return self.generation_batch_size // self.num_generations

    @property
    def micro_steps_per_generation(self) -> int:
        """Micro-batches per generation: its slices times the passes over them."""
        assert self.steps_per_generation is not None
        return self.steps_per_generation * self.num_iterations

    @property
    def rollouts_stay_on_policy(self) -> bool:
        """Whether every micro-batch is trained on before the weights that generated it are updated."""
        return bool(self.gradient_accumulation_steps % self.micro_steps_per_generation == 0)


def own_fields(config_class: type) -> list[str]:
    """Names of the fields that a config adds to TrainingArguments."""
    inherited = {f.name for f in fields(TrainingArguments)}
    return [f.name for f in fields(config_class) if f.name not in inherited]
