"""Runs under DeepSpeed on CPUs, where it is installed."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from accelerate.state import AcceleratorState

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
PREFIX = "ACCELERATE_"


def config(stage: int, **zero: Any) -> dict[str, Any]:
    """A config of DeepSpeed as the training arguments take it."""
    automatic = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    return {
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": "auto"},
        **dict.fromkeys(automatic, "auto"),
    }


def prepare() -> None:
    """On the CPU, without the C++ extension for processes of one host, which would be compiled at the first use."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)  # on GPUs accelerate does it


@contextmanager
def launched(stage: int | None = None) -> Iterator[None]:
    """With the variables that accelerate's launcher sets for a stage; those that are left behind are removed."""
    before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    os.environ.pop(PREFIX + "USE_CPU", None)  # with it accelerate passes over DeepSpeed
    if stage is not None:
        values = {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": str(stage), "DEEPSPEED_ZERO3_INIT": "true"}
        os.environ.update({PREFIX + name: value for name, value in values.items()})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)


def stage_of(trainer: Any) -> int:
    """The stage of the engine that trains."""
    return int(trainer.model_wrapped.zero_optimization_stage())
