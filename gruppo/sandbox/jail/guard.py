"""The guard waits for the code, and leaves nothing of it behind."""

import marshal
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gruppo.sandbox.spec import Spec

BEYOND_MEASURE = 1 << 62
TICK = 0.1  # how often orphans are reaped and the folder is measured


def watch(code: int, spec: "Spec", uid: int, status_fd: int, lifeline_fd: int) -> None:
    """Wait until the code ends, the time is over, the folder is full or the host says stop; then end everything."""
    start = time.monotonic()
    poll = select.poll()
    handle = os.pidfd_open(code)
    poll.register(handle, select.POLLIN)
    poll.register(lifeline_fd, select.POLLIN)  # a byte, or the end of the host itself
    measured = "mount namespace" not in spec["mechanisms"]  # else the folder has a size of its own
    stopped = ""
    while not stopped:
        left = start + spec["seconds"] - time.monotonic()
        if left <= 0:
            stopped = "timeout"
            break
        ready = [fd for fd, _ in poll.poll(1000 * min(left, TICK))]
        if handle in ready:
            break
        if lifeline_fd in ready:
            stopped = "host"
        elif measured and _size(spec["work"]) > spec["disk"]:
            stopped = "disk"
        _reap_orphans(code)
    if stopped:
        os.kill(code, signal.SIGKILL)
    _, status, usage = os.wait4(code, 0)
    seconds = time.monotonic() - start
    _end_everything(spec["mechanisms"], uid)
    report = {
        "stopped": stopped,
        "exit_code": os.waitstatus_to_exitcode(status),
        "cpu": usage.ru_utime + usage.ru_stime,
        "seconds": seconds,
    }
    os.write(status_fd, marshal.dumps(report))


def _reap_orphans(code: int) -> None:
    """Take the ended children of ended children off the process table, where they count against the limit."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == code:
            return
        os.waitpid(ended.si_pid, 0)


def _end_everything(mechanisms: list[str], uid: int) -> None:
    """Kill until there is no child left: orphans come to us, so no child means no descendant."""
    while True:
        _kill_all(mechanisms, uid)
        time.sleep(0.001)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _kill_all(mechanisms: list[str], uid: int) -> None:
    if "pid namespace" in mechanisms:
        _kill(-1, signal.SIGKILL)  # all of the namespace but us
    elif "own uid" in mechanisms:
        killer = os.fork()
        if not killer:
            os.setresuid(uid, uid, uid)
            _kill(-1, signal.SIGKILL)  # all that this uid may signal: its own
            os._exit(0)
        os.waitpid(killer, 0)
    else:
        # Stopped first, so that none forks while the others are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in _descendants():
                _kill(process, number)


def _kill(process: int, number: int) -> None:
    try:  # noqa: SIM105 (contextlib takes time to import)
        os.kill(process, number)
    except ProcessLookupError:
        pass


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(parent, []).append(int(entry))
    found = list(children.get(os.getpid(), []))
    for process in found:  # grows while we walk
        found += children.get(process, [])
    return found


def _size(folder: str) -> int:
    """Bytes below a folder; one that hides from being measured counts as full."""
    total = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # no permission, or a path too long to follow
            return BEYOND_MEASURE
    return total
