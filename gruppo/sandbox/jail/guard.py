"""The guard waits for the code to end, then kills all remaining processes."""

import marshal
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gruppo.sandbox.spec import Spec

BEYOND_MEASURE = 1 << 62
TICK = 0.1  # seconds between reaping orphans and measuring the working directory


def watch(code: int, spec: "Spec", uid: int, status_fd: int, lifeline_fd: int) -> None:
    """Wait until the code ends, the time or disk limit is hit, or the host asks to stop; then end all processes."""
    start = time.monotonic()
    poll = select.poll()
    handle = os.pidfd_open(code)
    poll.register(handle, select.POLLIN)
    poll.register(lifeline_fd, select.POLLIN)  # readable on a byte from the host, or when the host ends
    measured = "mount namespace" not in spec["mechanisms"]  # else the tmpfs enforces its size
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
    """Reap orphans that have ended, since zombies count against the process limit."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == code:
            return
        os.waitpid(ended.si_pid, 0)


def _end_everything(mechanisms: list[str], uid: int) -> None:
    """Kill until no child is left. Orphans are reparented to the guard, so no child means no descendant."""
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
        _kill(-1, signal.SIGKILL)  # all of the namespace except this process
    elif "own uid" in mechanisms:
        killer = os.fork()
        if not killer:
            os.setresuid(uid, uid, uid)
            _kill(-1, signal.SIGKILL)  # all processes that this uid may signal: its own
            os._exit(0)
        os.waitpid(killer, 0)
    else:
        # Stop all of them first, so that none forks while the others are killed.
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
        except OSError:  # the process has ended in the meantime
            continue
        children.setdefault(parent, []).append(int(entry))
    found = list(children.get(os.getpid(), []))
    for process in found:  # grows during the loop
        found += children.get(process, [])
    return found


def _size(folder: str) -> int:
    """Bytes below a directory; one that cannot be measured counts as full."""
    total = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:  # removed in the meantime
            continue
        except OSError:  # no permission, or a path too long to follow
            return BEYOND_MEASURE
    return total
