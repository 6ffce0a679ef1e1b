"""Arithmetic of memory and time: what fits where and how long it takes, computed before anything is allocated.

    shape      a decoder's sizes: what its passes keep and compute
    budgets    how much a run samples and trains on at once; engine and trainer ask here
    devices    datasheet peaks and memory
    presets    public shapes by name
    reading    a model's shape, from its config
    job        all that a forecast depends on
    measured   constants that were measured, not derived
    standing   what of a run stays in memory
    memory     a run's phases, term by term
    seconds    a step's parts, term by term
    terms      the lines of a forecast
    search     the largest settings that fit

`gruppo plan` shows the forecast. It asks the functions of `budgets` what the run itself will ask them.
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
from gruppo.plan.shape import ModelShape, Passes

__all__ = [
    "DEVICES",
    "Device",
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
