"""How far a sampler's own log-probs are from the trainer's at the same weights."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gruppo.algo.loss import Max, Mean, Stat
from gruppo.types import TrainBatch

DRIFT = "sampling/sampling_logp_difference"
_RATIO = "_sampling_ratio"  # not logged


def drift_stats(
    batch: TrainBatch, logps_BT: Tensor, old_BT: Tensor | None, ran_B: Tensor | None, now: int
) -> dict[str, Stat]:
    """Statistics of one micro-batch: |ℓ_trainer − ℓ_sampler| and exp(ℓ_trainer − ℓ_sampler), where both are known.

    The trainer's log-probs are `old_BT` if given. Otherwise they are `logps_BT` of the rows that were run (`ran_B`)
    and that were sampled from the current weights (`now` is the number of updates so far). A process without its
    sampler's log-probs returns the same keys, because another process may have them and all must gather equally many
    numbers.
    """
    sampled_BT = batch.engine_logps if batch.sampling_per_token_logps is None else batch.sampling_per_token_logps
    if sampled_BT is None:
        return _unknown(logps_BT)
    trained_BT = logps_BT.detach() if old_BT is None else old_BT
    signed_BT = trained_BT - sampled_BT
    drift_BT = signed_BT.abs()
    counts_BT = batch.loss_mask_BT.bool() & ~drift_BT.isnan()
    if old_BT is None and ran_B is not None:
        counts_BT &= ran_B[:, None]
    if old_BT is None and batch.sampled_at is not None:  # leave out rows sampled from earlier weights
        counts_BT &= (batch.sampled_at == now)[:, None]
    drift = torch.where(counts_BT, drift_BT, 0.0)
    tokens = counts_BT.sum().to(drift.dtype)
    return {  # without a device sync, since there may be many micro-batches
        f"{DRIFT}/mean": Mean(drift.sum(), tokens),
        _RATIO: Mean(torch.where(counts_BT, signed_BT, -torch.inf).exp().sum(), tokens),
        f"{DRIFT}/max": Max(torch.where(counts_BT, drift, torch.nan)),
    }


def _unknown(like: Tensor) -> dict[str, Stat]:
    nan = like.new_full((), torch.nan)
    return {f"{DRIFT}/mean": Mean(nan, nan), _RATIO: Mean(nan, nan), f"{DRIFT}/max": Max(like.new_empty(0))}


Sums = Mapping[str, Sequence[tuple[float, float]]]  # numerator and denominator of each micro-batch's mean


def mean_of(sums: Sums, key: str) -> float | None:
    """The mean over the tokens of an update; None if there are none."""
    total, tokens = (sum(part) for part in zip(*sums.get(key, [(0.0, 0.0)]), strict=True))
    return total / tokens if tokens else None


def drift_of_update(sums: Sums, logged: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """The statistics of an update by which the audits judge the sampler."""
    known = logged.get(f"{DRIFT}/max")
    return {
        "drift_mean": mean_of(sums, f"{DRIFT}/mean"),
        "drift_max": known[-1] if known and not math.isnan(known[-1]) else None,
        "drift_ratio": mean_of(sums, _RATIO),
    }
