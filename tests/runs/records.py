"""Small records that the tests share."""

from pathlib import Path
from typing import Any

import pytest

from gruppo.runs import RolloutRow, UpdateRows, lines, prompt_id, record, record_files

CONFIG = {"learning_rate": 1e-6, "num_generations": 2}


def row(number: int = 0, **changes: Any) -> RolloutRow:
    prompt = f"{number}+1="
    values: dict[str, Any] = dict(
        update=number,
        split="train",
        row=number,
        group=number // 2,
        prompt_id=prompt_id(prompt),
        prompt=prompt,
        prompt_tokens=[number, 10],
        completion=f" {number + 1}",
        completion_tokens=[20 + number, 2],
        logps=[-0.5, -0.25],
        entropies=[0.5, 0.125],
        rewards={"right": 1.0, "short": None},
        reward_kinds={"right": "score", "short": "abstain"},
        reward=1.0,
        advantage=0.5,
        stop="eos",
        truncated=False,
    )
    return RolloutRow(**{**values, **changes})


def updated(**changes: Any) -> UpdateRows:
    """The record of an update with two rows, of which it ran one."""
    facts = {"loss": 0.25, "update_rows": 2, "update_tokens": 4, "update_micro_batches": 1}
    facts |= {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28}
    values: dict[str, Any] = dict(
        generation=[0, 0], row=[1, 0], micro_batch=[0, 0], logps=[[-0.5, -0.25], None], old="own", facts=facts
    )
    return UpdateRows(**{**values, **changes})


def train(recorder: record.RunRecorder, first: int, last: int) -> None:
    """Record the updates from `first` to `last`."""
    for update in range(first, last + 1):
        recorder.rollouts([row(update), row(update + 1)])
        recorder.metrics(update, {"loss": update / 8, "reward": 0.5})


def files(folder: Path) -> dict[str, bytes]:
    """The files of a folder: names and contents."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the clock constant, so that equal records are equal byte for byte."""
    for module in (lines, record, record_files):
        monkeypatch.setattr(module, "now", lambda: "2026-01-01T00:00:00.000+00:00")


class FullDisk:
    """A disk with `room` bytes left; further writes raise OSError with errno `number`. Tests may increase `room`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, number: int):
        self.room = room
        self.refused = 0
        real = lines.os.write

        def write(file: int, data: Any) -> int:
            if self.room <= 0:
                self.refused += 1
                raise OSError(number, "full")
            written = real(file, bytes(data)[: self.room])
            self.room -= written
            return written

        monkeypatch.setattr(lines.os, "write", write)
