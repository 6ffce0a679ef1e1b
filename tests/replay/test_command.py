"""`gruppo replay`: what it prints and writes, and what it says to mistakes."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from gruppo.cli import main
from tests.helpers import prompts


def command(*arguments: Any) -> int:
    return main(["replay", *map(str, arguments)])


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", tmp_path / "out.json", "--parquet", tmp_path / "rows.parquet"]
    wide = ["recipe=gspo", "epsilon=0.2", "epsilon_high=0.2"]  # its own widths leave nothing of a second update
    assert command(folder, "--updates", "2:", "--set", "recipe=dapo", "beta=0", "--against", *wide, *files) == 0
    printed = capsys.readouterr().out
    assert "beta=0" in printed
    assert "importance_sampling_level=sequence" in printed
    written = json.loads((tmp_path / "out.json").read_text())
    assert [update["update"] for update in written["updates"]] == [2]
    assert 0 < written["updates"][0]["cosine"] <= 1
    table = pq.read_table(tmp_path / "rows.parquet")
    assert {"advantage", "gradient", "second_advantage", "second_gradient"} <= set(table.column_names)
    assert len(table) == 8


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_the_command_with_a_reward(
    suffix: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "edited.py").write_text(
        "def shorter(completions, answer, **kwargs):\n    return [-float(len(text)) for text in completions]\n"
    )
    write = {"jsonl": Dataset.to_json, "parquet": Dataset.to_parquet, "csv": Dataset.to_csv}[suffix]
    write(prompts(8), tmp_path / f"rows.{suffix}")
    reward = f"length_reward={tmp_path / 'edited.py'}:shorter"
    assert command(folder, "--reward", reward, "--dataset", tmp_path / f"rows.{suffix}") == 0
    assert "rank correlation within groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--updates", "a:b"], "3:10"),
        (["--updates", ":"], "3:10"),
        (["--set", "loss_type"], "field=value"),
        (["--set", "loss_typ=grpo"], "Did you mean `loss_type`"),
        (["--reward", "nowhere.py:f"], "There is no file"),
        (["--dataset", "x.jsonl"], "name one with --reward"),
        (["--dataset", "x.csv", "--reward", "gruppo.demo:exact_match"], "no file x.csv"),
        (["--json", "no/such/folder.json"], "no folder no/such"),
        (["--json", "."], ". is a folder"),
        (["--parquet", "."], ". is a folder"),
        (["--set", "recipe=[a]"], "recipe=['a'] is not one of"),
        (["--updates", "40:"], "it has 1 to 2"),
        (["--model", "no/such/model"], "cannot be loaded"),
        (["--model", "x", "--groups", "0"], "at least 1"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(folder, *arguments) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command(folder, "--updats", "3")
    assert stop.value.code == 2
    assert "unknown option --updats. Did you mean `--updates`?" in capsys.readouterr().err


def test_numbers_are_whole_on_a_narrow_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert command(folder, "--set", "recipe=gspo", "--against", "recipe=gspo", "beta=0") == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "replayed" not in printed
    assert "e-0" in printed, "a loss that is nearly 0, with all its digits"
