"""Short runs of the demo's model, of every kind that a replay must reproduce."""

import os
from pathlib import Path
from typing import Any

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.demo import exact_match, load_task, model_path
from tests.helpers import base_args

RANK = int(os.environ.get("RANK", "0"))


def brevity(completions: list[str], **kwargs: Any) -> list[float | None]:
    """Shorter is better; no reward for completions without a full stop."""
    return [-len(text) / 100 if "." in text else None for text in completions]


def steps(completion_ids: list[list[int]], **kwargs: Any) -> list[Any]:
    """Two steps, whose rewards depend on their last tokens."""
    return [
        sorted({len(ids) // 2: float(ids[len(ids) // 2] % 5), len(ids) - 1: float(ids[-1] % 3)}.items())
        for ids in completion_ids
    ]


# Settings for a tiny model: one generation, two groups, two updates.
OFF_POLICY: dict[str, Any] = {
    "num_iterations": 2,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "learning_rate": 1e-2,
}

# The learning rate is high, so that ratios are far from 1 in the second pass over a generation.
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 32,
    "learning_rate": 5e-4,
    "max_steps": 2,
}
RUNS: dict[str, dict[str, Any]] = {
    "grpo with a reference": {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
    "dr_grpo, twice": {"loss_type": "dr_grpo", "scale_rewards": "none", "num_iterations": 2},
    "dapo": {
        "dynamic_sampling": True,
        "epsilon_high": 0.28,
        "parity_check": "off",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
    },
    "gspo, truncated masked": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "num_iterations": 2,
        "mask_truncated_completions": True,
        "max_completion_length": 24,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    "rloo": {"trainer": "rloo", "beta": 0.2, "num_iterations": 2, "reward_clip_range": [0.0, 0.8]},
    "rloo on policy": {"trainer": "rloo", "beta": 0.2, "normalize_advantages": True, "parity_check": "off"},
    "bnpo in parts": {"loss_type": "bnpo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "entropy": {"loss_type": "sapo", "entropy_coef": 0.01, "top_entropy_quantile": 0.3, "num_iterations": 2},
    "vespo, padded rows": {"loss_type": "vespo", "packed_update": False, "num_iterations": 2},
    "two rewards": {
        "rewards": [exact_match, brevity],
        "reward_weights": [1.0, 0.5],
        "multi_objective_aggregation": "normalize_then_sum",
        "reuse_sampling_logps": False,
        "num_iterations": 2,
        "off_policy_mask_threshold": 0.01,
    },
    "steps": {"rewards": [exact_match, steps], "loss_type": "luspo", "importance_sampling_level": "sequence"},
}


def trained(folder: Path, **settings: Any) -> Any:
    """A trainer on the demo's task, after its updates."""
    settings = COMMON | settings
    rewards, rloo = settings.pop("rewards", exact_match), settings.pop("trainer", "grpo") == "rloo"
    kind, config = (RLOOTrainer, RLOOConfig) if rloo else (GRPOTrainer, GRPOConfig)
    args = config(**base_args(folder, **settings))
    trainer = kind(model=str(model_path()), reward_funcs=rewards, args=args, train_dataset=load_task()[0])
    trainer.train()
    return trainer


def main(folder: Path) -> None:
    """Run on two processes: updates with rows of both, some of which the processes exchange."""
    trained(folder / "run", loss_type="bnpo", per_device_train_batch_size=8, num_iterations=2, max_steps=2)
