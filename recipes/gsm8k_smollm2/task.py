"""GSM8K as this recipe uses it: prompts, targets of the warm-up, and rewards.

The data folder contains gsm8k/train.jsonl (or train.jsonl.gz), one problem per line:

    {"question": "Natalia sold clips …", "solution": "Natalia sold 48/2 = 24 clips …", "answer": "72", …}
"""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from gruppo.errors import DataError
from gruppo.evaluation.prompts import INSTRUCTIONS
from gruppo.rewards import get_math_answer_reward, get_soft_overlong_punishment
from gruppo.rewards.format import completion_text
from gruppo.rewards.marks import in_worker

Row = dict[str, Any]

FILE = "gsm8k/train.jsonl"
KEYS = ("question", "solution", "answer")
INSTRUCTION = INSTRUCTIONS["cot", "en"]  # that of the evaluation, so that training uses the same prompt
ACCURACY = "rewards/math_answer_reward/mean"  # the trainers' metric for the mean of the first reward
SAMPLED_ACCURACY = "math_answer/sampled"  # the same over all completions, including those of replaced prompts
RESULT = re.compile(r"=\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?|-?\.\d+)")  # 24 in "48/2 = $24"
OVERLONG_WEIGHT = 0.5  # a wrong answer costs 1 and the longest completion half of that, as in the DAPO paper


def read(data: str | Path, limit: int | None = None) -> list[Row]:
    """The training problems of a data folder, the first `limit` of them."""
    plain = Path(data) / FILE
    packed = plain.with_name(plain.name + ".gz")
    if not plain.exists() and not packed.exists():
        raise DataError(f"{data} has no {FILE} and no {FILE}.gz; name the folder that holds the folder gsm8k.")
    path = plain if plain.exists() else packed
    text = gzip.decompress(path.read_bytes()) if path == packed else path.read_bytes()
    rows: list[Row] = [json.loads(line) for line in text.decode("utf-8").split("\n")[:limit] if line]
    for number, row in enumerate(rows, 1):
        if missing := [key for key in KEYS if not row.get(key)]:
            raise DataError(f"{path}, line {number} has no {' and no '.join(missing)}.")
    return rows


def prompt(row: Row) -> list[dict[str, str]]:
    """A problem as a conversation of one turn."""
    return [{"role": "user", "content": row["question"] + INSTRUCTION}]


def target(row: Row) -> str:
    """The completion that the warm-up imitates: the solution of the data set, then its answer in a box.

    Example:
        target({"solution": "3 + 4 = 7", "answer": "7", …}) == "3 + 4 = 7\\n\\\\boxed{7}"
    """
    return f"{row['solution']}\n\\boxed{{{row['answer']}}}"


def dataset(rows: list[Row]) -> Dataset:
    """A dataset with the columns that a trainer needs: the prompt and, for the rewards, answer and solution."""
    columns = ("answer", "solution")
    return Dataset.from_list([{"prompt": prompt(row), **{name: row[name] for name in columns}} for row in rows])


_grade = get_math_answer_reward("gsm8k", column="answer")


@in_worker
def math_answer_reward(
    completions: Sequence[Any],
    answer: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1 for the right number, 0 for a wrong one or none.

    With dynamic sampling the trainer's own mean covers only the prompts that it kept. Metrics that a reward logs are
    averaged over all completions that it scored, so the score of every completion is logged separately.

    Example:
        math_answer_reward(["so \\\\boxed{7}", "so \\\\boxed{8}"], answer=["7", "7"]) == [1.0, 0.0]
    """
    scores = _grade(completions, log_extra, log_metric, answer=answer)
    if log_metric is not None:
        for score in scores:
            if score is not None:
                log_metric(SAMPLED_ACCURACY, score)
    return scores


def results(text: str) -> set[float]:
    """The numbers that a text computes: those after an equals sign.

    Example:
        results("48/2 = 24 clips, 24+48 = $72") == {24.0, 72.0}
    """
    return {float(number.replace(",", "")) for number in RESULT.findall(text)}


@in_worker
def step_results_reward(completions: Sequence[Any], solution: Sequence[str], **kwargs: Any) -> list[float | None]:
    """Agreement of the intermediate results with those of the solution, as F1 so that many guesses do not pay off.

    None if the solution computes nothing.

    Example:
        step_results_reward(["48/2 = 24, 24*2 = 48"], solution=["48/2 = 24, 24+48 = 72"]) == [0.5]
    """
    scores: list[float | None] = []
    for completion, text in zip(completions, solution, strict=True):
        wanted, found = results(text), results(completion_text(completion))
        scores.append(2 * len(wanted & found) / (len(wanted) + len(found)) if wanted else None)
    return scores


def rewards(
    limit: int, overlong_tokens: int = 0, step_weight: float = 0.0
) -> tuple[list[Callable[..., Any]], list[float]]:
    """The reward functions and their weights: 1 for the right number, and optional ones.

    The optional ones are a length penalty that grows over the last `overlong_tokens` before `limit`, and the agreement
    of intermediate results, weighted by `step_weight`; 0 leaves either out.
    """
    functions: list[tuple[Callable[..., Any], float]] = [(math_answer_reward, 1.0)]
    if overlong_tokens:
        functions.append((get_soft_overlong_punishment(limit, overlong_tokens), OVERLONG_WEIGHT))
    if step_weight:
        functions.append((step_results_reward, step_weight))
    return [function for function, _ in functions], [weight for _, weight in functions]
