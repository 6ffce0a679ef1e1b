"""Evaluation folders as `gruppo eval` writes them, made without a model."""

from pathlib import Path

from gruppo.evaluation.store import EvaluationFolder
from gruppo.evaluation.types import Attempt, GradedAttempt, Problem
from gruppo.grading import Grade, Rule, Rung
from gruppo.types import StopReason
from tests.view.runs import SCRIPT

PROBLEMS = 12


def make_evaluation(path: Path, right: int, asked: str = "What is") -> Path:
    problems = {
        f"demo/{i}": Problem(f"demo/{i}", f"{asked} {i} + 1? {SCRIPT}", (str(i + 1),)) for i in range(PROBLEMS)
    }
    scored = []
    for i, name in enumerate(problems):
        correct = i < right
        answer = str(i + 1) if correct else "-1"
        attempt = Attempt(name, 0, f"It is {answer}. {SCRIPT}", 8, StopReason.EOS)
        scored.append(
            GradedAttempt(attempt, Grade(correct, Rung.NUMBER, gold=str(i + 1), answer=answer, rule=Rule.LAST_NUMBER))
        )
    folder = EvaluationFolder(path)
    folder.add("demo", "greedy", problems, scored, {"weights": str(right), "shots": 0})
    numbers = {"accuracy": right / PROBLEMS, "interval": [0.1, 0.9], "problems": PROBLEMS, "truncation_rate": 0.0}
    summary = {"format": 1, "model": path.name, "benchmarks": {"demo": {"title": "Demo", "greedy": numbers}}}
    folder.write_results(summary, {})
    return path
