"""CMATH: Chinese primary-school problems, labelled with school grades 1 to 6."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gruppo.evaluation.types import Benchmark, FewShot, HubSource
from gruppo.grading import LADDERS

__all__ = ["CMATH", "CMATH_VALIDATION"]


def _row(source: Mapping[str, Any]) -> dict[str, Any]:
    answer = str(source["golden"]).replace(",", "")
    return {"question": source["question"], "answer": answer, "level": source["grade"]}


CMATH = Benchmark(
    name="cmath",
    title="CMATH",
    file="cmath/test.jsonl",
    ladder=LADDERS["cmath"],
    language="zh",
    rows=1098,
    hub=HubSource("weitianwen/cmath", split="test", row=_row),
    few_shot=FewShot(
        "cmath.jsonl", shots=6, question="问题：{}", answer="答案：{}", separator="\n\n\n", stop=("\n问题：",)
    ),
    group_by=("level",),
    level_name="grade",
)

CMATH_VALIDATION = replace(
    CMATH,
    name="cmath_validation",
    title="CMATH (validation)",
    file="cmath/validation.jsonl",
    rows=600,
    hub=HubSource("weitianwen/cmath", split="validation", row=_row),
)
