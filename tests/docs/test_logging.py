"""What docs/logging.md says of a push: which files leave the machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.trainer
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.demo import model_path


class Hub:
    """The hub, as far as a push needs it: it notes what it is sent."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, folder_path: str, ignore_patterns: Any = None, **_: Any) -> Any:
        found = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        self.files |= set(filter_repo_objects(found, ignore_patterns=ignore_patterns))
        return SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None)


def pushed(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> set[str]:
    """The folders and files that a run of one update pushes."""
    hub = Hub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda *_, **__: hub)
    args = GRPOConfig(
        str(folder), max_steps=1, save_steps=1, num_generations=4, per_device_train_batch_size=8, use_cpu=True,
        bf16=False, max_completion_length=8, push_to_hub=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"Q: {n}\nA:"} for n in range(8)])
    trainer = GRPOTrainer(model=model_path(), reward_funcs=_length, args=args, train_dataset=rows)
    trainer.train()
    trainer.push_to_hub()
    return {file.partition("/")[0] for file in hub.files}


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_push_uploads_the_record_and_leaves_out_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pushed(tmp_path / "all", monkeypatch)
    assert {"model.safetensors", "README.md", "training_args.bin"} <= files
    assert {"rollouts", "updates", "metrics.jsonl", "config.yaml", "environment.json"} <= files
    assert not [name for name in files if name.startswith("checkpoint")]


def test_with_less_of_a_record_no_completion_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pushed(tmp_path / "metrics", monkeypatch, record="metrics")
    assert "metrics.jsonl" in files
    assert not {"rollouts", "updates", "completions"} & files
    assert "model.safetensors" in files
