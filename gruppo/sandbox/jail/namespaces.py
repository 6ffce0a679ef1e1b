"""Namespaces: a network without interfaces, no view of other processes, and a minimal file system."""

import os

from gruppo.sandbox.jail.kernel import buffer, checked, libc, syscall

NEW_MOUNTS = 0x0002_0000
NEW_IPC = 0x0800_0000
NEW_USER = 0x1000_0000
NEW_PIDS = 0x2000_0000
NEW_NETWORK = 0x4000_0000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MS_RDONLY = 1
MNT_DETACH = 2
PIVOT_ROOT = 155 if os.uname().machine == "x86_64" else 41
MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = -100, 0x8000


def unshare(flags: int) -> None:
    checked(libc.unshare(flags))


def own_user_namespace() -> None:
    """Enter a new user namespace with the same uid, which grants the right to create the other namespaces."""
    uid, gid = os.getuid(), os.getgid()
    unshare(NEW_USER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def own_root(root: str, readable: list[str], work: str, work_size: int, owner: int) -> None:
    """Move to a new root that holds the readable paths, read-only, and an empty `work` folder in memory.

    No other file of the machine is reachable by any path, and the folder disappears with its last process. The caller
    must be in a process namespace, which is the one that /proc shows.
    """
    _mount("none", "/", None, MS_REC | MS_PRIVATE)  # mounts made here must not propagate to other namespaces
    _mount("root", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    bound: list[str] = []
    for path in sorted(readable):
        if any(path.startswith(f"{other}/") for other in bound):
            continue
        if _bind(path, root + path):
            bound.append(path)
    os.makedirs(root + work, exist_ok=True)
    _mount("work", root + work, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=700,uid={owner},size={work_size},nr_inodes=4096")
    _own_proc(f"{root}/proc")
    os.symlink(work, f"{root}/dev/shm")  # semaphores and shared memory count as files of the folder
    os.chdir(root)
    syscall(PIVOT_ROOT, buffer(b".\0"), buffer(b".\0"))  # the old root is now mounted over the new one
    checked(libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _own_proc(target: str) -> None:
    """Mount a /proc of this namespace. Containers that mask parts of their /proc refuse it; the code then has none.

    This must happen before the old root is unmounted: the kernel allows it only while another /proc is visible.
    """
    os.makedirs(target, exist_ok=True)
    try:  # noqa: SIM105 (contextlib takes time to import)
        _mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:
        pass


def _bind(source: str, target: str) -> bool:
    """Bind-mount `source` at `target`, recursively and read-only; a symlink is copied instead, and returns False."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return False
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, MS_BIND | MS_REC)
    read_only_no_suid = (1 | 2).to_bytes(8, "little") + bytes(24)
    syscall(MOUNT_SETATTR, AT_FDCWD, buffer(os.fsencode(target) + b"\0"), AT_RECURSIVE, buffer(read_only_no_suid), 32)
    return True


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    checked(libc.mount(words[0], words[1], words[2], flags, words[3]))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
