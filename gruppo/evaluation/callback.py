"""Benchmarks during training: the trainer loads this module when `eval_benchmarks` names some.

TrainingBenchmarks(names, …)   at construction: finds them, loads their problems
.bind(backend, tokenizer)      … and asks them once on paper, so that a mistake shows before the first update
.run(backend, …)               at each evaluation: this process's share, gathered, summed up
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.utils import gather_object

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.benchmarks import find_benchmark
from gruppo.evaluation.data import load_problems
from gruppo.evaluation.sampling import Evaluator
from gruppo.evaluation.scoring import Graders
from gruppo.evaluation.summary import summarise
from gruppo.evaluation.tir import TirSettings
from gruppo.evaluation.types import Benchmark, Decoding, Mode, Problem, Rendering, Scored
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.continuous import ContinuousBatchingBackend

__all__ = ["METRICS", "TrainingBenchmarks", "TrainingSettings"]

# Of each benchmark, as `<name>_<metric>`, and what a summary calls it; docs/metrics.md has a row for each.
METRICS = {
    "accuracy": "accuracy",
    "boxed_rate": "boxed_rate",
    "truncated_ratio": "truncation_rate",
    "mean_length": "mean_tokens",
    "runtime": "seconds",
}


@dataclass(frozen=True)
class TrainingSettings:
    """How benchmarks are asked during training: the keys of `eval_benchmarks_settings`.

    Example, four samples of each problem; accuracy is then their mean:
        TrainingSettings(samples=4, temperature=0.7, max_new_tokens=256)
    """

    mode: Mode = "cot"
    rendering: Rendering | Literal["auto"] = "auto"
    shots: int = 0
    max_new_tokens: int = 512
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    rounds: int | None = None  # tir: times that the model may speak; None: as many as `gruppo eval` allows
    max_total_tokens: int | None = None  # tir: new tokens of all rounds

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise ConfigError(f"shots={self.shots} must not be negative.")
        if self.mode != "tir" and (self.rounds is not None or self.max_total_tokens is not None):
            raise ConfigError("rounds and max_total_tokens are settings of programs: they need mode='tir'.")

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.samples, self.temperature, self.top_p, self.max_new_tokens, self.seed)

    @property
    def tir(self) -> TirSettings | None:
        if self.mode != "tir":
            return None
        given: dict[str, Any] = {"rounds": self.rounds, "max_total_tokens": self.max_total_tokens}
        return TirSettings(**{name: value for name, value in given.items() if value is not None})


class TrainingBenchmarks:
    """Benchmarks that a trainer runs with its own sampler.

    Example:
        benchmarks = TrainingBenchmarks(["gsm8k:200"], data_dir="data")
        benchmarks.bind(trainer.backend, trainer.processing_class)
        benchmarks.run(trainer.backend)  # {"gsm8k_accuracy": 0.31, "gsm8k_boxed_rate": 0.97, …}
    """

    def __init__(
        self, names: Sequence[str], *, data_dir: str | None = None, settings: Mapping[str, Any] | None = None
    ):
        self.settings = TrainingSettings(**(settings or {}))
        self.decoding = self.settings.decoding
        chosen = [find_benchmark(name) for name in names]
        twice = {each.name for each, _ in chosen if [other.name for other, _ in chosen].count(each.name) > 1}
        if twice:
            raise ConfigError(f"eval_benchmarks={list(names)!r} names {sorted(twice)} twice; their metrics would mix.")
        self.tasks: list[tuple[Benchmark, list[Problem]]] = []
        for benchmark, limit in chosen:
            try:
                self.tasks.append((benchmark, load_problems(benchmark, data_dir, limit)))
            except (ConfigError, DataError) as error:
                raise type(error)(f"{error} In a config, data_dir is `eval_benchmarks_dir`.") from error
        self._evaluator: Evaluator | None = None

    @property
    def metric_names(self) -> list[str]:
        """The keys that `run` returns."""
        return [f"{benchmark.name}_{metric}" for benchmark, _ in self.tasks for metric in METRICS]

    def bind(self, backend: RolloutBackend, tokenizer: Any) -> None:
        """Look whether it can be done: settings, sandbox, and every prompt once. What cannot be asked raises here."""
        settings = self.settings
        if (settings.shots or settings.mode == "tir") and backend.name == ContinuousBatchingBackend.name:
            raise ConfigError(
                f"shots={settings.shots} and mode={settings.mode!r}: such completions end at certain strings, which "
                "transformers' continuous batching does not know. Use shots=0 and mode='cot', or set "
                "use_transformers_continuous_batching=False."
            )
        self._evaluator = Evaluator(
            backend,
            tokenizer,
            mode=settings.mode,
            rendering=settings.rendering,
            shots=settings.shots,
            tir=settings.tir,
        )
        for benchmark, problems in self.tasks:
            self._evaluator.prompts(benchmark, problems)

    def run(
        self,
        backend: RolloutBackend,
        process: int = 0,
        processes: int = 1,
        gather: Callable[[list[Any]], list[Any]] = gather_object,
    ) -> dict[str, float]:
        """Every benchmark, once. Each process samples and grades its share; all of them return the same numbers."""
        metrics: dict[str, float] = {}
        for benchmark, problems in self.tasks:
            start = time.perf_counter()
            # Every so many: neighbours are often of one length, or of one level.
            rows = self._attempts(backend, benchmark, problems[process::processes], processes)
            own = [(rows, time.perf_counter() - start)]
            shares: list[tuple[list[Scored], float]] = own if processes == 1 else gather(own)
            scored = [row for share, _ in shares for row in share]
            summary = summarise(benchmark, problems, scored, self.decoding, self.settings.mode)
            summary["seconds"] = max(seconds for _, seconds in shares)
            metrics |= {f"{benchmark.name}_{name}": float(summary[key]) for name, key in METRICS.items()}
        return metrics

    def _attempts(
        self, backend: RolloutBackend, benchmark: Benchmark, problems: Sequence[Problem], processes: int
    ) -> list[Scored]:
        evaluator = self._evaluator
        assert evaluator is not None, "bind comes first"
        evaluator.backend = backend  # a trainer may have been given another one since
        with ExitStack() as stack:
            if not benchmark.ladder.literal:  # the cores are for the workers of all processes
                evaluator.graders = stack.enter_context(Graders(max(Graders().processes // processes, 1)))
            try:
                return [row for chunk in evaluator.attempts(benchmark, problems, self.decoding) for row in chunk]
            finally:
                evaluator.graders = None
