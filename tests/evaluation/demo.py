"""The demo model and its problems as a benchmark, some of which it solves."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import gruppo
from gruppo.demo import model_path
from gruppo.demo.task import problems
from gruppo.evaluation.run import Results
from gruppo.evaluation.types import Benchmark
from gruppo.grading import LADDERS

# The demo's prompts contain only the question, so the template leaves the instruction out.
TEMPLATE = "{% for message in messages %}Q: {{ message['content'].split('\n')[0] }}\n{% endfor %}"
COUNT = 24
DEMO = Benchmark("demo", "Demo", file="demo.jsonl", ladder=LADDERS["gsm8k"], group_by=("level",))


def write_problems(folder: Path, count: int = COUNT) -> Path:
    """A data folder with problems of the demo; their level is the number of digits of the answer."""
    rows = [
        {"question": each.question, "answer": each.answer, "level": len(str(each.answer))}
        for each in problems("held_out", count, seed=3)
    ]
    (folder / "demo.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def tokenizer() -> Any:
    loaded = AutoTokenizer.from_pretrained(model_path())
    loaded.chat_template = TEMPLATE
    return loaded


def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype="float32")


def save_model(folder: Path) -> Path:
    """The demo model with a chat template, in a folder."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def evaluate(model: Any, data: Path, benchmark: Any = DEMO, **settings: Any) -> Results:
    defaults: dict[str, Any] = dict(tokenizer=tokenizer(), data_dir=data, max_new_tokens=40)
    return gruppo.evaluate(model, benchmark, **{**defaults, **settings})


def texts(results: Results, decoding: str = "greedy", benchmark: str = "demo") -> list[str]:
    return [each.attempt.text for each in results.scored[benchmark][decoding]]
