"""A complete GRPO job in one folder: task, tokenizer, model and reward, without network or GPU; see EXAMPLE."""

from pathlib import Path

from gruppo.demo.evaluate import accuracy, greedy
from gruppo.demo.task import exact_match, load_task

__all__ = ["EXAMPLE", "accuracy", "exact_match", "greedy", "load_task", "model_path"]

# The job of `gruppo demo` without its progress display; a test runs it.
EXAMPLE = """\
from gruppo import GRPOConfig, GRPOTrainer
from gruppo.demo import accuracy, exact_match, load_task, model_path

train, held_out = load_task()
args = GRPOConfig("runs/demo", max_steps=40, learning_rate=2e-4, num_generations=8, per_device_train_batch_size=128,
                  max_completion_length=32, bf16=False, use_cpu=True, gradient_checkpointing=False)
trainer = GRPOTrainer(model=model_path(), reward_funcs=exact_match, args=args, train_dataset=train)
before = accuracy(trainer.model, trainer.processing_class, held_out)
trainer.train()
after = accuracy(trainer.model, trainer.processing_class, held_out)
print(f"held-out accuracy: {before:.3f} -> {after:.3f}")
"""


def model_path() -> str:
    """The folder with the demo's starting model and tokenizer, in the Hugging Face layout."""
    return str(Path(__file__).parent / "assets")
