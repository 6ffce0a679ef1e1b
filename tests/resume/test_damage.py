"""Checkpoints that are damaged, plain or of other settings; folders that are locked; disks that are full."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.resume.harness import Job, Outcome, assert_same, run, start
from tests.resume.moments import Stop
from tests.resume.test_kills import Straight

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def once_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after its third checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    run("grpo", folder, stop=Stop("optimizer", 7))
    checkpoints = sorted(path.name for path in (folder / "run").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-4", "checkpoint-6"]
    return folder / "run"


@pytest.fixture
def killed(once_killed: Path, tmp_path: Path) -> Path:
    """A copy of its folder, as tmp_path/run."""
    return Path(shutil.copytree(once_killed, tmp_path / "run"))


# ---- damage


def truncate(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def flip_a_bit(checkpoint: Path) -> None:
    optimizer = checkpoint / "optimizer.pt"
    data = bytearray(optimizer.read_bytes())
    data[len(data) // 2] ^= 1
    optimizer.write_bytes(data)


def remove_a_file(checkpoint: Path) -> None:
    (checkpoint / "scheduler.pt").unlink()


def empty_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(b"")


def remove_the_manifest(checkpoint: Path) -> None:
    """It is not a plain checkpoint for that: it has files that only ours have."""
    (checkpoint / "manifest.json").unlink()


def leave_half_of_it(checkpoint: Path) -> None:
    """As a program that was copying the folder leaves it."""
    for path in sorted(path for path in checkpoint.iterdir() if path.is_file())[::2]:
        path.unlink()


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, remove_a_file, empty_the_manifest, remove_the_manifest, leave_half_of_it]
)
def test_a_damaged_checkpoint_is_passed_over(
    damage: Callable[[Path], None], straight: Straight, killed: Path, tmp_path: Path
) -> None:
    damage(killed / "checkpoint-6")
    resumed = run("grpo", tmp_path, resume=True).checked()
    assert "checkpoint-6" in resumed.log, "it says which one was passed over"
    assert_same(straight("grpo"), resumed)


def test_the_damaged_one_by_name_is_refused(killed: Path, tmp_path: Path) -> None:
    checkpoint = killed / "checkpoint-6"
    flip_a_bit(checkpoint)
    refused = run("grpo", tmp_path, resume=True, checkpoint=checkpoint)
    assert refused.exits == (1,)
    assert "CheckpointError" in refused.log
    assert "optimizer.pt" in refused.log


def test_no_good_checkpoint_is_left(killed: Path, tmp_path: Path) -> None:
    for number in (4, 6):
        flip_a_bit(killed / f"checkpoint-{number}")
    refused = run("grpo", tmp_path, resume=True)
    assert refused.exits == (1,)
    assert "CheckpointError" in refused.log
    assert "checkpoint-4" in refused.log
    assert "checkpoint-6" in refused.log


PLAIN = {"config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt"}
PLAIN |= {"tokenizer.json", "tokenizer_config.json", "trainer_state.json", "training_args.bin"}


@pytest.mark.parametrize("named", [False, True], ids=["found", "named"])
def test_a_plain_checkpoint_loads(named: bool, killed: Path, tmp_path: Path) -> None:
    """What transformers.Trainer itself writes, and nothing else."""
    folder = tmp_path / "elsewhere"
    checkpoint = Path(shutil.copytree(killed / "checkpoint-6", folder / "run" / "checkpoint-6"))
    for path in checkpoint.iterdir():
        if path.name not in PLAIN:
            path.unlink()
    resumed = run("grpo", folder, resume=True, checkpoint=checkpoint if named else None).checked()
    assert resumed.evidence["process 0"]["updates"] == 7
    assert resumed.reached[0]["optimizer"] == [6], "one update was left to make"


# ---- other settings


def test_another_setting_is_named_and_refused(killed: Path, tmp_path: Path) -> None:
    changed = {"learning_rate": 2e-3}
    refused = run("grpo", tmp_path, resume=True, changes=changed)
    assert refused.exits == (1,)
    assert "CheckpointError" in refused.log
    assert "learning_rate: 0.001 in the checkpoint, 0.002 now" in refused.log
    allowed = {**changed, "resume_allow_changes": ["learning_rate"]}
    resumed = run("grpo", tmp_path, resume=True, changes=allowed).checked()
    assert resumed.evidence["process 0"]["updates"] == 7


# ---- locks


def state_of(process: int) -> str:
    """One letter: R runs, S sleeps, T is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_two_runs_in_one_folder(straight: Straight, tmp_path: Path) -> None:
    first = start(Job("grpo", str(tmp_path), stop=Stop("rollout", 7, signal.SIGSTOP)))
    deadline = time.monotonic() + 60
    while state_of(first.pid) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    refused = run("grpo", tmp_path / "second", changes={"folder": tmp_path / "run"})
    assert refused.exits == (1,)
    assert "RunLockedError" in refused.log
    assert str(first.pid) in refused.log, "it names the owner"
    os.kill(first.pid, signal.SIGCONT)
    first.join(60)
    assert first.exitcode == 0
    assert_same(straight("grpo"), Outcome.of([Job("grpo", str(tmp_path))], (0,)))


def test_the_lock_of_a_killed_run_is_taken_over(killed: Path, tmp_path: Path) -> None:
    owner = json.loads((killed / "lock").read_text())["pid"]
    resumed = run("grpo", tmp_path, resume=True).checked()
    assert re.search(rf"{owner}\b.* was left by a process that has ended", resumed.log)
    assert not (killed / "lock").exists()


# ---- no room


def test_a_full_disk(straight: Straight, tmp_path: Path) -> None:
    """One save fails; the run goes on, keeps the checkpoint before it, and saves as soon as it can."""
    filled = run("grpo", tmp_path, tricks=("full_disk",)).checked()
    assert "checkpoint-4" in filled.log
    assert_same(straight("grpo"), filled)
    killed = run("grpo", tmp_path / "killed", tricks=("full_disk",), stop=Stop("optimizer", 6))
    names = {path.name for path in killed.folder.glob("checkpoint-*")}
    assert "checkpoint-2" in names, "the last good one"
    assert "checkpoint-5" in names, "tried again after the next update"
    assert_same(straight("grpo"), run("grpo", tmp_path / "killed", resume=True).checked())


# ---- other runs


def test_a_new_run_in_the_folder_of_an_old_one(killed: Path, tmp_path: Path) -> None:
    """Checkpoints that an earlier run left there are not taken for those of the new one, and do not drive them out."""
    anew = {"seed": 7}
    expected = run("grpo", tmp_path / "alone", changes=anew).checked()
    run("grpo", tmp_path, changes=anew, stop=Stop("optimizer", 4))
    assert (killed / "checkpoint-2").exists(), "of the new run"
    resumed = run("grpo", tmp_path, changes=anew, resume=True).checked()
    assert resumed.reached[0]["optimizer"] == [2, 3, 4, 5, 6], "gone on from checkpoint 2"
    assert_same(expected, resumed)
