"""Hints for error messages about names and sizes that another library, an older release or a paper would use.

LOSSES     values of `loss_type` that are algorithms, but not losses
RENAMED    keywords of other configs, and the field to use instead
MISPLACED  keywords that belong to the trainer
whole_groups, whole_eval_groups    batch sizes that hold whole groups
nearest    the name that was probably meant
"""

import difflib
import math
from collections.abc import Collection
from typing import Any

LOSSES = {
    "gspo": "GSPO is loss_type='grpo' with importance_sampling_level='sequence' (docs/algorithm.md).",
    "rloo": "RLOO has its own trainer: RLOOTrainer with RLOOConfig.",
    "reinforce": "REINFORCE with a leave-one-out baseline has its own trainer: RLOOTrainer with RLOOConfig.",
    "ppo": "PPO has a critic, which is not supported; its clipped objective on group advantages is 'grpo'.",
}

_LENGTH, _GROUP = "Use `max_completion_length`.", "Use `num_generations`."
RENAMED = {
    "max_new_tokens": _LENGTH,
    "max_tokens": _LENGTH,
    "response_length": _LENGTH,
    "max_length": "Use `max_completion_length`, and `max_prompt_length` for prompts.",
    "rloo_k": _GROUP,
    "num_return_sequences": _GROUP,
    "group_size": _GROUP,
    "kl_coef": "Use `beta`.",
    "cliprange": "Use `epsilon`, and `epsilon_high` for a different upper width.",
    "num_ppo_epochs": "Use `num_iterations`.",
    "num_mini_batches": "Use `steps_per_generation`.",
    "total_episodes": "Use `max_steps` or `num_train_epochs`.",
    "local_rollout_forward_batch_size": "Leave it out: the sampler sizes its batches by the available memory.",
    # from older releases of transformers
    "warmup_ratio": "Use `warmup_steps`, which takes a number of steps or, below 1, a share of them.",
    "torch_dtype": "Use `dtype`, of ModelConfig or in model_init_kwargs.",
    "logging_dir": "Leave it out: the run record is in output_dir; TENSORBOARD_LOGGING_DIR sets TensorBoard's folder.",
    "no_cuda": "Use `use_cpu`.",
    "group_by_length": "Leave it out: rows of all lengths are packed, and shuffle_dataset sets their order.",
    "overwrite_output_dir": "Leave it out: an earlier record in output_dir moves to earlier/.",
}

_OF_TRAINER = (
    *("model", "reward_funcs", "train_dataset", "eval_dataset", "processing_class", "peft_config", "callbacks"),
    *("tools", "rollout_func", "environment_factory", "optimizers"),
)
MISPLACED = {
    "tokenizer": "Pass it to the trainer, as processing_class.",
    "reward_model_path": "Pass the name to the trainer, in reward_funcs.",
    **dict.fromkeys(_OF_TRAINER, "It is an argument of the trainer."),
}


def field_hint(name: str) -> str:
    """A hint for a keyword that is not a field, with a leading space; empty if there is none.

    Example:
        field_hint("max_new_tokens") == " Use `max_completion_length`."
    """
    said = RENAMED.get(name) or MISPLACED.get(name)
    return f" {said}" if said else ""


def divisors(n: int) -> list[int]:
    """The group sizes that divide a batch of n."""
    return [d for d in range(2, n + 1) if n % d == 0]


def step(group: int, others: int) -> int:
    """The smallest number that, multiplied by `others`, gives a batch of whole groups, as its multiples do.

    Example, groups of 8 on two processes:
        step(8, 2) == 4
    """
    return group // math.gcd(group, others)


def whole_groups(config: Any) -> str:
    """A sentence or two on how to make the generation batch hold whole groups."""
    rows, steps, world = config.per_device_train_batch_size, config.steps_per_generation, config.world_size
    group = config.num_generations
    of_steps = f"a multiple of {step(group, rows * world)}"
    if steps == config.gradient_accumulation_steps:
        of_rows = f"a multiple of {step(group, steps * world)}"
        said = f"Set per_device_train_batch_size to {of_rows}, or gradient_accumulation_steps to {of_steps}."
    else:
        whole = math.lcm(group, rows * world)
        said = f"Set steps_per_generation to {of_steps}, or generation_batch_size to a multiple of {whole}."
    return said + _that_fit(config.generation_batch_size)


def whole_eval_groups(config: Any, group: int) -> str:
    """The same for the evaluation batch, which has no gradient accumulation."""
    said = f"Set per_device_eval_batch_size to a multiple of {step(group, config.world_size)}."
    return said + _that_fit(config.per_device_eval_batch_size * config.world_size)


def _that_fit(rows: int) -> str:
    fit = divisors(rows)
    return f" Group sizes that fit the current batch: {fit}." if fit else ""


def nearest(name: str, candidates: Collection[str]) -> str:
    """A ' Did you mean …?' for error messages, or an empty string if no other candidate is close."""
    close = difflib.get_close_matches(name, [each for each in candidates if each != name], n=1, cutoff=0.7)
    return f" Did you mean `{close[0]}`?" if close else ""
