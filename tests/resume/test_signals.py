"""A run that is asked to stop saves, says so by its exit code, and can be gone on with."""

import signal
from pathlib import Path

import pytest

from tests.resume.harness import SAVED_AND_LEFT, assert_same, has_checkpoint, run
from tests.resume.moments import Stop
from tests.resume.test_kills import Straight

pytestmark = pytest.mark.medium


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "moment", "count", "number"),
    [
        ("grpo", "scoring", 1, signal.SIGINT),  # before there is anything to lose
        ("grpo", "rollout", 5, signal.SIGTERM),
        ("slices", "scoring", 3, signal.SIGTERM),  # in an update that began with rows of the generation before
        ("grpo", "backward", 3, signal.SIGTERM),
        ("slices", "backward", 3, signal.SIGINT),
        ("grpo", "optimizer", 3, signal.SIGINT),
        ("iterations", "saving", 12, signal.SIGTERM),
        ("ahead", "rollout", 6, signal.SIGTERM),  # the next generation is in flight
        ("ahead", "scoring", 4, signal.SIGINT),
        ("ahead", "backward", 3, signal.SIGTERM),
        ("ahead-iterations", "backward", 4, signal.SIGTERM),
        ("ahead-iterations", "saving", 5, signal.SIGINT),
        ("second-epoch", "rollout", 9, signal.SIGTERM),  # the first of the second epoch
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_stopped_and_resumed(
    case: str, moment: str, count: int, number: signal.Signals, straight: Straight, tmp_path: Path
) -> None:
    stopped = run(case, tmp_path, stop=Stop(moment, count, number))
    assert stopped.exits == (SAVED_AND_LEFT,), stopped.log[-3000:]
    assert has_checkpoint(tmp_path)
    assert_same(straight(case), run(case, tmp_path, resume=True).checked())


def test_both_processes_stop_together(straight: Straight, tmp_path: Path) -> None:
    """Only one of them gets the signal."""
    stopped = run("two-processes", tmp_path, stop=Stop("scoring", 3, signal.SIGTERM, rank=1))
    assert stopped.exits == (SAVED_AND_LEFT, SAVED_AND_LEFT), stopped.log[-3000:]
    assert_same(straight("two-processes"), run("two-processes", tmp_path, resume=True).checked())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_ends_the_run_at_once(number: signal.Signals, straight: Straight, tmp_path: Path) -> None:
    stopped = run("grpo", tmp_path, stop=Stop("rollout", 7, number, times=2))
    assert stopped.exits == (128 + number,), stopped.log[-3000:]
    assert sorted(path.name for path in stopped.folder.glob("checkpoint-*")) == ["checkpoint-2"], "nothing was saved"
    assert_same(straight("grpo"), run("grpo", tmp_path, resume=True).checked())


def test_without_save_on_signal_the_run_just_ends(tmp_path: Path) -> None:
    changes = {"save_on_signal": False}
    stopped = run("grpo", tmp_path, stop=Stop("rollout", 7, signal.SIGTERM), changes=changes)
    assert stopped.exits == (-signal.SIGTERM,)
    assert sorted(path.name for path in stopped.folder.glob("checkpoint-*")) == ["checkpoint-2"]
