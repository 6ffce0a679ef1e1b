"""The soak test: that it notices what it looks for, and a short run of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import soak
from benchmarks.soak import GROUP, PROMPTS, PROMPTS_PER_UPDATE, books, growth, leaks

UPDATES = PROMPTS // PROMPTS_PER_UPDATE  # an epoch


def record(folder: Path) -> Path:
    """A run whose books balance."""
    (folder / "rollouts").mkdir(parents=True)
    metrics = [{"update": update, "kind": "train", "loss": 0.0} for update in range(1, UPDATES + 1)]
    metrics.append({"update": UPDATES, "kind": "end", "train_loss": 0.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    for number in range(UPDATES):
        first = number * PROMPTS_PER_UPDATE
        write(folder, number, [i for i in range(first, first + PROMPTS_PER_UPDATE) for _ in range(GROUP)])
    return folder


def write(folder: Path, number: int, prompts: list[int], update: int | None = None) -> None:
    updates = [number if update is None else update] * len(prompts)
    table = pa.table({"update": updates, "prompt_index": prompts})
    pq.write_table(table, folder / "rollouts" / f"{number:08d}-0000.parquet")


def test_books_that_balance(tmp_path: Path) -> None:
    assert books(record(tmp_path), UPDATES) == []


def test_an_update_that_is_missing_or_there_twice(tmp_path: Path) -> None:
    path = record(tmp_path) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[2], *lines[4:]]))
    (problem,) = books(tmp_path, UPDATES)
    assert "updates [4] are missing, [3] are there more than once" in problem


def test_rollouts_that_are_missing_or_of_another_update(tmp_path: Path) -> None:
    folder = record(tmp_path)
    write(folder, 5, [0] * 8, update=4)
    assert any("other updates" in problem for problem in books(folder, UPDATES))
    (folder / "rollouts" / "00000005-0000.parquet").unlink()
    assert any("without a gap" in problem for problem in books(folder, UPDATES))


def test_a_prompt_that_was_asked_twice(tmp_path: Path) -> None:
    folder = record(tmp_path)
    write(folder, 7, [0] * 4 + [1] * 4)
    assert books(folder, UPDATES) == [f"epoch 0: not every prompt was asked {GROUP} times"]


def samples(count: int = 200, **slopes: float) -> list[dict[str, Any]]:
    """What a process held after each update, growing by so much with each."""
    start = {"memory": 500_000, "files": 10, "threads": 5, "children": 1}
    return [{name: value + slopes.get(name, 0) * i for name, value in start.items()} for i in range(count)]


@pytest.mark.parametrize(
    ("slopes", "problem"),
    [
        ({}, None),
        ({"memory": 100}, None),  # 3 %
        ({"memory": 200}, "memory grew"),
        ({"files": 0.1}, "files grew"),
        ({"threads": 0.1}, "threads grew"),
        ({"children": 0.1}, "children grew"),
    ],
)
def test_what_grows_is_seen(slopes: dict[str, float], problem: str | None) -> None:
    found = leaks([growth(samples(**slopes))], {"temporary files": 0})
    assert [problem in line for line in found] == [True] if problem else found == []


def test_what_is_left_is_seen() -> None:
    assert leaks([], {"temporary files": 2, "entries of /dev/shm": 0}) == ["2 temporary files left"]


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, soak.__file__, "--updates", "60", "--kills", "2", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert out.exists(), run.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["problems"] == []
    assert run.returncode == 0
    assert len(result["killed"]) == 2
    assert len(result["processes"]) == 3
    assert result["share_of_tool_calls_that_failed"] > 0
    assert sum(result["reward_faults"].values()) > 0
