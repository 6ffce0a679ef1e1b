"""The share of a step's time that recording the run and the audits take.

    python benchmarks/recording.py                   (CPU only)

Two runs; each update logs the seconds that it spent on recording and on audits:

    demo     the demo's configuration as it is: 16 prompts × 8 completions of up to 32 tokens, two threads
    512x512  32 prompts × 16 completions of 512 tokens, with log-probs and entropies of every token, one thread. Its
             model has only a few thousand weights, so its step time is not representative: the seconds are also given
             as a share of a 1.5B model's step of the same size on a GPU (results/step_qwen2-1.5b.json)
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads sleep: other work disturbs them less
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import provenance
from gruppo import GRPOConfig, GRPOTrainer
from gruppo.demo import model_path
from gruppo.demo.run import settings as demo_settings
from gruppo.demo.task import exact_match, load_task
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer

RESULTS = Path(__file__).parent / "results"
TARGETS = {"record": 0.02, "audit": 0.01}
REAL_STEP = RESULTS / "step_qwen2-1.5b.json"


def demo(folder: Path, steps: int) -> Any:
    """The demo's trainer."""
    torch.set_num_threads(2)
    train, _ = load_task()
    args = GRPOConfig(**demo_settings(folder, steps, seed=0))
    return GRPOTrainer(model=str(model_path()), reward_funcs=exact_match, args=args, train_dataset=train)


def many_tokens(folder: Path, steps: int) -> Any:
    """512 rows of 512 tokens."""
    torch.set_num_threads(1)
    args = base_args(
        folder,
        max_steps=steps,
        num_generations=16,
        per_device_train_batch_size=512,
        max_completion_length=512,
        generation_kwargs={"min_new_tokens": 512},
        learning_rate=1e-6,
        parity_check="off",
    )
    return GRPOTrainer(
        model=tiny_model(max_position_embeddings=1024),
        reward_funcs=length_reward,
        args=GRPOConfig(**args),
        train_dataset=prompts(64),
        processing_class=tiny_tokenizer(),
    )


def measure(trainer: Any) -> dict[str, Any]:
    """Median seconds of a step and of its parts; the first step is a warm-up and left out."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.train()
    steps = [log for log in trainer.state.log_history if "step_time" in log][1:]
    seconds = {
        name: statistics.median(log[key] for log in steps)
        for name, key in (("step", "step_time"), ("record", "record/seconds"), ("audit", "audit/seconds"))
    }
    return {
        "steps": len(steps),
        "seconds": {name: round(value, 5) for name, value in seconds.items()},
        "share": {name: round(seconds[name] / seconds["step"], 5) for name in TARGETS},
    }


def of_a_real_step(seconds: dict[str, float]) -> dict[str, float]:
    """The seconds as shares of a large model's step."""
    rounds = json.loads(REAL_STEP.read_text())["engines"]["gruppo"]["rounds"]
    step = statistics.median(facts["step"] for facts in rounds)
    return {"step_seconds": round(step, 3), **{name: round(seconds[name] / step, 5) for name in TARGETS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "recording.json")
    parser.add_argument("--demo-steps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of 512 × 512 tokens (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "demo": measure(demo(Path(folder) / "demo", options.demo_steps)),
            "512x512": measure(many_tokens(Path(folder) / "many", options.steps)),
        }
    cases["512x512"]["share_of_a_real_step"] = of_a_real_step(cases["512x512"]["seconds"])
    shares = [cases["demo"]["share"], cases["512x512"]["share_of_a_real_step"]]
    kept = all(share[name] < target for share in shares for name, target in TARGETS.items())
    result = {**provenance("gruppo", "pyarrow"), "targets": TARGETS, "cases": cases, "kept": kept}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
