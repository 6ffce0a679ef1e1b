"""The task of train.py with TRL's GRPOTrainer and vLLM: the same model, prompts, batch, learning rate and reward.

    python -m recipes.gsm8k_smollm2.peer --config recipes/gsm8k_smollm2/trl.yaml --model runs/warmup --data DATA

Needs TRL 1.16 and vLLM 0.24, which gruppo itself does not. The output folder gets a record.json like that of train.py.
"""

import os
from collections.abc import Sequence

from benchmarks.rollout_vllm import ENVIRONMENT
from recipes.gsm8k_smollm2.record import origin
from recipes.gsm8k_smollm2.train import parse_for, run


def main(argv: Sequence[str] | None = None) -> None:
    for name, value in {**ENVIRONMENT, "TRL_EXPERIMENTAL_SILENCE": "1"}.items():
        os.environ.setdefault(name, value)  # before TRL imports vLLM
    from trl import GRPOConfig, GRPOTrainer

    recipe, args = parse_for(GRPOConfig, argv)
    packages = ("trl", "vllm") if args.use_vllm else ("trl",)
    run(recipe, args, GRPOTrainer, {"library": "trl", **origin("peer", *packages)})


if __name__ == "__main__":
    main()
