"""Same script, same seed, two libraries: are the weights and the metrics the same?

    make bench-peers
    .venv-peers/bin/python benchmarks/trl_parity.py --out benchmarks/results/trl_parity.json

Trains a tiny random model for a few updates with TRL 1.16 and with gruppo, from the same seed on the CPU in float32.
Both sample with transformers' generate, so the completions are the same as long as the weights are. Reports the
largest relative difference of any weight tensor and of any metric that TRL logs.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import provenance
from tests.helpers import base_args, chats, length_reward, prompts, tiny_model, tiny_tokenizer

CASES: dict[str, dict[str, Any]] = {
    **{f"grpo/{loss}": {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo")},
    "grpo/cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "grpo/gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "grpo/beta": {"beta": 0.1},
    "grpo/beta-iterations": {"beta": 0.1, "num_iterations": 2, "epsilon": 0.05},
    "grpo/reuse": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "loss_type": "grpo"},
    "grpo/accumulate": {"gradient_accumulation_steps": 4},
    "grpo/batch-scale": {"scale_rewards": "batch"},
    "grpo/no-scale": {"scale_rewards": False, "mask_truncated_completions": True},
    "grpo/two-rewards": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
    # Sharp: entropies that differ by more than the margin below the threshold, within which TRL's rounding decides.
    "grpo/entropy-mask": {"top_entropy_quantile": 0.37, "sharp": True},
    "grpo/entropy-bonus": {"entropy_coef": 0.05, "gradient_accumulation_steps": 2},
    "grpo/entropy-adaptive": {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 10.0},
    "grpo/temperature": {"temperature": 0.7, "delta": 1.5, "num_iterations": 2},
    "grpo/chat": {"chat": True},
    "rloo/default": {},
    "rloo/iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "grpo/bfloat16": {"dtype": "bfloat16", "num_iterations": 2},
    "rloo/bfloat16": {"dtype": "bfloat16", "num_iterations": 2},
    "grpo/eval": {"eval_strategy": "steps", "eval_steps": 4, "num_generations_eval": 2, "beta": 0.1},
    "rloo/truncated": {"mask_truncated_completions": True},
    "rloo/normalized": {"normalize_advantages": True, "reward_clip_range": (0.1, 0.4), "beta": 0.0},
}

# Plain SGD, because Adam would turn rounding noise in vanishing gradients into visible steps. The length limit lets
# some completions end before it: with equal lengths, half of the loss types would be the same.
COMMON = {
    "max_completion_length": 40,
    "max_steps": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "optim": "sgd",
    "learning_rate": 0.5,
}


def second_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None if i % 5 == 0 else (len(c) % 3) / 3 for i, c in enumerate(completions)]


def saved_model(folder: str, sharp: bool) -> str:
    model = tiny_model(max_position_embeddings=128)
    if sharp:
        model.lm_head.weight.data *= 25
    model.save_pretrained(f"{folder}/start")
    return f"{folder}/start"


def run(library: Any, case: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train and return the final weights and the log history."""
    algorithm = case.split("/")[0].upper()
    settings = dict(CASES[case])
    sharp = settings.pop("sharp", False)
    dataset = chats(24) if settings.pop("chat", False) else prompts(24)
    if "dtype" in settings:
        settings["model_init_kwargs"] = {"dtype": settings.pop("dtype")}
    if library.__name__ == "gruppo":
        settings["rollout_backend"] = "transformers"  # both must sample the same completions
    rewards = [length_reward, second_reward] if "reward_weights" in settings else length_reward
    with tempfile.TemporaryDirectory() as folder:
        settings = base_args(folder, **(COMMON | settings))
        trainer = getattr(library, f"{algorithm}Trainer")(
            model=saved_model(folder, sharp),  # as a path, from which TRL also loads its reference model
            reward_funcs=rewards,
            args=getattr(library, f"{algorithm}Config")(**settings),
            train_dataset=dataset,
            eval_dataset=prompts(8),  # full batches only: TRL weights an incomplete last batch differently
            processing_class=tiny_tokenizer(),
            **({"rollout_func": None} if algorithm == "GRPO" else {}),
        )
        if trainer.beta and trainer.ref_model is None:
            raise RuntimeError("no reference model")
        trainer.train()
        return trainer.model.state_dict(), trainer.state.log_history


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-6)


def compare(case: str) -> dict[str, Any]:
    import trl

    import gruppo

    theirs, their_logs = run(trl, case)
    ours, our_logs = run(gruppo, case)
    start = tiny_model(max_position_embeddings=128).state_dict()
    moved = max(((theirs[k] - start[k]).norm() / start[k].norm()).item() for k in theirs)
    differences = torch.stack([(theirs[k] - ours[k]).norm() / theirs[k].norm() for k in theirs])
    weights = differences.max().item() if differences.isfinite().all() else float("nan")
    skipped = ("time", "runtime", "per_second", "flos")
    metrics: dict[str, float] = {}
    for theirs_at, ours_at in zip(their_logs, our_logs, strict=True):
        for key, value in theirs_at.items():
            if any(word in key for word in skipped) or value is None:
                continue
            if key not in ours_at or ours_at[key] is None:
                raise RuntimeError(f"{case}: gruppo did not log {key!r}")
            difference = abs(value - ours_at[key]) if abs(value) < 1e-5 else relative(value, ours_at[key])
            if not math.isfinite(difference):
                raise RuntimeError(f"{case}: {key!r} is {value} in TRL and {ours_at[key]} in gruppo")
            metrics[key] = max(metrics.get(key, 0.0), difference)
    worst = max(metrics, key=metrics.__getitem__)
    return {
        "weights_moved": moved,
        "weights_difference": weights,
        "metrics_compared": len(metrics),
        "worst_metric": worst,
        "worst_metric_difference": metrics[worst],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {}
    for case in options.only:
        results[case] = compare(case)
        print(f"{case:24s}", json.dumps(results[case]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({**provenance("trl", "gruppo"), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
