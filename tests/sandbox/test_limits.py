"""What one run may use. Every program here would go far beyond it, but none without end if it were not stopped."""

import time

import pytest

from gruppo.sandbox import Limits, Sandbox
from gruppo.sandbox.spec import MIB
from tests.sandbox.conftest import SETS, MakeSandbox, use_mechanisms


def test_an_endless_loop_is_stopped_and_its_output_kept(make_sandbox: MakeSandbox) -> None:
    start = time.monotonic()
    execution = make_sandbox(seconds=0.5).run("print('before')\nwhile True: pass")
    assert (execution.reason, execution.stdout) == ("timeout", "before\n")
    assert execution.seconds >= 0.5
    assert time.monotonic() - start < 15


def test_a_sleeper_that_ignores_signals_is_stopped(make_sandbox: MakeSandbox) -> None:
    code = "import signal, time\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"
    assert make_sandbox(seconds=0.5).run(code).reason == "timeout"


def test_processor_time_counts_all_threads(make_sandbox: MakeSandbox) -> None:
    # Hashing releases the interpreter's lock, so that the threads really run at once.
    code = """
import hashlib, threading
block = b"x" * 10_000_000
def burn():
    for _ in range(3000): hashlib.sha256(block)
threads = [threading.Thread(target=burn) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    execution = make_sandbox(cpu_seconds=1, seconds=60).run(code)
    assert execution.reason == "cpu"
    assert execution.exit_code < 0


def test_processor_time_cannot_be_had_by_ignoring_its_signal(make_sandbox: MakeSandbox) -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert make_sandbox(cpu_seconds=1, seconds=60).run(code).reason == "cpu"


def test_a_memory_bomb_gets_a_memory_error(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox(memory=128 * MIB)
    code = "print('before')\nkept = []\nfor _ in range(64): kept.append(bytearray(10 << 20))\nprint('all')"
    execution = box.run(code)
    assert (execution.reason, execution.stdout) == ("memory", "before\n")
    assert execution.stderr.endswith("MemoryError\n")
    assert "kept.append" in execution.stderr, "there is memory left to say where"
    assert box.run("bytearray(10 << 20)").reason == "ok"


def check_made(made: int, allowed: int, tried: int) -> None:
    """The kernel counts by user: where the code has none of its own, our other processes shift the count."""
    if {"own uid", "user namespace"} & set(Sandbox.capabilities().mechanisms):
        assert 1 <= made <= allowed
    else:
        assert made < tried


# Memory that is in no address space, and so counts against no limit. Each prints "held" if it could go on and on.
HOARDS = {
    "memory files": """
import os
for _ in range(8):
    os.write(os.memfd_create("x"), bytes(20 << 20))
print("held")
""",
    "secret memory files": """
import ctypes, os
error = ctypes.CDLL(None, use_errno=True)
print("held" if error.syscall(447, 0) >= 0 or ctypes.get_errno() == 38 else "")  # 38: the kernel has none
""",
    "shared memory": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmdt.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
kept = [libc.shmget(0, 20 << 20, 0o600) for _ in range(8)]
for one in kept:
    place = libc.shmat(one, None, 0)
    libc.shmctl(one, 0, None)  # gone with its last user
    if place not in (None, ctypes.c_void_p(-1).value):
        ctypes.memset(place, 1, 20 << 20)
        libc.shmdt(place)
        print("held")
        break
""",
    "pages in a pipe": """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
place = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(place))
piece = (ctypes.c_void_p * 2)(address, 1)  # one byte keeps its page, which can be one of 2 MiB
print("held" if libc.vmsplice(os.pipe()[1], piece, ctypes.c_ulong(1), 0) == 1 else "")
""",
    "pages of deleted files in a pipe": """
import os
with open("f", "wb+") as file:
    file.write(bytes(8192))
    file.flush()
    print("held" if os.splice(file.fileno(), os.pipe()[1], 4096, offset_src=0) else "")
""",
    "pages of deleted files in a socket": """
import os, socket
with open("f", "wb+") as file:
    file.write(bytes(8192))
    file.flush()
    one, other = socket.socketpair()
    print("held" if os.sendfile(one.fileno(), file.fileno(), 0, 1) else "")
""",
    "buffers of sockets": """
import socket
one, other = socket.socketpair()
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
print("held")
""",
}


@pytest.mark.parametrize("way", HOARDS)
def test_memory_is_not_had_outside_of_the_address_space(make_sandbox: MakeSandbox, way: str) -> None:
    assert make_sandbox("memory", memory=128 * MIB).run(HOARDS[way]).stdout.strip() == ""


@pytest.mark.parametrize("way", HOARDS)
def test_the_hoards_would_work(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """And a sandbox that lets them is not one that bounds memory."""
    use_mechanisms(monkeypatch, tuple(name for name in SETS["all"] if name != "seccomp"))
    assert "memory" in Sandbox.capabilities().missing
    box = Sandbox(Limits(memory=128 * MIB), allow_unconfined=Sandbox.capabilities().missing)
    assert box.run(HOARDS[way]).stdout == "held\n"


def test_memory_is_bounded_for_each_process(make_sandbox: MakeSandbox) -> None:
    """What is promised: no process has more than its share. Several have several."""
    code = """
import os
for _ in range(3):
    if os.fork() == 0:
        kept = bytearray(60 << 20)
        os._exit(0 if kept else 1)
print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3)])
"""
    assert make_sandbox("memory", memory=128 * MIB).run(code).stdout == "[0, 0, 0]\n"


def test_copying_files_works_without_the_calls_that_are_denied(make_sandbox: MakeSandbox) -> None:
    code = "import shutil\nopen('a', 'w').write('x' * 10**6)\nshutil.copyfile('a', 'b')\nprint(len(open('b').read()))"
    assert make_sandbox().run(code).stdout == "1000000\n"


def test_processes_are_counted(make_sandbox: MakeSandbox) -> None:
    code = """
import os, signal
made = 0
for _ in range(60):
    try:
        if os.fork() == 0: signal.pause()
    except BlockingIOError:
        break
    made += 1
print(made)
"""
    execution = make_sandbox("processes", processes=10).run(code)
    check_made(int(execution.stdout), 10, 60)


def test_threads_count_as_processes(make_sandbox: MakeSandbox) -> None:
    code = """
import threading, time
made = 0
try:
    for _ in range(60):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        made += 1
except RuntimeError:
    pass
print(made)
"""
    check_made(int(make_sandbox("processes", processes=10).run(code).stdout), 10, 60)


def test_a_fork_bomb_ends_with_the_time(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox("processes", seconds=1)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert box.run(bomb).reason == "timeout"
    assert box.run("print('goes on')").stdout == "goes on\n"


def test_a_fork_bomb_that_goes_on_after_its_parent_is_ended(make_sandbox: MakeSandbox) -> None:
    bomb = "import os\nif os.fork():\n    os._exit(0)\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    start = time.monotonic()
    assert make_sandbox("processes").run(bomb).reason == "ok"
    assert time.monotonic() - start < 15


def test_endless_output_is_cut_and_stopped(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox(output=10_000)
    for stream in ("stdout", "stderr"):
        execution = box.run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
        assert execution.reason == "output"
        assert len(getattr(execution, stream)) == 10_000
    assert box.run("print('x' * 9_999)").reason == "ok"
    assert box.run("print('x' * 10_000)").reason == "output"


def test_one_file_may_not_grow_beyond_its_limit(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox(file_size=MIB)
    execution = box.run("with open('f', 'wb') as f:\n    for _ in range(20): f.write(bytes(1 << 20))")
    assert execution.reason == "error"
    assert "OSError: [Errno 27] File too large" in execution.stderr


def test_all_files_together_may_not_fill_the_disk(make_sandbox: MakeSandbox) -> None:
    code = """
import time
for i in range(100):
    with open(str(i), "wb") as f: f.write(bytes(1 << 20))
    time.sleep(0.02)
print("filled")
"""
    execution = make_sandbox(disk=10 * MIB).run(code)
    assert execution.stdout == ""
    # A folder with a size of its own is full; one without is measured from outside.
    assert execution.reason == "output" or "No space left on device" in execution.stderr
