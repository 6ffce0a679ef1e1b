"""Fixtures: a folder with a tiny model, rows and rewards, created once, and a run file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import tiny_model, tiny_tokenizer

SMALL: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_completion_length": 4,
    "max_steps": 2,
    "logging_steps": 1,
}
REWARDS = """
def brevity(completions, **_):
    return [-len(c) / 10 for c in completions]

def wants_gold(completions, gold, **_):
    return [0.0] * len(completions)

def make(by):
    def scaled(completions, **_):
        return [by] * len(completions)
    return scaled

def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: the first
        b: the second
    '''
    return a + b

def ask(row):
    return {"prompt": [{"role": "user", "content": row["question"]}]}
"""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, rows and rewards of a run; no test writes into it."""
    folder = tmp_path_factory.mktemp("home")
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": f"p{i}:", "answer": str(i)} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(REWARDS)
    return folder


@pytest.fixture
def recipe(home: Path, tmp_path: Path) -> Any:
    """A function that writes a valid run file with changes; a value of None removes the key."""

    def write(**changes: Any) -> Path:
        values: dict[str, Any] = {
            "model": str(home / "model"),
            "dataset": str(home / "rows.jsonl"),
            "rewards": [f"{home / 'own.py'}:brevity"],
            "output_dir": str(tmp_path / "run"),
            **SMALL,
            **changes,
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
        return path

    return write
