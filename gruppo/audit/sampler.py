"""Checks of what was sampled, once per generation; most are functions that return a finding or None.

    impossible_logps   log-probs above 0, NaN or −inf; impossible entropies
    bad_tokens         ids outside the vocabulary; text after an end token
    nan_logits         completions that ended because the logits were not finite
    no_end             no completion ended by itself, for many generations
    empty              most completions are empty
    stale_weights      the sampler's weights differ from the trainer's

Statistical checks are in `chance.py`.
"""

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from gruppo.audit.findings import Finding
from gruppo.audit.tokens import Tokens
from gruppo.types import StopReason

ABOVE_ZERO = 1e-4  # tolerance for log-probs: float32 rounding of a difference of logits
ENTROPY_ROUNDING = 1e-2  # nats: a sum over the vocabulary in float32, with a wide margin
MOST = 0.5  # share of a generation's completions


def impossible_logps(tokens: Tokens, vocabulary: int) -> Finding | None:
    """Log-probs that a sampled token cannot have, or entropies impossible for a vocabulary of this size."""
    logps = tokens.given_logps
    if tokens.logps is not None:
        logps = np.concatenate([logps, tokens.logps[tokens.own]])
    some = tokens.some
    entropies = np.zeros(0) if some.entropies is None else some.entropies[some.own]
    most = math.log(vocabulary) + ENTROPY_ROUNDING
    values = {
        "above_zero": float((logps > ABOVE_ZERO).sum()),
        "nan": float(np.isnan(logps).sum()),
        "minus_infinity": float((logps == -np.inf).sum()),
        # Negated, so that NaN, which is in no range, is counted.
        "entropies": float((~((entropies >= -ENTROPY_ROUNDING) & (entropies <= most))).sum()),
    }
    if not any(values.values()):
        return None
    return Finding(
        "impossible_logps",
        f"Of {len(logps)} log-probs of sampled tokens {values['above_zero']:.0f} are above 0, {values['nan']:.0f} are "
        f"NaN and {values['minus_infinity']:.0f} are -inf; {values['entropies']:.0f} entropies are not between 0 and "
        f"log({vocabulary}). The sampler's numbers do not belong to the tokens it drew: look at logits that overflow "
        "(float16?), at a rollout function that returns probabilities instead of log-probs, and at custom kernels.",
        values,
    )


def bad_tokens(tokens: Tokens, vocabulary: int, end_ids: Collection[int]) -> Finding | None:
    """Ids outside of the vocabulary, and completions that continue after an end token.

    Completions with tool turns are exempt from the latter: they contain end tokens.
    """
    unknown = int(((tokens.ids < 0) | (tokens.ids >= vocabulary)).sum())
    inside = np.zeros(len(tokens.ids), np.bool_)
    for end in end_ids:  # there are few; np.isin pays off for many
        inside |= tokens.ids == end
    inside[tokens.ends[tokens.lengths > 0] - 1] = False
    going_on = tokens.row_sums(inside.astype(np.float64)) > 0
    if going_on.any():
        going_on &= np.array([completion.model_mask is None for completion in tokens.completions])
    if not unknown and not going_on.any():
        return None
    return Finding(
        "bad_tokens",
        f"{unknown} token ids are outside of the model's vocabulary of {vocabulary}, and {going_on.sum()} of "
        f"{len(going_on)} completions have text after an end token ({sorted(end_ids)}). The loss would train on text "
        "that the model never wrote. Likely: a tokenizer of another model, completions that were returned with "
        "padding, or an end token that the sampler does not know.",
        {"unknown": float(unknown), "behind_end": float(going_on.sum())},
    )


def nan_logits(tokens: Tokens) -> Finding | None:
    """Completions that ended because the logits were not finite."""
    broken = sum(completion.stop is StopReason.NAN for completion in tokens.completions)
    if not broken:
        return None
    return Finding(
        "nan_logits",
        f"{broken} of {len(tokens.rows)} completions ended because the model's logits were NaN or infinite. The "
        "weights or activations overflow: look at grad_norm before this, lower the learning rate, and prefer bfloat16 "
        "or float32 to float16.",
        {"completions": float(broken)},
    )


def no_end(generations: int) -> Finding:
    """No completion ended by itself."""
    return Finding(
        "no_end",
        f"Not one completion of {generations} generations in a row ended by itself: all are cut off, and rewards "
        "judge incomplete texts. Raise max_completion_length, and see whether the model knows its end token (a chat "
        "template whose turns end with another one, a base model that never learned any).",
        {"generations": float(generations)},
    )


def empty(tokens: Tokens, end_ids: Collection[int]) -> Finding | None:
    """More than half of the completions are empty or consist of an end token only."""
    if not len(tokens.lengths):
        return None
    nothing = tokens.lengths == 0
    only = np.flatnonzero(tokens.lengths == 1)
    nothing[only] = np.isin(tokens.ids[tokens.ends[only] - 1], list(end_ids))
    share = float(nothing.mean())
    if share <= MOST:
        return None
    return Finding(
        "empty",
        f"{share:.0%} of the completions are empty or only an end token. Likely: a chat template that ends the "
        "assistant's turn instead of opening it, prompts that leave no room in the model's context, or a reward that "
        "favours empty completions.",
        {"share": share},
    )


def stale_weights(weights: tuple[Any, Any]) -> Finding | None:
    """The sampler's and the trainer's weights are from different updates; `weights` identifies them."""
    sampler, trainer = weights
    if sampler == trainer:
        return None
    return Finding(
        "stale_weights",
        f"The completions were sampled with weights {sampler!r}, but the trainer holds {trainer!r}: they come from "
        "another policy, and ratios that are assumed to be 1 are not. The sampler missed an update: look at how its "
        "weights are sent or refreshed.",
    )
