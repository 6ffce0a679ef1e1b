"""A seccomp filter: system calls that model-written code does not need fail with EPERM.

No socket can be created, except a connected stream pair, which asyncio and multiprocessing need. The ways around this
are closed too: io_uring, new namespaces, another process's memory or descriptors, other architectures' system calls.
So is memory that is in no address space, where no resource limit counts it.
"""

import ctypes
import errno
import struct

from gruppo.sandbox.jail.kernel import PR_SET_SECCOMP, X86, buffer, checked, libc

FILTER_MODE = 2
ALLOW, ERRNO = 0x7FFF_0000, 0x0005_0000
DENY = ERRNO | errno.EPERM
UNKNOWN = ERRNO | errno.ENOSYS

NUMBER_AT, ARCHITECTURE_AT, ARGS_AT = 0, 4, 16
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06

AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
NEW_NAMESPACES = 0x7E02_0000  # the flags of clone that create namespaces

# (x86-64, aarch64), as in the tables below
ARCHITECTURE = (0xC000_003E, 0xC000_00B7)
SOCKETPAIR, CLONE, CLONE3 = (53, 199), (56, 220), (435, 435)
MACHINE = 0 if X86 else 1

# name: (x86-64, aarch64); if aarch64 lacks the call, its equivalent
DENIED: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # Memory outside of address spaces: files in memory, and pages that a pipe or a socket holds on to. One byte holds
    # its whole page, also a huge one and one of a file that was cut since. Without them, libraries copy.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
    "setsockopt": (54, 208),  # SO_SNDBUF: megabytes in each socket, where the default is 208 KiB
    # These create objects that outlive their process, shared memory too.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}

# Landlock does not protect modes, owners, times and attributes; needed if the user's files have the code's uid.
METADATA: dict[str, tuple[int, int]] = {
    "chmod": (90, 52),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 55),
    "fchown": (93, 55),
    "lchown": (94, 55),
    "fchownat": (260, 54),
    "utime": (132, 88),
    "utimes": (235, 88),
    "futimesat": (261, 88),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}


def restrict(metadata: bool) -> None:
    """Install the filter for this process and all its descendants; requires no_new_privs."""
    program = program_for(MACHINE, metadata)
    instructions = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(instructions))
    checked(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(FILTER_MODE), buffer(header), 0, 0))


def program_for(machine: int, metadata: bool) -> list[bytes]:
    """The filter as BPF instructions: each test is followed by its verdict, which it either reaches or skips."""
    program = [
        _step(LOAD, ARCHITECTURE_AT),
        _step(EQUAL, ARCHITECTURE[machine], 1, 0),
        _step(RETURN, DENY),
        _step(LOAD, NUMBER_AT),
    ]
    if machine == 0:  # the x32 ABI: the same calls under other numbers
        program += [_step(AT_LEAST, 0x4000_0000, 0, 1), _step(RETURN, UNKNOWN)]
    denied = DENIED | METADATA if metadata else DENIED
    for number in sorted({numbers[machine] for numbers in denied.values()}):
        program += [_step(EQUAL, number, 0, 1), _step(RETURN, DENY)]
    return [
        *program,
        # The flags of clone3 are in memory, which a filter cannot read; with ENOSYS the C library falls back to clone.
        *(_step(EQUAL, CLONE3[machine], 0, 1), _step(RETURN, UNKNOWN)),
        *(_step(EQUAL, CLONE[machine], 0, 3), _argument(0), _step(ANY_BIT, NEW_NAMESPACES, 0, 1), _step(RETURN, DENY)),
        _step(LOAD, NUMBER_AT),
        _step(EQUAL, SOCKETPAIR[machine], 0, 6),
        *(_argument(0), _step(EQUAL, AF_UNIX, 0, 3)),
        *(_argument(1), _step(AND, SOCK_TYPE_MASK), _step(EQUAL, SOCK_STREAM, 1, 0)),
        _step(RETURN, DENY),
        _step(RETURN, ALLOW),
    ]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _argument(index: int) -> bytes:
    """Load the low 32 bits of a system call's argument."""
    return _step(LOAD, ARGS_AT + 8 * index)
