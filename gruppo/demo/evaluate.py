"""Greedy answers and exact match on a set of problems."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gruppo.demo.task import exact_match

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["accuracy", "greedy"]

MAX_NEW_TOKENS = 40


def greedy(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], batch_size: int = 250
) -> list[str]:
    """The model's most likely completion of each prompt."""
    import torch

    was_training = model.training
    model.eval()
    texts: list[str] = []
    with torch.inference_mode():
        for start in range(0, len(prompts), batch_size):
            batch = tokenizer(
                list(prompts[start : start + batch_size]), padding=True, padding_side="left", return_tensors="pt"
            ).to(model.device)
            ids = model.generate(
                **batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
            texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return texts


def accuracy(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rows: Mapping[str, Any] | Any
) -> float:
    """The share of `rows` (columns `prompt` and `answer`) that the model's greedy completion answers right."""
    scores = exact_match(greedy(model, tokenizer, list(rows["prompt"])), list(rows["answer"]))
    return sum(scores) / len(scores)
