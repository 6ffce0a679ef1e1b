"""What a trainer writes down about its rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gruppo import GRPOTrainer
from gruppo.runs import Run
from gruppo.runs.rollouts import prompt_id
from gruppo.trainer.collect import recording
from tests.helpers import chats, prompts
from tests.trainer.runs import run


def test_logs_of_updates_are_told_from_the_end_of_a_run(tmp_path: Path) -> None:
    """With this setting transformers adds the runtime to every log."""
    run(tmp_path, GRPOTrainer, max_steps=2, logging_steps=1, include_num_input_tokens_seen="all")
    kinds = [line["kind"] for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    assert kinds == ["train", "train", "end"]


@pytest.mark.parametrize("rows", [prompts(8), chats(8)], ids=["plain", "chats"])
def test_a_prompt_that_a_group_shares_is_named_once(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: Counter[str] = Counter()

    def counting(prompt: Any) -> str:
        named[str(prompt)] += 1
        return prompt_id(prompt)

    monkeypatch.setattr(recording, "prompt_id", counting)
    run(tmp_path, GRPOTrainer, dataset=rows, num_generations=4, per_device_train_batch_size=8, max_steps=4)
    assert named == {str(prompt): 1 for prompt in rows["prompt"]}
    recorded = Run(tmp_path).rollouts().to_pylist()
    assert len(recorded) == 32
    for row in recorded:
        assert row["prompt_id"] == prompt_id(rows[row["prompt_index"]]["prompt"])
