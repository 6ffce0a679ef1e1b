"""Rows with images, and small runs of the trainers on them."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from torch import Tensor

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.data.vision import VisionEncoder
from gruppo.policy.loading import placeholder_ids
from gruppo.policy.unwrap import forward_arguments
from tests.helpers import base_args
from tests.vision.families import FAMILIES, picture

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
SIZES = ((16, 16), (24, 16), (16, 24))  # of images, in turn


def row(number: int, images: int, **columns: Any) -> dict[str, Any]:
    """A question about `images` images."""
    pictures = [picture(10 * number + i, SIZES[(number + i) % 3]) for i in range(images)]
    return {"prompt": [{"role": "user", "content": "what" + "?" * number}], "images": pictures, **columns}


def rows(counts: Sequence[int] = (1, 2, 0, 1)) -> list[dict[str, Any]]:
    return [row(number, images) for number, images in enumerate(counts)]


def encoder_of(model: Any, processor: Any, **settings: Any) -> VisionEncoder:
    tokens = placeholder_ids(model)
    return VisionEncoder(processor, accepts=forward_arguments(model), placeholders=tokens, **settings)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {key: weight.detach().clone() for key, weight in trainer.model.named_parameters()}


def variety(completions: list[Any], **kwargs: Any) -> list[float]:
    """The number of distinct characters, for strings and conversations."""
    return [len(set(text if isinstance(text, str) else text[-1]["content"])) / 10 for text in completions]


def make(
    folder: Any,
    family: str = "qwen2_vl",
    kind: str = "grpo",
    *,
    model: Any = None,
    processor: Any = None,
    dataset: Any = None,
    rewards: Any = variety,
    trainer: Any = None,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer of a tiny model of a family, with two completions for each of two prompts per update."""
    own_model, own_processor = FAMILIES[family].make()
    trainer_class, config_class = TRAINERS[kind]
    quiet = {"rollout_backend": "transformers", "packed_update": False}
    return (trainer or trainer_class)(
        own_model if model is None else model,
        rewards,
        args=config_class(**(base_args(folder) | quiet | settings)),
        train_dataset=Dataset.from_list(rows()) if dataset is None else dataset,
        processing_class=own_processor if processor is None else processor,
        **(arguments or {}),
    )
