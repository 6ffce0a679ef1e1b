"""The commands that docs/replay.md shows run, on the record of a demo; its Python is run by tests/docs."""

import json
import re
import shlex
from pathlib import Path

import pytest

from gruppo.cli import main
from gruppo.demo import load_task
from tests.replay.conftest import Recorded

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`gruppo (replay runs/demo [^`]*)`", PAGE)


@pytest.fixture
def place(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, its prompts and a reward."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(recorded("dapo"))
    load_task()[0].to_json(tmp_path / "prompts.jsonl")
    (tmp_path / "my_rewards.py").write_text("from gruppo.demo import exact_match\n")
    return tmp_path


@pytest.mark.medium
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert "cosine" in capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(COMMANDS) == 3


def test_the_number_is_the_measured_one() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "replay.json").read_text(encoding="utf-8"))
    runs = [measured["demo"], *measured["runs"].values()]
    said = f"{max(run['loss'] for run in runs):.0e}"
    assert f"no loss is further than {said} from the logged one" in PAGE
    assert f"equal to the logged losses to {said}" in (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    assert max(run["advantage"] for run in runs) == 0
    assert len(measured["runs"]) == 12
