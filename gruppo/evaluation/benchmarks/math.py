"""MATH: competition problems in English, all 5000 of the test split."""

from collections.abc import Mapping
from typing import Any

from gruppo.evaluation.types import Benchmark, FewShot, HubSource
from gruppo.grading import LADDERS, last_box

__all__ = ["FEW_SHOT", "MATH"]

FEW_SHOT = FewShot(
    "math.jsonl",
    shots=4,
    question="Problem:\n{}",
    answer="\nSolution:\n{}",
    separator="\n\n",
    stop=("\nProblem:",),
)


def _row(source: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row; the answer is in the last box of the worked solution."""
    answer = last_box(source["solution"])
    return {"question": source["problem"], "answer": answer, "level": source["level"], "subject": source["type"]}


MATH = Benchmark(
    name="math",
    title="MATH",
    file="math/test.jsonl",
    ladder=LADDERS["math"],
    rows=5000,
    hub=HubSource("DigitalLearningGmbH/MATH-lighteval", name="default", split="test", row=_row),
    few_shot=FEW_SHOT,
    group_by=("level", "subject"),
)
