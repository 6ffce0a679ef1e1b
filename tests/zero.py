"""Helpers for runs under DeepSpeed on CPUs, if it is installed."""

import codecs
import importlib.util
import locale
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
runs_deepspeed = pytest.mark.skipif(
    codecs.lookup(locale.getencoding()).name != "utf-8",
    reason="DeepSpeed's engine imports torch.compile, which reads files of torch in the locale's encoding: not UTF-8",
)
builds_deepspeed = pytest.mark.skipif(
    " " in torch.__path__[0], reason="torch does not quote its path in a linker's line, and the path has a space"
)
PREFIX = "ACCELERATE_"


def config(stage: int, **zero: Any) -> dict[str, Any]:
    """A DeepSpeed config in the form that the training arguments accept."""
    automatic = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    if stage == 3:  # else weights as small as in these tests are not sharded
        zero = {"stage3_param_persistence_threshold": 0} | zero
    return {
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": "auto"},
        **dict.fromkeys(automatic, "auto"),
    }


def prepare() -> None:
    """Set DeepSpeed up on the CPU, without its C++ communication extension, which would be compiled at first use."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)  # on GPUs accelerate does this


@contextmanager
def launched(stage: int | None = None) -> Iterator[None]:
    """Set the variables that accelerate's launcher sets for a stage; on exit, restore all ACCELERATE_ variables."""
    before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    os.environ.pop(PREFIX + "USE_CPU", None)  # with it accelerate ignores DeepSpeed
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
    """The ZeRO stage of the trainer's DeepSpeed engine."""
    return int(trainer.model_wrapped.zero_optimization_stage())
