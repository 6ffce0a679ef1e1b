"""MGSM-zh: the first 250 problems of GSM8K's test split in Chinese."""

from collections.abc import Mapping
from typing import Any

from gruppo.evaluation.types import Benchmark, FewShot, HubSource
from gruppo.grading import LADDERS

__all__ = ["MGSM_ZH"]


def _row(source: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": source["question"], "answer": str(source["answer_number"])}


MGSM_ZH = Benchmark(
    name="mgsm_zh",
    title="MGSM-zh",
    file="mgsm_zh/test.jsonl",
    ladder=LADDERS["mgsm_zh"],
    language="zh",
    rows=250,
    hub=HubSource("juletxara/mgsm", name="zh", split="test", row=_row),
    # The paper has no few-shot prompt for this set; this one uses the layout of CMATH's.
    few_shot=FewShot(
        "mgsm_zh.jsonl", shots=8, question="问题：{}", answer="答案：{}", separator="\n\n\n", stop=("\n问题：",)
    ),
)
