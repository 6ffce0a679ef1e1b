"""The store that collects metrics until they are logged, and the metrics of a generation."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from gruppo.algo.loss import Mean, Min, Stat
from gruppo.algo.stats import nanmax, nanmin, nanstd
from gruppo.trainer.processes.collectives import gather_rows

Metrics = dict[str, list[float]]


class MetricStore:
    """Values per mode and key; `take` averages and clears them.

    The batches of an evaluation may differ in size, so its values are weighted by the number of rows or tokens that
    each was computed from.

    Statistics of the loss are kept as sums on the device and combined over processes once per update, so that a
    micro-batch costs neither a synchronisation nor a collective.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.values: dict[str, Metrics] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._counts: Metrics = defaultdict(list)  # the number of rows or tokens behind each value of an evaluation
        self._pending: list[dict[str, Stat]] = []

    def add(self, mode: str, metrics: Mapping[str, float], of: float | Mapping[str, float] = 1.0) -> None:
        """Add a value to each key; `of` is the number of rows or tokens behind it, one number or one per key."""
        for key, value in metrics.items():
            self.values[mode][key].append(value)
            if mode == "eval":
                self._counts[key].append(of[key] if isinstance(of, Mapping) else of)

    def set(self, mode: str, metrics: Mapping[str, float]) -> None:
        """Set totals, which replace earlier values: the latest value of a key is logged."""
        self.values[mode].update({key: [value] for key, value in metrics.items()})

    def count(self, mode: str, counts: Mapping[str, float], beside: str) -> None:
        """Add counts of a generation, of which keys may be new: their mean is over the generations that have `beside`.

        A new key gets a zero for each earlier generation since the last log.
        """
        values = self.values[mode]
        for key, count in counts.items():
            values[key] += [0.0] * (len(values[beside]) - 1 - len(values[key])) + [count]

    def raise_by(self, mode: str, counts: Mapping[str, float]) -> None:
        """Add counts to totals since the last log."""
        values = self.values[mode]
        values.update({name: [sum(values[name]) + count] for name, count in counts.items()})

    def last(self, mode: str, key: str) -> float | None:
        """The latest value of a key since the last log."""
        values = self.values[mode].get(key)
        return values[-1] if values else None

    def defer(self, stats: dict[str, Stat]) -> None:
        """Keep one micro-batch's statistics until `flush`."""
        self._pending.append(stats)

    def discard(self) -> None:
        """Drop what an earlier run has not logged, and the deferred statistics of an update that was interrupted."""
        self._pending = []
        self.values["train"].clear()

    def state_dict(self) -> dict[str, Any]:
        """The training metrics that wait for the next log."""
        return {key: list(values) for key, values in self.values["train"].items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values["train"].clear()
        self.values["train"].update({key: list(values) for key, values in state.items()})

    def flush(self, mode: str) -> dict[str, list[tuple[float, float]]]:
        """Combine deferred statistics; returns, for each key that is a mean, (numerator, denominator) per micro-batch.

        Keys that begin with an underscore are returned but not logged. All processes must have deferred the same keys.
        A key that no process has for a micro-batch is left out for that micro-batch.
        """
        if not self._pending:
            return {}
        device = self.accelerator.device
        # Micro-batches may differ in their keys, for example where the sampler's log-probs are missing.
        kinds = {key: type(stat) for stats in self._pending for key, stat in stats.items()}
        local = torch.stack(
            [torch.stack([_pair(stats.get(key)).to(device) for key in kinds]) for stats in self._pending]
        )
        self._pending = []
        gathered = self.accelerator.gather(local.unsqueeze(0)).cpu()  # (processes, micro-batches, keys, 2)
        means: dict[str, list[tuple[float, float]]] = {}
        for k, (key, kind) in enumerate(kinds.items()):
            for micro_batch in gathered[:, :, k].unbind(1):
                if micro_batch.isnan().all():
                    continue
                if kind is Mean:
                    num, den = micro_batch.nansum(0).tolist()
                    means.setdefault(key, []).append((num, den))
                    if not key.startswith("_"):
                        self.add(mode, {key: num / den if den else 0.0}, of=den)  # 0 where there is no loss token
                else:
                    extreme = nanmin if kind is Min else nanmax
                    self.add(mode, {key: extreme(micro_batch[:, 0]).item()})
        return means

    def take(self, mode: str) -> dict[str, float | None]:
        """The mean of each key's values, ignoring NaNs (None if all are NaN); empties the store for this mode."""
        averaged = {}
        for key, values in self.values[mode].items():
            counts = self._counts[key] if mode == "eval" else []
            if len(counts) != len(values) or not any(counts):  # training, written to `values` directly, or all 0
                counts = [1.0] * len(values)
            averaged[key] = _mean(values, counts)
        self.values[mode].clear()
        if mode == "eval":
            self._counts.clear()
        return averaged


def _mean(values: Sequence[float], counts: Sequence[float]) -> float | None:
    """The mean of the values, weighted by their counts and ignoring NaNs; None if all are NaN."""
    known = [(value, count) for value, count in zip(values, counts, strict=True) if not math.isnan(value)]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None


def _pair(stat: Stat | None) -> Tensor:
    """Numerator and denominator of a mean, or an extreme and 0; two NaNs for a missing statistic."""
    if isinstance(stat, Mean):
        return torch.stack([stat.num.detach().double(), stat.den.detach().double()])
    if stat is None or not stat.values.numel():
        return torch.full((2,), math.nan, dtype=torch.double)
    extreme = nanmin(stat.values) if isinstance(stat, Min) else nanmax(stat.values)
    return torch.stack([extreme.double(), torch.zeros_like(extreme, dtype=torch.double)])


def value_stat(value: Tensor) -> Mean:
    """A statistic whose mean over processes is the mean of their values."""
    return Mean(value.detach(), torch.ones_like(value))


def reward_metrics(names: Iterable[str], rewards_BR: Tensor, rewards_B: Tensor, zero_std: Tensor) -> dict[str, float]:
    """Mean and spread of each reward and of their weighted sum."""
    metrics = {}
    for i, name in enumerate(names):
        metrics[f"rewards/{name}/mean"] = rewards_BR[:, i].nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(rewards_BR[:, i]).item()
    metrics["reward"] = rewards_B.nanmean().item()
    metrics["reward_std"] = nanstd(rewards_B).item()
    metrics["frac_reward_zero_std"] = zero_std.item()
    return metrics


def ratio_metrics(accelerator: Accelerator, weights: Tensor | None, mask_BT: Tensor) -> tuple[dict[str, float], float]:
    """Metrics of the importance weights that correct for the sampler, and the number of weights.

    Both are over the loss tokens, or the sequences, of all processes.
    """
    if weights is None:
        values = torch.zeros(0, device=mask_BT.device)
    else:
        values = weights[mask_BT.bool()] if weights.shape == mask_BT.shape else weights.flatten()
    values = gather_rows(accelerator, values)
    if not len(values):
        return {}, 0.0
    found = {"min": values.min(), "mean": values.mean(), "max": values.max()}
    metrics = {f"sampling/importance_sampling_ratio/{name}": value.item() for name, value in found.items()}
    return metrics | {"sampling/dropped_share": (values == 0).float().mean().item()}, float(len(values))


def rows_scored(names: Iterable[str], rewards_BR: Tensor, rewards_B: Tensor) -> dict[str, float]:
    """The number of rows behind each value of `reward_metrics`: those that the reward scored."""
    counts = {}
    for i, name in enumerate(names):
        counts[f"rewards/{name}/mean"] = counts[f"rewards/{name}/std"] = float((~rewards_BR[:, i].isnan()).sum())
    counts["reward"] = counts["reward_std"] = float((~rewards_B.isnan()).sum())
    return counts | {"frac_reward_zero_std": float(len(rewards_B))}


def length_metrics(lengths_B: Tensor, truncated_B: Tensor) -> dict[str, float]:
    """Lengths of all completions, and of those that ended by themselves (0 if none did)."""
    lengths = lengths_B.float()
    ended = lengths[~truncated_B.bool()]
    if len(ended) == 0:
        ended = torch.zeros(1)
    return {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": truncated_B.float().mean().item(),
        "completions/mean_terminated_length": ended.mean().item(),
        "completions/min_terminated_length": ended.min().item(),
        "completions/max_terminated_length": ended.max().item(),
    }
