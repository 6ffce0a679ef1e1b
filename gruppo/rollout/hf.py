"""Sampling with transformers' own `generate`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from gruppo.data.collate import pad
from gruppo.errors import RolloutError
from gruppo.types import Completion, SampleRequest, StopReason


def generation_config(args: Any, *, pad_token_id: int, bos_token_id: int | None, stop_ids: Sequence[int]) -> Any:
    """The sampling settings of a config; `generation_kwargs` override what has a field of its own."""
    settings = {
        "max_new_tokens": args.max_completion_length,
        "do_sample": True,
        "pad_token_id": pad_token_id,
        "bos_token_id": bos_token_id,
        "eos_token_id": list(stop_ids),
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "cache_implementation": args.cache_implementation,
        "use_cache": True,
        "disable_compile": True,
    }
    return GenerationConfig(**(settings | (args.generation_kwargs or {})))


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients: no dropout, no checkpointing. Every module's mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class TransformersBackend:
    """Generates with the training module itself, all rows in one batch."""

    name = "transformers"

    def __init__(
        self,
        policy: Callable[[], PreTrainedModel],
        config: GenerationConfig,
        *,
        stop_ids: Sequence[int],
        pad_to_multiple_of: int | None = None,
    ):
        self.policy = policy  # called anew each time: wrapping for training replaces the module
        self.config = config
        self.stop_ids = set(stop_ids)
        self.pad_to_multiple_of = pad_to_multiple_of

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """`count` completions for each request, flat and in order."""
        rows = [
            torch.tensor(list(request.prompt_ids), dtype=torch.long)
            for request in requests
            for _ in range(request.count)
        ]
        if not rows:
            return []
        policy = self.policy()
        device = policy.get_input_embeddings().weight.device
        masks = [torch.ones_like(row) for row in rows]
        prompt_ids = pad(rows, self.config.pad_token_id, "left", self.pad_to_multiple_of).to(device)
        prompt_mask = pad(masks, 0, "left", self.pad_to_multiple_of).to(device)
        with sampling_mode(policy):
            sequences = policy.generate(
                input_ids=prompt_ids, attention_mask=prompt_mask, generation_config=self.config
            )
        if len(sequences) != len(rows):
            raise RolloutError(f"generate returned {len(sequences)} sequences for {len(rows)} prompts.")
        return [self._completion(ids) for ids in sequences[:, prompt_ids.shape[1] :].tolist()]

    def _completion(self, ids: list[int]) -> Completion:
        """Cut after the first end-of-sequence token; what follows is padding."""
        for position, token in enumerate(ids):
            if token in self.stop_ids:
                return Completion(ids[: position + 1], StopReason.EOS)
        return Completion(ids, StopReason.LENGTH)
