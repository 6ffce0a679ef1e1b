"""Complete scripts in the style that users have them, of which only the import line is ours."""

import copy
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from tests.helpers import tiny_model, tiny_tokenizer

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_model(max_position_embeddings=256).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run_script(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_the_import_line_is_the_only_line_that_names_the_library(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "gruppo" in line]
    assert lines
    assert all(line.startswith(("from gruppo import ", "from gruppo.rewards import ")) for line in lines)


def test_grpo_with_parser_lora_and_math_rewards(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("math_verify")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    for split, count in (("train", 8), ("test", 2)):
        rows = [{"problem": f"What is {i} + 1?", "solution": f"$\\boxed{{{i + 1}}}$"} for i in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text("max_completion_length: 8\nlearning_rate: 1.0e-3\nnum_generations: 2\n")
    arguments = {
        "config": tmp_path / "run.yaml",
        "model_name_or_path": model_folder,
        "dataset_name": tmp_path / "data",
        "output_dir": tmp_path / "out",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "lora_r": 2,
        "lora_target_modules": "q_proj",
        "report_to": "none",
    }
    flags = ["--use_peft", "--use_cpu", "--no_gradient_checkpointing", "--disable_tqdm", "true", "--bf16", "false"]
    strings = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
    run_script("grpo_math.py", [*strings, *flags], monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert "updates: 2" in printed
    assert f"trained: {2 * (2 * 16 + 2 * 16)} of" in " ".join(printed), "two layers, r = 2, from 16 to 16"
    assert "format 0.00, accuracy 0.00" in printed, "a random model thinks nothing and knows nothing"
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_rloo_with_evaluation_callback_and_reward_model(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy.deepcopy(tiny_model().config)
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    run_script("rloo_helpful.py", [str(model_folder), str(tmp_path / "judge"), str(tmp_path / "out")], monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert "stopped at update 4 after 2 evaluations" in printed
    assert "rewards: judge, brevity" in printed
    assert "kl logged: True" in printed
    assert "final eval reward is a number: True" in printed


def test_grpo_with_rollout_function_async_reward_and_subclass(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script("grpo_game.py", [str(model_folder), str(tmp_path / "out")], monkeypatch)
    output = capsys.readouterr().out
    printed = output.splitlines()
    assert "updates: 2" in printed
    assert "rewards: remote_judge, contains" in printed
    assert "model tokens: 4" in printed, "three of the guess and the end; the reply is the game's"
    assert "own metrics: True" in printed
    assert "Step 2" in output
    table = columns(tmp_path / "out" / "completions" / "completions_00002.parquet")
    assert table["found"] == ["e" in text for text in table["completion"]]
    assert table["contains"] == [float(found) for found in table["found"]]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-2")
    assert any((a != b).any() for a, b in zip(saved.parameters(), tiny_model().parameters(), strict=True))


def columns(path: Path) -> dict[str, list[Any]]:
    return pq.read_table(path).to_pydict()
