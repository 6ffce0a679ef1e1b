"""Advantages, loss and d loss / d log-prob of recorded rows, computed with the functions that training uses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gruppo.algo.advantages import Advantages
from gruppo.algo.loss import LossInputs, LossSettings, Max, Mean, Min, Stat, policy_loss
from gruppo.algo.masks import drop_rows, entropy_threshold
from gruppo.algo.mismatch import importance_weights
from gruppo.algo.reduce import UpdateSize
from gruppo.algo.stats import nanmax, nanmin
from gruppo.config.recipe import estimate_advantages
from gruppo.errors import ConfigError, DataError
from gruppo.replay.record import MicroBatch, RecordedGeneration, RecordedUpdate
from gruppo.replay.settings import Settings

__all__ = ["Computed", "advantages_of", "compute"]

Rows = Mapping[int, Tensor]  # advantages by generation, (N,) or (N, T)


def advantages_of(generation: RecordedGeneration, settings: Settings, rewards_NR: Tensor | None = None) -> Advantages:
    """The advantages of a generation under these settings, from its recorded rewards or from `rewards_NR`.

    The KL penalty is recorded for the run's beta; for another beta it is scaled in proportion.
    """
    if generation.has_steps:
        raise DataError(
            f"Rewards of generation {generation.number} scored steps, which are not recorded: its advantages can be "
            "used as recorded, but not recomputed."
        )
    penalty_N = None
    if settings.recipe.kl == "reward":
        penalty_N = generation.kl_penalty()
        if penalty_N is None:
            raise ConfigError(
                f"beta={settings.config.beta} in RLOO subtracts the KL to a reference from the reward, and this run "
                "had no reference. Set beta=0 as well."
            )
        if "beta" in settings.changes:
            penalty_N = penalty_N * (settings.config.beta / settings.recorded["beta"])
    rewards_NR = generation.rewards_NR if rewards_NR is None else rewards_NR
    weights_R = settings.weights(generation.names)
    config, recipe, size = settings.config, settings.recipe, generation.group_size
    return estimate_advantages(config, recipe, rewards_NR, weights_R, size, penalty_N)


@dataclass
class Computed:
    """An update under some settings; lists have one entry per row, in the order of `RecordedUpdate.micro_batches`.

    `gradients` are d loss / d log-prob for each token of a completion, where the loss is that of the whole update. The
    gradient of an entropy bonus does not pass through the log-probs and is not included.
    """

    loss: float
    metrics: dict[str, float]
    advantages: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    assumed: list[bool] = field(default_factory=list)  # whether the row's log-probs are the sampler's, or unknown


def compute(update: RecordedUpdate, settings: Settings, advantages: Rows) -> Computed:
    """The loss, metrics and gradient of an update, computed without a model."""
    loss_settings = settings.loss_settings(update.facts)
    masks = [_loss_mask(batch, settings) for batch in update.micro_batches]
    size = UpdateSize(
        rows=float(sum(len(batch) for batch in update.micro_batches)),
        tokens=float(sum(int(mask.sum()) for mask in masks)),
        micro_batches=float(len(update.micro_batches)),
    )
    thresholds = _thresholds(update.micro_batches, masks, settings.entropy_share)
    total, found = 0.0, Computed(0.0, {})
    stats: dict[int, list[Mapping[str, Stat]]] = {}
    for batch, mask_BT in zip(update.micro_batches, masks, strict=True):
        inputs, assumed_B = _inputs(batch, mask_BT, settings, loss_settings, _own_advantages(batch, advantages))
        inputs.logps_BT.requires_grad_(True)
        output = policy_loss(_with_entropy(inputs, batch, settings, thresholds[batch.index]), loss_settings, size)
        (gradient_BT,) = torch.autograd.grad(output.loss, inputs.logps_BT, allow_unused=True)
        gradient_BT = torch.zeros_like(inputs.logps_BT) if gradient_BT is None else gradient_BT
        total += output.loss.item()
        stats.setdefault(batch.index, []).append(output.stats)
        found.gradients += [row[:length].clone() for row, length in zip(gradient_BT, batch.lengths, strict=True)]
        found.advantages += _mean_advantages(inputs.advantages, batch).tolist()
        found.assumed += assumed_B.tolist()
    found.loss, found.metrics = total, _metrics(list(stats.values()))
    return found


def _loss_mask(batch: MicroBatch, settings: Settings) -> Tensor:
    masked = settings.config.mask_truncated_completions
    return drop_rows(batch.mask_BT, batch.truncated_B) if masked else batch.mask_BT


def _own_advantages(batch: MicroBatch, advantages: Rows) -> Tensor:
    """The advantages of the rows of a micro-batch: (B,), or (B, T) if a generation has one for each token."""
    rows = [advantages[g][r] for g, r in zip(batch.generation, batch.row, strict=True)]
    if all(row.dim() == 0 for row in rows):
        return torch.stack(rows)
    out = torch.zeros(len(batch), batch.mask_BT.shape[1])
    for place, row, length in zip(out, rows, batch.lengths, strict=True):
        place[:length] = row if row.dim() == 0 else row[:length]
    return out


def _mean_advantages(advantages: Tensor, batch: MicroBatch) -> Tensor:
    if advantages.dim() == 1:
        return advantages
    return advantages.sum(1) / torch.tensor(batch.lengths).clamp(min=1)


def _inputs(
    batch: MicroBatch, mask_BT: Tensor, settings: Settings, loss_settings: LossSettings, advantages: Tensor
) -> tuple[LossInputs, Tensor]:
    """The inputs of the loss, and which rows (B,) have log-probs that are assumed."""
    sampled_BT = batch.sampled_BT.nan_to_num(0.0)
    old = {"own": None, "rollout": sampled_BT, "row": batch.old_logps_BT, "sum": batch.old_sum_B}[batch.old]
    sampled_known_B = ~(batch.sampled_BT.isnan() & batch.mask_BT).any(1)
    assumed_B = ~batch.known_B & mask_BT.any(1) & (advantages.reshape(len(batch), -1) != 0).any(1)
    if batch.old == "sum" and loss_settings.ratio != "sequence_sum":
        if not sampled_known_B.all():
            raise DataError(
                f"The run recorded the old log-probs of whole completions only, and the sampler's are not known: "
                f"ratios of tokens ({settings.name}) cannot be computed. Only recipe=rloo can be replayed."
            )
        old, assumed_B = sampled_BT, mask_BT.any(1)
    # A row that the update skipped gets its sampling log-probs, so that its ratio is 1, as in the update itself.
    stand_in_BT = old if old is not None and old.dim() == 2 else sampled_BT
    logps_BT = torch.where(batch.known_B[:, None], batch.logps_BT, stand_in_BT)
    if old is not None and old.dim() == 1:
        own_B = (stand_in_BT * mask_BT).sum(1)
        old = torch.where(batch.known_B, old, own_B)
    if loss_settings.beta != 0 and batch.ref_logps_BT is None:
        raise ConfigError(
            f"beta={loss_settings.beta} needs log-probs of the reference, which this run has not recorded. Set beta=0 "
            "as well."
        )
    sampler_BT = batch.sampler_logps_BT
    weights = None
    if settings.corrects_sampler and sampler_BT is not None and old is not None:
        how = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))
        weights = importance_weights(old, sampler_BT, mask_BT, *(getattr(settings.config, name) for name in how))
    if sampler_BT is None and loss_settings.off_policy_mask_threshold is not None:
        sampler_BT = batch.sampled_BT  # NaNs count as no drift
    inputs = LossInputs(
        logps_BT=logps_BT,
        mask_BT=mask_BT,
        advantages=advantages,
        old_logps_BT=old,
        ref_logps_BT=batch.ref_logps_BT,
        sampler_logps_BT=sampler_BT,
        importance_weights=weights,
    )
    return inputs, assumed_B


def _with_entropy(inputs: LossInputs, batch: MicroBatch, settings: Settings, threshold: Tensor | None) -> LossInputs:
    changed = "entropy_coef" in settings.changes or settings.trainer == "rloo"
    coef = getattr(settings.config, "entropy_coef", 0.0) if changed else batch.entropy_coef
    if coef and batch.entropy_BT is None:
        raise ConfigError(f"entropy_coef={coef} needs entropies, which this run has not recorded.")
    if not coef and threshold is None:
        return inputs
    return replace(inputs, entropy_BT=batch.entropy_BT, entropy_threshold=threshold, entropy_coef=float(coef))


def _thresholds(batches: Sequence[MicroBatch], masks: Sequence[Tensor], share: float) -> dict[int, Tensor | None]:
    """The entropy threshold of each micro-batch, computed over all processes, as in training."""
    numbers = {batch.index for batch in batches}
    if share >= 1:
        return dict.fromkeys(numbers)
    if any(batch.entropy_BT is None for batch in batches):
        raise ConfigError(f"top_entropy_quantile={share} needs entropies, which this run has not recorded.")
    found: dict[int, Tensor | None] = {}
    for number in numbers:
        own = [
            batch.entropy_BT[mask]
            for batch, mask in zip(batches, masks, strict=True)
            if batch.index == number and batch.entropy_BT is not None
        ]
        found[number] = entropy_threshold(torch.cat(own), share)
    return found


def _metrics(stats: Sequence[Sequence[Mapping[str, Stat]]]) -> dict[str, float]:
    """The metrics as training logs them: combined over the processes, then averaged over micro-batches."""
    values: dict[str, list[float]] = {}
    for processes in stats:
        for key in dict.fromkeys(key for stat in processes for key in stat):
            value = _together([stat[key] for stat in processes if key in stat])
            if value == value:
                values.setdefault(key, []).append(value)
    return {key: sum(found) / len(found) for key, found in values.items()}


def _together(stats: Sequence[Stat]) -> float:
    if isinstance(stats[0], Mean):
        number, of = (sum(float(getattr(stat, name)) for stat in stats) for name in ("num", "den"))
        return number / of if of else 0.0
    extreme: Callable[[Tensor], Tensor] = nanmin if isinstance(stats[0], Min) else nanmax
    return float(extreme(torch.cat([stat.values.reshape(-1) for stat in stats if isinstance(stat, Min | Max)])))
