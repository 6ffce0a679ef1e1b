"""The record of a run of this recipe: record.json, in the same format for gruppo and for its peer.

    {"library": "gruppo", "experiment": "grpo", "seed": 0, "config": {…}, "commit": …, "device": …, "versions": …,
     "start_weights": "4be1…", "construct_seconds": 6.1, "train_seconds": 420.3,
     "steps": [{"step": 1, "seconds": 4.9, "accuracy": 0.06, …}, …]}

Seconds count from the beginning of training, and `accuracy` is over all completions that a step sampled.
`start_weights` is the fingerprint of the weights before the first step, which equals `weights` of their warm-up.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks.common import provenance
from gruppo.evaluation.models import weights_fingerprint
from recipes.gsm8k_smollm2.task import ACCURACY, SAMPLED_ACCURACY

NAME = "record.json"
# What is kept of a step besides its accuracy, with the names of the logged metrics.
KEPT = {
    "reward": "reward",
    "reward_std": "reward_std",
    "flat": "frac_reward_zero_std",
    "length": "completions/mean_length",
    "clipped": "completions/clipped_ratio",
    "boxed": "math_answer/boxed",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "tokens": "num_tokens",
    "prompts": "dynamic_sampling/prompts_sampled",
}
CONFIG = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "optim", "bf16", "max_steps"),
    *("num_generations", "generation_batch_size", "num_iterations", "max_completion_length", "temperature"),
    *("loss_type", "scale_rewards", "epsilon", "epsilon_high", "beta", "normalize_advantages", "reward_weights"),
    "top_entropy_quantile",
    *("dynamic_sampling", "max_resample_rounds", "use_vllm", "vllm_mode", "gradient_checkpointing"),
)
SAVE_EVERY = 10.0  # seconds, the most that a killed run loses


def origin(script: str, *packages: str) -> dict[str, Any]:
    """The commit, date, device, versions, and the command in a form that can be run again."""
    facts = provenance(*packages)
    arguments = facts["command"].split(" ", 2)[2:]
    return facts | {"command": " ".join([f"python -m recipes.gsm8k_smollm2.{script}", *arguments])}


def sampled_accuracy(logs: Mapping[str, Any]) -> float:
    """The share of correct answers among all completions of a step.

    The reward logs it. A trainer that does not forward this metric replaces no prompts, so the mean of its rewards is
    the same.

    Example, half of the kept completions are correct, but only a quarter of all:
        sampled_accuracy({"rewards/math_answer_reward/mean": 0.5, "math_answer/sampled": 0.25}) == 0.25
    """
    return float(logs[ACCURACY] if logs.get(SAMPLED_ACCURACY) is None else logs[SAMPLED_ACCURACY])


def step_of(step: int, seconds: float, logs: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of one step, from the trainer's log; some trainers log numbers as text."""
    kept = {name: round(float(logs[key]), 6) for name, key in KEPT.items() if logs.get(key) is not None}
    return {"step": step, "seconds": round(seconds, 3), "accuracy": round(sampled_accuracy(logs), 6), **kept}


class Recorder(TrainerCallback):
    """Keeps the record of a run, prints a line for each step, and stops the run when its time is over."""

    def __init__(self, folder: Path, facts: dict[str, Any], max_seconds: float):
        self.path = folder / NAME
        self.record: dict[str, Any] = {**facts, "steps": []}
        self.max_seconds = max_seconds
        self._constructed = time.perf_counter()
        self._began = self._saved = 0.0

    def built(self, model: Any) -> None:
        """Called when the trainer is constructed: record how long that took, and the weights it starts from."""
        self.record["construct_seconds"] = round(time.perf_counter() - self._constructed, 2)
        self.record["start_weights"] = weights_fingerprint(model, adapters=False)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.perf_counter() - self._began >= self.max_seconds:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or ACCURACY not in logs:  # the summary at the end is logged too
            return
        now = time.perf_counter()
        line = step_of(state.global_step, now - self._began, logs)
        self.record["steps"].append(line)
        self.record["train_seconds"] = line["seconds"]
        shown = (f"{name} {line[name]:.3f}" for name in ("accuracy", "length", "entropy") if name in line)
        print(f"step {line['step']:4}  {line['seconds']:6.1f} s  {'  '.join(shown)}", flush=True)
        if now - self._saved >= SAVE_EVERY:
            self.save()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.save()

    def save(self) -> None:
        """Write the record to a temporary file and rename it, so that readers always see a complete file."""
        self._saved = time.perf_counter()
        unfinished = self.path.with_suffix(".new")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(self.record, default=str) + "\n", encoding="utf-8")
        unfinished.replace(self.path)


def config_of(args: Any) -> dict[str, Any]:
    """The settings that distinguish experiments, from the config of either library."""
    return {name: getattr(args, name) for name in CONFIG if hasattr(args, name)}
