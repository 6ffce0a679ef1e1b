"""The published recipes as config fields, and the effect of a short run of each on the demo's model.

    python benchmarks/learning.py --out benchmarks/results/learn_demo.json      [two cores, about four minutes]

tests/learning checks the same results with assertions.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PrinterCallback

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import measure_seeds
from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.algo.advantages import Advantages
from gruppo.demo import accuracy, exact_match, load_task, model_path

STEPS = 20
HELD_OUT = 300  # problems; the standard deviation of an accuracy is then below 3 points

# 8 prompts × 8 completions, each generation used twice: in the second update ratios are not 1, so that the recipes
# differ, which all have the same gradient on-policy.
SETTINGS: dict[str, Any] = dict(
    per_device_train_batch_size=64,
    num_generations=8,
    num_iterations=2,
    max_completion_length=32,
    learning_rate=3e-4,
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
    parity_check="off",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)


@dataclass(frozen=True)
class Recipe:
    """A trainer, and the settings given in the recipe's paper."""

    trainer: type[Any] = GRPOTrainer
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, folder: str, **changes: Any) -> Any:
        return self.trainer.config_class(output_dir=folder, **{**SETTINGS, **self.settings, **changes})


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(settings=dict(loss_type="grpo", beta=0.04)),
    "rloo": Recipe(RLOOTrainer, dict(beta=0.05)),
    "dr_grpo": Recipe(settings=dict(loss_type="dr_grpo", scale_rewards="none")),
    "dapo": Recipe(settings=dict(loss_type="dapo", epsilon_high=0.28, dynamic_sampling=True)),
    "gspo": Recipe(
        settings=dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
    ),
    "cispo": Recipe(settings=dict(loss_type="cispo", epsilon_high=5.0)),
}


@dataclass(frozen=True)
class Lift:
    """Greedy held-out accuracy before and after a run, and the logs of its steps."""

    before: float
    after: float
    logs: list[dict[str, Any]]

    @property
    def points(self) -> float:
        return 100 * (self.after - self.before)


def lift(recipe: str, seed: int, steps: int = STEPS, *, reversed_sign: bool = False) -> Lift:
    """Train the demo's model; with `reversed_sign`, with all advantages negated."""
    chosen = RECIPES[recipe]
    trainer_class = backwards(chosen.trainer) if reversed_sign else chosen.trainer
    train, held_out = task()
    with TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=model_path(),
            reward_funcs=exact_match,
            args=chosen.config(folder, seed=seed, max_steps=steps),
            train_dataset=train,
        )
        trainer.remove_callback(PrinterCallback)
        before = accuracy(trainer.model, trainer.processing_class, held_out)
        trainer.train()
        after = accuracy(trainer.model, trainer.processing_class, held_out)
    return Lift(before, after, [line for line in trainer.state.log_history if "loss" in line])


def backwards(trainer_class: type[Any]) -> type[Any]:
    """The trainer with every advantage negated, and nothing else changed."""

    class Backwards(trainer_class):
        def estimate_advantages(self, *args: Any) -> Advantages:
            found: Advantages = super().estimate_advantages(*args)
            return found._replace(advantages_B=-found.advantages_B)

    return Backwards


@cache
def task() -> Any:
    return load_task(held_out_size=HELD_OUT)


def measured(recipe: str, reversed_sign: bool, seed: int) -> dict[str, Any]:
    """One run, for a result file."""
    found = lift(recipe, seed, reversed_sign=reversed_sign)
    facts = {"recipe": recipe, "reversed": reversed_sign, "seed": seed, "updates": STEPS, "held_out": HELD_OUT}
    return {**facts, "before": round(found.before, 4), "after": round(found.after, 4)}


if __name__ == "__main__":
    measure_seeds(__doc__, *(partial(measured, recipe, way) for recipe in RECIPES for way in (False, True)))
