"""Train the warmed-up model with GRPO, RLOO, DAPO or Dr. GRPO, for a limited number of seconds.

    python -m recipes.gsm8k_smollm2.train --config recipes/gsm8k_smollm2/grpo.yaml --model runs/warmup --data DATA

The config file overrides common.yaml, and the command line overrides both: `--seed 1 --learning_rate 2e-5`. The output
folder gets the trained model, the run's own record (metrics.jsonl, config.yaml with all settings, …) and record.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PrinterCallback, TrainerCallback, set_seed

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, TrlParser
from gruppo.errors import ConfigError
from recipes.gsm8k_smollm2 import task
from recipes.gsm8k_smollm2.record import Recorder, config_of, origin

COMMON = Path(__file__).with_name("common.yaml")
SETTINGS = ("algorithm", "overlong_tokens", "step_weight", "average", "lora_rank")  # that distinguish experiments
ALGORITHMS: dict[str, tuple[Any, Any]] = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}


@dataclass
class RecipeArguments:
    """The arguments of this recipe besides the settings of a trainer."""

    experiment: str = field(metadata={"help": "Name of the experiment: runs that differ in the seed only share it."})
    model: str = field(metadata={"help": "Folder of the model to begin with."})
    data: str = field(metadata={"help": "Folder that holds gsm8k/train.jsonl(.gz)."})
    algorithm: str = field(default="grpo", metadata={"help": "Trainer: grpo or rloo."})
    max_seconds: float = field(default=420.0, metadata={"help": "Train no longer than this."})
    overlong_tokens: int = field(
        default=0, metadata={"help": "Punish length over so many tokens before the limit (DAPO); 0 does not."}
    )
    step_weight: float = field(
        default=0.0, metadata={"help": "Reward results on the way too, with this weight; 0: the answer only."}
    )
    average: float = field(
        default=0.0,
        metadata={"help": "Save a running mean of the weights, which keeps this much of itself per update."},
    )
    lora_rank: int = field(default=0, metadata={"help": "Train adapters of this rank in all layers; 0: the weights."})
    at_once: int = field(
        default=1, metadata={"help": "How many runs share the device, for the record: their seconds are longer ones."}
    )
    rows: int | None = field(default=None, metadata={"help": "First problems only, to try it."})

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm={self.algorithm!r} must be one of {', '.join(ALGORITHMS)}.")
        if self.max_seconds <= 0:
            raise ConfigError(f"max_seconds={self.max_seconds} must be above 0.")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average={self.average} must be at least 0 and below 1.")


def parse(argv: Sequence[str] | None = None) -> tuple[RecipeArguments, Any]:
    """Parse the arguments of the recipe, and the config of the trainer that they select."""
    # Parsed twice: the first pass determines which config class to use.
    first = TrlParser(RecipeArguments).parse_args_and_config(argv, return_remaining_strings=True)[0]
    return parse_for(ALGORITHMS[first.algorithm][0], argv)


def parse_for(config_class: Any, argv: Sequence[str] | None) -> tuple[RecipeArguments, Any]:
    """The same for a given config class: `--config` overrides common.yaml, and the command line overrides both."""
    parser = TrlParser((RecipeArguments, config_class))
    if unknown := parser.set_defaults_with_config(**yaml.safe_load(COMMON.read_text(encoding="utf-8"))):
        raise ConfigError(f"{COMMON}: {config_class.__name__} has no {' and no '.join(unknown[::2])}.")
    recipe, args = parser.parse_args_and_config(argv)
    return recipe, args


def adapters(rank: int) -> Any:
    """The LoRA configuration for adapters of this rank in all layers; None for rank 0."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")


class RunningMean(TrainerCallback):
    """An exponential moving average of the trained weights over updates, less sensitive to any single update."""

    def __init__(self, model: Any, keep: float):
        self.trained = [weight for weight in model.parameters() if weight.requires_grad] if keep else []
        self.mean = [weight.detach().clone() for weight in self.trained]
        self.keep = keep

    def on_step_end(self, args: Any, state: Any, *arguments: Any, **kwargs: Any) -> None:
        # The plain mean over the first updates, because otherwise the start would weigh too much.
        share = max(1 - self.keep, 1 / state.global_step)
        with torch.no_grad():
            torch._foreach_lerp_(self.mean, [weight.detach() for weight in self.trained], share)

    def write(self) -> None:
        """Replace the model's weights by the mean."""
        with torch.no_grad():
            for weight, mean in zip(self.trained, self.mean, strict=True):
                weight.copy_(mean)


def run(recipe: RecipeArguments, args: Any, trainer_class: Any, facts: dict[str, Any]) -> None:
    """Train with any library's trainer, keep the record, and save the model; `facts` names library and versions."""
    set_seed(args.seed)
    if recipe.at_once > 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.95 / recipe.at_once)  # the other runs will use what is free now
    reward_funcs, args.reward_weights = task.rewards(
        args.max_completion_length, recipe.overlong_tokens, recipe.step_weight
    )
    config = {name: getattr(recipe, name) for name in SETTINGS} | config_of(args)
    facts = {"experiment": recipe.experiment, "seed": args.seed, "at_once": recipe.at_once, **facts, "config": config}
    recorder = Recorder(Path(args.output_dir), facts, recipe.max_seconds)
    trainer = trainer_class(
        model=recipe.model,
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=task.dataset(task.read(recipe.data, recipe.rows)),
        callbacks=[recorder],
        peft_config=adapters(recipe.lora_rank),
    )
    trainer.remove_callback(PrinterCallback)
    recorder.built(trainer.model)
    mean = RunningMean(trainer.model, recipe.average)
    if recipe.average:
        trainer.add_callback(mean)
    trainer.train()
    mean.write()
    trainer.save_model(args.output_dir)


def main(argv: Sequence[str] | None = None) -> None:
    recipe, args = parse(argv)
    run(recipe, args, ALGORITHMS[recipe.algorithm][1], {"library": "gruppo", **origin("train")})


if __name__ == "__main__":
    main()
