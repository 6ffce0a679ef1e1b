"""Threads of OpenMP that wait for each other, on a machine that is busy with other work too."""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

POLICY = "OMP_WAIT_POLICY"
UPDATES = 20  # of a run that are looked at: the load average follows what the machine does within a minute
CROWDED = 1.25  # load per core; this process alone does not get beyond 1


def threads_spin() -> bool:
    """Whether threads that wait keep their core: nothing was set when torch was loaded, and there are several."""
    return POLICY not in os.environ and torch.get_num_threads() > 1


def advice(load: float, cores: int) -> str | None:
    """What to set if more wants to run than the machine has cores; None if nothing needs to be."""
    if load <= CROWDED * cores:
        return None
    return (
        f"The load of the machine is {load:.1f} on {cores} cores, and threads of torch that wait for each other keep "
        "their core meanwhile: a step can take ten times as long. Import gruppo before torch, or set "
        f"{POLICY}=passive in the environment."
    )


class BusyMachine(TrainerCallback):
    """Gives that advice once, in the first updates of a run on the processor."""

    def __init__(self, load: Callable[[], float] = lambda: os.getloadavg()[0], cores: int | None = None):
        self._load, self._cores = load, cores or os.cpu_count() or 1
        self._left = UPDATES

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._left and state.is_world_process_zero:
            self._left -= 1
            if (said := advice(self._load(), self._cores)) is not None:
                self._left = 0
                logger.warning(said)
