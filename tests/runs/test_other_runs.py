"""Nothing is lost: what another run left in the folder, and what came after a checkpoint that is gone back to."""

import errno
import itertools
import json
import os
from pathlib import Path

import pytest

from gruppo.errors import DataError
from gruppo.runs import Run, RunRecorder
from gruppo.runs.checkpoints import (
    checkpoints,
    clean_leftovers,
    newest_good,
    problems,
    publish,
    put_aside,
    rotate,
    stage,
)
from tests.runs.killing import every_kill
from tests.runs.records import CONFIG, FullDisk, files, row, train
from tests.runs.saving import cut, fill, mark, names, save

ABOUT: dict[str, dict[str, object]] = {"config": CONFIG, "environment": {}}


# ---- checkpoints of another run


def kept(run: Path) -> list[Path]:
    """The checkpoints in earlier/."""
    return sorted(run.glob("earlier/*/checkpoint-*"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_checkpoints_of_the_run_are_counted_and_removed(tmp_path: Path) -> None:
    plain = tmp_path / "checkpoint-1"
    plain.mkdir()
    save(tmp_path, 2, "theirs", run_id="theirs")
    save(tmp_path, 90, "theirs", run_id="theirs")
    before = tree(tmp_path)
    for step in (3, 4, 5):
        save(tmp_path, step, run_id="mine")
    assert rotate(tmp_path, 3, run_id="mine") == []
    assert rotate(tmp_path, 2, run_id="mine") == [tmp_path / "checkpoint-3"]
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (1, 2, 4, 5, 90)]
    assert {name: content for name, content in tree(tmp_path).items() if name in before} == before


@pytest.mark.parametrize("owner", ["theirs", "", None])
def test_a_checkpoint_of_another_run_makes_way_and_is_kept(tmp_path: Path, owner: str | None) -> None:
    before = tree(save(tmp_path, 5, "old", run_id=owner))
    assert mark(save(tmp_path, 5, "new", run_id="mine")) == "new"
    assert names(tmp_path) == ["checkpoint-5", "earlier"]
    assert tree(tmp_path / "earlier" / "0001" / "checkpoint-5") == before
    save(tmp_path, 5, "newer", run_id="mine")
    assert len(kept(tmp_path)) == 1, "its own is replaced"
    assert newest_good(tmp_path).path == tmp_path / "checkpoint-5"


def test_one_whose_manifest_is_damaged_is_kept(tmp_path: Path) -> None:
    cut(save(tmp_path, 5, "old", run_id="mine") / "manifest.json")
    save(tmp_path, 5, "new", run_id="mine")
    assert [mark(path) for path in kept(tmp_path)] == ["old"]


def test_killed_while_another_runs_checkpoint_makes_way(tmp_path: Path) -> None:
    number = itertools.count()

    def prepare() -> Path:
        run = tmp_path / str(next(number))
        save(run, 2, "old", run_id="theirs")
        return run

    ends = set()
    for run, _ in every_kill(prepare, lambda run: save(run, 2, "new", run_id="mine")):
        clean_leftovers(run)
        assert clean_leftovers(run) == []
        everything = [*checkpoints(run), *kept(run)]
        assert all(problems(path) == [] for path in everything)
        assert not [name for name in names(run) if name.startswith(".")]
        ends.add(tuple(mark(path) for path in everything))
    assert ends == {("old",), ("new", "old")}


def test_if_the_new_one_fails_the_other_runs_checkpoint_is_back(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 5, "old", run_id="theirs")
    staged = stage(tmp_path, "checkpoint-5")
    fill(staged, "new")
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if source == staged:
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="No space"):
            publish(staged, {"run_id": "mine"})
    assert (mark(tmp_path / "checkpoint-5"), kept(tmp_path)) == ("old", [])


def test_nothing_is_moved_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    run = tmp_path / "run"
    save(run, 5, "old", run_id="theirs")
    (run / "earlier").symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="is a link"):
        save(run, 5, "new", run_id="mine")
    assert (mark(run / "checkpoint-5"), names(tmp_path / "outside")) == ("old", [])


# ---- going back


def run_of_six(folder: Path) -> dict[str, object]:
    """Six updates with checkpoints after 2, 4 and 6, two ranks; returns the position after update 2."""
    zero, one = (RunRecorder(folder, rank=rank, world=2) for rank in range(2))
    one.join(zero.begin(**ABOUT))
    for update in range(1, 7):
        train(zero, update, update)
        one.rollouts([row(update)])
        if update % 2 == 0:
            one.sync()
            position = zero.sync()
            save(folder, update, run_id=zero.run_id, position=position)
        if update == 2:
            second = position
    for recorder in (zero, one):
        recorder.close()
    return second


def test_what_came_after_an_older_checkpoint_is_kept(tmp_path: Path) -> None:
    position = run_of_six(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    tables = files(tmp_path / "rollouts")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 7, "ki')

    zero, one = (RunRecorder(tmp_path, rank=rank, world=2) for rank in range(2))
    for recorder in (zero, one):
        recorder.resume(position=position, checkpoint=tmp_path / "checkpoint-2", branch=True, **ABOUT)
    one.join(str(zero.run_id))
    archive = tmp_path / "earlier" / "0001"
    assert (zero.archive, one.archive) == (archive, None)
    put_aside([tmp_path / "checkpoint-6", tmp_path / "checkpoint-4"], archive)

    assert names(archive) == ["checkpoint-4", "checkpoint-6", "metrics.jsonl", "note.json", "rollouts"]
    assert (archive / "metrics.jsonl").read_bytes() == b"".join(lines[2:])
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:2])
    assert files(archive / "rollouts") == {name: table for name, table in tables.items() if name >= "00000002"}
    assert files(archive / "rollouts") | files(tmp_path / "rollouts") == tables
    assert len(files(archive / "rollouts")) == 8
    note = json.loads((archive / "note.json").read_text())
    assert (note["run_id"], note["checkpoint"]) == (zero.run_id, "checkpoint-2")
    assert "older checkpoint" in note["why"]
    event = Run(tmp_path).events()[-1]
    assert (event["event"], event["record"], event["archive"]) == ("resumed", "continued", "earlier/0001")
    assert (event["checkpoint"], event["metrics_lines_cut"], event["rollout_files_cut"]) == ("checkpoint-2", 4, 8)
    assert newest_good(tmp_path, run_id=zero.run_id).path == tmp_path / "checkpoint-2"
    assert all(problems(archive / f"checkpoint-{step}") == [] for step in (4, 6))

    train(zero, 3, 3)
    assert [line["update"] for line in Run(tmp_path).metrics()] == [1, 2, 3]
    zero.close()
    RunRecorder(tmp_path).resume(position=position, checkpoint=tmp_path / "checkpoint-2", branch=True, **ABOUT)
    assert len((tmp_path / "earlier" / "0002" / "metrics.jsonl").read_bytes().splitlines()) == 1


def test_without_a_branch_nothing_is_kept(tmp_path: Path) -> None:
    position = run_of_six(tmp_path)
    recorder = RunRecorder(tmp_path)
    recorder.resume(position=position, **ABOUT)
    assert (recorder.archive, (tmp_path / "earlier").exists()) == (None, False)
    assert Run(tmp_path).events()[-1]["archive"] is None


def test_killed_while_what_came_after_is_put_aside(tmp_path: Path) -> None:
    """Whatever the moment, every line and every table is somewhere."""
    number = itertools.count()
    positions = {}

    def prepare() -> Path:
        run = tmp_path / str(next(number))
        positions[run] = run_of_six(run)
        return run

    def go_back(run: Path) -> None:
        recorder = RunRecorder(run)
        recorder.resume(position=positions[run], checkpoint=run / "checkpoint-2", branch=True, **ABOUT)
        put_aside([run / "checkpoint-6", run / "checkpoint-4"], recorder.archive)  # type: ignore[arg-type]

    for run, killed in every_kill(prepare, go_back):
        clean_leftovers(run)
        written = [json.loads(line) for path in run.rglob("metrics.jsonl") for line in path.open()]
        assert {line["update"] for line in written} == {1, 2, 3, 4, 5, 6}
        assert len({path.name for path in run.rglob("*.parquet")}) == 12
        assert {path.name for path in run.rglob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 4, 6)}
        if not killed:
            assert len(written) == 6


@pytest.mark.parametrize("keeps", [True, False])
def test_there_is_a_place_for_checkpoints_even_if_no_record_is_cut(tmp_path: Path, keeps: bool) -> None:
    recorder = RunRecorder(tmp_path, keeps=keeps)
    recorder.begin(**ABOUT)
    position = recorder.sync()
    recorder.close()
    recorder.resume(position=position, branch=True, **ABOUT)
    assert recorder.archive == tmp_path / "earlier" / "0001"
    assert names(recorder.archive) == ["note.json"]
    RunRecorder(tmp_path / "empty", keeps=keeps).resume(position=position, branch=True, **ABOUT)
    assert names(tmp_path / "empty" / "earlier" / "0001") == ["note.json"]


def test_a_new_record_and_a_branch_share_their_place(tmp_path: Path) -> None:
    run_of_six(tmp_path)
    recorder = RunRecorder(tmp_path)
    recorder.resume(position=None, checkpoint=tmp_path / "checkpoint-2", branch=True, **ABOUT)
    assert recorder.archive == tmp_path / "earlier" / "0001"
    assert len(Run(recorder.archive).metrics()) == 6
    assert (recorder.archive / "note.json").exists()
    assert Run(tmp_path).events()[-1]["archive"] == "earlier/0001"


def test_without_room_to_put_it_aside_nothing_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    position = run_of_six(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes(), files(tmp_path / "rollouts")
    with monkeypatch.context() as patch:
        FullDisk(patch, 0, errno.ENOSPC)
        with pytest.raises(OSError, match="full"):
            RunRecorder(tmp_path).resume(position=position, branch=True, **ABOUT)
    assert ((tmp_path / "metrics.jsonl").read_bytes(), files(tmp_path / "rollouts")) == before
