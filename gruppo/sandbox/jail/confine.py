"""Permanently drops privileges in the process of the code, before the code starts."""

import os
import resource
import signal

from gruppo.sandbox.jail import landlock, seccomp
from gruppo.sandbox.jail.kernel import (
    CAP_DAC_READ_SEARCH,
    PR_SET_DUMPABLE,
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    MechanismError,
    drop_capabilities,
    prctl,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gruppo.sandbox.spec import Spec

FIRST_UID = 1_900_000_000  # above the ranges assigned to users, services and containers
LAST_WORDS = 64 << 20  # address space held in reserve, so that a MemoryError can be printed
DEVICES = ["/dev/null", "/dev/zero", "/dev/full"]


def step(mechanism: str, function: "Callable[..., object]", *args: object) -> None:
    """Call a function; an OSError becomes a MechanismError that names the mechanism."""
    try:
        function(*args)
    except OSError as error:
        raise MechanismError(mechanism, error.strerror or repr(error)) from None


def private_uid() -> int:
    """A uid that no other process has: the process id, offset into an unused range.

    In a container with few uids, the upper half of its range is used. Process ids then wrap around (after about 30,000
    for 65,536 uids), and two runs may get the same uid.
    """
    ranges = []
    with open("/proc/self/uid_map", encoding="ascii") as file:
        for line in file:
            first, _, count = map(int, line.split())
            ranges.append((count, first))
    if any(first <= FIRST_UID and first + count > FIRST_UID + (1 << 22) for count, first in ranges):
        return FIRST_UID + os.getpid()
    count, first = max(ranges)
    if count < 3:
        raise MechanismError("own uid", "the current user namespace has no other uid")
    half = count // 2
    return first + half + os.getpid() % (count - half - 1)


def confine(spec: "Spec", uid: int) -> None:
    mechanisms = spec["mechanisms"]
    os.setsid()
    os.umask(0o077)
    os.chdir(spec["work"])
    _limit(spec)
    if "own uid" in mechanisms:
        step("own uid", _become, uid)
    # If the interpreter is in a private directory (/root, for root), the code may traverse it; Landlock limits access.
    keep = CAP_DAC_READ_SEARCH if spec["search"] else 0
    step("own uid" if keep else "start", drop_capabilities, keep)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    own_root = "mount namespace" in mechanisms
    if "landlock" in mechanisms:
        readable = ["/"] if own_root else [*spec["readable"], "/proc/self"]
        step("landlock", landlock.restrict, readable, [spec["work"], *DEVICES])
    prctl(PR_SET_DUMPABLE, 1)  # changing the uid made /proc/self inaccessible
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "seccomp" in mechanisms:
        step("seccomp", seccomp.restrict, not own_root and "own uid" not in mechanisms)


def _limit(spec: "Spec") -> None:
    memory = spec["memory"]
    limits = {
        resource.RLIMIT_AS: (memory, memory + LAST_WORDS),
        resource.RLIMIT_CPU: (spec["cpu_seconds"], spec["cpu_seconds"] + 1),
        resource.RLIMIT_FSIZE: (spec["file_size"], spec["file_size"]),
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_NPROC: (spec["processes"] + _others(spec["mechanisms"]),) * 2,
    }
    for kind, wanted in limits.items():
        hard = resource.getrlimit(kind)[1]
        soft, new_hard = (value if hard == resource.RLIM_INFINITY else min(value, hard) for value in wanted)
        resource.setrlimit(kind, (soft, new_hard))


def _others(mechanisms: list[str]) -> int:
    """The number of tasks that count against the process limit before the code has started any."""
    if "own uid" in mechanisms:
        return 0
    if "user namespace" in mechanisms:
        return 2 if "pid namespace" in mechanisms else 1
    tasks = 0
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == os.getuid():
                tasks += len(os.listdir(f"/proc/{entry}/task"))
        except OSError:  # the process has ended in the meantime
            continue
    return tasks


def _become(uid: int) -> None:
    prctl(PR_SET_KEEPCAPS, 1)  # `drop_capabilities` decides which to keep
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
