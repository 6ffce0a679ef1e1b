"""Names that subclasses and callbacks written for other trainers of this kind read. None of them holds a value."""

from collections import deque
from typing import Any

from gruppo.trainer.completions import CompletionLog
from gruppo.trainer.metrics import Metrics, MetricStore


class KnownNames:
    """Read-only views of the config and of the run's state."""

    args: Any
    mode: str
    metrics: MetricStore
    completion_logs: dict[str, CompletionLog]
    _queue: deque[dict[str, Any]]

    @property
    def beta(self) -> float:
        return self.args.beta

    @property
    def temperature(self) -> float:
        return self.args.temperature

    @property
    def num_generations(self) -> int:
        return self.args.num_generations

    @property
    def num_generations_eval(self) -> int:
        return self.args.num_generations_eval or self.args.num_generations

    @property
    def num_iterations(self) -> int:
        return self.args.num_iterations

    @property
    def epsilon_low(self) -> float:
        return self.args.epsilon

    @property
    def epsilon_high(self) -> float:
        return self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    @property
    def _metrics(self) -> dict[str, Metrics]:
        return self.metrics.values

    @property
    def _logs(self) -> dict[str, Any]:
        return self.completion_logs[self.mode].columns

    @property
    def _buffered_inputs(self) -> list[dict[str, Any]]:
        return list(self._queue)
