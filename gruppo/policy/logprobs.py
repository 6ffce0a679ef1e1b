"""Log-probs and entropies of completions under a model: padded rows, a full vector of logits for every position."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gruppo.algo.logprobs import entropy_from_logits, selective_log_softmax
from gruppo.policy.prefix import SharedPrompts, forward_arguments, position_ids


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
    shortcuts: bool = True,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Score the last `logits_to_keep` tokens of each row under the tempered distribution of the model.

    Rows are run in pieces of at most `batch_size`. With `shortcuts`, rows of similar length share a piece and rows of
    one prompt share its encoding; without them, every row is run in full (the slow twin). Positions that the mask
    excludes score exactly 0.
    """
    rows_in_all, prompt_width = len(input_ids), input_ids.shape[1] - logits_to_keep
    if shortcuts:
        prompts = _used_columns(attention_mask[:, :prompt_width].flip(1))
        completions = _used_columns(attention_mask[:, prompt_width:])
    else:
        prompts, completions = [prompt_width] * rows_in_all, [logits_to_keep] * rows_in_all
    pieces = _pieces(prompts, completions, batch_size, shortcuts, input_ids.device.type)
    padding = prompt_width - max(prompts)
    input_ids, attention_mask, prompt_width = input_ids[:, padding:], attention_mask[:, padding:], max(prompts)
    shared = None
    if shortcuts:
        prompt_ids, prompt_mask = input_ids[:, :prompt_width], attention_mask[:, :prompt_width]
        shared = SharedPrompts.encode(model, prompt_ids, prompt_mask, batch_size)
    logps, entropies = [], []
    for rows in pieces:
        index = torch.tensor(rows, device=input_ids.device)
        width = max(1, max(completions[row] for row in rows))
        used = slice(0 if shared else prompt_width - max(prompts[row] for row in rows), prompt_width + width)
        logits = _logits(model, input_ids[index, used], attention_mask[index, used], width, shared, index)
        scores = _scores(
            logits,
            input_ids[index, prompt_width : prompt_width + width],
            attention_mask[index, prompt_width : prompt_width + width].bool(),
            temperature,
            entropy,
            entropy_gradient,
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


def _logits(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    width: int,
    shared: SharedPrompts | None,
    index: Tensor,
) -> Tensor:
    """Logits that predict the last `width` tokens: those of the positions before them."""
    accepted = forward_arguments(model)
    kwargs: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": shared is not None}
    if "position_ids" in accepted:
        kwargs["position_ids"] = position_ids(attention_mask)
    if "logits_to_keep" in accepted:
        # One more than the completion: its first token is predicted from the prompt's last position.
        kwargs["logits_to_keep"] = width + 1
    if shared is not None:
        # Only the prompt's last token and the completion are left to run.
        input_ids = input_ids[:, -width - 1 :]
        kwargs["position_ids"] = kwargs["position_ids"][:, -width - 1 :]
        kwargs["past_key_values"] = shared.for_rows(index)
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
