"""System calls that the standard library does not provide."""

import ctypes
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)

X86 = os.uname().machine == "x86_64"

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

CAP_DAC_READ_SEARCH = 1 << 2


class MechanismError(Exception):
    """A mechanism that the kernel, or the surrounding container, refuses."""

    def __init__(self, mechanism: str, error: str):
        super().__init__(f"{mechanism}: {error}")
        self.mechanism = mechanism
        self.error = error


def checked(result: int) -> int:
    """The result of a C call, or its errno as an OSError."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def syscall(number: int, *args: "int | ctypes.Array[ctypes.c_char] | None") -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return checked(int(libc.syscall(ctypes.c_long(number), *words)))


def prctl(option: int, *args: int) -> None:
    # Pass all five arguments: some options require the unused ones to be 0.
    words = [*args, 0, 0, 0, 0][:4]
    checked(libc.prctl(option, *(ctypes.c_ulong(word) for word in words)))


def buffer(content: bytes) -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(content, len(content))


def drop_capabilities(keep: int = 0) -> None:
    """Drop all capabilities except those in the mask `keep`; after no_new_privs, none can be regained."""
    version_3 = buffer(struct.pack("=Ii", 0x20080522, 0))
    effective_permitted_inheritable = struct.pack("=3I", keep, keep, 0)
    checked(libc.capset(version_3, buffer(effective_permitted_inheritable + bytes(12))))
