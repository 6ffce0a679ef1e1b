"""Updates in which process 0 has all rows with images, and process 1 those without; run by test_runs.py."""

import os
from pathlib import Path

import torch
from datasets import Dataset

from tests.vision.runs import make, row, weights

RANK = int(os.environ.get("RANK", "0"))


def main(folder: Path) -> None:
    dataset = Dataset.from_list([row(0, 1), row(1, 0), row(2, 2), row(3, 0)])
    settings = {"per_device_train_batch_size": 2, "shuffle_dataset": False, "max_steps": 2, "learning_rate": 1e-2}
    trainer = make(folder / "run", dataset=dataset, **settings)
    images: list[bool] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, given: images.append("pixel_values" in given) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    trainer.train()
    assert images
    assert set(images) == {RANK == 0}
    torch.save(weights(trainer), folder / f"rank{RANK}.pt")
