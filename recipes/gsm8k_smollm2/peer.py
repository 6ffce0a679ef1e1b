"""The task of train.py with TRL's GRPOTrainer and vLLM: the same model, prompts, batch, learning rate and reward.

    python -m recipes.gsm8k_smollm2.peer --config recipes/gsm8k_smollm2/trl.yaml --model runs/warmup --data DATA

Needs TRL 1.16 and vLLM 0.24, which gruppo itself does not. The output folder gets a record.json like that of train.py.
"""

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.rollout_vllm import ENVIRONMENT
from gruppo import TrlParser
from recipes.gsm8k_smollm2.record import origin
from recipes.gsm8k_smollm2.train import RecipeArguments, run


def parse(argv: Sequence[str] | None, config_class: Any) -> tuple[RecipeArguments, Any]:
    """The arguments of the recipe, and TRL's config."""
    recipe, args = TrlParser((RecipeArguments, config_class)).parse_args_and_config(argv)
    return recipe, args


def main(argv: Sequence[str] | None = None) -> None:
    for name, value in {**ENVIRONMENT, "TRL_EXPERIMENTAL_SILENCE": "1"}.items():
        os.environ.setdefault(name, value)  # before TRL imports vLLM
    from trl import GRPOConfig, GRPOTrainer

    recipe, args = parse(argv, GRPOConfig)
    packages = ("trl", "vllm") if args.use_vllm else ("trl",)
    run(recipe, args, GRPOTrainer, {"library": "trl", **origin("peer", *packages)})


if __name__ == "__main__":
    main()
