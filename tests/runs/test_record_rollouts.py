"""Rows as parquet: the columns, the same bytes every time, text that is no text."""

import dataclasses
import json
import os
import subprocess
import sys
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gruppo.runs import RolloutRow, RunRecorder, prompt_id
from gruppo.runs.rollouts import COLUMNS, encode, to_table
from tests.runs.records import CONFIG, files, row

CHAT = [{"role": "user", "content": "2+2?"}]
ANSWER = [
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"b": 2, "a": 2}}}]},
    {"role": "tool", "content": "4"},
]


def written(folder: Path, *rows: RolloutRow) -> list[dict[str, object]]:
    recorder = RunRecorder(folder)
    recorder.begin(config=CONFIG, environment={})
    recorder.rollouts(rows)
    return pq.read_table(folder / "rollouts" / "00000000-0000.parquet").to_pylist()  # type: ignore[no-any-return]


def test_every_field_arrives(tmp_path: Path) -> None:
    original = row(
        3,
        **dict(prompt_index=17, round=2, replaced=True, model_mask=[1, 0], advantages=[0.5, -0.5], turns=3),
        **dict(prompt=CHAT, prompt_id=prompt_id(CHAT), completion=ANSWER, extra={"score": [1, None]}, truncated=True),
    )
    plain, chat = written(tmp_path, row(2), original)
    same = {field.name for field in dataclasses.fields(RolloutRow)} - {"rewards", "reward_kinds"}
    same -= {"prompt", "completion", "extra"}
    assert {name: chat[name] for name in same} == {name: getattr(original, name) for name in same}
    assert (chat["reward/right"], chat["reward/short"]) == (1.0, None)
    assert (chat["reward_kind/right"], chat["reward_kind/short"]) == ("score", "abstain")
    assert (plain["prompt"], plain["prompt_format"], chat["prompt_format"]) == ("2+1=", "text", "messages")
    assert json.loads(str(chat["prompt"])) == CHAT
    assert json.loads(str(chat["completion"])) == ANSWER
    assert (plain["completion_format"], chat["completion_format"]) == ("text", "messages")
    assert json.loads(str(chat["extra"])) == {"score": [1, None]}
    for name in ("model_mask", "advantages", "extra", "prompt_index"):
        assert plain[name] is None


def test_the_columns_and_their_order() -> None:
    table = to_table([row()], 0)
    at = list(COLUMNS).index("reward")
    rewards = ["reward/right", "reward/short", "reward_kind/right", "reward_kind/short"]
    assert table.column_names == [*list(COLUMNS)[:at], *rewards, *list(COLUMNS)[at:]]
    assert table.schema.metadata == {b"gruppo.rollouts": b"1"}
    for name, kind in COLUMNS.items():
        assert table.schema.field(name).type == kind
    fields = [field.name for field in dataclasses.fields(RolloutRow) if not field.name.startswith("reward")]
    assert [name for name in COLUMNS if name in fields] == fields


def test_numbers_of_any_kind_are_the_same_table() -> None:
    torch = pytest.importorskip("torch")
    logps = [-0.5, -0.25]
    forms = [logps, tuple(logps), np.array(logps), np.array(logps, np.float32), torch.tensor(logps)]
    tables = [encode(to_table([row(1, logps=form)], 4)).to_pybytes() for form in forms]
    assert len(set(tables)) == 1


def test_an_unknown_logp_is_nan(tmp_path: Path) -> None:
    (read,) = written(tmp_path, row(logps=[None, -0.5], entropies=None))
    assert np.isnan(read["logps"][0])  # type: ignore[index]
    assert read["logps"][1] == -0.5  # type: ignore[index]
    assert read["entropies"] is None


def test_empty_completions(tmp_path: Path) -> None:
    empty = row(completion="", completion_tokens=[], logps=[], entropies=[])
    first, second, third = written(tmp_path, empty, row(1), empty)
    assert (first["completion_tokens"], second["completion_tokens"], third["logps"]) == ([], [21, 2], [])


def test_rewards_that_only_some_rows_have(tmp_path: Path) -> None:
    first, second = written(tmp_path, row(0), row(1, rewards={"mod.fn": 2.0}, reward_kinds={"mod.fn": "score"}))
    assert (first["reward/right"], first["reward/mod.fn"]) == (1.0, None)
    assert (second["reward/right"], second["reward/mod.fn"], second["reward_kind/short"]) == (None, 2.0, None)


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    bad = "a\ud800b ä 🎲"
    chat = [{"role": "user", "content": bad}]
    for folder, prompt in (("text", bad), ("chat", chat)):
        (read,) = written(
            tmp_path / folder,
            row(prompt=prompt, prompt_id=prompt_id(prompt), completion=bad, extra={bad: bad}, rewards={bad: 1.0}),
        )
        assert read["completion"] == "a?b ä 🎲"
        assert "a?b ä 🎲" in str(read["prompt"])
        assert json.loads(str(read["extra"])) == {"a?b ä 🎲": "a?b ä 🎲"}
        assert read["reward/a?b ä 🎲"] == 1.0


def test_prompt_ids_are_stable() -> None:
    assert prompt_id("2+2=") == "8ef82285d4dc1c2d"
    assert prompt_id(CHAT) == prompt_id([{"content": "2+2?", "role": "user"}]) != prompt_id("2+2?")
    (read,) = to_table([row(prompt=CHAT)], 0)["prompt"].to_pylist()
    assert prompt_id(CHAT) == blake2b(read.encode(), digest_size=8).hexdigest(), "it is the hash of what is stored"


SCRIPT = """
import sys
from hashlib import sha256
from gruppo.runs.rollouts import encode, to_table
from tests.runs.records import row
rows = [row(i, extra={"tags": {"b", "a", "c" * i}, "thing": object()}) for i in range(50)]
print(sha256(encode(to_table(rows, 7))).hexdigest())
"""


def test_equal_rows_are_equal_bytes_in_every_process() -> None:
    """Also where hashes, and with them the order of sets, and addresses differ."""

    def digest(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        ).stdout

    first = digest("1")
    assert first == digest("2")
    assert len(first.strip()) == len(sha256().hexdigest())


def test_two_runs_leave_equal_files(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        written(tmp_path / folder, row(1), row(2, extra={"a": 0.1}))
    assert files(tmp_path / "a" / "rollouts") == files(tmp_path / "b" / "rollouts") != {}
