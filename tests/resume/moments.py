"""Moments at which a process of a run can be stopped: it counts them and sends itself a signal at a given one.

    rollout     a backend samples: before the first token, and again after the last, or after the request was sent
    scoring     a reward function is running
    backward    some of the gradients are computed, others are not
    optimizer   the weights have changed, but nothing has recorded it yet
    recording   a rollout file is about to be renamed to its final name
    saving      a file of a checkpoint is about to be written, or the checkpoint to be renamed to its final name
    rotating    an old checkpoint is about to be renamed, or the next of its files to be removed

The last three are observed from outside, through Python's audit events for files that are opened, renamed or removed.
They do not depend on how the trainer saves.
"""

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

MOMENTS = ("rollout", "scoring", "backward", "optimizer", "recording", "saving", "rotating")


@dataclass(frozen=True)
class Stop:
    """The process sends itself `signal`, `times` times, when it reaches `moment` for the `count`-th time."""

    moment: str
    count: int = 1
    signal: int = signal.SIGKILL
    times: int = 1
    rank: int = 0

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name} at {self.moment} {self.count} of process {self.rank}"


class Moments:
    """The moments that this process has reached: for each, the number of updates made before every occurrence."""

    def __init__(self) -> None:
        self.reached: dict[str, list[int]] = defaultdict(list)
        self.stop: Stop | None = None
        self.updates: Callable[[], int] = lambda: 0
        self.saving = False
        self.removing = False

    def reach(self, moment: str) -> None:
        self.reached[moment].append(self.updates())
        stop = self.stop
        if stop is not None and (moment, len(self.reached[moment])) == (stop.moment, stop.count):
            for _ in range(stop.times):
                os.kill(os.getpid(), stop.signal)


MOMENT = Moments()


def watch(trainer: Any, stop: Stop | None) -> None:
    """Count the moments of this trainer from now on, and stop at the given one."""
    MOMENT.stop = stop
    MOMENT.updates = lambda: int(trainer.state.global_step)
    _watch_sampling(trainer.backend)
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    weights[len(weights) // 2].register_post_accumulate_grad_hook(lambda weight: MOMENT.reach("backward"))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: MOMENT.reach("optimizer"))
    _watch_saving(trainer)
    sys.addaudithook(_see)


def _watch_sampling(backend: Any) -> None:
    def watched(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def asked(requests: Any) -> Any:
            MOMENT.reach("rollout")
            answer = ask(requests)
            MOMENT.reach("rollout")
            return answer

        return asked

    backend.sample, backend.begin = watched(backend.sample), watched(backend.begin)


def _watch_saving(trainer: Any) -> None:
    save = trainer._save_checkpoint

    def watched(*args: Any, **kwargs: Any) -> Any:
        MOMENT.saving = True
        try:
            return save(*args, **kwargs)
        finally:
            MOMENT.saving = False

    trainer._save_checkpoint = watched


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: called before Python accesses a file."""
    if event == "os.rename":
        _see_rename(Path(os.fsdecode(arguments[0])), Path(os.fsdecode(arguments[1])))
    elif event == "shutil.rmtree":
        MOMENT.removing = Path(os.fsdecode(arguments[0])).name.startswith(("checkpoint-", ".deleting-checkpoint-"))
        if MOMENT.removing:
            MOMENT.reach("rotating")
    elif event in ("os.remove", "os.rmdir") and MOMENT.removing:
        MOMENT.reach("rotating")
    elif event == "open" and MOMENT.saving:
        _, _, flags = arguments
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
            MOMENT.removing = False
            MOMENT.reach("saving")


def _see_rename(source: Path, target: Path) -> None:
    if target.name.startswith(".deleting-"):
        MOMENT.reach("rotating")
    elif target.parent.name == "rollouts":
        MOMENT.reach("recording")
    elif MOMENT.saving:
        MOMENT.reach("saving")
