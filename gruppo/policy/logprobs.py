"""Log-probs and entropies of completions under a model, computed in the slow and obvious way.

Rows are padded, each has its own prompt, and every scored position has a full vector of logits. Packed rows are
checked against this code, and hooks of subclasses work with it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gruppo.algo.logprobs import entropy_from_logits, selective_log_softmax
from gruppo.data.vision import model_inputs
from gruppo.policy.inplace import finite_masks
from gruppo.policy.routing import own_router_loss
from gruppo.policy.unwrap import forward_arguments, inner_model, makes_positions, position_ids
from gruppo.types import Vision


class TokenScores(NamedTuple):
    """Log-probs (B, T) of the sampled tokens and, if asked for, entropies (B, T) of their distributions.

    For a mixture of experts also its load-balancing loss (0-d), if asked for.
    """

    logps_BT: Tensor
    entropy_BT: Tensor | None = None
    router_loss: Tensor | None = None


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
    router_loss: bool = False,
    trim: bool = False,
    vision: Sequence[Vision | None] | None = None,
) -> TokenScores:
    """Score the last `logits_to_keep` tokens of each row under the tempered distribution of the model.

    Rows are run in pieces of at most `batch_size`; with `trim`, a row that is run alone is not padded. Positions that
    the mask excludes score exactly 0. `router_loss`
    covers all tokens of the rows; for several pieces it is their mean. `vision` is the processor's output for the
    prompts, which end where the scored tokens begin.
    """
    size, width = batch_size or len(input_ids), logits_to_keep
    asked = {"output_router_logits": True} if router_loss else {}
    scores, losses = [], []
    for i, (ids, mask) in enumerate(zip(input_ids.split(size), attention_mask.split(size), strict=True)):
        first, missing = _padding_of(mask, width) if trim else (0, 0)
        keep, kept = slice(first, ids.shape[1] - missing), width - missing
        ids, mask = ids[:, keep], mask[:, keep]
        seen = {} if vision is None else _seen(model, vision[i * size : i * size + len(ids)], ids, mask, kept)
        output = _run(model, ids, mask, kept, asked | seen)
        tokens, counts = ids[:, -kept:], mask[:, -kept:].bool()
        logits = output.logits[:, -kept - 1 : -1]
        found = _scores(logits, tokens, counts, temperature, entropy, entropy_gradient)
        entropies_BT = None if found.entropy_BT is None else pad(found.entropy_BT, (0, missing))
        scores.append(TokenScores(pad(found.logps_BT, (0, missing)), entropies_BT))
        if router_loss:
            losses.append(own_router_loss(model, output))
    entropies = [score.entropy_BT for score in scores if score.entropy_BT is not None]
    return TokenScores(
        torch.cat([score.logps_BT for score in scores]),
        torch.cat(entropies) if entropies else None,
        torch.stack(losses).mean() if losses else None,
    )


def _padding_of(mask: Tensor, width: int) -> tuple[int, int]:
    """Columns to cut off before and after a row that is run alone: it needs no padding. (0, 0) for several rows."""
    if len(mask) > 1 or not mask.any():
        return 0, 0
    places, columns = mask[0].nonzero()[:, 0].tolist(), mask.shape[1]
    return min(places[0], columns - width - 1), min(columns - places[-1] - 1, width - 1)


def _seen(
    model: nn.Module, vision: Sequence[Vision | None], ids: Tensor, mask: Tensor, width: int
) -> dict[str, Tensor]:
    """The model inputs for the images of some rows, whose prompts are padded on the left."""
    ends = ids.shape[1] - width
    starts = (ends - mask[:, :ends].sum(1)).tolist()
    return model_inputs(vision, starts, ids.shape[1], device=ids.device, dtype=inner_model(model).dtype)


def _run(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, width: int, asked: dict[str, Any]) -> Any:
    """The model's output, with the logits of at least the last `width` + 1 positions."""
    accepted = forward_arguments(model)
    kwargs: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": False, **asked}
    if "position_ids" in accepted and not makes_positions(kwargs):
        kwargs["position_ids"] = position_ids(attention_mask)
    if "logits_to_keep" in accepted:
        # One more than the completion: its first token is predicted from the prompt's last position.
        kwargs["logits_to_keep"] = width + 1
    with finite_masks():
        return model(input_ids=input_ids, **kwargs)


def _scores(
    logits: Tensor, tokens: Tensor, mask: Tensor, temperature: float, entropy: bool, entropy_gradient: bool
) -> TokenScores:
    logps = selective_log_softmax(logits, tokens, temperature=temperature)
    entropies = None
    if entropy:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = entropy_from_logits(logits, temperature=temperature).masked_fill(~mask, 0.0)
    return TokenScores(logps.masked_fill(~mask, 0.0), entropies)
