"""Small checkpoints, and ways to damage them."""

import json
import os
from pathlib import Path

from gruppo.runs.checkpoints import publish, stage


def fill(folder: Path, mark: str) -> None:
    (folder / "model.safetensors").write_bytes(mark.encode() * 500)
    (folder / "trainer_state.json").write_text(json.dumps({"mark": mark}))
    (folder / "rank_0").mkdir()
    (folder / "rank_0" / "state.pt").write_bytes(b"state of " + mark.encode())
    (folder / "empty").write_bytes(b"")


def save(run: Path, step: int, mark: str = "new", **about: object) -> Path:
    staged = stage(run, f"checkpoint-{step}")
    fill(staged, mark)
    return publish(staged, {"step": step, **about})


def mark(checkpoint: Path) -> str:
    return json.loads((checkpoint / "trainer_state.json").read_text())["mark"]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def add(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
