"""Updates of rows with and without images by one process or by two; run by test_runs.py."""

import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from gruppo import GRPOTrainer
from tests.vision.families import FAMILIES
from tests.vision.runs import make, row, weights

# The number of images of each prompt (None: all is text), and settings. An update has two prompts, and each of two
# processes has the rows of one.
CASES: dict[str, dict[str, Any]] = {
    "one process has all images": {"images": (1, 0, 2, 0)},
    "no images in the second update": {"images": (1, 1, 0, 0)},
    "checkpointing": {"images": (1, 0, 2, 0), "gradient_checkpointing": True},
    "text, checkpointing": {"images": None, "gradient_checkpointing": True},
    "text, options of checkpointing": {
        "images": None,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"early_stop": False},
    },
}


class Scripted(GRPOTrainer):
    """Samples completions that depend only on the prompt and the position of the row in its group."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        width = 2
        return [
            [10 + (3 * (i % width) + 7 * len(ids)) % 40 + j for j in range(2 + 2 * (i % width))]
            for i, ids in enumerate(prompt_ids)
        ], None


def by_place(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.1 * len(str(text)) + 0.3 * (i % 2) for i, text in enumerate(completions)]


def update(folder: Path, name: str, processes: int) -> dict[str, Tensor]:
    """By how much the updates of a case move each weight, in float64."""
    settings = dict(CASES[name])
    images = settings.pop("images")
    rows = [row(i, count) for i, count in enumerate(images or (0, 0, 0, 0))]
    model, processor = FAMILIES["qwen2_vl"].make()
    trainer = make(
        folder / name,
        dataset=Dataset.from_list(rows if images else [{"prompt": each["prompt"]} for each in rows]),
        model=model.double(),
        processor=processor if images else processor.tokenizer,
        trainer=Scripted,
        rewards=by_place,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 // processes,
        shuffle_dataset=False,
        max_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        epsilon=1e6,
        **settings,
    )
    before = weights(trainer)
    trainer.train()
    return {key: weight - before[key] for key, weight in weights(trainer).items()}


def main(folder: Path) -> None:
    for name in CASES:
        torch.save(update(folder, name, 2), folder / f"{name}{os.environ['RANK']}.pt")
