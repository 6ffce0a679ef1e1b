"""The loss of one micro-batch, composed of its parts: ratio × objective × masks + KL, reduced.

`policy_loss` reads from top to bottom as the definition of the loss; each step calls a function from another file.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gruppo.algo.entropy import entropy_bonus
from gruppo.algo.kl import kl_to_reference
from gruppo.algo.masks import off_policy_mask, top_entropy_mask
from gruppo.algo.objectives import OBJECTIVE_STATS, OBJECTIVES, WEIGHTS_INSIDE, Tokens
from gruppo.algo.ratios import log_ratio
from gruppo.algo.reduce import UpdateSize, reduce_loss
from gruppo.algo.tensors import count, masked_sum, widen
from gruppo.algo.types import LossInputs, LossOutput, LossSettings, Max, Mean, Min, Stat

__all__ = ["LossInputs", "LossOutput", "LossSettings", "Max", "Mean", "Min", "Stat", "policy_loss"]


def policy_loss(inputs: LossInputs, settings: LossSettings, size: UpdateSize) -> LossOutput:
    """This micro-batch's share of the update's loss, and its statistics.

    Masks and weights act on the policy term only: the KL and the entropy bonus are added after them.
    """
    if settings.objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {tuple(OBJECTIVES)}, not {settings.objective!r}")
    inputs = _clean(inputs)
    x = _tokens(inputs, settings)
    chosen_BT = _chosen(inputs)

    advantages = _kept_advantages(x, inputs, settings, chosen_BT)
    terms = OBJECTIVES[settings.objective](x._replace(advantages=advantages), settings)
    if inputs.importance_weights is not None and settings.objective not in WEIGHTS_INSIDE:
        terms = terms * inputs.importance_weights
    stats = _stats(x, inputs, settings)
    if settings.beta != 0:
        kl_BT = _kl(x, inputs, settings)
        terms = terms + settings.beta * kl_BT
        stats["kl"] = _mean(kl_BT, x.mask_BT)

    policy = reduce_loss(terms, x.mask_BT, settings.reduction, size, settings.max_completion_length)
    loss = policy
    if inputs.entropy_coef != 0:
        entropy_BT = _required(inputs.entropy_BT, "entropy_BT", "the entropy bonus")
        bonus = entropy_bonus(entropy_BT, chosen_BT, size.micro_batch_chosen)
        loss = policy - inputs.entropy_coef * bonus / size.micro_batches
    chosen_entropy = None if inputs.entropy_BT is None else _mean(inputs.entropy_BT, chosen_BT)
    return LossOutput(loss, policy.detach(), stats, chosen_entropy)


def _clean(inputs: LossInputs) -> LossInputs:
    """The same micro-batch in full precision, with a bool mask and 0 wherever the mask is off."""
    mask_BT = inputs.mask_BT.bool()

    def masked(x: Tensor | None) -> Tensor | None:
        if x is None or x.shape != mask_BT.shape:
            return None if x is None else widen(x)
        return widen(x).masked_fill(~mask_BT, 0.0)

    logps_BT = widen(inputs.logps_BT).masked_fill(~mask_BT, 0.0)
    advantages = widen(inputs.advantages)
    return replace(
        inputs,
        logps_BT=logps_BT,
        mask_BT=mask_BT,
        advantages=advantages.unsqueeze(1) if advantages.ndim == 1 else advantages,
        old_logps_BT=logps_BT.detach() if inputs.old_logps_BT is None else masked(inputs.old_logps_BT),
        ref_logps_BT=masked(inputs.ref_logps_BT),
        sampler_logps_BT=masked(inputs.sampler_logps_BT),
        importance_weights=None if inputs.importance_weights is None else widen(inputs.importance_weights),
        entropy_BT=masked(inputs.entropy_BT),
    )


def _tokens(inputs: LossInputs, settings: LossSettings) -> Tokens:
    old_BT = _required(inputs.old_logps_BT, "old_logps_BT", "the ratio")
    per_token = old_BT.shape == inputs.logps_BT.shape
    token_BT = log_ratio(inputs.logps_BT, old_BT, inputs.mask_BT, "token") if per_token else None
    if token_BT is not None and settings.ratio == "token":
        ratio = token_BT
    else:
        ratio = log_ratio(inputs.logps_BT, old_BT, inputs.mask_BT, settings.ratio)
    return Tokens(
        logps_BT=inputs.logps_BT,
        log_ratio=ratio,
        token_log_ratio_BT=token_BT,
        advantages=inputs.advantages,
        mask_BT=inputs.mask_BT,
        importance_weights=inputs.importance_weights,
    )


def _chosen(inputs: LossInputs) -> Tensor:
    """The loss tokens that pass the entropy threshold, if there is one."""
    if inputs.entropy_threshold is None:
        return inputs.mask_BT
    entropy_BT = _required(inputs.entropy_BT, "entropy_BT", "the entropy mask")
    return top_entropy_mask(entropy_BT, inputs.mask_BT, inputs.entropy_threshold)


def _kept_advantages(x: Tokens, inputs: LossInputs, settings: LossSettings, chosen_BT: Tensor) -> Tensor:
    """Advantages with 0 for dropped tokens and sequences.

    Zeroing the factor rather than the product leaves no 0 · inf behind, in the value or in the gradient.
    """
    advantages = x.advantages
    if settings.off_policy_mask_threshold is not None:
        sampler_BT = inputs.old_logps_BT if inputs.sampler_logps_BT is None else inputs.sampler_logps_BT
        if sampler_BT is None or sampler_BT.shape != x.mask_BT.shape:
            raise ValueError("the off-policy mask needs old or sampler log-probs per token, (B, T)")
        keep = off_policy_mask(x.advantages, x.logps_BT, sampler_BT, x.mask_BT, settings.off_policy_mask_threshold)
        advantages = torch.where(keep, advantages, 0.0)
    if inputs.entropy_threshold is not None:
        advantages = torch.where(chosen_BT, advantages, 0.0)
    if inputs.importance_weights is not None and settings.objective not in WEIGHTS_INSIDE:
        advantages = torch.where(inputs.importance_weights != 0, advantages, 0.0)
    return advantages


def _kl(x: Tokens, inputs: LossInputs, settings: LossSettings) -> Tensor:
    ref_BT = _required(inputs.ref_logps_BT, "ref_logps_BT", "beta")
    return kl_to_reference(x.logps_BT, ref_BT, x.log_ratio.exp(), settings.use_bias_correction_kl)


def _stats(x: Tokens, inputs: LossInputs, settings: LossSettings) -> dict[str, Stat]:
    stats: dict[str, Stat] = {}
    if settings.objective in OBJECTIVE_STATS:
        stats.update(OBJECTIVE_STATS[settings.objective](x, settings))
    if inputs.entropy_BT is not None:
        stats["entropy"] = _mean(inputs.entropy_BT, x.mask_BT)
    return stats


def _mean(x: Tensor, mask_BT: Tensor) -> Mean:
    return Mean(masked_sum(x.detach(), mask_BT), count(mask_BT, x))


def _required(x: Tensor | None, name: str, reason: str) -> Tensor:
    if x is None:
        raise ValueError(f"{name} is None, but {reason} needs it")
    return x
