"""A full disk delays the record and never stops the run."""

import errno
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gruppo.runs import Run, RunRecorder, lines
from gruppo.runs import tables as rollout_files
from gruppo.runs.lines import LineFile
from tests.runs.records import CONFIG, FullDisk, files, row, train


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    recorder = RunRecorder(tmp_path / "run")
    recorder.begin(config=CONFIG, environment={})
    return recorder


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("room", [0, 1, 700])
def test_everything_is_there_when_there_is_room_again(
    recorder: RunRecorder, room: int, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch, room, number)
    train(recorder, 1, 5)
    assert disk.refused >= 5
    assert not [name for name in files(recorder.folder / "rollouts") if name.endswith(".tmp")]
    position = recorder.sync()
    disk.room = 1 << 30
    recorder.metrics(6, {"loss": 1.0})
    run = Run(recorder.folder)
    assert [line["update"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert run.rollouts()["generation"].to_pylist() == [n for n in range(5) for _ in range(2)]
    assert [event["event"] for event in run.events()] == ["started", "disk_full"]
    assert (run.events()[-1]["lines_dropped"], run.events()[-1]["rollouts_dropped"]) == (0, 0)
    assert caplog.text.count("No space on the disk") == 1
    # What waited counts in the position: after a resume from it, the first five updates are there, and no other.
    RunRecorder(recorder.folder).resume(config=CONFIG, environment={}, position=position)
    assert [line["update"] for line in Run(recorder.folder).metrics()] == [1, 2, 3, 4, 5]
    assert Run(recorder.folder).events()[-1]["event"] == "resumed"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_run_begins_on_a_full_disk(
    tmp_path: Path, room: int, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch, room, number)
    recorder = RunRecorder(tmp_path)
    run_id = recorder.begin(config=CONFIG, environment={"gpus": 1})
    recorder.plan({"packed": True})
    recorder.tokenizer("{}")
    train(recorder, 1, 2)
    assert not (tmp_path / "run.json").exists()
    assert list(tmp_path.glob("*.tmp")) == []
    disk.room = 1 << 30
    train(recorder, 3, 3)
    run = Run(tmp_path)
    assert (run.info["run_id"], run.config) == (run_id, CONFIG)
    assert (tmp_path / "tokenizer" / "tokenizer.json").read_text() == "{}"
    (start,) = run.environment["starts"]
    assert (start["gpus"], start["plan"]) == (1, {"packed": True})
    assert [line["update"] for line in run.metrics()] == [1, 2, 3]
    assert [event["event"] for event in run.events()] == ["started", "disk_full"]
    assert caplog.text.count("No space on the disk") == 1


def test_a_run_goes_on_on_a_full_disk(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    train(recorder, 1, 2)
    position = recorder.sync()
    recorder.close()
    disk = FullDisk(monkeypatch, 0, errno.ENOSPC)
    resumed = RunRecorder(recorder.folder)
    resumed.resume(config={**CONFIG, "beta": 0.5}, environment={"second": True}, position=position)
    assert (resumed.run_id, Run(recorder.folder).config) == (position["run_id"], CONFIG), "whole, though old"
    disk.room = 1 << 30
    train(resumed, 3, 3)
    run = Run(recorder.folder)
    assert run.config == {**CONFIG, "beta": 0.5}
    assert [start.get("second") for start in run.environment["starts"]] == [None, True]
    assert [event["event"] for event in run.events()] == ["started", "resumed", "config_changed", "disk_full"]


def test_no_room_for_new_files_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota of files: not even an empty one can be made."""
    real = lines.os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & lines.os.O_CREAT:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real(path, flags, *mode)

    recorder = RunRecorder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(lines.os, "open", refuse)
        recorder.begin(config=CONFIG, environment={})
        train(recorder, 1, 2)
        assert list(tmp_path.iterdir()) == [tmp_path / "rollouts"]
    recorder.close()
    assert [line["update"] for line in Run(tmp_path).metrics()] == [1, 2]
    assert Run(tmp_path).rollouts().num_rows == 4
    assert [event["event"] for event in Run(tmp_path).events()] == ["started", "disk_full"]


def test_files_that_never_found_room_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FullDisk(monkeypatch, 0, errno.ENOSPC)
    recorder = RunRecorder(tmp_path, keeps=False)
    recorder.begin(config=CONFIG, environment={})
    recorder.close()
    assert "run.json could not be written" in caplog.text


def test_a_torn_line_is_completed(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, 10, errno.ENOSPC)
    recorder.metrics(1, {"loss": 1.0})
    recorder.metrics(2, {"loss": 2.0})
    assert (recorder.folder / "metrics.jsonl").read_bytes() == b'{"update":'
    assert Run(recorder.folder).metrics() == []
    disk.room = 3  # torn a second time
    recorder.metrics(3, {"loss": 3.0})
    disk.room = 1 << 20
    recorder.event("more")
    written = [json.loads(line) for line in (recorder.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in written] == [1, 2, 3]


def test_killed_while_the_disk_is_full(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited in memory is lost; resuming says so and goes on with whole lines."""
    recorder.metrics(1, {"loss": 1.0})
    with monkeypatch.context() as patch:
        FullDisk(patch, 20, errno.ENOSPC)
        train(recorder, 2, 3)
        position = recorder.sync()
    resumed = RunRecorder(recorder.folder)
    resumed.resume(config=CONFIG, environment={}, position=position)
    train(resumed, 4, 4)
    assert [line["update"] for line in Run(recorder.folder).metrics()] == [1, 4]
    incomplete = Run(recorder.folder).events()[-1]
    assert incomplete["event"] == "record_incomplete"
    assert "2 files of rollouts, 0 are left" in incomplete["missing"][1]


def test_memory_is_bounded(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_LINES", 3)
    monkeypatch.setattr(rollout_files, "MOST_BYTES", 3 * 7000)
    disk = FullDisk(monkeypatch, 10, errno.ENOSPC)
    for update in range(1, 10):
        recorder.metrics(update, {"loss": 1.0})
    for update in range(1, 10):
        recorder.rollouts([row(update)])
    kept = recorder.sync()["rollout_files"]
    disk.room = 1 << 30
    recorder.event("room")
    run = Run(recorder.folder)
    assert [line["update"] for line in run.metrics()] == [1, 8, 9], "the first was torn, and is kept whole"
    assert 1 <= kept <= 8
    assert run.rollouts()["generation"].to_pylist() == list(range(9 - kept, 9))
    event = run.events()[-1]
    assert (event["event"], event["lines_dropped"], event["rollouts_dropped"]) == ("disk_full", 6, 9 - kept)
    assert recorder.sync()["rollout_files"] == kept


def test_lost_at_the_end_is_told(
    recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FullDisk(monkeypatch, 0, errno.ENOSPC)
    train(recorder, 1, 2)
    recorder.close()
    assert "2 lines, 2 tables of rollouts and 0 of updates are lost" in caplog.text


def test_what_waits_does_not_reach_the_next_run(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        FullDisk(patch, 0, errno.ENOSPC)
        train(recorder, 1, 2)
        recorder.close()
    recorder.begin(config=CONFIG, environment={})
    recorder.begin(config=CONFIG, environment={})
    train(recorder, 7, 7)
    assert [line["update"] for line in Run(recorder.folder).metrics()] == [7]
    assert Run(recorder.folder).rollouts()["update"].to_pylist() == [7, 8]
    assert [event["event"] for event in Run(recorder.folder).events()] == ["started"]
    open_files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert not [path for path in open_files if path.is_relative_to(recorder.folder / "earlier")]


def test_other_errors_raise(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    FullDisk(monkeypatch, 0, errno.EACCES)
    with pytest.raises(PermissionError):
        recorder.metrics(1, {"loss": 1.0})
    with pytest.raises(PermissionError):
        recorder.rollouts([row()])


def test_other_ranks_wait_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RunRecorder(tmp_path, rank=1, world=2)
    recorder.join("abc")
    disk = FullDisk(monkeypatch, 100, errno.ENOSPC)
    recorder.rollouts([row(0)])
    assert files(tmp_path / "rollouts") == {}
    disk.room = 1 << 30
    recorder.rollouts([])
    recorder.sync()
    assert list(files(tmp_path / "rollouts")) == ["00000000-0001.parquet"]


def test_a_device_that_is_always_full() -> None:
    file = LineFile(Path("/dev/full"))
    file.open()
    file.append({"update": 1})
    with pytest.raises(OSError, match="No space left") as caught:
        file.flush()
    assert caught.value.errno == errno.ENOSPC
    assert file.waiting == 1
    file.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_run_begins_on_a_disk_that_is_full(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(1 << 20))
    recorder = RunRecorder(small_disk)
    run_id = recorder.begin(config=CONFIG, environment={})
    train(recorder, 1, 3)
    assert not (small_disk / "run.json").exists()
    (small_disk / "other").unlink()
    recorder.close()
    assert Run(small_disk).info["run_id"] == run_id
    assert [line["update"] for line in Run(small_disk).metrics()] == [1, 2, 3]


def test_a_disk_that_is_full(small_disk: Path) -> None:
    """No imitation: a file system of 1 MiB, filled and emptied by someone else."""
    recorder = RunRecorder(small_disk)
    recorder.begin(config=CONFIG, environment={})
    (small_disk / "other").write_bytes(bytes(900 * 1024))
    for update in range(1, 61):
        train(recorder, update, update)
        recorder.sync()
    assert 0 < Run(small_disk).rollouts().num_rows < 2 * 60
    (small_disk / "other").unlink()
    recorder.close()
    run = Run(small_disk)
    assert [line["update"] for line in run.metrics()] == list(range(1, 61))
    assert run.rollouts()["generation"].to_pylist() == [number for number in range(60) for _ in range(2)]
    assert [event["event"] for event in run.events()] == ["started", "disk_full"]
