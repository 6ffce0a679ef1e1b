"""How many processes a run has and how they share the work, from every place where it may be said."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gruppo import cli
from gruppo.cli.arguments import LaunchArguments
from gruppo.cli.launching import launch_config
from gruppo.cli.plan import forecast_on
from gruppo.cli.recipe import RunFile
from gruppo.cli.sharing import Sharing, sharing_of
from gruppo.errors import ConfigError
from gruppo.plan import DEVICES

RECIPES = Path(__file__).parents[2] / "recipes"


def written(folder: Path, **values: Any) -> str:
    path = folder / "acc.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize(
    ("said", "accelerate", "found"),
    [
        ({}, [], (None, None)),
        ({"launch": "fsdp2"}, [], ("fsdp2", None)),
        ({"launch": "ddp", "nproc": 4}, ["--num_processes", "8"], ("ddp", 4)),
        ({"launch": "fsdp2"}, ["--num_machines", "2", "--num_processes", "16"], ("fsdp2", 16)),
        ({"accelerate_config": "zero3"}, ["--num_processes", "8"], ("zero3", 8)),
        ({"accelerate_config": "single_gpu"}, [], ("ddp", 1)),
        ({"accelerate_config": "multi_gpu", "nproc": 2}, [], ("ddp", 2)),
        ({}, ["--use_deepspeed", "--zero_stage", "3", "--num_processes", "2"], ("zero3", 2)),
        ({}, ["--use_fsdp", "--fsdp_version", "2"], ("fsdp2", None)),
        ({}, ["--multi_gpu", "--num_processes", "2"], ("ddp", 2)),
    ],
)
def test_words(said: dict[str, Any], accelerate: list[str], found: tuple[str | None, int | None]) -> None:
    assert sharing_of(LaunchArguments(**said), accelerate) == Sharing(*found)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_files_of_accelerate(name: str, tmp_path: Path) -> None:
    file = LaunchArguments(accelerate_config=written(tmp_path, **launch_config(name, 6)))
    assert sharing_of(file) == Sharing(name, 6)
    assert sharing_of(file, ["--num_processes", "4"]) == Sharing(name, 4), "options count more"
    shipped = LaunchArguments(accelerate_config=str(RECIPES / "accelerate" / f"{name}.yaml"))
    assert sharing_of(shipped) == Sharing(name, 8)


def test_a_file_that_names_a_config_of_deepspeed(tmp_path: Path) -> None:
    own = tmp_path / "ds.json"
    own.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    values = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(own)}}
    assert sharing_of(LaunchArguments(accelerate_config=written(tmp_path, **values))).launch == "zero1"
    own.unlink()
    with pytest.raises(ConfigError, match=r"ds\.json cannot be read"):
        sharing_of(LaunchArguments(accelerate_config=str(tmp_path / "acc.yaml")))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": {}}, "fsdp_version: 2"),
        ({"distributed_type": "MULTI_GPU", "num_processes": "two"}, "num_processes='two' must be a whole number"),
    ],
)
def test_files_that_cannot_be_used(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        sharing_of(LaunchArguments(accelerate_config=written(tmp_path, **values)))


def test_a_plan_keeps_how_a_file_is_launched(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(RECIPES / "multi_node.yaml"), "--model", "qwen2-7b", "--device", "H100", "--gpus", "8", "--json"]
    assert cli.main(["plan", *asked]) == 0
    assert "weights × 4 B / 8 processes" in str(json.loads(capsys.readouterr().out)["phases"])
    assert cli.main(["plan", *asked, "--launch", "ddp"]) == 1, "what is said on the line wins"
    assert "processes" not in str(json.loads(capsys.readouterr().out)["phases"])


@pytest.mark.parametrize("by_file", [False, True], ids=["name", "file"])
def test_an_accelerate_config_is_planned_and_checked_for(
    by_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: dict[str, Any] = dict(model="qwen2-7b", dataset="rows.jsonl", rewards=["r.py:f"], output_dir="run")
    values |= dict(num_generations=8, per_device_train_batch_size=2, max_completion_length=64, bf16=True)
    if by_file:
        values["accelerate_config"] = written(tmp_path, **launch_config("fsdp2", 8))
    else:
        values |= {"accelerate_config": "zero3", "num_processes": 8}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    assert cli.main(["plan", str(path), "--device", "H100", "--json"]) == 0
    assert "/ 8 processes" in capsys.readouterr().out
    run = RunFile.of_another_machine([str(path)])  # as `gruppo check` reads it
    assert (run.processes, run.config.world_size) == (8, 8)
    job = forecast_on(DEVICES["H100"], run).job
    assert (job.sharding, job.processes, job.shares) == ("fsdp2" if by_file else "zero3", 8, 8)
