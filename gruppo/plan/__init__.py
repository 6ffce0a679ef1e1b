"""Forecasts of memory and time: what fits on a device and how long a step takes, before anything is allocated.

    shape      a decoder's sizes, layer by layer; what its passes keep in memory and compute
    budgets    how much a run samples and trains on at once; engine and trainer use it too
    devices    datasheet peaks and memory
    presets    shapes of public models by name
    reading    a model's shape, from its config
    job        everything that a forecast depends on
    measured   constants that were measured, not derived
    standing   what stays in memory during a run
    memory     memory of each phase of a run, term by term
    seconds    duration of each part of a step, term by term
    terms      the lines of a forecast
    search     the largest settings that fit

`gruppo plan` shows the forecast. It calls the same functions of `budgets` that the run itself will call.
"""

from gruppo.plan.budgets import (
    RolloutPlan,
    UpdatePlan,
    batch_buckets,
    free_memory,
    plan_rollout,
    plan_update,
    plan_whole_weights,
    training_bytes,
)
from gruppo.plan.devices import DEVICES, Device, find_device, peak_flops
from gruppo.plan.shape import LayerShape, MeasuredShape, ModelShape, Passes

__all__ = [
    "DEVICES",
    "Device",
    "LayerShape",
    "MeasuredShape",
    "ModelShape",
    "Passes",
    "RolloutPlan",
    "UpdatePlan",
    "batch_buckets",
    "find_device",
    "free_memory",
    "peak_flops",
    "plan_rollout",
    "plan_update",
    "plan_whole_weights",
    "training_bytes",
]
