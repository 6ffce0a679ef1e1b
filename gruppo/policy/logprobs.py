"""Log-probs and entropies of completions under a model: the slow, obvious way.

Every row is padded, every position of a completion gets its full vector of logits.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gruppo.algo.logprobs import entropy_from_logits, selective_log_softmax


class TokenScores(NamedTuple):
    """Log-probs (B, T) of the sampled tokens and, if asked for, entropies (B, T) of their distributions."""

    logps_BT: Tensor
    entropy_BT: Tensor | None


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions as if each row stood alone: padding on the left does not count."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def score_tokens(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    temperature: float = 1.0,
    batch_size: int | None = None,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Score the last `logits_to_keep` tokens of each row under the tempered distribution of the model.

    Rows are run `batch_size` at a time. Positions that the mask excludes score exactly 0.
    """
    batch_size = batch_size or len(input_ids)
    parts = [
        _score_rows(
            model,
            input_ids[start : start + batch_size],
            attention_mask[start : start + batch_size],
            logits_to_keep,
            temperature,
            entropy,
            entropy_gradient,
        )
        for start in range(0, len(input_ids), batch_size)
    ]
    logps = torch.cat([part.logps_BT for part in parts])
    entropies = [part.entropy_BT for part in parts if part.entropy_BT is not None]
    return TokenScores(logps, torch.cat(entropies) if entropies else None)


def _score_rows(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    temperature: float,
    entropy: bool,
    entropy_gradient: bool,
) -> TokenScores:
    accepted = _forward_arguments(model)
    kwargs: dict[str, Any] = {"attention_mask": attention_mask}
    if "position_ids" in accepted:
        kwargs["position_ids"] = position_ids(attention_mask)
    if "logits_to_keep" in accepted:
        # One more than the completion: its first token is predicted from the prompt's last position.
        kwargs["logits_to_keep"] = logits_to_keep + 1
    logits = model(input_ids=input_ids, use_cache=False, **kwargs).logits
    logits = logits[:, -logits_to_keep - 1 : -1]
    mask = attention_mask[:, -logits_to_keep:].bool()
    logps = selective_log_softmax(logits, input_ids[:, -logits_to_keep:], temperature=temperature)
    entropies = None
    if entropy:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = entropy_from_logits(logits / temperature).masked_fill(~mask, 0.0)
    return TokenScores(logps.masked_fill(~mask, 0.0), entropies)


def _forward_arguments(model: Any) -> set[str]:
    # A wrapper (DDP, an adapter, accelerate's autocast) hides the signature of the model inside.
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return set(inspect.signature(type(inner).forward).parameters)
