"""The lock of a run folder, across processes that live, die and fork."""

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gruppo.errors import RunLockedError
from gruppo.runs import lock as module
from gruppo.runs.lock import Owner, RunLock


@pytest.fixture(params=["flock", "no flock", "no flock, no links"])
def anywhere(request, monkeypatch) -> None:
    """On a file system that knows flock, and on others."""
    if request.param != "flock":
        monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOTSUP))
    if request.param == "no flock, no links":
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))


def refuse(number: int) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A forked process that does something, says so, and stays until it is killed."""
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            work()
            os.write(say, b"!")
            os.close(say)
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(say)
    try:
        assert os.read(ready, 1) == b"!", "the child failed"
        yield pid
    finally:
        os.close(ready)
        end(pid)


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # ended before


def owner(folder: Path) -> Owner:
    found = Owner.read((folder / "lock").read_bytes())
    assert found is not None
    return found


def record(**changes: object) -> str:
    fields = {name: getattr(Owner.here(), name) for name in Owner.__dataclass_fields__}
    return json.dumps({**fields, **changes})


# ---- one process


def test_the_file_says_who_holds_it_and_goes_with_the_lock(tmp_path, anywhere):
    folder = tmp_path / "not" / "yet"
    lock = RunLock(folder)
    assert lock.acquire() is None
    held = owner(folder)
    assert (held.pid, held.host) == (os.getpid(), platform.node())
    assert held.may_run()
    lock.release()
    assert list(folder.iterdir()) == []
    lock.release()  # and again: nothing to do


def test_a_lock_can_be_taken_again_after_it_was_given_back(tmp_path, anywhere):
    lock = RunLock(tmp_path)
    for _ in range(3):
        with lock:
            assert (tmp_path / "lock").exists()
        assert not (tmp_path / "lock").exists()


def test_one_object_takes_it_once_and_another_is_refused(tmp_path, anywhere):
    with RunLock(tmp_path) as lock:
        with pytest.raises(RunLockedError, match="already held"):
            lock.acquire()
        with pytest.raises(RunLockedError, match="this same process"):
            RunLock(tmp_path).acquire()
        assert owner(tmp_path).pid == os.getpid(), "the refused left it as it was"
    assert [path.name for path in tmp_path.iterdir()] == []


def test_locks_of_other_names_are_other_locks(tmp_path, anywhere):
    with RunLock(tmp_path, "one"), RunLock(tmp_path, "two"), RunLock(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "one", "two"]
        with pytest.raises(RunLockedError):
            RunLock(tmp_path, "two").acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_process_whose_name_is_not_utf8_is_alive(tmp_path, anywhere):
    """The kernel cuts names after 15 bytes, also within a character; and in the C locale all but ASCII is invalid."""

    def hold() -> None:
        RunLock(tmp_path).acquire()
        Path("/proc/self/comm").write_bytes("trainingsläufe".encode()[:11])

    with child(hold), pytest.raises(RunLockedError):
        RunLock(tmp_path).acquire()


def test_it_is_given_back_when_the_run_fails(tmp_path, anywhere):
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        1 / 0  # noqa: B018
    assert RunLock(tmp_path).acquire() is None


def test_the_arguments_of_the_program_are_not_written_down(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/home/me/train.py", "--hub_token", "hf_secret"])
    with RunLock(tmp_path):
        assert owner(tmp_path).command == "train.py"
        assert "secret" not in (tmp_path / "lock").read_text()


def test_a_lock_that_was_removed_by_hand_and_taken_by_another_is_not_removed(tmp_path, anywhere):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    (tmp_path / "lock").unlink()
    assert second.acquire() is None
    (tmp_path / "lock").write_text(record(pid=1))
    first.release()
    assert (tmp_path / "lock").exists()


# ---- several processes


def test_a_live_process_keeps_others_out_and_is_named(tmp_path, anywhere):
    with child(RunLock(tmp_path).acquire) as pid:
        with pytest.raises(RunLockedError) as caught:
            RunLock(tmp_path).acquire()
        started = owner(tmp_path).started
        for part in (str(tmp_path), f"process {pid} on {platform.node()}, started {started}", "output_dir", "stop"):
            assert part in str(caught.value)


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, anywhere):
    with child(RunLock(tmp_path).acquire) as pid:
        started = owner(tmp_path).started
        end(pid)
        lock = RunLock(tmp_path)
        said = lock.acquire()
    assert said is not None
    assert said.startswith(f"The lock of process {pid} on {platform.node()}, started {started}, was left by a process")
    assert owner(tmp_path).pid == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_not_yet_buried_is_gone(tmp_path, anywhere):
    with child(RunLock(tmp_path).acquire) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie: its id is still there
        assert f"process {pid} " in (RunLock(tmp_path).acquire() or "")


def fork_and_stay() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


@pytest.mark.parametrize("start", [fork_and_stay, lambda: subprocess.Popen(["sleep", "600"]).pid])
def test_children_of_the_run_do_not_keep_its_lock(tmp_path, start):
    note = tmp_path / "child"
    run = tmp_path / "run"
    lock = RunLock(run)  # not in the frame only: a lock that is collected would be forgotten

    def work() -> None:
        lock.acquire()
        note.write_text(str(start()))

    with child(work) as pid:
        grandchild = int(note.read_text())
        with pytest.raises(RunLockedError):
            RunLock(run).acquire()
        end(pid)
        try:
            os.kill(grandchild, 0)  # it lives
            assert f"process {pid} " in (RunLock(run).acquire() or "")
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_a_forked_child_neither_has_nor_frees_the_lock(tmp_path, anywhere):
    with RunLock(tmp_path) as lock:

        def work() -> None:
            lock.release()
            with pytest.raises(RunLockedError):
                lock.acquire()

        with child(work), pytest.raises(RunLockedError):
            RunLock(tmp_path).acquire()
        assert owner(tmp_path).pid == os.getpid()


def test_of_many_that_come_and_go_one_is_inside_at_a_time(tmp_path):
    inside = tmp_path / "inside"

    def work() -> None:
        entered = 0
        while entered < 25:
            lock = RunLock(tmp_path / "run")
            try:
                assert lock.acquire() is None, "nobody died"
            except RunLockedError:
                continue
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if another is inside
            inside.unlink()
            lock.release()
            entered += 1

    workers = [os.fork() or _run(work) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in workers] == [0] * 4
    assert list((tmp_path / "run").iterdir()) == []


def _run(work: Callable[[], object]) -> int:
    """The life of a forked child: it ends here, with 0 if the work was done."""
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_a_file_that_its_owner_removes_meanwhile_is_not_mistaken_for_the_lock(tmp_path, monkeypatch):
    (tmp_path / "lock").touch()
    flock, calls = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not calls:  # between opening and locking, the owner gives the lock back
            (tmp_path / "lock").unlink()
        calls.append(how)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with RunLock(tmp_path):
        assert len(calls) == 2
        with pytest.raises(RunLockedError):
            RunLock(tmp_path).acquire()


# ---- without flock, what the file says decides


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS])
def test_these_errors_mean_that_there_is_no_flock(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", refuse(number))
    (tmp_path / "lock").write_text(record())
    with pytest.raises(RunLockedError):
        RunLock(tmp_path).acquire()


def test_other_errors_are_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        RunLock(tmp_path).acquire()


def test_a_platform_without_fcntl(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "fcntl", None)
    with RunLock(tmp_path), pytest.raises(RunLockedError):
        RunLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


GONE = 2**22 + 1  # larger than any process id


@pytest.mark.parametrize(
    ("changes", "stale"),
    [
        ({}, False),
        ({"pid_started": 1}, True),  # the id was given to another process
        ({"boot": "another"}, True),
        ({"pid": GONE}, True),
        ({"pid_started": None}, False),  # without /proc only the id counts
        ({"pid_started": None, "pid": GONE}, True),
        ({"pid_started": None, "boot": None, "pid": 2**80}, True),
        ({"host": "elsewhere", "pid": GONE, "boot": "another"}, False),  # who knows
    ],
)
def test_who_may_still_run(tmp_path, monkeypatch, changes, stale):
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOTSUP))
    (tmp_path / "lock").write_text(record(**changes))
    if stale:
        assert "process that has ended" in (RunLock(tmp_path).acquire() or "")
    else:
        with pytest.raises(RunLockedError) as caught:
            RunLock(tmp_path).acquire()
        assert ("sure that it has ended, remove" in str(caught.value)) == ("host" in changes)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_with_flock_the_kernel_decides_wherever_the_owner_was(tmp_path):
    (tmp_path / "lock").write_text(record(host="elsewhere"))
    assert "on elsewhere, started" in (RunLock(tmp_path).acquire() or "")


# ---- what else may lie there


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", "7", "x" * 100_000, record(pid="1"), record(pid=-1), "[" * 60_000]
)
def test_a_file_that_names_nobody_is_taken_over(tmp_path, anywhere, content):
    (tmp_path / "lock").write_text(content)
    assert RunLock(tmp_path).acquire() == (
        "The lock of an unknown process was left by a process that has ended: it is taken over."
    )


def test_an_empty_file_is_no_lock(tmp_path, anywhere):
    (tmp_path / "lock").touch()
    assert RunLock(tmp_path).acquire() is None


def test_a_link_is_not_written_through(tmp_path, anywhere):
    target = tmp_path / "precious"
    target.write_text("data")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(RunLockedError, match="not a plain file"):
        RunLock(tmp_path).acquire()
    assert target.read_text() == "data"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_other_things_are_refused_at_once(tmp_path, anywhere, make):
    make(tmp_path / "lock")
    with pytest.raises(RunLockedError, match="not a plain file"):
        RunLock(tmp_path).acquire()


# ---- full disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_the_lock_is_held_without_a_name(tmp_path, monkeypatch, caplog, number):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse(number))
        with RunLock(tmp_path):
            assert (tmp_path / "lock").read_bytes() == b""
            with pytest.raises(RunLockedError, match="in use by another process"):
                RunLock(tmp_path).acquire()
    assert "No space on the disk" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_written_for_another_reason_is_not_held(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            RunLock(tmp_path).acquire()
    assert RunLock(tmp_path).acquire() is None


def test_without_flock_a_full_disk_refuses_and_leaves_nothing(tmp_path, monkeypatch):
    """There only what the file says keeps others out."""
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOTSUP))
    monkeypatch.setattr(Path, "write_bytes", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        RunLock(tmp_path).acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert (tmp_path / "lock").stat().st_size == 0
