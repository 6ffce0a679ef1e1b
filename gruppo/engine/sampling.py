"""From logits to tokens: transformers' processors and warpers as plain tensor code, and the draw.

    raw logits ── penalty, bans, forced tokens ── temperature ── top_k ── top_p ── min_p ──► scores ──► token
        └───────── × 1/temperature ──► the plain distribution, whose log-probs and entropy are reported

Filters take several passes over float32 copies of the logits. If the only filter is a ban on a few tokens
(`few_bans`), the draw reads the model's own logits with −inf in those columns, and the plain distribution is computed
from the original values of these columns.

Shapes: B rows, V tokens of the vocabulary, K of them banned. Everything can be captured in a CUDA graph: nothing is
read back to the host and shapes depend on B, V and the settings alone. Run it once before capturing: lists of tokens
are copied from the host the first time (`_mask`, `_ban_tensors`).

Two differences from `generate` are inherent: rows have no padding here, so the padding token is never penalised as a
repetition because a batch was padded, and a prompt has its own length, not that of the longest prompt in the batch.
"""

import math
import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gruppo.engine.ops import sample_tokens
from gruppo.engine.settings import SamplingSettings

# Maximum number of tokens to ban column by column: this many columns cost little compared to the whole vocabulary.
_FEW = 64


class Choice(NamedTuple):
    """What was drawn for each row. A row whose logits cannot be sampled from has token −1 and NaN elsewhere."""

    tokens: Tensor  # int64 [B]
    logps: Tensor  # float32 [B]: of the distribution drawn from; with greedy decoding the same as plain_logps
    plain_logps: Tensor  # float32 [B]: of softmax(logits / temperature), before any filter
    entropies: Tensor | None  # float32 [B]: of that plain distribution


def needs_seen(settings: SamplingSettings) -> bool:
    """Whether `filter_logits` must know which tokens have occurred."""
    return settings.repetition_penalty != 1


def needs_filter(settings: SamplingSettings) -> bool:
    """Whether anything but the temperature changes the logits before the draw."""
    return _has_processors(settings) or _has_warpers(settings)


def few_bans(settings: SamplingSettings, vocabulary: int) -> tuple[tuple[int, int], ...]:
    """Banned tokens, each with the number of generated tokens at which its ban ends.

    Empty if there are other filters too, if no token is banned, or if too many are.

    Example, min_new_tokens=4 with the end token 2, begin_suppress_tokens=(2, 7), suppress_tokens=(5,):
        ((2, 4), (5, sys.maxsize), (7, 1))
    """
    enough = settings.min_new_tokens
    lists = (
        (settings.stop_ids if enough else (), enough),
        (settings.begin_suppress_tokens, 1),
        (settings.suppress_tokens, sys.maxsize),
    )
    forces = settings.forced_bos_token_id is not None or settings.forced_eos_token_id
    if forces or needs_seen(settings) or _has_warpers(settings) or sum(len(tokens) for tokens, _ in lists) > _FEW:
        return ()
    until: dict[int, int] = {}
    for tokens, count in lists:
        until |= {token: max(count, until.get(token, 0)) for token in tokens if 0 <= token < vocabulary}
    return tuple(sorted(until.items()))


def choose(
    raw_logits: Tensor,
    settings: SamplingSettings,
    keys: Tensor,
    positions: Tensor,
    inverse_temperature: Tensor,
    generated: Tensor,
    seen: Tensor | None,
    entropy: bool,
    prompt_lengths: Tensor | None = None,
) -> Choice:
    """Draw one token per row.

    raw_logits          [B, V] the model's output; bans may overwrite entries temporarily and restore them
    keys, positions     int64 [B]: address the noise of a draw, see `ops.sample_tokens`
    inverse_temperature float32 [1]
    generated           int64 [B]: tokens this completion has so far
    seen                bool [B, V]: tokens of prompt and completion, where `needs_seen`
    prompt_lengths      int64 [B]: only read for `forced_bos_token_id`, which generate applies after a prompt of one
                        token; None means that all prompts are longer
    """
    greedy = settings.greedy
    if not needs_filter(settings):
        tokens, logps, entropies = sample_tokens(
            raw_logits, keys, positions, inverse_temperature, greedy=greedy, entropy=entropy
        )
        return Choice(tokens, logps, logps, entropies)
    if bans := few_bans(settings, raw_logits.shape[1]):
        return _choose_without(
            bans, raw_logits, keys, positions, inverse_temperature, generated, greedy=greedy, entropy=entropy
        )
    logits = raw_logits.float()
    scores = filter_logits(
        logits,
        settings,
        generated=generated,
        seen=seen,
        inverse_temperature=inverse_temperature,
        prompt_lengths=prompt_lengths,
    )
    tempered_already = torch.ones_like(inverse_temperature)
    tokens, _, _ = sample_tokens(scores, keys, positions, tempered_already, greedy=greedy, entropy=False)
    return Choice(
        tokens, *actual_and_plain(logits, scores, tokens, inverse_temperature, greedy=greedy, entropy=entropy)
    )


def _choose_without(
    bans: tuple[tuple[int, int], ...],
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    inverse_temperature: Tensor,
    generated: Tensor,
    *,
    greedy: bool,
    entropy: bool,
) -> Choice:
    """`choose` if the bans of `few_bans` are the only filter."""
    if 0 in logits.stride():  # rows that share memory cannot be banned one by one
        logits = logits.contiguous()
    ids, until = _ban_tensors(bans, logits.device)
    columns = logits.index_select(1, ids)
    banned = _ban(logits, ids, columns, generated[:, None] < until)
    tokens, logps, entropies = sample_tokens(
        logits, keys, positions, inverse_temperature, greedy=greedy, entropy=entropy
    )
    drawn = logits.gather(1, tokens.clamp(min=0)[:, None])
    logits.index_copy_(1, ids, columns)

    # The plain distribution: the log of the mass of all tokens that could be drawn, and of each banned token.
    log_mass = drawn * inverse_temperature - logps[:, None]
    log_masses = torch.cat([log_mass, columns.masked_fill(~banned, -math.inf) * inverse_temperature], dim=1)
    log_shares = log_masses.log_softmax(-1, dtype=torch.float32)  # [B, 1 + K]
    log_share = log_shares[:, 0]
    plain_logps = logps + log_share
    if entropies is not None:
        # The entropy over these parts, plus the entropy within the one part that has several tokens.
        entropies = torch.special.entr(log_shares.exp()).sum(-1) + log_share.exp() * entropies
    return Choice(tokens, plain_logps if greedy else logps, plain_logps, entropies)


def _ban(logits: Tensor, ids: Tensor, columns: Tensor, unwanted: Tensor) -> Tensor:
    """Write −inf to the columns `ids` of logits where `unwanted` is true; returns the bans that remain, bool [B, K].

    `columns` [B, K] are the values of these columns; `unwanted` is bool [B, K]. As in `filter_logits`, the best tokens
    of a row are kept if nothing else would be left, and a row with NaN or +inf still has it afterwards.
    """
    # Subtracting infinity turns NaN and +inf into NaN: the row's maximum is then NaN, and the row stays invalid.
    logits.index_copy_(1, ids, torch.where(unwanted, columns - math.inf, columns))
    something_left = logits.amax(-1, keepdim=True) > -math.inf
    banned = unwanted & (something_left | (columns < columns.amax(-1, keepdim=True)))
    logits.index_copy_(1, ids, columns.masked_fill(banned, -math.inf))
    return banned


def actual_and_plain(
    logits: Tensor, scores: Tensor, tokens: Tensor, inverse_temperature: Tensor, *, greedy: bool, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs [B] of `tokens` as drawn from `scores` and under the plain tempered distribution, and its entropy.

    Greedy decoding draws from no distribution: both log-probs are the plain one. Rows with token −1 get NaN.
    """
    missing = tokens < 0
    index = tokens.clamp(min=0)[:, None]

    def at_tokens(logps: Tensor) -> Tensor:
        return logps.gather(1, index).squeeze(1).masked_fill(missing, math.nan)

    plain = torch.log_softmax(logits * inverse_temperature, dim=-1)
    plain_logps = at_tokens(plain)
    entropies = None
    if entropy:
        # entr(p) = −p log p is 0 at p = 0, where the product of the two would be NaN.
        entropies = torch.special.entr(plain.exp()).sum(-1).masked_fill(missing, math.nan)
    logps = plain_logps if greedy else at_tokens(torch.log_softmax(scores, dim=-1))
    return logps, plain_logps, entropies


def filter_logits(
    logits: Tensor,
    settings: SamplingSettings,
    *,
    generated: Tensor,
    seen: Tensor | None,
    inverse_temperature: Tensor,
    prompt_lengths: Tensor | None = None,
) -> Tensor:
    """Scores [B, V] to draw from, as `generate` computes them from float32 logits [B, V]. Arguments as in `choose`.

    The order is that of `GenerationMixin._get_logits_processor`: forced tokens come before bans, and greedy decoding
    stops before the temperature. If nothing is left of a row, its best tokens are kept. A row with NaN, +inf or only
    −inf becomes NaN, so that no filter makes it look valid.
    """
    best = logits.amax(-1, keepdim=True)  # NaN if there is one in the row
    scores = logits
    if needs_seen(settings):
        if seen is None:
            raise ValueError("A repetition penalty needs `seen`, the tokens that have occurred.")
        scores = _penalise(scores, seen, settings.repetition_penalty)
    if _has_processors(settings):
        scores = _restrict(scores, settings, generated[:, None], prompt_lengths)
        empty = scores.amax(-1, keepdim=True) == -math.inf
        scores = torch.where(empty & (logits == best), logits, scores)
    if not settings.greedy:
        scores = _warp(scores * inverse_temperature, settings)
    return torch.where(best.isfinite(), scores, math.nan)


def _has_processors(settings: SamplingSettings) -> bool:
    return bool(
        settings.repetition_penalty != 1
        or (settings.min_new_tokens and settings.stop_ids)
        or settings.suppress_tokens
        or settings.begin_suppress_tokens
        or settings.forced_bos_token_id is not None
        or settings.forced_eos_token_id
    )


def _has_warpers(settings: SamplingSettings) -> bool:
    return not settings.greedy and bool(settings.top_k or settings.top_p < 1 or settings.min_p)


def _penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that have occurred less likely, whichever sign their score has."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _restrict(scores: Tensor, settings: SamplingSettings, generated: Tensor, prompt_lengths: Tensor | None) -> Tensor:
    """Bans and forced tokens; `generated` is [B, 1]."""
    vocabulary, device = scores.shape[-1], scores.device
    if settings.min_new_tokens and settings.stop_ids:
        too_short = generated < settings.min_new_tokens
        scores = scores.masked_fill(too_short & _mask(settings.stop_ids, vocabulary, device), -math.inf)
    begin: int | Tensor = 0  # the first token that is free to choose
    if settings.forced_bos_token_id is not None and prompt_lengths is not None:
        lone = prompt_lengths[:, None] == 1
        only = _only((settings.forced_bos_token_id,), vocabulary, device)
        scores = torch.where(lone & (generated == 0), only, scores)
        begin = lone.long()
    if settings.forced_eos_token_id:
        last = generated == settings.max_new_tokens - 1
        scores = torch.where(last, _only(settings.forced_eos_token_id, vocabulary, device), scores)
    if settings.suppress_tokens:
        scores = scores.masked_fill(_mask(settings.suppress_tokens, vocabulary, device), -math.inf)
    if settings.begin_suppress_tokens:
        banned = _mask(settings.begin_suppress_tokens, vocabulary, device)
        scores = scores.masked_fill((generated == begin) & banned, -math.inf)
    return scores


def _warp(scores: Tensor, settings: SamplingSettings) -> Tensor:
    """top_k, top_p and min_p on tempered scores. Each keeps the likeliest token."""
    ascending = None
    if 0 < settings.top_k < scores.shape[-1]:
        top = scores.topk(settings.top_k).values
        scores = scores.masked_fill(scores < top[:, -1:], -math.inf)  # keeps all that tie with the last
        ascending = top.flip(-1)
    if settings.top_p < 1:
        if ascending is None:
            ascending = scores.sort(dim=-1).values
        scores = _nucleus(scores, ascending, settings.top_p)
    if settings.min_p > 0:
        # p < min_p · max p, in logs: the normaliser drops out.
        bound = scores.amax(-1, keepdim=True) + math.log(settings.min_p)
        scores = scores.masked_fill(scores < bound, -math.inf)
    return scores


def _nucleus(scores: Tensor, ascending: Tensor, top_p: float) -> Tensor:
    """Remove the least likely tokens whose total probability is at most 1 − top_p.

    scores [B, V]; ascending [B, K] are its K highest values, sorted; all others are −inf or tie with the lowest of
    them, as top_k leaves them. Ties are common if the logits were bfloat16. As many tied tokens are removed as in
    transformers, where the order of a sort decides which ones; here those with the lowest ids go, on every device.
    """
    lowest, highest = ascending[:, :1], ascending[:, -1:]
    unlisted = (scores == lowest).sum(-1, keepdim=True) - (ascending == lowest).sum(-1, keepdim=True)
    weights = (ascending - highest).exp()
    of_unlisted = unlisted * weights[:, :1]
    total = weights.sum(-1, keepdim=True) + of_unlisted
    cumulative = (of_unlisted + weights.cumsum(-1)) / total
    listed_out = (cumulative <= 1 - top_p)[:, :-1].sum(-1, keepdim=True)  # the likeliest always stays

    # Tokens that tie with the lowest but are not listed go first, perhaps only some of them.
    fitting = ((1 - top_p) * total / weights[:, :1]).floor()
    unlisted_out = torch.where(listed_out > 0, unlisted, torch.minimum(fitting, unlisted).nan_to_num().long())

    cut = ascending.gather(1, listed_out)  # the lowest value that stays, at least in part
    below = (ascending < cut).sum(-1, keepdim=True) + torch.where(lowest < cut, unlisted, 0)
    ties_out = listed_out + unlisted_out - below
    ties = scores == cut
    rank = ties.cumsum(-1, dtype=torch.int32)  # from 1, by id
    return scores.masked_fill((scores < cut) | (ties & (rank <= ties_out)), -math.inf)


def _only(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    """Scores [V] that allow only these tokens, all equally likely."""
    return torch.zeros(vocabulary, device=device).masked_fill(~_mask(tokens, vocabulary, device), -math.inf)


@cache
def _mask(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    """bool [V], true at these tokens. Never freed: a CUDA graph cannot copy from the host and reads this memory."""
    with torch.inference_mode(False):
        mask = torch.zeros(vocabulary, dtype=torch.bool)
        mask[[token for token in tokens if 0 <= token < vocabulary]] = True
        return mask.to(device)


@cache
def _ban_tensors(bans: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """`few_bans` as int64 [K] tokens and [K] counts. Never freed, like `_mask`."""
    with torch.inference_mode(False):
        ids, until = torch.tensor(bans).unbind(1)
        return ids.contiguous().to(device), until.contiguous().to(device)
