"""The results table of the DeepSeekMath paper (arXiv 2402.03300) as data, for comparison with your own rows.

`PAPER_RESULTS` has the rows in the paper's order, as printed there. A model without a size is one whose weights were
not published.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from gruppo.errors import ConfigError
from gruppo.evaluation.types import Mode

__all__ = ["PAPER_BENCHMARKS", "PAPER_RESULTS", "Cell", "TableRow"]

PAPER_BENCHMARKS = ("gsm8k", "math", "mgsm_zh", "cmath")


@dataclass(frozen=True)
class Cell:
    """One number of a results table.

    Example, 200 problems of GSM8K, with its 95 % interval:
        Cell(31.5, note="200 of 1319 problems", interval=(25.5, 38.2))
    """

    value: float | None  # in percent; None: not known
    majority: bool = False  # True: majority vote over 32 samples; False: one greedy attempt
    note: str = ""  # why it is not comparable with its column; becomes a footnote
    interval: tuple[float, float] | None = None  # 95 %, in percent

    def __post_init__(self) -> None:
        if self.value is not None and not 0 <= self.value <= 100:
            raise ConfigError(f"Cell({self.value}): a value is in percent, from 0 to 100.")


@dataclass(frozen=True)
class TableRow:
    """A model's results.

    Example:
        TableRow("SmolLM2", "1.7B", "cot", {"gsm8k": Cell(48.2)})
    """

    model: str
    size: str | None
    mode: Mode
    cells: Mapping[str, Cell] = field(default_factory=dict)  # by the name of the benchmark

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"TableRow(mode={self.mode!r}): use one of {', '.join(get_args(Mode))}.")


def _row(mode: Mode, model: str, size: str | None, *printed: str) -> TableRow:
    """Build a row from the printed cells: `*` marks a majority vote, `–` is no value."""
    cells = {
        name: Cell(float(text.rstrip("*")), majority=text.endswith("*"))
        for name, text in zip(PAPER_BENCHMARKS, printed, strict=True)
        if text != "–"
    }
    return TableRow(model, size, mode, cells)


PAPER_RESULTS: tuple[TableRow, ...] = (
    _row("cot", "Gemini Ultra", None, "94.4*", "53.2", "–", "–"),
    _row("cot", "GPT-4", None, "92.0", "52.9", "–", "86.0"),
    _row("cot", "Inflection-2", None, "81.4", "34.8", "–", "–"),
    _row("cot", "GPT-3.5", None, "80.8", "34.1", "–", "73.8"),
    _row("cot", "Gemini Pro", None, "86.5*", "32.6", "–", "–"),
    _row("cot", "Grok-1", None, "62.9", "23.9", "–", "–"),
    _row("cot", "Baichuan-3", None, "88.2", "49.2", "–", "–"),
    _row("cot", "GLM-4", None, "87.6", "47.9", "–", "–"),
    _row("cot", "InternLM2-Math", "20B", "82.6", "37.7", "–", "–"),
    _row("cot", "Qwen", "72B", "78.9", "35.2", "–", "–"),
    _row("cot", "Math-Shepherd-Mistral", "7B", "84.1", "33.0", "–", "–"),
    _row("cot", "WizardMath-v1.1", "7B", "83.2", "33.0", "–", "–"),
    _row("cot", "DeepSeek-LLM-Chat", "67B", "84.1", "32.6", "74.0", "80.3"),
    _row("cot", "MetaMath", "70B", "82.3", "26.6", "66.4", "70.9"),
    _row("cot", "SeaLLM-v2", "7B", "78.2", "27.5", "64.8", "–"),
    _row("cot", "ChatGLM3", "6B", "72.3", "25.7", "–", "–"),
    _row("cot", "WizardMath-v1.0", "70B", "81.6", "22.7", "64.8", "65.4"),
    _row("cot", "DeepSeekMath-Instruct", "7B", "82.9", "46.8", "73.2", "84.6"),
    _row("cot", "DeepSeekMath-RL", "7B", "88.2", "51.7", "79.6", "88.8"),
    _row("tir", "GPT-4 Code Interpreter", None, "97.0", "69.7", "–", "–"),
    _row("tir", "InternLM2-Math", "20B", "80.7", "54.3", "–", "–"),
    _row("tir", "DeepSeek-LLM-Chat", "67B", "86.7", "51.1", "76.4", "85.4"),
    _row("tir", "ToRA", "34B", "80.7", "50.8", "41.2", "53.4"),
    _row("tir", "MAmmoTH", "70B", "76.9", "41.8", "–", "–"),
    _row("tir", "DeepSeekMath-Instruct", "7B", "83.7", "57.4", "72.0", "84.3"),
    _row("tir", "DeepSeekMath-RL", "7B", "86.7", "58.8", "78.4", "87.6"),
)
