"""Wall-clock time of the phases of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Timings:
    """Seconds and number of calls per phase, summed since the trainer was made.

    Example:
        trainer.timings.seconds == {"transformers.generate": 12.3, "compute_loss": 4.5, …}
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds
        self.calls[name] += 1


class Stopwatch:
    """Device time between starts and stops, measured without synchronising at any of them.

    Example:
        watch.start()
        …                 # work is given to the device
        watch.stop()
        …                 # something that waits for the device
        watch.take()      # how long it worked, since the last call
    """

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self._begun: Any = None  # None: it is not running
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._begun = self._now()

    def stop(self) -> None:
        if self._begun is not None:
            self._spans.append((self._begun, self._now()))
            self._begun = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this context it does not run; after it, it runs if it did before."""
        ran = self._begun is not None
        self.stop()
        try:
            yield
        finally:
            if ran:
                self.start()

    def take(self) -> float:
        spans, self._spans, self._begun = self._spans, [], None
        if not self.on_cuda:
            return float(sum(ended - begun for begun, ended in spans))
        for _, ended in spans[-1:]:
            ended.synchronize()
        return float(sum(begun.elapsed_time(ended) for begun, ended in spans)) / 1000

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def profiling_context(trainer: Any, name: str) -> Iterator[None]:
    """Time a block and report it, as `profiling/Time taken: <Trainer>.<block>`, to the trackers that are in use."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        trainer.timings.add(name, seconds)
        if trainer.accelerator.is_main_process:
            report(trainer, {f"profiling/Time taken: {type(trainer).__name__}.{name}": seconds})


def report(trainer: Any, values: dict[str, float]) -> None:
    """Log values outside the regular log calls to wandb, mlflow and trackio."""
    trackers = trainer.args.report_to
    if "wandb" in trackers:
        import wandb

        if wandb.run is not None:
            wandb.log(values)
    if "mlflow" in trackers:
        import mlflow

        if mlflow.active_run() is not None:
            mlflow.log_metrics(values, step=trainer.state.global_step)
    if "trackio" in trackers:
        import trackio

        trackio.log(values)
