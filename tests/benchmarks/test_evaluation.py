"""The benchmark of `gruppo eval`: what is measured of both engines, with a tiny model and a stand-in for vLLM."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evaluation
from tests.helpers import tiny_model, tiny_tokenizer

STAND_IN = """
import time
from types import SimpleNamespace
time.sleep(0.6)  # an import is no loading of a model
class LLM:
    def __init__(self, model, seed):
        time.sleep(0.3)
    def generate(self, prompts, params):
        time.sleep(0.1)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * params.tokens)]) for _ in prompts]
class SamplingParams:
    def __init__(self, temperature, max_tokens):
        self.tokens = max_tokens
"""


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    for folder in ("model", "data/gsm8k", "site"):
        (tmp_path / folder).mkdir(parents=True)
    tiny_model(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"id": f"gsm8k/test/{i}", "question": f"{i} and 2?", "answer": str(i + 2)} for i in range(3)]
    (tmp_path / "data/gsm8k/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "site/vllm.py").write_text(STAND_IN)
    places = {"model": tmp_path / "model", "data_dir": tmp_path / "data", "vllm_site": tmp_path / "site"}
    return argparse.Namespace(**places, benchmark="gsm8k", max_new_tokens=4)


def parts(run: dict[str, Any]) -> float:
    return float(run["load_seconds"] + run["after_load_seconds"])


def test_loading_does_not_count_the_imports_and_the_process_does(options: argparse.Namespace, tmp_path: Path) -> None:
    run = evaluation.run_vllm(options, tmp_path / "vllm")
    assert run["load_seconds"] >= 0.3
    assert run["after_load_seconds"] >= 0.1
    assert run["process_seconds"] >= parts(run) + 0.6
    assert (run["problems"], run["total_tokens"]) == (3, 12)


@pytest.mark.slow
def test_ours_has_the_same_measures(options: argparse.Namespace, tmp_path: Path) -> None:
    ours, theirs = evaluation.run_ours(options, tmp_path / "ours"), evaluation.run_vllm(options, tmp_path / "vllm")
    assert set(theirs) <= set(ours)
    assert ours["process_seconds"] > parts(ours) > 0
    assert ours["problems"] == 3
