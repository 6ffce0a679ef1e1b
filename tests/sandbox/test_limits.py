"""What one run may use. Every program here would go far beyond it, but none without end if it were not stopped."""

import time

from gruppo.sandbox import Sandbox
from gruppo.sandbox.spec import MIB
from tests.sandbox.conftest import MakeSandbox


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
    box = make_sandbox("memory", memory=128 * MIB)
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
