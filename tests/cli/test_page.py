"""docs/cli.md: its run is run, its other commands and files are read by the real parser."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from gruppo import cli
from gruppo.cli.recipe import RunFile, accelerate_options, make_parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.medium
def test_the_run_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assets = tmp_path / "gruppo" / "demo"
    assets.mkdir(parents=True)
    (assets / "assets").symlink_to(ROOT / "gruppo" / "demo" / "assets")
    prompts, rewards, _ = blocks("python")
    exec(compile(prompts, "docs/cli.md", "exec"), {})
    (tmp_path / "rewards.py").write_text(rewards)
    (tmp_path / "run.yaml").write_text(blocks("yaml")[0])
    for command in blocks("bash")[0].splitlines():
        _, *argv = shlex.split(command)
        assert cli.main(argv) == 0, capsys.readouterr().err
        capsys.readouterr()
    assert (tmp_path / "runs" / "first" / "checkpoint-6").is_dir()
    assert (tmp_path / "runs" / "second" / "model.safetensors").exists()


def test_its_other_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run.yaml", "of_trl.yaml"):
        (tmp_path / name).write_text(blocks("yaml")[0])
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line)[1:] for line in blocks("bash")[1].splitlines()]
    assert len(commands) == 4
    for command, *argv in commands:
        assert RunFile.read(argv, command, build=False).model


def test_its_keys_are_all_there_are() -> None:
    table = PAGE.partition("| key | meaning |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])))
    own = {name for action in make_parser("grpo")._actions for name in [o.lstrip("-") for o in action.option_strings]}
    assert named <= own | {"trainer"}
    added = {"dataset_map", "eval_dataset", "tools", "environment_factory", "rollout_func", "peft", "launch", "nproc"}
    assert named >= added | {"accelerate_config", "resume", "model", "dataset", "reward", "rewards", "trainer"}
    assert named.isdisjoint(accelerate_options())


def test_its_rewards_can_be_named(tmp_path: Path) -> None:
    from gruppo.cli.loading import load_reward

    (tmp_path / "rewards.py").write_text(blocks("python")[1])
    entries = yaml.safe_load(blocks("yaml")[1])["rewards"]
    assert [load_reward(entry, tmp_path) is not None for entry in entries] == [True] * 4


def test_every_recipe_is_listed() -> None:
    listed = PAGE.partition("## Recipes")[2]
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert f"{path.stem}.yaml`" in listed or f"`{path.stem}`" in listed, path.name
