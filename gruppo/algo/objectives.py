"""The policy term P of each loss, per token: minimising it makes good completions likelier and bad ones rarer.

A new loss needs one function here and one entry in `OBJECTIVES`, an entry in `OBJECTIVE_STATS` if it reports metrics,
and one in `WEIGHTS_INSIDE` if it applies the sampler correction itself. An objective must be 0, with zero gradient,
where the advantage is 0: that is how tokens are dropped.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gruppo.algo.tensors import count, masked_sum
from gruppo.algo.types import LossSettings, Max, Mean, Min, Stat

__all__ = [
    "OBJECTIVES",
    "OBJECTIVE_STATS",
    "WEIGHTS_INSIDE",
    "Tokens",
    "cispo",
    "clip",
    "gamma_weights",
    "sapo",
    "vespo",
]

_LOG_FLOOR, _LOG_CEIL = math.log(1e-8), 20.0


class Tokens(NamedTuple):
    """What an objective sees; masked positions hold 0."""

    logps_BT: Tensor
    log_ratio: Tensor
    """(B, T) or (B, 1), depending on the ratio level of the settings."""
    token_log_ratio_BT: Tensor | None
    """None if the old log-probs are known only as row sums."""
    advantages: Tensor
    """(B, 1), or (B, T) with one per token."""
    mask_BT: Tensor
    importance_weights: Tensor | None = None


def clip(x: Tokens, s: LossSettings) -> Tensor:
    """−min(r̂·A, clamp(r, 1−ε_low, 1+ε_high)·A) with r̂ = min(r, δ): https://arxiv.org/abs/1707.06347.

    For a fixed sign of A this is −A times r clamped to an interval: there is no floor if A ≥ 0, and δ moves only the
    ceiling (the two-sided clip of https://arxiv.org/abs/2505.07291). Clamping r by selection keeps the gradient
    exactly 0 outside the interval, even where r overflows.
    """
    lowest, highest = 1 - s.epsilon_low, 1 + s.epsilon_high
    delta = math.inf if s.delta is None else s.delta
    positive = x.advantages >= 0
    with torch.no_grad():
        r = x.log_ratio.exp()
        floor = _by_sign(positive, -math.inf, lowest, r)
        ceiling = _by_sign(positive, min(highest, delta), max(highest, delta), r)
        held = r.clamp(floor, ceiling)
        outside = held != r
    return -x.advantages * torch.where(outside, held, _exp_unless(x.log_ratio, outside))


def cispo(x: Tokens, s: LossSettings) -> Tensor:
    """−sg(min(r, ε_high))·A·ℓ, REINFORCE with a capped weight: CISPO, https://arxiv.org/abs/2506.13585.

    ε_high is the absolute cap, not its distance from 1: about 5 is the intended setting.
    """
    return _reinforce(x.log_ratio.detach().exp().clamp(max=s.epsilon_high) * x.advantages, x.logps_BT)


def sapo(x: Tokens, s: LossSettings) -> Tensor:
    """−(4/τ)·sigmoid(τ(r − 1))·A, a soft gate in place of the clip: SAPO, https://arxiv.org/abs/2511.20347.

    τ is `sapo_temperature_pos` for A > 0, otherwise `sapo_temperature_neg`.
    """
    tau = _by_sign(x.advantages > 0, s.sapo_temperature_pos, s.sapo_temperature_neg, x.log_ratio)
    saturated = x.log_ratio.detach().exp().isinf()
    gate = torch.sigmoid(tau * (_exp_unless(x.log_ratio, saturated) - 1))
    return -4 / tau * torch.where(saturated, 1.0, gate) * x.advantages


def vespo(x: Tokens, s: LossSettings) -> Tensor:
    """−sg(φ)·A·ℓ with φ the sequence weight of `gamma_weights`, whatever the ratio level.

    VESPO, https://arxiv.org/abs/2602.10693.
    """
    return _reinforce(_phi(x, s) * x.advantages, x.logps_BT)


@torch.no_grad()
def gamma_weights(
    advantages: Tensor,
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    importance_weights_BT: Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """VESPO's φ = exp(λ + k·log w − λ·w), shaped like a Gamma density, with φ(w = 1) = 1 and non-finite values 0.

    w is the sequence ratio: log w = Σ_t of the token log-ratios (plus log ρ, if given), with terms and sum clamped.
    (k, λ) depend on the sign of `advantages` (B, 1) or (B, T); the result has the shape of `advantages`.
    """
    log_w_B1 = masked_sum(log_ratio_BT.clamp(-20.0, 20.0), mask_BT, dim=1, keepdim=True)
    if importance_weights_BT is not None:
        if importance_weights_BT.shape != mask_BT.shape:
            raise ValueError(
                "vespo needs importance weights per token, (B, T): use a 'token' importance sampling mode"
            )
        log_w_B1 = log_w_B1 + masked_sum(
            importance_weights_BT.log().clamp(_LOG_FLOOR, _LOG_CEIL), mask_BT, dim=1, keepdim=True
        )
    log_w_B1 = log_w_B1.clamp(_LOG_FLOOR, _LOG_CEIL)
    positive = advantages >= 0
    k = _by_sign(positive, k_pos, k_neg, log_w_B1)
    decay = _by_sign(positive, lambda_pos, lambda_neg, log_w_B1).clamp(min=1e-4)
    phi = (decay + k * log_w_B1 - decay * log_w_B1.exp()).exp()
    return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@torch.no_grad()
def clip_stats(x: Tokens, s: LossSettings) -> dict[str, Stat]:
    """Shares of tokens (of sequences, for a sequence ratio) clipped at a bound, measured on the δ-capped ratio."""
    r = x.log_ratio.exp()
    if s.delta is not None:
        r = r.clamp(max=s.delta)
    low = (r < 1 - s.epsilon_low) & (x.advantages < 0)
    high = (r > 1 + s.epsilon_high) & (x.advantages > 0)

    def rows(hit: Tensor) -> Tensor:
        # Where every row counts (RLOO), a row without loss tokens counts as not clipped.
        return hit.float()[:, 0] if s.reduction == "rows" else _row_shares(hit, x.mask_BT)

    return {
        "clip_ratio/low_mean": _share(low, x.mask_BT, s),
        "clip_ratio/low_min": Min(rows(low)),
        "clip_ratio/high_mean": _share(high, x.mask_BT, s),
        "clip_ratio/high_max": Max(rows(high)),
        "clip_ratio/region_mean": _share(low | high, x.mask_BT, s),
    }


@torch.no_grad()
def cispo_stats(x: Tokens, s: LossSettings) -> dict[str, Stat]:
    """Share of tokens whose weight is capped and whose advantage is positive."""
    capped = (x.log_ratio.exp() > s.epsilon_high) & (x.advantages > 0)
    return {"cispo_clip_ratio": _share(capped, x.mask_BT, s)}


@torch.no_grad()
def vespo_stats(x: Tokens, s: LossSettings) -> dict[str, Stat]:
    """Mean φ over the sequences it acts on: those with a nonzero advantage, whose log-probs are always known.

    NaN, which averages skip, if there are no such sequences.
    """
    phi, acts = _phi(x, s), x.advantages != 0
    count = torch.where(acts.any(), acts.sum().to(phi), torch.nan)
    return {"vespo/phi_seq_mean": Mean(torch.where(acts, phi, 0.0).sum() + 0 * count, count)}


OBJECTIVES: dict[str, Callable[[Tokens, LossSettings], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
}

OBJECTIVE_STATS: dict[str, Callable[[Tokens, LossSettings], dict[str, Stat]]] = {
    "clip": clip_stats,
    "cispo": cispo_stats,
    "vespo": vespo_stats,
}

# Objectives that apply the weights of the sampler correction themselves: VESPO includes them in its sequence weight.
# The terms of all other objectives are multiplied by these weights.
WEIGHTS_INSIDE = {"vespo"}


def _by_sign(condition: Tensor, if_true: float, if_false: float, like: Tensor) -> Tensor:
    """One of two numbers, in the dtype of `like`: `torch.where` on Python numbers would round them to float32."""
    return torch.where(condition, like.new_full((), if_true), like.new_full((), if_false))


def _exp_unless(log_ratio: Tensor, constant: Tensor) -> Tensor:
    """exp, but 1 at the positions that `where` will not select, so that their backward avoids 0 · inf = NaN."""
    return log_ratio.expand(constant.shape).masked_fill(constant, 0.0).exp()


def _reinforce(weight: Tensor, logps_BT: Tensor) -> Tensor:
    """−weight·ℓ, where a weight of 0 gives 0 even if ℓ is infinite."""
    return -weight * logps_BT.masked_fill(weight.expand(logps_BT.shape) == 0, 0.0)


def _phi(x: Tokens, s: LossSettings) -> Tensor:
    if x.token_log_ratio_BT is None:
        raise ValueError("vespo needs old log-probs per token, (B, T), not row sums")
    return gamma_weights(
        x.advantages,
        x.token_log_ratio_BT,
        x.mask_BT,
        x.importance_weights,
        s.vespo_k_pos,
        s.vespo_lambda_pos,
        s.vespo_k_neg,
        s.vespo_lambda_neg,
    )


def _share(hit: Tensor, mask_BT: Tensor, settings: LossSettings) -> Mean:
    """Share of loss tokens or, if the ratio is that of a sequence, of rows."""
    if settings.ratio != "token" and hit.shape[1] == 1:  # an advantage per token makes it one value per token
        mask_BT = torch.ones_like(hit)
    ones = hit.float()
    return Mean(masked_sum(ones, mask_BT), count(mask_BT, ones))


def _row_shares(hit: Tensor, mask_BT: Tensor) -> Tensor:
    """Share of each row's loss tokens, (B,); NaN for a row without any."""
    ones = hit.float()
    return masked_sum(ones, mask_BT, dim=1) / count(mask_BT, ones, dim=1)
