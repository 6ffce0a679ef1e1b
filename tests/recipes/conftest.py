"""Fixtures: a tiny data folder and a tiny model."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_model, tiny_tokenizer


def problems(count: int) -> list[dict[str, Any]]:
    pairs = [(3 + i % 5, 2 + i % 7) for i in range(count)]
    return [
        {
            "id": f"gsm8k/test/{i}",
            "question": f"{a} and {b}?",
            "solution": f"{a} + {b} = {a + b}",
            "answer": str(a + b),
        }
        for i, (a, b) in enumerate(pairs)
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A tiny data folder."""
    folder = tmp_path / "data"
    (folder / "gsm8k").mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in problems(24))
    (folder / "gsm8k/train.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "gsm8k/test.jsonl").write_text(text)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a tiny model with a chat template."""
    folder = tmp_path / "model"
    tiny_model(max_position_embeddings=512).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
