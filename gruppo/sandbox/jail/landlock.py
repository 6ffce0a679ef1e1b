"""Landlock: restricts file access by path, for a process and all its descendants."""

import os
import stat
import struct

from gruppo.sandbox.jail.kernel import buffer, syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
GET_VERSION = 1
PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEVICE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
ON_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
NO_SIGNALS_OR_ABSTRACT_SOCKETS_OUTWARDS = 0b11


def restrict(readable: list[str], writable: list[str]) -> None:
    """Allow only reads below `readable`, and reads and writes below `writable`; requires no_new_privs."""
    version = syscall(CREATE_RULESET, None, 0, GET_VERSION)
    # The number of rights by version: 13 at first, then renaming across directories, truncate, ioctl on devices.
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    words = [rights]
    if version >= 6:
        words += [0, NO_SIGNALS_OR_ABSTRACT_SOCKETS_OUTWARDS]
    ruleset = syscall(CREATE_RULESET, buffer(struct.pack(f"={len(words)}Q", *words)), 8 * len(words), 0)
    for paths, allowed in ((readable, READ), (writable, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(handle).st_mode):
        rights &= ON_A_FILE
    syscall(ADD_RULE, ruleset, PATH_BENEATH, buffer(struct.pack("=Qi", rights, handle)), 0)
    os.close(handle)
