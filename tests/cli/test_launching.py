"""Several processes: which command starts them, and how signals reach them."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import yaml

from gruppo import cli
from gruppo.cli import launching
from gruppo.cli.launching import LAUNCHES, launch_command, launch_config, run_command
from gruppo.errors import ConfigError
from tests.runs import saving
from tests.zero import builds_deepspeed, needs_deepspeed, runs_deepspeed

ROOT = Path(__file__).parents[2]


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


SCRIPT = """
import json
import os
from pathlib import Path

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.demo import exact_match, load_task, model_path
from tests.sharded import as_on_gpus

args = GRPOConfig("run", max_steps=1, num_generations=4, per_device_train_batch_size=8, max_completion_length=8,
                  use_cpu=True, report_to="none", save_strategy="no")
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    as_on_gpus()
trainer = GRPOTrainer(model=model_path(), reward_funcs=exact_match, args=args, train_dataset=load_task()[0])
trainer.train()
state = trainer.accelerator
done = [state.distributed_type.value, state.num_processes, state.mixed_precision, trainer.state.global_step]
Path(f"rank{state.process_index}.json").write_text(json.dumps(done))
"""


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[needs_deepspeed, runs_deepspeed, builds_deepspeed] if name.startswith("zero") else []
        )
        for name in LAUNCHES
    ],
)
def test_accelerate_launches_a_script_with_a_ready_config(name: str, tmp_path: Path) -> None:
    """On CPUs, because the script says so; everything else is as the config says."""
    (tmp_path / "train.py").write_text(SCRIPT)
    config = ROOT / "recipes" / "accelerate" / f"{name}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", "2", "--main_process_port", "0", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    kind = "MULTI_CPU" if name == "ddp" else LAUNCHES[name]["distributed_type"]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == [kind, 2, "bf16", 1]


def test_how_processes_are_started(tmp_path: Path) -> None:
    program = ["-m", "gruppo", "train", "r.yaml"]
    command = launch_command("fsdp2", 4, program, ["--num_machines", "2"], on_cpu=False, folder=tmp_path)
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--config_file"]
    assert yaml.safe_load(Path(command[4]).read_text()) == launch_config("fsdp2", 4)
    assert command[5:] == ["--num_machines", "2", *program]
    assert "torch.distributed.run" in launch_command("ddp", 2, [], on_cpu=True, folder=tmp_path)
    with pytest.raises(ConfigError, match="--launch zero2 needs GPUs"):
        launch_command("zero2", 2, [], on_cpu=True, folder=tmp_path)


def started(argv: list[str], monkeypatch: pytest.MonkeyPatch, command: str = "train") -> list[str]:
    """The command that the launcher would run, less the interpreter."""
    commands: list[list[str]] = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(launching, "run_command", lambda started, patience: commands.append(started) or 0)
    assert cli.main([command, *argv]) == 0
    return commands[0][1:]


def test_the_words_about_launching_stay_with_the_launcher(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(recipe(use_cpu=None))
    argv = [path, "--launch=fsdp2", "--nproc", "4", "--num_machines", "2", "--multi_gpu", "--learning_rate", "1e-5"]
    command = started([*argv, "--resume"], monkeypatch)
    assert command[:2] == ["-m", "accelerate.commands.launch"]
    assert command[4:7] == ["--num_machines", "2", "--multi_gpu"]
    assert command[7:] == ["-m", "gruppo", "train", path, "--learning_rate", "1e-5", "--resume"]


def test_accelerates_keys_of_a_file_start_its_launcher(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(recipe(use_cpu=None, num_processes=2, multi_gpu=True, tpu=False))
    command = started(["--config", path], monkeypatch, "grpo")
    assert command[2:] == ["--multi_gpu", "--num_processes", "2", "-m", "gruppo", "grpo", "--config", path]


def test_trls_names_of_ready_configs(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(recipe(use_cpu=None))
    own = tmp_path / "own.yaml"
    own.write_text("num_processes: 3")
    command = started([path, "--accelerate_config", str(own)], monkeypatch)
    assert command[2:] == ["--config_file", str(own), "-m", "gruppo", "train", path]
    command = started([path, "--accelerate_config", "zero2", "--num_processes", "2"], monkeypatch)
    assert command[3].endswith("zero2.yaml")
    assert command[4:6] == ["--num_processes", "2"]


def test_on_cpus_torchrun_starts_them(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = started([str(recipe()), "--launch", "ddp", "--num_processes", "2"], monkeypatch)
    assert command[1] == "torch.distributed.run"
    assert "--nproc_per_node=2" in command


def test_an_end_of_the_processes_is_told(
    recipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(launching, "run_command", lambda started, patience: 1)
    path = recipe()
    assert cli.main(["train", str(path), "--launch", "ddp", "--nproc", "2"]) == 1
    assert capsys.readouterr().err.endswith(
        "The launcher ended with code 1; the output of its processes says why. There is no checkpoint.\n"
    )
    saving.save(path.parent / "run", 1)
    assert cli.main(["train", str(path), "--launch", "ddp", "--nproc", "2"]) == 1
    again = f"gruppo train {quote(str(path))} --launch ddp --nproc 2 --resume"
    assert capsys.readouterr().err.endswith(
        f"The launcher ended with code 1; the output of its processes says why. Resume with: {again}\n"
    )


def test_the_words_of_the_first_that_failed_are_repeated(
    recipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def processes(started: list[str], patience: float) -> int:
        monkeypatch.setenv("GRUPPO_LAUNCHED", "1")  # what they do, in this one
        assert cli.main(started[started.index("gruppo") + 1 :]) == 2
        launching.keep_words("the next one")
        train = importlib.import_module("gruppo.cli.train")  # `gruppo.cli` has a function of that name
        monkeypatch.setattr(train, "make_trainer", lambda run, callbacks: os.kill(os.getpid(), 15))
        assert cli.main(["train", str(recipe())]) == 143, "ended by the launcher"
        return 1

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(launching, "run_command", processes)
    assert cli.main(["train", str(recipe(dataset="none.jsonl")), "--launch", "ddp", "--nproc", "2"]) == 1
    err = capsys.readouterr().err
    assert "The launcher ended with code 1: There is no file none.jsonl.\nThere is no checkpoint.\n" in err
    assert "Stopped while loading" not in err
    assert launching.WORDS not in os.environ


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc", "2"], "--nproc 2 needs --launch"),
        (["--launch", "ddp", "--nproc", "0"], "--nproc 0 must be at least 1"),
        (["--launch", "ddp", "--nproc", "-1"], "--nproc -1 must be at least 1"),
        (["--num_processes", "two"], "--num_processes two must be a whole number of at least 1"),
        (["--num_processes"], "--num_processes must be a whole number of at least 1"),
        (["--launch", "fsdp1", "--nproc", "2"], "FSDP1 is not supported: use fsdp2"),
        (["--launch", "zero4", "--nproc", "2"], "not one of ddp, fsdp2"),
        (["--launch", "ddp", "--accelerate_config", "fsdp2"], "both set how to launch"),
        (["--launch", "fsdp2", "--nproc", "2"], "--launch fsdp2 needs GPUs"),
        (["--launch", "ddp", "--nproc", "2", "--num_machines", "2"], "accelerate's launcher is not used with use_cpu"),
    ],
)
def test_launches_that_cannot_be_meant(
    flags: list[str], message: str, recipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert cli.main(["train", str(recipe()), *flags]) == 2
    assert message in capsys.readouterr().err


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


@pytest.mark.medium
def test_a_file_is_a_run_of_two_processes(recipe: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gruppo", "train", str(recipe()), "--launch", "ddp", "--nproc", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, check=True, timeout=300, env=environment, capture_output=True, text=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("balance/tokens_max_over_mean" in line for line in lines) == 2, "updates of several processes"
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert ended.stdout.count("update 2/2  reward") == 1, "one process shows progress"
    assert ended.stdout.count("Finished 2 updates") == 1
