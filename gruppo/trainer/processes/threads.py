"""Threads of OpenMP that wait for each other, on a machine that is busy with other work too."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

POLICY = "OMP_WAIT_POLICY"
SET_BY_USER = (POLICY, "GOMP_SPINCOUNT")  # either says how long threads that wait keep their core
UPDATES = 20  # of a run that are looked at
CROWDED = 0.5  # threads that wait for a core, on average over an update


def threads_spin() -> bool:
    """Whether threads that wait keep their core: nothing was set when torch was loaded, and there are several."""
    return not any(name in os.environ for name in SET_BY_USER) and torch.get_num_threads() > 1


def seconds_without_core() -> float | None:
    """How long the threads of this process could have run but had no core, in total; None if the system has no count.

    Unlike the load of the machine it is about the cores that this process may use, also in a container.
    """
    if not Path("/proc/self/schedstat").exists():
        return None
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text(encoding="ascii").split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return total / 1e9


class BusyMachine(TrainerCallback):
    """Says once in a process what to set, if cores are short in one of the first updates of a run on the processor."""

    _said: ClassVar[bool] = False

    def __init__(
        self,
        without_core: Callable[[], float | None] = seconds_without_core,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._without_core, self._clock, self._left = without_core, clock, UPDATES
        self._start: tuple[float, float | None] = (0.0, None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._left and state.is_world_process_zero and not BusyMachine._said:
            self._start = self._clock(), self._without_core()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (began, before), now = self._start, self._without_core() if self._start[1] is not None else None
        self._start = (0.0, None)
        if before is None or now is None:
            return
        self._left -= 1
        waiting = (now - before) / max(self._clock() - began, 1e-9)
        if waiting > CROWDED:
            BusyMachine._said = True
            logger.warning(
                f"In update {state.global_step} {waiting:.1f} threads of this process waited for a core, on average: "
                "others, of this or another process, were on it. Threads of torch that wait for each other keep "
                "their core meanwhile: a step can take ten times as long. Import gruppo before torch, or set "
                f"{POLICY}=passive in the environment."
            )
