"""`gruppo train`: what a file may say, and that it trains."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gruppo import cli
from gruppo.cli.train import LAUNCHES, Run, launch_command, launch_config, load_reward, load_rows, run_command
from gruppo.errors import ConfigError, DataError
from tests.helpers import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
LEAST = {"model": "m", "dataset": "d", "rewards": ["gruppo.rewards:accuracy_reward"]}


def written(folder: Path, **values: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_what_is_not_ours_is_a_setting(tmp_path: Path) -> None:
    run = Run.read(
        written(tmp_path, **LEAST, beta=0.1), ["learning_rate=1e-5", "trainer=rloo", "record=off", "x=[1, 2]"]
    )
    assert (run.trainer, run.model, run.rewards) == ("rloo", "m", LEAST["rewards"])
    assert run.settings == {"beta": 0.1, "learning_rate": 1e-5, "record": "off", "x": [1, 2]}


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        ({}, [], "has no `model`"),
        ({"modle": "m"}, [], "has no `model`.* Did you mean `modle`"),
        ({**LEAST, "trainer": "ppo"}, [], "trainer='ppo' is not one of grpo, rloo"),
        (LEAST, ["beta"], "not of the form field=value"),
    ],
)
def test_files_that_cannot_be_meant(values: dict[str, Any], changes: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Run.read(written(tmp_path, **values), changes)


@pytest.mark.parametrize(("text", "message"), [("- a", "must be a mapping"), ("a: [", "is not YAML")])
def test_files_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Run.read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Run.read(tmp_path / "none.yaml")


def test_rewards_by_name(tmp_path: Path) -> None:
    from gruppo.rewards import accuracy_reward

    assert load_reward("gruppo.rewards:accuracy_reward") is accuracy_reward
    assert load_reward("a/reward-model") == "a/reward-model"
    own = tmp_path / "own_rewards.py"
    own.write_text(
        "def make(by):\n    def scaled(completions, **_):\n        return [by] * len(completions)\n    return scaled\n"
    )
    assert load_reward({f"{own}:make": {"by": 3}})(["x", "y"]) == [3, 3]
    for entry, message in [
        (f"{own}:mkae", "has no `mkae`. Did you mean `make`"),
        ("gruppo.nowhere:x", "cannot be imported"),
        (str(tmp_path / "none.py") + ":x", "There is no file"),
        (3, "an entry is a string"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_reward(entry)


def test_rows_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert load_rows(str(path), "train")["prompt"][:] == ["a", "b"]
    assert len(load_rows({"path": "json", "data_files": str(path)}, "train")) == 2
    with pytest.raises(DataError, match="There is no file"):
        load_rows(str(tmp_path / "none.jsonl"), "train")


def test_the_ready_configs_are_those_of_the_command() -> None:
    folder = ROOT / "recipes" / "accelerate"
    assert {path.stem for path in folder.glob("*.yaml")} == set(LAUNCHES)
    for name in LAUNCHES:
        assert yaml.safe_load((folder / f"{name}.yaml").read_text()) == launch_config(name)


def test_accelerate_understands_the_ready_configs() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    for name in LAUNCHES:
        config = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
        assert config.num_processes == 8
        assert config.distributed_type.value == LAUNCHES[name]["distributed_type"]


def test_how_processes_are_started(tmp_path: Path) -> None:
    command = launch_command("fsdp2", 4, ["--config", "r.yaml"], on_cpu=False, folder=tmp_path)
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--config_file"]
    assert yaml.safe_load(Path(command[4]).read_text()) == launch_config("fsdp2", 4)
    assert command[5:] == ["-m", "gruppo", "train", "--config", "r.yaml"]
    assert "torch.distributed.run" in launch_command("ddp", 2, [], on_cpu=True, folder=tmp_path)
    with pytest.raises(ConfigError, match="--launch zero2 needs GPUs"):
        launch_command("zero2", 2, [], on_cpu=True, folder=tmp_path)


def test_processes_without_a_way_to_share_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--config", str(written(tmp_path, **LEAST)), "--nproc", "2"]) == 2
    assert "--nproc 2 needs --launch" in capsys.readouterr().err


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(75)", 75), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_a_signal_reaches_the_launcher(ends: str, code: int, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    program = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: {ends})
open({str(begun)!r}, "w").close()
time.sleep(60)
"""

    def send() -> None:
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    sender = threading.Thread(target=send)
    sender.start()
    assert run_command([sys.executable, "-c", program]) == code
    sender.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_launcher_gives_processes_time_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    program = "import os, sys; sys.exit(int(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT']))"
    assert run_command([sys.executable, "-c", program], patience=100.5) == 161
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert run_command([sys.executable, "-c", program], patience=100.5) == 7, "what the user says"


def run_file(folder: Path) -> Path:
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}:"}) + "\n" for i in range(8)))
    (folder / "brevity.py").write_text(
        "def brevity(completions, **_):\n    return [-len(c) / 10 for c in completions]\n"
    )
    return written(
        folder,
        model=str(folder / "model"),
        dataset=str(folder / "rows.jsonl"),
        rewards=[f"{folder / 'brevity.py'}:brevity"],
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=4,
        max_steps=2,
        logging_steps=1,
    )


def test_a_file_is_a_run(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    assert cli.main(["train", "--config", str(path), "--set", "max_steps=1", "--set", "save_strategy=no"]) == 0
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.medium
def test_a_file_is_a_run_of_two_processes(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    command = [sys.executable, "-m", "gruppo", "train", "--config", str(path), "--launch", "ddp", "--nproc", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, timeout=300, env=environment)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("balance/tokens_max_over_mean" in line for line in lines) == 2, "updates of several processes"
    assert (tmp_path / "run" / "model.safetensors").exists()
