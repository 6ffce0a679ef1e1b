"""Benchmarks and the problems selected from them."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gruppo.errors import ConfigError
from gruppo.evaluation.benchmarks import find_benchmark
from gruppo.evaluation.data import load_problems, spread
from gruppo.evaluation.types import Benchmark, Problem

__all__ = ["Task", "load_tasks"]

logger = logging.getLogger(__name__)


class Task(NamedTuple):
    """A benchmark and the problems selected from it."""

    benchmark: Benchmark
    problems: list[Problem]
    rows: int  # number of problems in its data


def load_tasks(
    benchmarks: str | Benchmark | Sequence[str | Benchmark], data_dir: str | Path | None = None
) -> list[Task]:
    """Find the benchmarks, and load and check their problems.

    Example:
        load_tasks(["gsm8k:200", "cmath"], "data")
    """
    listed = [benchmarks] if isinstance(benchmarks, str | Benchmark) else list(benchmarks)
    if not listed:
        raise ConfigError("There is no benchmark to evaluate: name at least one.")
    chosen = [find_benchmark(each) for each in listed]
    names = [benchmark.name for benchmark, _ in chosen]
    if len(set(names)) < len(names):
        raise ConfigError(f"A benchmark is named twice ({', '.join(names)}); their numbers would mix.")
    if len(names) > 1 and data_dir is not None and Path(data_dir).is_file():
        raise ConfigError(
            f"data_dir={str(data_dir)!r} is one file, but there are {len(names)} benchmarks: give a folder."
        )
    tasks = []
    for benchmark, limit in chosen:
        problems = load_problems(benchmark, data_dir)
        if benchmark.rows not in (None, len(problems)):
            logger.warning(
                f"{benchmark.name}: the data has {len(problems)} problems, but {benchmark.title} has "
                f"{benchmark.rows}. Do not compare the result with published numbers."
            )
        tasks.append(Task(benchmark, spread(problems, limit), len(problems)))
    return tasks
