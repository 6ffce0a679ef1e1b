"""MATH-500: 500 problems of the MATH test split. Its results are not comparable with those on all 5000."""

from collections.abc import Mapping
from typing import Any

from gruppo.evaluation.benchmarks.math import FEW_SHOT
from gruppo.evaluation.types import Benchmark, HubSource
from gruppo.grading import LADDERS

__all__ = ["MATH500"]


def _row(source: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": source["problem"], **{key: source[key] for key in ("answer", "level", "subject")}}


MATH500 = Benchmark(
    name="math500",
    title="MATH-500",
    file="math500/test.jsonl",
    ladder=LADDERS["math"],
    rows=500,
    hub=HubSource("HuggingFaceH4/MATH-500", split="test", row=_row),
    few_shot=FEW_SHOT,
    group_by=("level", "subject"),
)
