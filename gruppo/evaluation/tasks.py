"""Benchmarks with the problems of them that are asked."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gruppo.errors import ConfigError
from gruppo.evaluation.benchmarks import find_benchmark
from gruppo.evaluation.data import load_problems, spread
from gruppo.evaluation.types import Benchmark, Problem

__all__ = ["Task", "load_tasks"]


class Task(NamedTuple):
    """A benchmark, and the problems of it that are asked."""

    benchmark: Benchmark  # with the number of its rows
    problems: list[Problem]


def load_tasks(
    benchmarks: str | Benchmark | Sequence[str | Benchmark], data_dir: str | Path | None = None
) -> list[Task]:
    """All problems, read and checked.

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
        # Of a set whose size nobody wrote down, a part can be told from the whole only here.
        counted = benchmark if benchmark.rows is not None else replace(benchmark, rows=len(problems))
        tasks.append(Task(counted, spread(problems, limit)))
    return tasks
