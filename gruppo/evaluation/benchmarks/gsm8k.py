"""GSM8K: grade-school word problems in English."""

from collections.abc import Mapping
from typing import Any

from gruppo.evaluation.types import Benchmark, FewShot, HubSource
from gruppo.grading import LADDERS

__all__ = ["GSM8K"]


def _row(source: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row; the answer follows the worked solution: `… #### 1,250`."""
    return {"question": source["question"], "answer": source["answer"].rpartition("####")[2].strip().replace(",", "")}


GSM8K = Benchmark(
    name="gsm8k",
    title="GSM8K",
    file="gsm8k/test.jsonl",
    ladder=LADDERS["gsm8k"],
    rows=1319,
    hub=HubSource("openai/gsm8k", name="main", split="test", row=_row),
    few_shot=FewShot("gsm8k.jsonl", shots=8, question="Q: {}", answer="A: {}", separator="\n\n\n", stop=("\nQ:",)),
)
