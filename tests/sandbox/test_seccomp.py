"""The filter, judged by an interpreter of its little language: it must be right on machines that are not at hand."""

import struct

import pytest

from gruppo.sandbox.jail import seccomp

X86, ARM = 0, 1
AF_UNIX, AF_INET, STREAM, DATAGRAM, CLOEXEC = 1, 2, 1, 2, 0o2000000
SIGCHLD, CLONE_VM, NEW_USER, NEW_NETWORK = 17, 0x100, 0x1000_0000, 0x4000_0000


def judge(program: list[bytes], architecture: int, number: int, *args: int) -> int:
    """What the kernel would do with a call."""
    call = struct.pack("=IIQ6Q", number, architecture, 0, *args, *[0] * (6 - len(args)))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack("HBBI", program[at])
        at += 1
        match code:
            case seccomp.LOAD:
                accumulator = struct.unpack_from("=I", call, value)[0]
            case seccomp.AND:
                accumulator &= value
            case seccomp.EQUAL:
                at += if_true if accumulator == value else if_false
            case seccomp.AT_LEAST:
                at += if_true if accumulator >= value else if_false
            case seccomp.ANY_BIT:
                at += if_true if accumulator & value else if_false
            case seccomp.RETURN:
                return int(value)
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize("machine", [X86, ARM])
def test_verdicts(machine: int) -> None:
    program = seccomp.program_for(machine, metadata=False)
    architecture = seccomp.ARCHITECTURE[machine]
    read, openat, socket, socketpair, clone = [(0, 257, 41, 53, 56), (63, 56, 198, 199, 220)][machine]
    for number, args, verdict in [
        (read, (0,), seccomp.ALLOW),
        (openat, (0,), seccomp.ALLOW),
        (socket, (AF_INET, STREAM), seccomp.DENY),
        (socket, (AF_UNIX, STREAM), seccomp.DENY),
        (socketpair, (AF_UNIX, STREAM | CLOEXEC), seccomp.ALLOW),
        (socketpair, (AF_UNIX, DATAGRAM | CLOEXEC), seccomp.DENY),
        (socketpair, (AF_INET, STREAM), seccomp.DENY),
        (clone, (SIGCHLD,), seccomp.ALLOW),
        (clone, (SIGCHLD | CLONE_VM,), seccomp.ALLOW),
        (clone, (SIGCHLD | NEW_USER,), seccomp.DENY),
        (clone, (SIGCHLD | NEW_NETWORK,), seccomp.DENY),
        (435, (), seccomp.UNKNOWN),  # clone3
        (425, (), seccomp.DENY),  # io_uring_setup
    ]:
        assert judge(program, architecture, number, *args) == verdict, (number, args)


@pytest.mark.parametrize("machine", [X86, ARM])
def test_calls_of_another_machine_are_denied(machine: int) -> None:
    program = seccomp.program_for(machine, metadata=False)
    i386 = 0x4000_0003
    assert judge(program, i386, 3) == seccomp.DENY
    if machine == X86:
        assert judge(program, seccomp.ARCHITECTURE[X86], 0x4000_0000 + 41, AF_INET) == seccomp.UNKNOWN


@pytest.mark.parametrize("machine", [X86, ARM])
def test_modes_are_guarded_on_request(machine: int) -> None:
    fchmodat = (268, 53)[machine]
    for metadata, verdict in ((False, seccomp.ALLOW), (True, seccomp.DENY)):
        program = seccomp.program_for(machine, metadata)
        assert judge(program, seccomp.ARCHITECTURE[machine], fchmodat) == verdict


def test_a_name_has_one_number() -> None:
    table = seccomp.DENIED | seccomp.METADATA
    assert len({numbers[X86] for numbers in table.values()}) == len(table)
    assert all(numbers[X86] == numbers[ARM] for numbers in table.values() if numbers[X86] >= 424), "shared since 2019"
