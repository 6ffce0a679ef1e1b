"""Log-probs and entropies of completions under a model: padded rows, a full vector of logits for every position."""

import inspect
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

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
    by_length: bool = True,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Score the last `logits_to_keep` tokens of each row under the tempered distribution of the model.

    Rows are run in pieces, each as wide as its longest row: at most `batch_size` rows at a time, and rows of similar
    length together unless `by_length` is off. Positions that the mask excludes score exactly 0.
    """
    prompt_width = input_ids.shape[1] - logits_to_keep
    prompts = _used_columns(attention_mask[:, :prompt_width].flip(1))
    completions = _used_columns(attention_mask[:, prompt_width:])
    pieces = _pieces(prompts, completions, batch_size, by_length, input_ids.device.type)
    logps, entropies = [], []
    for rows in pieces:
        index = torch.tensor(rows, device=input_ids.device)
        width = max(1, max(completions[row] for row in rows))
        used = slice(prompt_width - max(prompts[row] for row in rows), prompt_width + width)
        scores = _score_rows(
            model, input_ids[index, used], attention_mask[index, used], width, temperature, entropy, entropy_gradient
        )
        logps.append(functional.pad(scores.logps_BT, (0, logits_to_keep - width)))
        if scores.entropy_BT is not None:
            entropies.append(functional.pad(scores.entropy_BT, (0, logits_to_keep - width)))
    back = torch.tensor([row for rows in pieces for row in rows], device=input_ids.device).argsort()
    return TokenScores(torch.cat(logps)[back], torch.cat(entropies)[back] if entropies else None)


def _used_columns(mask: Tensor) -> list[int]:
    """For each row, the columns up to its last one that is on; there may be holes before it."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.bool() * columns).amax(1).tolist() if mask.shape[1] else [0] * len(mask)


# What one more forward pass costs, in tokens that could have been padding instead.
_PASS_COST = {"cpu": 256, "cuda": 2048}


def _pieces(
    prompts: list[int], completions: list[int], batch_size: int | None, by_length: bool, device: str
) -> list[list[int]]:
    """Rows in the order of their length, cut into the number of pieces that costs least."""
    order = list(range(len(prompts)))
    fewest = 1 if batch_size is None else -(-len(order) // batch_size)

    def cut(count: int) -> list[list[int]]:
        bounds = [len(order) * i // count for i in range(count + 1)]
        return [order[start:stop] for start, stop in pairwise(bounds)]

    def cost(pieces: list[list[int]]) -> int:
        tokens = (len(p) * (max(prompts[r] for r in p) + max(completions[r] for r in p)) for p in pieces)
        return sum(tokens) + len(pieces) * _PASS_COST.get(device, 2048)

    if not by_length:
        return cut(fewest)
    order.sort(key=lambda row: (completions[row], prompts[row]))
    return min((cut(n) for n in (fewest, 2 * fewest, 4 * fewest) if n <= len(order)), key=cost)


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
    while hasattr(inner, "module") or hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return set(inspect.signature(type(inner).forward).parameters)
