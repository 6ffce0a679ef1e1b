"""Names that subclasses and callbacks written for other trainers of this kind use."""

from collections import deque
from typing import Any

from gruppo.algo.loss import LossSettings
from gruppo.errors import ConfigError
from gruppo.trainer.completions import CompletionLog
from gruppo.trainer.metrics import Metrics, MetricStore


class KnownNames:
    """Views of the config and of the run's state. `_step` counts micro-steps for them; nothing here reads it."""

    args: Any
    mode: str
    metrics: MetricStore
    completion_logs: dict[str, CompletionLog]
    loss_settings: LossSettings
    _queue: deque[dict[str, Any]]
    _step: int
    _beta: float

    def make_loss_settings(self) -> LossSettings:
        raise NotImplementedError

    @property
    def beta(self) -> float:
        """The weight of the KL; callbacks may change it during a run."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        if value and not self._beta and not self.args.beta:
            raise ConfigError("The run began with beta=0 and so has no reference model; begin with a small beta.")
        self._beta = value
        self.loss_settings = self.make_loss_settings()

    @property
    def temperature(self) -> float:
        return self.args.temperature

    @property
    def num_generations(self) -> int:
        return self.args.num_generations

    @property
    def num_generations_eval(self) -> int:
        return self.args.eval_group_size

    @property
    def num_iterations(self) -> int:
        return self.args.num_iterations

    @property
    def epsilon_low(self) -> float:
        return self.args.epsilon

    @property
    def epsilon_high(self) -> float:
        return self.args.upper_clip

    @property
    def _metrics(self) -> dict[str, Metrics]:
        return self.metrics.values

    @property
    def _logs(self) -> dict[str, Any]:
        return self.completion_logs[self.mode].columns

    @property
    def _buffered_inputs(self) -> list[dict[str, Any]]:
        return list(self._queue)
