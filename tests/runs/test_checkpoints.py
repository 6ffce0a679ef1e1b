"""Checkpoints: whole or not there, after a kill at every moment."""

import errno
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gruppo.errors import CheckpointError
from gruppo.runs import manifests
from gruppo.runs.checkpoints import (
    MANIFEST,
    Choice,
    checkpoints,
    clean_leftovers,
    differences,
    discard,
    is_disk_full,
    manifest,
    newest_good,
    problems,
    publish,
    rotate,
    stage,
)
from gruppo.runs.manifests import FileEntry
from tests.runs.killing import Interrupted, every_kill, interrupt, killed_at
from tests.runs.saving import cut, fill, flip, mark, names, save

# ---- saving


def test_a_published_checkpoint_has_its_name_its_files_and_a_manifest(tmp_path):
    path = save(tmp_path, 5, run_id="abc", rates=(0.1, 0.2))
    assert path == tmp_path / "checkpoint-5"
    assert names(tmp_path) == ["checkpoint-5"]
    content = manifest(path)
    assert content is not None
    assert content.about == {"step": 5, "run_id": "abc", "rates": [0.1, 0.2]}
    assert set(content.files) == {"model.safetensors", "trainer_state.json", "rank_0/state.pt", "empty"}
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # the SHA-256 of nothing
    assert content.files["empty"] == FileEntry(0, empty)
    assert json.loads((path / MANIFEST).read_text())["format"] == 1
    assert problems(path) == []


def test_all_of_it_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    staged = stage(tmp_path, "checkpoint-5")
    fill(staged, "new")
    log: list[object] = []
    fsync, rename = os.fsync, os.rename

    def logged_sync(handle: int) -> None:
        log.append(os.fstat(handle).st_ino)
        fsync(handle)

    def logged_rename(source: Path, target: Path) -> None:
        log.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_sync)
    monkeypatch.setattr(os, "rename", logged_rename)
    path = publish(staged, {})
    before, after = log[: log.index("rename")], log[log.index("rename") :]
    for entry in [path, *path.rglob("*")]:
        assert entry.stat().st_ino in before, entry
    assert tmp_path.stat().st_ino in after


def test_staging_starts_empty_and_can_be_given_up(tmp_path):
    (stage(tmp_path, "checkpoint-5") / "half").write_bytes(b"x")
    staged = stage(tmp_path, "checkpoint-5")
    assert list(staged.iterdir()) == []
    discard(staged)
    assert names(tmp_path) == []


def test_staging_again_does_not_lose_what_was_complete(tmp_path, monkeypatch):
    staged = stage(tmp_path, "checkpoint-5")
    fill(staged, "new")
    manifests.write(staged, manifests.describe(staged, {}))
    stage(tmp_path, "checkpoint-5")
    assert mark(tmp_path / "checkpoint-5") == "new"


def test_what_cannot_become_a_checkpoint(tmp_path):
    for name in ("final", "checkpoint-", "checkpoint-1/../..", "..", ""):
        with pytest.raises(CheckpointError, match="checkpoint-N"):
            stage(tmp_path, name)
    with pytest.raises(CheckpointError, match="is empty"):
        publish(stage(tmp_path, "checkpoint-5"), {})
    staged = stage(tmp_path, "checkpoint-5")
    (staged / "link").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="a link or a device"):
        publish(staged, {})
    assert checkpoints(tmp_path) == []


def test_a_second_save_of_a_step_replaces_the_first(tmp_path):
    save(tmp_path, 5, "old")
    assert mark(save(tmp_path, 5, "new")) == "new"
    assert names(tmp_path) == ["checkpoint-5"]


def test_a_save_that_failed_can_be_published_again(tmp_path, monkeypatch):
    staged = stage(tmp_path, "checkpoint-5")
    fill(staged, "new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(OSError, match="No space"):
            publish(staged, {"attempt": 1})
    path = publish(staged, {"attempt": 2})
    assert problems(path) == []
    assert manifest(path).about == {"attempt": 2}
    assert MANIFEST not in manifest(path).files


def test_a_replacement_that_fails_leaves_the_old_one_in_place(tmp_path, monkeypatch):
    save(tmp_path, 5, "old")
    staged = stage(tmp_path, "checkpoint-5")
    fill(staged, "new")
    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda source, target: full() if source == staged else rename(source, target))
        with pytest.raises(OSError, match="No space"):
            publish(staged, {})
    discard(staged)
    assert clean_leftovers(tmp_path) == []
    assert mark(tmp_path / "checkpoint-5") == "old"


def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- choosing


def test_checkpoints_come_by_step_the_highest_first(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-x", "checkpoint-1.bak", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-10", "checkpoint-9"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_the_newest_good_one_is_chosen_and_the_others_say_why_not(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step)
    cut(tmp_path / "checkpoint-10" / "model.safetensors")
    flip(tmp_path / "checkpoint-2" / "model.safetensors")
    choice = newest_good(tmp_path)
    assert choice.path == tmp_path / "checkpoint-1"
    assert [path.name for path, _ in choice.rejected] == ["checkpoint-10", "checkpoint-2"]
    assert "was cut off" in choice.rejected[0][1][0]
    assert "has changed" in choice.rejected[1][1][0]


def test_nothing_good_is_no_choice(tmp_path):
    assert newest_good(tmp_path) == Choice(None, [])
    Path.unlink(save(tmp_path, 1) / "model.safetensors")
    assert newest_good(tmp_path).path is None


def test_checkpoints_of_another_run_are_not_chosen(tmp_path):
    plain = tmp_path / "checkpoint-3"
    plain.mkdir()
    (plain / "trainer_state.json").write_text("{}")
    (plain / "pytorch_model.bin").write_bytes(b"x")
    save(tmp_path, 4, run_id="mine")
    save(tmp_path, 6, run_id="other")
    choice = newest_good(tmp_path, run_id="mine")
    assert choice.path == tmp_path / "checkpoint-4"
    assert choice.rejected == [(tmp_path / "checkpoint-6", ["it belongs to another run (other); this run is mine"])]
    assert newest_good(tmp_path).path == tmp_path / "checkpoint-6"
    assert newest_good(tmp_path).path is not None
    assert "no manifest" in dict(newest_good(tmp_path, run_id="third").rejected)[plain][0]


# ---- removing


@pytest.mark.parametrize(
    ("keep", "spare", "left"),
    [
        (None, [], [1, 2, 9, 10]),
        (0, [], [1, 2, 9, 10]),
        (5, [], [1, 2, 9, 10]),
        (3, [], [2, 9, 10]),
        (1, [], [10]),
        (2, [1], [1, 10]),
        (1, [1, 9], [1, 9, 10]),
        (3, [1], [1, 9, 10]),
    ],
)
def test_the_oldest_go_first(tmp_path, keep, spare, left):
    for step in (1, 2, 9, 10):
        save(tmp_path, step)
    removed = rotate(tmp_path, keep, [tmp_path / f"checkpoint-{step}" for step in spare])
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in left)
    gone = sorted({1, 2, 9, 10} - set(left))
    assert removed == [tmp_path / f"checkpoint-{step}" for step in gone]


def test_after_a_resume_from_an_older_one_the_last_save_stays(tmp_path):
    for step in (5, 10, 6):
        save(tmp_path, step)
    old = (tmp_path / "checkpoint-10" / MANIFEST).stat().st_mtime - 100
    for step in (5, 10):
        os.utime(tmp_path / f"checkpoint-{step}" / MANIFEST, (old, old))
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-6"]


def test_the_newest_that_looks_good_stays(tmp_path):
    for step in (5, 6, 10):
        save(tmp_path, step)
    cut(tmp_path / "checkpoint-10" / "model.safetensors")
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-6"]


def test_a_linked_checkpoint_is_not_ours_to_remove(tmp_path):
    first = save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    shutil.move(first, tmp_path / "precious")
    first.symlink_to(tmp_path / "precious")
    rotate(tmp_path / "run", 1)
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    assert problems(tmp_path / "precious") == []


@pytest.mark.parametrize("left", [".saving-checkpoint-1", ".deleting-checkpoint-1"])
def test_a_link_is_not_taken_for_what_a_kill_left(tmp_path, left):
    complete = save(tmp_path / "theirs", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / left).symlink_to(complete)
    clean_leftovers(tmp_path / "run")
    assert names(tmp_path / "run") == []
    assert problems(complete) == []


def test_a_checkpoint_with_a_link_that_leads_out_is_not_chosen(tmp_path):
    save(tmp_path, 1)
    newer = save(tmp_path, 2)
    (tmp_path / "secret").write_text("{}")
    (newer / "added.json").symlink_to(tmp_path / "secret")
    choice = newest_good(tmp_path)
    assert choice.path == tmp_path / "checkpoint-1"
    assert [path for path, _ in choice.rejected] == [newer]


def test_what_cannot_be_removed_now_is_removed_at_the_next_start(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save(tmp_path, step)

    def busy(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        rotate(tmp_path, 1)
    assert "could not be removed" in caplog.text
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    assert clean_leftovers(tmp_path) == ["The removal of checkpoint-1 was interrupted: it was completed."]
    assert names(tmp_path) == ["checkpoint-2"]


# ---- killed, at every moment


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Path]:
    """A new run folder each time, with the checkpoints 1 and 2."""
    number = itertools.count()

    def prepare() -> Path:
        run = tmp_path / str(next(number))
        save(run, 1, "old")
        save(run, 2, "old")
        return run

    return prepare


def all_good(run: Path) -> bool:
    return all(problems(path) == [] for path in checkpoints(run))


def tidy(run: Path) -> list[str]:
    """After a kill: what has a real name is good, before and after the leftovers are dealt with."""
    assert all_good(run)
    said = clean_leftovers(run)
    assert all_good(run)
    assert not [name for name in names(run) if name.startswith(".")]
    assert clean_leftovers(run) == [], "nothing is left to do"
    return said


def test_killed_while_a_new_checkpoint_is_saved(fresh):
    ends = set()
    for run, killed in every_kill(fresh, lambda run: save(run, 3)):
        said = tidy(run)
        assert names(run)[:2] == ["checkpoint-1", "checkpoint-2"]
        ends.add((killed, len(names(run)), bool(said)))
    assert ends >= {(True, 2, True), (True, 3, True), (False, 3, False)}, "undone, finished, and not killed"


def test_killed_while_a_checkpoint_is_replaced(fresh):
    marks = set()
    for run, _ in every_kill(fresh, lambda run: save(run, 2, "new")):
        tidy(run)
        assert names(run) == ["checkpoint-1", "checkpoint-2"], "one or the other, never none"
        marks.add(mark(run / "checkpoint-2"))
    assert marks == {"old", "new"}


def test_killed_while_old_ones_are_removed(fresh):
    left = set()
    for run, _ in every_kill(fresh, lambda run: rotate(run, 1)):
        tidy(run)
        assert "checkpoint-2" in names(run)
        left.add(len(names(run)))
    assert left == {1, 2}


@pytest.mark.slow
def test_killed_while_the_leftovers_are_dealt_with(fresh):
    """Every kill of a replacement, and after each every kill of the repair."""
    moments = itertools.count()
    for moment in moments:
        first = fresh()
        if not killed_at(moment, lambda run=first: save(run, 2, "new")):
            break
        for second in itertools.count():
            run = first.with_name(f"{first.name}-{second}")
            shutil.copytree(first, run)
            killed = killed_at(second, lambda run=run: clean_leftovers(run))
            tidy(run)
            assert names(run) == ["checkpoint-1", "checkpoint-2"]
            if not killed:
                break


@pytest.mark.parametrize("work", [lambda run: save(run, 2, "new"), lambda run: rotate(run, 1)])
def test_an_error_at_any_moment_leaves_what_a_kill_leaves(fresh, work):
    def fail() -> None:
        raise Interrupted

    for moment in itertools.count():
        run = fresh()
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, moment, fail)
            try:
                work(run)
            except Interrupted:
                pass
            else:
                break
        tidy(run)
        assert "checkpoint-2" in names(run)
    assert moment > 4


def aside(run: Path) -> tuple[Path, Path]:
    """Between the two renames: checkpoint-2 has been moved aside, and the one to replace it waits."""
    staged = stage(run, "checkpoint-2")
    fill(staged, "new")
    manifests.write(staged, manifests.describe(staged, {}))
    old = run / ".deleting-checkpoint-2"
    os.rename(run / "checkpoint-2", old)
    return staged, old


def test_between_the_renames_the_complete_one_goes_into_place(fresh):
    run = fresh()
    aside(run)
    assert tidy(run) == ["checkpoint-2 had been saved completely, but not renamed yet: it has its final name now."]
    assert mark(run / "checkpoint-2") == "new"


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_between_the_renames_the_old_one_comes_back_if_the_new_one_is_damaged(fresh, damage):
    run = fresh()
    staged, _ = aside(run)
    damage(staged / "model.safetensors")
    assert len(tidy(run)) == 2
    assert mark(run / "checkpoint-2") == "old"


def test_a_damaged_one_does_not_come_back(fresh):
    run = fresh()
    staged, old = aside(run)
    cut(staged / "model.safetensors")
    cut(old / "model.safetensors")
    tidy(run)
    assert names(run) == ["checkpoint-1"]


def test_strange_names_are_left_alone(tmp_path):
    for name in (".saving-", ".saving-..", ".deleting-config.yaml", ".saving-.deleting-checkpoint-1"):
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    assert clean_leftovers(tmp_path) == []
    assert names(tmp_path) == before
    assert clean_leftovers(tmp_path / "nowhere") == []


# ---- full disks

# A device on which every write fails as on a full disk. Only opened files are written to: a library that replaces the
# file by name would, for root, replace the device.
FULL_DEVICE = Path("/dev/full")
needs_full_device = pytest.mark.skipif(
    not (FULL_DEVICE.exists() and stat.S_ISCHR(FULL_DEVICE.stat().st_mode)), reason="there is no /dev/full"
)


def caught(work: Callable[[], object]) -> BaseException:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


@needs_full_device
def test_a_write_to_a_full_device_is_a_full_disk(tmp_path):
    def write() -> None:
        with open(FULL_DEVICE, "wb") as file:
            file.write(b"x")

    def torch_write() -> None:
        with open(FULL_DEVICE, "wb", buffering=0) as file:
            torch.save(torch.zeros(100_000), file)

    assert is_disk_full(caught(write))
    assert is_disk_full(caught(torch_write))


def test_a_full_disk_is_found_anywhere_behind_an_error():
    cause = OSError(errno.EDQUOT, "Disk quota exceeded")
    outer = RuntimeError("could not save")
    outer.__cause__ = ValueError("inner")
    outer.__cause__.__context__ = cause
    cause.__context__ = outer  # a circle
    assert is_disk_full(outer)
    assert is_disk_full(ExceptionGroup("several", [ValueError("a"), OSError(errno.ENOSPC, "full")]))
    assert is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(OSError(errno.EIO, "Input/output error"))
    assert not is_disk_full(ValueError("full of mistakes"))


def test_a_lost_write_with_room_on_the_disk_is_another_error(tmp_path):
    error = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    assert not is_disk_full(error, tmp_path)
    assert not is_disk_full(error), "nobody knows"
    assert list(tmp_path.iterdir()) == []


ON_A_TINY_DISK = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from gruppo.runs.checkpoints import checkpoints, clean_leftovers, discard, is_disk_full, problems, publish, stage

run = Path(sys.argv[1])
staged = stage(run, "checkpoint-1")
(staged / "small").write_bytes(b"x" * 1000)
first = publish(staged, {})

def fails(step, write):
    staged = stage(run, f"checkpoint-{step}")
    try:
        write(staged)
        publish(staged, {})
    except Exception as error:
        assert is_disk_full(error, run), repr(error)
    else:
        raise AssertionError("there was room")
    discard(staged)

large = torch.zeros(1_000_000)
fails(2, lambda staged: torch.save(large, staged / "optimizer.pt"))
fails(3, lambda staged: save_file({"a": large}, staged / "model.safetensors"))
fails(4, lambda staged: (staged / "state").write_bytes(bytes(4_000_000)))
assert checkpoints(run) == [first] and problems(first) == [] and clean_leftovers(run) == []
"""


def test_a_disk_that_is_really_full(tmp_path):
    """On a file system of one megabyte, mounted where only the child sees it."""
    private = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0"'
    if shutil.which("unshare") is None or subprocess.run([*private, "sh", "-c", mount, tmp_path]).returncode:
        pytest.skip("nothing can be mounted here")
    script = f'{mount} && exec "$1" -c "$2" "$0"'
    done = subprocess.run(
        [*private, "sh", "-c", script, tmp_path, sys.executable, ON_A_TINY_DISK], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# ---- settings


@pytest.mark.parametrize(
    ("saved", "now", "sentences"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": [1, 2]}, {"a": (1, 2)}, []),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": 0.1}, {"a": 0.1 + 1e-18}, []),  # the same float
        ({"a": 0.3}, {"a": 0.1 + 0.2}, ["a: 0.3 in the checkpoint, 0.30000000000000004 now"]),
        ({"rate": 1e-06}, {"rate": 2e-06}, ["rate: 1e-06 in the checkpoint, 2e-06 now"]),
        (
            {"b": 1, "a": "x"},
            {"b": 2, "a": "y"},
            ["a: 'x' in the checkpoint, 'y' now", "b: 1 in the checkpoint, 2 now"],
        ),
        ({"a": 1}, {}, ["a: 1 in the checkpoint, absent now"]),
        ({}, {"a": None}, ["a: absent in the checkpoint, None now"]),
        ({"a": "absent"}, {}, ["a: 'absent' in the checkpoint, absent now"]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ["a.b.c: 1 in the checkpoint, 2 now"]),
        ({"a": {}}, {"a": {"b": 1}}, ["a: {} in the checkpoint, absent now", "a.b: absent in the checkpoint, 1 now"]),
        ({"free": 1, "deep": {"x": 1}, "deeper": 1}, {"free": 2, "deep": {"x": 2}, "deeper": 1}, []),
        ({"deeper": 1}, {"deeper": 2}, ["deeper: 1 in the checkpoint, 2 now"]),
    ],
)
def test_settings_that_differ_are_named(saved, now, sentences):
    assert differences(saved, now, ignore=["free", "deep"]) == sentences
