"""Log-probs and entropies of completions under a model, the slow and obvious way.

Padded rows, each with its own prompt, and a full vector of logits for every position: the twin that packed rows are
checked against, and what hooks of subclasses work with.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gruppo.algo.logprobs import entropy_from_logits, selective_log_softmax
from gruppo.policy.unwrap import forward_arguments, position_ids


class TokenScores(NamedTuple):
    """Log-probs (B, T) of the sampled tokens and, if asked for, entropies (B, T) of their distributions."""

    logps_BT: Tensor
    entropy_BT: Tensor | None


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

    Rows are run in pieces of at most `batch_size`. Positions that the mask excludes score exactly 0.
    """
    size = batch_size or len(input_ids)
    scores = []
    for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
        logits = _logits(model, ids, mask, logits_to_keep)
        tokens, counts = ids[:, -logits_to_keep:], mask[:, -logits_to_keep:].bool()
        scores.append(_scores(logits, tokens, counts, temperature, entropy, entropy_gradient))
    logps_BT = torch.cat([score.logps_BT for score in scores])
    entropies = [score.entropy_BT for score in scores if score.entropy_BT is not None]
    return TokenScores(logps_BT, torch.cat(entropies) if entropy else None)


def _logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, width: int) -> Tensor:
    """Logits that predict the last `width` tokens: those of the positions before them."""
    accepted = forward_arguments(model)
    kwargs: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": False}
    if "position_ids" in accepted:
        kwargs["position_ids"] = position_ids(attention_mask)
    if "logits_to_keep" in accepted:
        # One more than the completion: its first token is predicted from the prompt's last position.
        kwargs["logits_to_keep"] = width + 1
    logits: Tensor = model(input_ids=input_ids, **kwargs).logits
    return logits[:, -width - 1 : -1]


def _scores(
    logits: Tensor, tokens: Tensor, mask: Tensor, temperature: float, entropy: bool, entropy_gradient: bool
) -> TokenScores:
    logps = selective_log_softmax(logits, tokens, temperature=temperature)
    entropies = None
    if entropy:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = entropy_from_logits(logits, temperature=temperature).masked_fill(~mask, 0.0)
    return TokenScores(logps.masked_fill(~mask, 0.0), entropies)
