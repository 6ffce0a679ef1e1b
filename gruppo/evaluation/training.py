"""Benchmarks during training: what the trainer runs when `eval_benchmarks` is set.

TrainingBenchmarks(names, …)   at construction: finds the benchmarks, loads their problems
.bind(backend, tokenizer)      … and renders every prompt once, so that mistakes show before the first update
.run(backend, …)               at each evaluation: runs this process's share, gathers all shares, summarises
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from accelerate.utils import gather_object

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.graders import cores
from gruppo.evaluation.grading import Graders, require
from gruppo.evaluation.prompts import PromptText
from gruppo.evaluation.sampling import Evaluator
from gruppo.evaluation.settings import TrainingSettings
from gruppo.evaluation.summary import summarise
from gruppo.evaluation.tasks import load_tasks
from gruppo.evaluation.types import Benchmark, GradedAttempt, Problem
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.continuous import ContinuousBatchingBackend

__all__ = ["METRICS", "TrainingBenchmarks"]

# Metric, logged as `<benchmark>_<metric>` -> its key in a summary; docs/metrics.md has a row for each.
METRICS = {
    "accuracy": "accuracy",
    "boxed_rate": "boxed_rate",
    "truncated_ratio": "truncation_rate",
    "mean_length": "mean_tokens",
    "runtime": "seconds",
}


class TrainingBenchmarks:
    """Benchmarks that a trainer runs with its own rollout backend.

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
        try:
            self.tasks = load_tasks(names, data_dir)
        except (ConfigError, DataError) as error:
            raise type(error)(f"eval_benchmarks: {error} In a config, data_dir is `eval_benchmarks_dir`.") from error
        require(task.benchmark.ladder for task in self.tasks)
        self._evaluator: Evaluator | None = None
        self._prompts: dict[str, dict[str, PromptText]] = {}  # by benchmark and problem

    @property
    def metric_names(self) -> list[str]:
        """The keys that `run` returns."""
        return [f"{benchmark.name}_{metric}" for benchmark, *_ in self.tasks for metric in METRICS]

    def bind(self, backend: RolloutBackend, tokenizer: Any) -> None:
        """Check the settings and the sandbox and render every prompt once, so that errors are raised here."""
        settings = self.settings
        if (settings.shots or settings.mode == "tir") and backend.name == ContinuousBatchingBackend.name:
            raise ConfigError(
                f"shots={settings.shots} and mode={settings.mode!r}: such completions end at stop strings, which "
                "transformers' continuous batching does not support. Use shots=0 and mode='cot', or set "
                "use_transformers_continuous_batching=False."
            )
        self._evaluator = Evaluator(backend, tokenizer, **settings.asking())
        for benchmark, problems, _ in self.tasks:
            rendered = self._evaluator.prompts(benchmark, problems)
            self._prompts[benchmark.name] = {
                problem.id: prompt for problem, prompt in zip(problems, rendered, strict=True)
            }

    def run(
        self,
        backend: RolloutBackend,
        process: int = 0,
        processes: int = 1,
        gather: Callable[[list[Any]], list[Any]] = gather_object,
    ) -> dict[str, float]:
        """Run every benchmark once. Each process samples and grades its share; all return the same metrics."""
        metrics: dict[str, float] = {}
        for benchmark, problems, _ in self.tasks:
            start = time.perf_counter()
            # Strided shares: adjacent problems often have the same length or level.
            rows = self._attempts(backend, benchmark, problems[process::processes], processes)
            own = [(rows, time.perf_counter() - start)]
            shares: list[tuple[list[GradedAttempt], float]] = own if processes == 1 else gather(own)
            scored = [row for share, _ in shares for row in share]
            summary = summarise(benchmark, problems, scored, self.decoding, self.settings.mode)
            summary["seconds"] = max(seconds for _, seconds in shares)
            metrics |= {f"{benchmark.name}_{name}": float(summary[key]) for name, key in METRICS.items()}
        return metrics

    def _attempts(
        self, backend: RolloutBackend, benchmark: Benchmark, problems: Sequence[Problem], processes: int
    ) -> list[GradedAttempt]:
        evaluator = self._evaluator
        assert evaluator is not None, "call bind first"
        evaluator.backend = backend  # the trainer's backend may have been replaced since
        with ExitStack() as stack:
            if not benchmark.ladder.literal:  # the processes share the CPU cores for their workers
                evaluator.graders = stack.enter_context(Graders(max(cores() // processes, 1)))
            try:
                prompts = self._prompts[benchmark.name]
                chunks = evaluator.attempts(benchmark, problems, self.decoding, prompts)
                return [row for chunk in chunks for row in chunk]
            finally:
                evaluator.graders = None
