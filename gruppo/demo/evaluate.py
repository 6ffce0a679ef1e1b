"""Greedy answers and exact match on a set of problems."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gruppo.demo.task import exact_match

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["accuracy", "greedy"]

MAX_NEW_TOKENS = 40


def greedy(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], batch_size: int = 250
) -> list[str]:
    """The model's most likely completion of each prompt."""
    was_training = model.training
    model.eval()
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        chunk = list(prompts[start : start + batch_size])
        batch = tokenizer(chunk, padding=True, padding_side="left", return_tensors="pt").to(model.device)
        ids = model.generate(
            **batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return texts


def accuracy(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rows: "Dataset | Mapping[str, Sequence[str]]"
) -> float:
    """The share of `rows` (columns `prompt` and `answer`) that the model's greedy completion answers right."""
    scores = exact_match(greedy(model, tokenizer, list(rows["prompt"])), list(rows["answer"]))
    return sum(scores) / len(scores)
