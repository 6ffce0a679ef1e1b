"""Reading a run folder: live, damaged, from a newer version, from a stranger."""

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gruppo.errors import DataError
from gruppo.runs import Run, RunRecorder
from gruppo.runs.rollouts import COLUMNS, encode, to_table
from tests.runs.records import CONFIG, row, train, updated


@pytest.fixture
def run(tmp_path: Path) -> Run:
    recorder = RunRecorder(tmp_path / "run")
    recorder.begin(config=CONFIG, environment={"python": "3.12"})
    train(recorder, 1, 3)
    recorder.update(1, updated())
    recorder.metrics(3, {"eval_reward": 0.5}, kind="eval")
    recorder.close()
    return Run(tmp_path / "run")


def test_what_was_recorded(run: Run) -> None:
    assert run.config == CONFIG
    assert run.environment["starts"][0]["python"] == "3.12"
    assert [line["loss"] for line in run.metrics(kind="train")] == [0.125, 0.25, 0.375]
    assert len(run.metrics()) == 4
    assert run.rollouts().num_rows == 6
    assert run.info["run_id"] in repr(run)


def test_a_part_of_the_rollouts(run: Run) -> None:
    part = run.rollouts(columns=["reward/right", "row"], updates=range(2, 4))
    assert part.column_names == ["reward/right", "row"]
    assert part["row"].to_pylist() == [2, 2, 3, 3]
    assert run.rollouts(columns=["row"], split="eval").num_rows == 0
    assert run.rollouts(updates={1}, split="train").num_rows == 1
    with pytest.raises(DataError, match=r"no columns \['rewards'\]"):
        run.rollouts(columns=["rewards"])


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.begin(config=CONFIG, environment={})
    run = Run(tmp_path)
    assert (run.metrics(), run.checkpoints) == ([], [])
    table = run.rollouts(columns=["prompt", "reward"])
    assert (table.num_rows, table.column_names) == (0, ["prompt", "reward"])
    recorder.metrics(1, {"loss": 1.0})
    recorder.rollouts([row()])
    assert (len(run.metrics()), run.rollouts().num_rows) == (1, 1), "live"


def test_a_line_that_is_being_written(run: Run) -> None:
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "loss": 0.')
        file.flush()
        assert len(run.metrics()) == 4
        file.write("5}\n")
    assert run.metrics()[-1] == {"update": 4, "loss": 0.5}


def test_unreadable_parts_are_skipped(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = run.folder / "rollouts"
    whole = (rollouts / "00000001-0000.parquet").read_bytes()
    (rollouts / "00000001-0000.parquet").write_bytes(whole[: len(whole) // 2])
    (rollouts / "00000007-0000.parquet.tmp").write_bytes(whole)
    (rollouts / "notes.parquet").write_bytes(whole)
    pq.write_table(pa.table({"a": [1]}), rollouts / "00000008-0000.parquet")
    strange = to_table([row()], 9)
    strange = strange.set_column(strange.column_names.index("reward"), "reward", pa.array(["high"]))
    (rollouts / "00000009-0000.parquet").write_bytes(encode(strange))
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("[1]\nnonsense\n" + "[" * 100_000 + "\n")
    assert run.rollouts()["generation"].to_pylist() == [0, 0, 2, 2]
    for number in ("00000001", "00000008", "00000009"):
        assert f"{number}-0000.parquet is skipped" in caplog.text
    assert len(run.metrics()) == 4
    assert caplog.text.count("it is not a JSON object") == 3


def test_rewards_that_differ_between_files(run: Run) -> None:
    recorder = RunRecorder(run.folder, rank=1, world=2)
    recorder.join(run.info["run_id"])
    recorder.rollouts([row(rewards={"mod.new": 3.0}, reward_kinds={"mod.new": "score"})])
    table = run.rollouts()
    assert table["reward/mod.new"].to_pylist() == [None, None, 3.0, *[None] * 4]
    assert table["reward/right"].to_pylist() == [1.0, 1.0, None, *[1.0] * 4]
    assert table.column_names.index("reward_kind/mod.new") < table.column_names.index("reward")
    assert run.rollouts(columns=["reward/mod.new"])["reward/mod.new"].null_count == 6


def test_a_newer_format_says_so(run: Run) -> None:
    newer = to_table([row()], 9).replace_schema_metadata({"gruppo.rollouts": "2"})
    (run.folder / "rollouts" / "00000009-0000.parquet").write_bytes(encode(newer))
    with pytest.raises(DataError, match="is 2; this version of gruppo reads formats up to 1"):
        run.rollouts()
    (run.folder / "run.json").write_text('{"format": 7, "run_id": "a"}')
    with pytest.raises(DataError, match="is 7; this version of gruppo reads formats up to 1"):
        Run(run.folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "1"}', '{"format": true}', "[" * 100_000, "\udcff"])
def test_a_folder_that_holds_no_run(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        Run(tmp_path)
    (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError):
        Run(tmp_path)


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "!!python/object/apply:os.mkdir ['{place}']\n", "\x00"])
def test_settings_are_never_executed(run: Run, tmp_path: Path, text: str) -> None:
    place = tmp_path / "executed"
    (run.folder / "config.yaml").write_text(text.replace("{place}", str(place)))
    with pytest.raises(DataError, match=r"config\.yaml"):
        _ = run.config
    assert not place.exists()


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "environment.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("relative", [False, True])
def test_links_out_of_the_folder_are_not_followed(run: Run, tmp_path: Path, name: str, relative: bool) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((run.folder / name).read_bytes())
    (run.folder / name).unlink()
    (run.folder / name).symlink_to("../secret" if relative else secret)
    with pytest.raises(DataError, match="leads out of the folder"):
        _read_everything(run.folder)


def test_links_of_rollouts_and_checkpoints(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = run.folder / "rollouts" / "00000001-0000.parquet"
    table.rename(tmp_path / "outside.parquet")
    table.symlink_to(tmp_path / "outside.parquet")
    (run.folder / "checkpoint-9").symlink_to("/etc")
    (run.folder / "checkpoint-10").mkdir()
    (run.folder / "checkpoint-3").mkdir()
    (run.folder / "checkpoint-x").mkdir()
    (run.folder / "checkpoint-4").write_text("a file")
    assert run.rollouts()["generation"].to_pylist() == [0, 0, 2, 2]
    assert "leads out of the folder" in caplog.text
    assert run.checkpoints == [run.folder / "checkpoint-10", run.folder / "checkpoint-3"]
    (run.folder / "rollouts").rename(tmp_path / "elsewhere")
    (run.folder / "rollouts").symlink_to(tmp_path / "elsewhere")
    assert run.rollouts().num_rows == 0


def test_a_link_within_the_folder_and_to_it(run: Run, tmp_path: Path) -> None:
    (run.folder / "metrics.jsonl").rename(run.folder / "all.jsonl")
    (run.folder / "metrics.jsonl").symlink_to("all.jsonl")
    (tmp_path / "newest").symlink_to(run.folder)
    assert len(Run(tmp_path / "newest").metrics()) == 4


def test_a_pipe_does_not_block(run: Run) -> None:
    (run.folder / "metrics.jsonl").unlink()
    os.mkfifo(run.folder / "metrics.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        run.metrics()


def _read_everything(folder: Path) -> None:
    run = Run(folder)
    json.dumps([run.config, run.environment, run.metrics(), run.events()])


PAGE = Path(__file__).parents[2] / "docs" / "run-folder.md"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
def test_the_examples_of_the_page_run(
    run: Run, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.folder.parent / "runs").mkdir()
    run.folder.rename(run.folder.parent / "runs" / "demo")
    monkeypatch.chdir(run.folder.parent)
    exec(compile(code, PAGE.name, "exec"), {})
    assert "0.375" in capsys.readouterr().out, "the loss of the last update"


def test_the_page_lists_every_column() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in COLUMNS if f"`{name}`" not in page] == []
