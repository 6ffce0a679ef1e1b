"""Processes that die at a chosen moment."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Calls that change the disk or order changes. The disk looks the same to later readers at any point between two calls.
TOUCHES = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")


class Interrupted(Exception):  # noqa: N818 - it is no error
    pass


def killed_at(moment: int, work: Callable[[], object]) -> bool:
    """Do the work in a forked child that is killed before its n-th disk access; False if it finished before that."""
    child = os.fork()
    if child == 0:
        try:
            interrupt(pytest.MonkeyPatch(), moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return os.WIFSIGNALED(status)


def every_kill(prepare: Callable[[], Path], work: Callable[[Path], object]) -> Iterator[tuple[Path, bool]]:
    """Yield a fresh folder for each disk access of the work, as a kill there leaves it; the last one is complete."""
    moment, killed = 0, True
    while killed:
        run = prepare()
        killed = killed_at(moment, lambda run=run: work(run))
        yield run, killed
        moment += 1
    assert moment > 4, "the work touches the disk more often than that"


def interrupt(patch: pytest.MonkeyPatch, moment: int, end: Callable[[], object]) -> None:
    """Call `end` before the n-th disk access."""
    count = iter(range(1_000_000))

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def touch(*args: object, **kwargs: object) -> object:
            if next(count) == moment:
                end()
            return real(*args, **kwargs)

        return touch

    for name in TOUCHES:
        patch.setattr(os, name, counted(getattr(os, name)))
