"""Evaluations: their results, their attempts, and the comparison of two of them on the same problems."""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from gruppo.errors import DataError
from gruppo.evaluation.compare import check_same_problems, compare
from gruppo.evaluation.store import EvaluationFolder
from gruppo.evaluation.types import GradedAttempt
from gruppo.view.curves import finite

__all__ = ["Evaluation", "compare_two"]

CHARACTERS = 20_000  # maximum length of a text in an answer


class Evaluation:
    """The folder of one evaluation.

    Example:
        Evaluation(Path("evaluations/before"), "before").overview()["benchmarks"]
    """

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.folder = EvaluationFolder(path)
        _refuse_links(path)

    def version(self) -> str:
        """A value that changes whenever results.json is written."""
        try:
            return str((self.path / "results.json").stat().st_mtime_ns)
        except OSError:
            return ""

    def overview(self) -> dict[str, Any]:
        """The contents of results.json, and the passes that have attempts."""
        try:
            results, problem = self.folder.results() or {}, None
        except DataError as error:  # reported in the answer, so that the other folders can still be shown
            results, problem = {}, str(error)
        passes = [{"benchmark": benchmark, "pass": decoding} for benchmark, decoding in self.folder.passes()]
        benchmarks = results.get("benchmarks")
        return {
            "name": self.name,
            "path": str(self.path),
            "model": str(results.get("model", "")),
            "benchmarks": (finite(benchmarks) or {}) if isinstance(benchmarks, dict) else {},
            "passes": passes,
            "problem": problem,
        }

    def attempts(self, benchmark: str, decoding: str) -> dict[str, list[dict[str, Any]]]:
        """All attempts of a pass, grouped by problem."""
        if (benchmark, decoding) not in set(self.folder.passes()):
            raise DataError(f"{self.name} has no attempts of {benchmark}, {decoding}.")
        changed = max(path.stat().st_mtime_ns for path in self._files(benchmark, decoding))
        return _attempts(self.path, benchmark, decoding, changed)

    def problem(self, benchmark: str, decoding: str, problem: str) -> dict[str, Any]:
        """One problem: the question and the attempts at it."""
        attempts = self.attempts(benchmark, decoding)
        if problem not in attempts:
            raise DataError(f"{self.name} has no attempts at {problem!r}.")
        question = self.folder.questions(benchmark, decoding).get(problem, "")
        return {"problem": problem, "question": question[:CHARACTERS], "attempts": attempts[problem]}

    def _files(self, benchmark: str, decoding: str) -> list[Path]:
        return list((self.path / "completions" / benchmark / decoding).glob("*.parquet"))


@lru_cache(maxsize=8)
def _attempts(path: Path, benchmark: str, decoding: str, changed: int) -> dict[str, list[dict[str, Any]]]:
    """The attempts of a pass, cached; `changed` is part of the cache key, so that changed files are read again."""
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        attempts = EvaluationFolder(path).attempts(benchmark, decoding)
    except (ValueError, KeyError, TypeError, IndexError) as error:  # a file that `gruppo eval` did not write
        raise DataError(f"The attempts of {benchmark} in {path} cannot be read: {error!r}") from error
    for scored in attempts:
        found.setdefault(scored.attempt.problem, []).append(_attempt(scored))
    for own in found.values():
        own.sort(key=lambda attempt: attempt["sample"])
    return found


def _attempt(scored: GradedAttempt) -> dict[str, Any]:
    attempt = scored.attempt
    return {
        "sample": attempt.sample,
        "text": attempt.text[:CHARACTERS],
        "characters": len(attempt.text),
        "correct": scored.correct,
        "answer": scored.grade.answer,
        "gold": scored.grade.gold,
        "tokens": attempt.tokens,
        "stop": str(attempt.stop),
        "truncated": attempt.truncated,
    }


def compare_two(first: Evaluation, second: Evaluation, benchmark: str, decoding: str) -> dict[str, Any]:
    """Two checkpoints on the same problems: the statistics of `gruppo eval --compare`, and pass rates by problem."""
    sides = [each.attempts(benchmark, decoding) for each in (first, second)]
    scores = [{problem: [float(a["correct"]) for a in attempts] for problem, attempts in s.items()} for s in sides]
    names = (first.name, second.name) if first.name != second.name else (str(first.path), str(second.path))
    before, after = (each.folder.problems(benchmark, decoding) for each in (first, second))
    check_same_problems(before, after, names=names)
    comparison = compare(scores[0], scores[1], names=names)
    shared = [problem for problem in scores[0] if problem in scores[1]]
    rates = {problem: [_mean(each[problem]) for each in scores] for problem in shared}
    return {
        **comparison.to_dict(),
        "said": comparison.describe(),
        "asked": _differences(first.folder.identity(benchmark, decoding), second.folder.identity(benchmark, decoding)),
        "rates": [{"problem": problem, "first": a, "second": b} for problem, (a, b) in rates.items()],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Settings other than the weights in which two passes differ: if any, the comparison is not of weights alone."""
    keys = [key for key in {**first, **second} if key != "weights" and first.get(key) != second.get(key)]
    return [f"{key}: {first.get(key)} and {second.get(key)}" for key in keys]


def _refuse_links(path: Path) -> None:
    """Raise if a link leads out of the folder: a folder from an untrusted source could point at any file."""
    root = Path(os.path.realpath(path))
    for folder, subfolders, files in os.walk(root):
        for name in (*subfolders, *files):
            if not Path(os.path.realpath(Path(folder) / name)).is_relative_to(root):
                raise DataError(f"{Path(folder) / name} is a link that leads out of {path}. It is not followed")
